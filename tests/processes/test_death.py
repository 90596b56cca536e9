"""One of two processes dies: the other ends too, soon, and says why.

The limits are generous, since machines that run tests are busy; what is tested is that
the survivor ends by itself. Without what jfleet adds it takes 100 seconds or more.
"""

import re
import signal

import pytest

from jfleet import cli
from tests.processes import start

pytestmark = pytest.mark.multiprocess

SURVIVOR_SECS = 60
LOOP = """
import os, signal, sys, time
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
import jfleet
how, victim = sys.argv[1], int(sys.argv[2])
whole = NamedSharding(jfleet.init(), PartitionSpec())
total = jax.jit(jnp.sum, out_shardings=whole)
for step in range(100_000):
    assert float(total(jfleet.shard_batch(np.ones(1, np.float32)))) == 2
    if step == 2 and jax.process_index() == victim:
        if how == "raise":
            raise ZeroDivisionError("of process 1 only")
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 2 and how == "idle":
        print("no more steps", flush=True)
        time.sleep(600)
"""


@pytest.fixture
def loop(tmp_path):
    path = tmp_path / "loop.py"
    path.write_text(LOOP)
    return path


def survivor_of(loop, how, victim):
    """Run two processes without launch; return what the one that is left wrote."""
    command = [loop, how, victim]
    with start.started(command, start.environments(2, 1)) as running:
        dead, left = running[victim], running[1 - victim]
        _, last_words = dead.communicate(timeout=start.TIMEOUT_SECS)
        _, err = left.communicate(timeout=SURVIVOR_SECS)
        return dead.returncode, last_words, left.returncode, err


def test_launch_ends_the_others(loop, capfd):
    words = ["launch", "--processes", "2", "--grace", "1", str(loop), "kill", "1"]
    assert cli.main(words) == 128 + signal.SIGKILL
    err = capfd.readouterr().err
    assert re.search(
        r"jfleet launch: process 1 of 2 \(pid \d+\) ended with signal 9 \(SIGKILL\);"
        r" ending process 0\n",
        err,
    )


def test_a_lost_connection_ends_the_survivor(loop):
    died, _, code, err = survivor_of(loop, "kill", 1)
    assert (died, code) == (-signal.SIGKILL, 1)
    assert "Gloo" in err
    assert "jfleet: process 0 of 2 ends because of the error above" in err
    assert "another process died first" in err


@pytest.mark.slow
def test_a_lost_coordinator_ends_the_survivor(loop):
    died, _, code, err = survivor_of(loop, "kill", 0)
    assert died == -signal.SIGKILL
    assert code != 0
    assert "another task died" in err or "another process died first" in err


@pytest.mark.slow
def test_a_missing_heartbeat_ends_the_survivor(loop):
    """Between two collectives nothing but the heartbeat tells."""
    died, _, code, err = survivor_of(loop, "idle", 1)
    assert (died, code) == (-signal.SIGKILL, -signal.SIGABRT)
    assert "stopped sending heartbeats" in err
    assert "another task died" in err


@pytest.mark.slow
def test_an_error_in_one_process_ends_both(loop):
    died, words, code, err = survivor_of(loop, "raise", 1)
    assert (died, code) == (1, 1)
    assert "ZeroDivisionError: of process 1 only" in words
    assert "jfleet: process 1 of 2 ends because of the error above" in words
    # The first waits in its exit already, so the other need not be forced.
    assert "Gloo" in err
    assert "jfleet:" not in err


@pytest.mark.slow
def test_an_error_in_all_processes_needs_no_force(tmp_path):
    path = tmp_path / "all.py"
    path.write_text("import jfleet\njfleet.init()\nraise ZeroDivisionError\n")
    with start.started([path], start.environments(2, 1)) as running:
        outputs = start.outputs_of(running)
        assert [p.returncode for p in running] == [1, 1]
    for _, err in outputs:
        assert "ZeroDivisionError" in err
        assert "jfleet:" not in err


@pytest.mark.slow
def test_one_that_waits_for_the_others_says_so(tmp_path):
    done = tmp_path / "done"
    path = tmp_path / "early.py"
    path.write_text(
        "import os, sys, time, jax, jfleet\n"
        "jfleet.init()\n"
        "while jax.process_index() == 0 and not os.path.exists(sys.argv[1]):\n"
        "    time.sleep(0.1)\n"
    )
    with start.started([path, done], start.environments(2, 1)) as running:
        assert running[1].stderr.readline() == (
            "jfleet: process 1 of 2 has ended its script and waits for the others to"
            " end theirs\n"
        )
        done.touch()
        start.outputs_of(running)
        assert [p.returncode for p in running] == [0, 0]
