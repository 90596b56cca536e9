"""A run on a disk that fills up; prints what came of it as JSON.

    python -m tests.faults.disk full DIRECTORY         a small disk, if one can be made
    python -m tests.faults.disk limit DIRECTORY        files that may not grow
    python -m tests.faults.disk every DIRECTORY        the n-th file operation fails

The disk is a tmpfs in a mount namespace of this process alone, which ends with it.
Where that is not allowed, ``full`` does what ``limit`` does.
"""

import ctypes
import errno
import json
import os
import resource
import subprocess
import sys
import warnings

from tests.faults import victim

CLONE_NEWNS = 0x00020000
DISK_BYTES = 3 << 20
ROWS = 16_000
"""So that a state has about 1 MB, and two fit on the disk."""


def small_disk(directory):
    """Mount a disk of three megabytes; return what fills half of it, and the reverse.

    None if that is not allowed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    private = ["mount", "--make-rprivate", "/"]
    size = f"size={DISK_BYTES}"
    mount = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", directory]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    if libc.unshare(CLONE_NEWNS) or any(
        subprocess.run(command, **quiet).returncode for command in (private, mount)
    ):
        return None
    ballast = os.path.join(directory, "ballast")

    def fill():
        with open(ballast, "wb") as file:
            file.write(b"\0" * (DISK_BYTES // 2))

    return fill, lambda: os.unlink(ballast)


def small_files(directory):
    """Return what limits files to half a state, and what lifts the limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(num_bytes):
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))

    return lambda: limit(ROWS * 32), lambda: limit(before[0])


def state_at(step):
    import jax
    import jax.numpy as jnp

    return {"w": jax.jit(lambda: jnp.full((ROWS, 16), float(step)))(), "n": step}


def fill(directory, disk):
    """Save until an error comes up, look at what is left, make room, go on."""
    from jfleet._errors import CheckpointError
    from jfleet.checkpointer import Checkpointer

    said = {}
    limit, lift = disk(directory) or small_files(directory)
    run = os.path.join(directory, "run")
    with Checkpointer(run, keep=1) as checkpointer:
        checkpointer.save(1, state_at(1))
        checkpointer.wait()
        limit()
        try:
            checkpointer.save(2, state_at(2))
            checkpointer.maybe_save(3, state_at(3))
        except CheckpointError as error:
            said["error"] = str(error)
        said["loaded"] = loads(checkpointer)
        lift()
        checkpointer.save(2, state_at(2))
        checkpointer.wait()
        said["then"] = loads(checkpointer)
        said["left"] = sorted(os.listdir(run))
    return said


def loads(checkpointer):
    """The steps that load with the right values, and what is said of the others."""
    good = []
    for step in checkpointer.steps():
        state, _ = checkpointer.restore(state_at(0), step)
        if (state["w"] == step).all() and state["n"] == step:
            good.append(step)
    return [good, checkpointer.latest(), sorted(checkpointer.problems().values())]


def fail_every(directory, every):
    """Let every n-th file operation of a save fail, each in its turn.

    Returns:
        How many saves failed, how many did not mind, and what went wrong.
    """
    from jfleet._errors import CheckpointError
    from jfleet.checkpointer import Checkpointer

    armed = {"in": 0}

    def hook(event, args):
        if event in victim.EVENTS and args and str(args[0]).startswith(directory):
            armed["in"] -= 1
            if armed["in"] == 0:
                raise OSError(errno.ENOSPC, "No space left on device")

    sys.addaudithook(hook)
    said = {"failed": 0, "fine": 0, "wrong": []}
    step, at = 1, 1
    with Checkpointer(directory, keep=2) as checkpointer:
        checkpointer.save(step, victim.state_at(step), extra=step)
        checkpointer.wait()
        while True:
            armed["in"] = at
            failed = False
            try:
                checkpointer.save(step + 1, victim.state_at(step + 1), extra=step + 1)
                checkpointer.wait()
            except CheckpointError:
                failed = True
            except Exception as error:
                said["wrong"].append([at, repr(error)])
                failed = True
            done = armed["in"] > 0
            armed["in"] = 0
            if done:
                return said
            said["failed" if failed else "fine"] += 1
            latest = checkpointer.latest()
            if failed and latest == step + 1:
                failed = False  # It was complete, and what comes after it failed.
            step = step if failed else step + 1
            state, extra = checkpointer.restore(victim.state_at(0))
            if not (latest == extra == step and victim.same_as(step, state)):
                said["wrong"].append([at, latest, extra, step])
            at += every


def main():
    how, directory = sys.argv[1:]
    warnings.simplefilter("ignore")
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    if how.startswith("every"):
        said = fail_every(directory, int(how.removeprefix("every")))
    else:
        said = fill(directory, small_disk if how == "full" else small_files)
    print(json.dumps(said))


if __name__ == "__main__":
    main()
