"""Kill a run again and again in one directory, and look at what is left each time."""

import dataclasses
import json
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np

from jfleet.checkpointer import Checkpointer
from tests.faults import victim
from tests.processes.start import ROOT, clean_environment, free_port

MOST_EVENTS = 260
"""About as many file operations as four saves and a load make."""
LONGEST_SECS = 0.5
"""About as long as they take."""


@dataclasses.dataclass
class Tally:
    """What the kills hit."""

    kills: int = 0
    while_saving: int = 0
    while_loading: int = 0
    steps: int = 0
    incomplete: int = 0


class Nursery:
    """The process that forks the runs."""

    def __enter__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.faults.victim"],
            env=clean_environment(),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *error):
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def run(self, order):
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def order_of(rng, directory, count):
    """A random moment: an operation on files, or a time, to hit what is in between."""
    by_event = bool(rng.integers(2))
    return {
        "count": count,
        "directory": str(directory),
        "log": f"{directory}.log",
        "port": free_port() if count > 1 else 0,
        "rank": int(rng.integers(count)),
        "event": int(rng.integers(1, MOST_EVENTS)) if by_event else 0,
        "delay": None if by_event else float(rng.uniform(0, LONGEST_SECS * count)),
        "linger": float(rng.uniform(0, 0.1)) if count > 1 else 0.0,
        "limit": 120.0,
    }


def kill_many(directory, count, kills, seed):
    """Kill runs of ``count`` processes; check the directory after each.

    Returns:
        The tally.
    """
    rng = np.random.default_rng(seed)
    tally, done = Tally(), 0
    with Nursery() as nursery:
        for _ in range(kills):
            order = order_of(rng, directory, count)
            result = nursery.run(order)
            if result["codes"][order["rank"]] != -9:
                raise AssertionError(Path(order["log"]).read_text())
            reports = [line.split() for line in result["reports"]]
            assert "WRONG" not in {what for _, what, _ in reports}
            finished = [int(s) for _, what, s in reports if what == "done"]
            begun = [int(s) for _, what, s in reports if what == "begin"]
            done = max(finished, default=done)
            tally.kills += 1
            tally.steps += len({int(s) for _, what, s in reports if what == "done"})
            last = [w for rank, w, _ in reports if int(rank) == order["rank"]][-1]
            tally.while_saving += last == "begin"
            tally.while_loading += last == "load"
            latest, incomplete = look(directory, done, max(begun, default=done))
            tally.incomplete += incomplete
            done = latest
    return tally


def look(directory, done, begun):
    """Check a directory after a kill.

    Args:
        directory: of the run.
        done: the last step that the run knew to be complete.
        begun: the last step that it began.

    Returns:
        The step that loads, and how many folders are incomplete.
    """
    checkpointer = Checkpointer(directory)
    latest = checkpointer.latest()
    problems = checkpointer.problems()
    for text in problems.values():
        assert "is incomplete (interrupted save)" in text, text
    if latest is None:
        assert done == 0
        return 0, len(problems)
    assert done <= latest <= max(begun, done)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state, extra = checkpointer.restore(victim.state_at(0))
    assert extra == {"step": latest}
    assert victim.same_as(latest, state)
    for step in checkpointer.steps():
        older, extra = checkpointer.restore(victim.state_at(0), step)
        assert extra == {"step": step}
        assert victim.same_as(step, older)
    return latest, len(problems)
