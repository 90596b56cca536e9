"""The scripts that measure memory and leaks say that the promises hold."""

import json
import subprocess
import sys

import pytest

from tests.processes.start import ROOT, clean_environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(name, *args):
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / name), *map(str, args)],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=800,
    )


def test_peak_memory_of_saving_and_loading(tmp_path):
    output = tmp_path / "memory.json"
    done = run("checkpoints.py", "--memory", 480, "--level", "p_g_os", "--json", output)
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())["memory"]["p_g_os"]
    assert sorted(found) == ["load", "load, donated", "save"]
    for action, seen in found.items():
        assert seen["local MiB"] == pytest.approx(480, rel=0.01), action
        assert seen["peak MiB"] > 0.9 * seen["local MiB"], action
        assert seen["peak MiB"] <= seen["bound MiB"], action


def test_a_short_soak(tmp_path):
    output = tmp_path / "soak.json"
    done = run(
        "soak.py", "--minutes", 0.1, "--seconds", 0.3, "--width", 64, "--json", output
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    record = json.loads(output.read_text())
    said, samples = record["verdicts"], record["samples"]
    # Whether memory grows takes minutes to say; values are right at once.
    for name in ("losses equal", "state equal", "last step loads"):
        assert said[name], name
    assert said["saves"] == len(samples["saves"]) == len(samples["control"]) > 0
    assert said["holds"] == (done.returncode == 0)
    assert all(s["rss_mib"] > 0 and s["threads"] > 0 for s in samples["saves"])
