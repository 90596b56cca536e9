"""Save with one strategy and number of devices, resume with another: every pair."""

import itertools
import warnings

import jax
import numpy as np
import pytest

from jfleet._errors import CheckpointError, JfleetWarning
from jfleet.checkpointer import Checkpointer
from tests.elastic import table
from tests.save_helpers import assert_laid_out_as, assert_same_bits

FAST = [("local", 8, "local", 3), ("plain", 4, "amp", 4), ("local_amp", 4, "clip", 2)]
DEVICES = (1, 2, 3, 4, 6, 8)
SAME_STRATEGY = [
    (name, old, name, new)
    for name in table.STRATEGIES
    for old, new in itertools.product((2, 8), DEVICES)
]
OTHER_STRATEGY = [
    (old, 8, new, 4) for old, new in itertools.permutations(table.STRATEGIES, 2)
]
SLOW = [c for c in (*SAME_STRATEGY, *OTHER_STRATEGY) if c not in FAST]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of scrambled states, and their values, made when first asked for."""
    root, made = tmp_path_factory.mktemp("saved"), {}

    def of(name, num_devices):
        if (name, num_devices) not in made:
            state = table.scrambled(table.created(name, num_devices, 0), 1)
            folder = root / f"{name}{num_devices}"
            with Checkpointer(folder) as checkpointer:
                checkpointer.save(7, state, extra={"row": 7})
            made[name, num_devices] = folder, state
        return made[name, num_devices]

    return of


@pytest.mark.parametrize(
    ("old", "num_old", "new", "num_new"),
    [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_pair(saved, old, num_old, new, num_new):
    folder, state = saved(old, num_old)
    target = table.created(new, num_new, 2)
    checkpointer = Checkpointer(folder)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        loaded, extra = checkpointer.restore(target, strict=False)
    assert extra == {"row": 7}
    assert jax.tree.structure(loaded) == jax.tree.structure(target)
    assert_laid_out_as(loaded, target)
    source, before = table.values_of(state), table.values_of(target)
    want, got = table.expected(source, before, new), table.values_of(loaded)
    for meaning, value in want.items():
        value = before[meaning] if value is None else value
        np.testing.assert_array_equal(got[meaning], value, err_msg=str(meaning))
    check_report(checkpointer.report, state, target, warned)
    if old == new and num_old == num_new:
        assert_same_bits(loaded, state)
    after, metrics = table.step_of(new, num_new)(loaded, table.rows_for(num_new))
    assert np.isfinite(metrics.loss)
    assert int(after.step) == int(state.step) + 1


def check_report(report, state, target, warned):
    """What is new and what is gone is named, by path; the rest was loaded."""
    stored, wanted = table.kinds_of(state), table.kinds_of(target)
    has_old, has_new = ({k for k, _ in x.values()} for x in (stored, wanted))
    fresh = has_new - has_old - {"master"}
    gone = has_old - has_new - {"master"}
    assert set(report.fresh) == {p for p, (kind, _) in wanted.items() if kind in fresh}
    assert set(report.gone) == {p for p, (kind, _) in stored.items() if kind in gone}
    texts = [str(w.message) for w in warned if w.category is JfleetWarning]
    assert len(texts) == (1 if report.differences else 0)
    for path in (*report.fresh, *report.gone, *report.converted):
        assert f"\n  {path}: " in texts[0]
    for path in {p for p, k in wanted.items() if k[0] in ("params", *fresh)}:
        assert (path in report.fresh) == (wanted[path][0] in fresh)


@pytest.mark.parametrize("case", [FAST[0], FAST[1]], ids=str)
def test_strict_refuses_and_says_how_to_go_on(saved, case):
    old, num_old, new, num_new = case
    folder, _ = saved(old, num_old)
    target = table.created(new, num_new, 2)
    with pytest.raises(CheckpointError, match="does not fit this state") as caught:
        Checkpointer(folder).restore(target)
    assert "pass strict=False" in str(caught.value)
    if old == new:
        assert (
            "params/w: stored as float32 (8, 24, 16) of 8 replicas, wanted as"
            in str(caught.value)
        )


def test_eight_replicas_of_a_vector_are_not_a_matrix_of_eight_rows(saved):
    folder, _ = saved("local", 8)
    plain = table.created("plain", 8, 0)
    rows = np.zeros((8, 16), np.float32)
    params = {**plain.params, "deep": {**plain.params["deep"], "b": rows}}
    with pytest.warns(JfleetWarning, match=r"b: stored as .* of 8 replicas, wanted"):
        loaded, _ = Checkpointer(folder).restore(
            plain.replace(params=params), strict=False
        )
    assert (loaded.params["deep"]["b"] == 0).all()
