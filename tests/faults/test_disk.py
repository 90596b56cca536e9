"""A full disk loses nothing, says which step, and does not stop the run for good."""

import json
import subprocess
import sys

import pytest

from tests.processes.start import ROOT, clean_environment


def run(how, directory):
    directory.mkdir()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.faults.disk", how, directory],
        capture_output=True,
        text=True,
        env=clean_environment(),
        cwd=ROOT,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("how", ["full", pytest.param("limit", marks=pytest.mark.slow)])
def test_a_full_disk(tmp_path, how):
    said = run(how, tmp_path / "disk")
    assert "of step 2 could not be written" in said["error"]
    assert "what was there before is still there" in said["error"]
    good, latest, problems = said["loaded"]
    assert (good, latest) == ([1], 1)
    assert all("is incomplete (interrupted save)" in text for text in problems)
    assert said["then"] == [[2], 2, []]
    assert said["left"] == ["step_00000002"]


@pytest.mark.slow
@pytest.mark.parametrize("every", [9, 1])
def test_whichever_file_operation_fails(tmp_path, every):
    said = run(f"every{every}", tmp_path / "run")
    assert said["wrong"] == []
    assert said["failed"] > 10 / every
    assert said["fine"] > 0
