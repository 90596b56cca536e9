"""A run that saves, removes and loads checkpoints until it is killed.

The state of every step is known, so whoever looks at the directory afterwards knows
what must be in it. Run as a program it is a nursery: it imports what a run needs, once,
and forks the runs, which saves the start of Python and JAX for each of hundreds.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time
import traceback

import numpy as np

EVENTS = (
    "open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.listdir",
    "os.scandir", "os.truncate",
)  # fmt: skip
"""Audit events of Python's file operations; each is raised before it happens."""


def values_at(step):
    """What is saved at a step: split, whole, of several types, and growing."""
    rng = np.random.default_rng(step)
    return {
        "split": rng.normal(size=(16, 32)).astype(np.float32),
        "half": rng.normal(size=(8, 24)).astype(np.float16),
        "whole": rng.integers(0, 1 << 30, 37).astype(np.int32),
        "step": np.asarray(step, np.int32),
    }


def state_at(step):
    """The same on all devices of all processes."""
    import jax
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))

    def place(name, value):
        split = name in ("split", "half")
        where = NamedSharding(mesh, PartitionSpec("data") if split else PartitionSpec())
        return jax.make_array_from_callback(value.shape, where, lambda i: value[i])

    return {name: place(name, value) for name, value in values_at(step).items()}


def same_as(step, state):
    """Whether the shards that are here hold the values of a step, bit for bit."""
    want = values_at(step)
    return sorted(state) == sorted(want) and all(
        np.asarray(shard.data).tobytes() == want[name][shard.index].tobytes()
        for name, array in state.items()
        for shard in array.addressable_shards
    )


def live(directory, report, max_steps=10_000):
    """Resume, then save every step; keep two; load now and then."""
    from jfleet.checkpointer import Checkpointer

    checkpointer = Checkpointer(directory, keep=2)
    first = 0
    report("ready", first)
    if checkpointer.steps():
        report("load", first)
        state, extra = checkpointer.restore(state_at(0))
        first = extra["step"]
        report("right" if same_as(first, state) else "WRONG", first)
    for step in range(first + 1, first + 1 + max_steps):
        report("begin", step)
        checkpointer.maybe_save(step, state_at(step), extra={"step": step})
        if step % 3:
            checkpointer.wait()
            report("done", step)
        else:
            checkpointer.wait()
            report("load", step)
            state, extra = checkpointer.restore(state_at(0))
            good = extra == {"step": step} and same_as(step, state)
            report("right" if good else "WRONG", step)
            report("done", step)


def count_events(directory, at, action):
    """Call an action at the ``at``-th file operation below a directory."""
    seen = 0

    def hook(event, args):
        nonlocal seen
        if event in EVENTS and args and str(args[0]).startswith(directory):
            seen += 1
            if seen == at:
                action()

    sys.addaudithook(hook)


def run_child(order, rank, pipe):
    """The forked process: set up JAX, arm the trap, live."""
    os.environ["PYTHONWARNINGS"] = "ignore"
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    import warnings

    warnings.simplefilter("ignore")
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    if order["count"] > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        address = f"127.0.0.1:{order['port']}"
        jax.distributed.initialize(address, order["count"], rank)

    def report(what, step):
        os.write(pipe, f"{rank} {what} {step}\n".encode())
        if what == "ready" and rank == order["rank"] and order["event"]:
            count_events(order["directory"], order["event"], die)

    live(order["directory"], report)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def serve_one(order):
    """Fork the processes of one run, see that they die, say what they reported."""
    reader, writer = os.pipe()
    children = []
    for rank in range(order["count"]):
        pid = os.fork()
        if not pid:
            try:
                os.close(reader)
                run_child(order, rank, writer)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(3)
        children.append(pid)
    os.close(writer)
    try:
        lines = watch(order, reader, children)
    finally:
        codes = [end(pid) for pid in children]
        os.close(reader)
    return {"reports": lines, "codes": codes}


def watch(order, reader, children):
    """Collect reports until the chosen process is dead; kill it in time if asked."""
    victim = children[order["rank"]]
    text, kill_at, deadline = b"", None, time.monotonic() + order["limit"]
    while time.monotonic() < deadline and not has_ended(victim):
        wait = 0.05 if kill_at is None else kill_at - time.monotonic()
        wait = min(max(wait, 0), 0.05)
        if select.select([reader], [], [], wait)[0]:
            text += os.read(reader, 65536)
        ready = f"{order['rank']} ready".encode() in text
        if ready and kill_at is None and order["delay"] is not None:
            kill_at = time.monotonic() + order["delay"]
        if kill_at is not None and time.monotonic() >= kill_at:
            os.kill(victim, signal.SIGKILL)
            kill_at = float("inf")
    time.sleep(order["linger"])  # The others go on for a moment, as they would.
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    while chunk := os.read(reader, 65536):
        text += chunk
    return text.decode().splitlines()


def has_ended(pid):
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return found is not None


def end(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def nursery():
    """Import once, then serve orders, one JSON text a line, until the input ends."""
    import warnings

    warnings.simplefilter("ignore")
    import jfleet.checkpointer  # noqa: F401

    for line in sys.stdin:
        print(json.dumps(serve_one(json.loads(line))), flush=True)


if __name__ == "__main__":
    nursery()
