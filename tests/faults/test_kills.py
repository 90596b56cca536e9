"""Runs that are killed lose nothing that was complete."""

import pytest

from tests.faults.harness import kill_many


def check(tally, kills):
    assert tally.kills == kills
    assert tally.steps > 0


@pytest.mark.parametrize(
    ("count", "kills"), [(1, 4), pytest.param(2, 2, marks=pytest.mark.multiprocess)]
)
def test_a_few_kills(tmp_path, count, kills):
    check(kill_many(tmp_path / "run", count, kills, seed=count), kills)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("count", "kills"), [(1, 130), (2, 70)])
def test_two_hundred_kills(tmp_path, count, kills):
    tally = kill_many(tmp_path / "run", count, kills, seed=100 + count)
    check(tally, kills)
    # The moments are spread, and rests of saves were there to be seen.
    assert tally.while_saving > kills // 4
    assert tally.while_loading > kills // 40
    assert tally.incomplete > kills // 20
