"""Processes for tests: on loopback, bounded in time, ended by id."""

import contextlib
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_SECS = 240
PREAMBLE = f"""
import sys
sys.path[:0] = {[p for p in sys.path if p]!r}
import jax
import numpy as np
import jfleet
MESH = jfleet.init()
"""


def free_port(among=(0,)):
    """The first of some ports that is free now; by default any."""
    for port in among:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return probe.getsockname()[1]
    raise OSError("no free port")


def clean_environment(**more):
    """This environment without what says how JAX is set up."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("JAX_", "XLA_", "SLURM_", "OMPI_", "TPU_"))
    }
    path = os.pathsep.join([str(ROOT), kept.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**kept, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **more}


def environments(count, devices):
    """What tells each of several processes who it is."""
    address = f"127.0.0.1:{free_port()}"
    return [
        clean_environment(
            JAX_COORDINATOR_ADDRESS=address,
            JAX_COORDINATOR_BIND_ADDRESS=address,
            JAX_NUM_PROCESSES=str(count),
            JAX_PROCESS_ID=str(rank),
            JAX_NUM_CPU_DEVICES=str(devices),
        )
        for rank in range(count)
    ]


@contextlib.contextmanager
def started(command, environments, **options):
    """Start a command in every environment; end what is left of it."""
    running = []
    try:
        for env in environments:
            running.append(
                subprocess.Popen(
                    [sys.executable, "-u", *map(str, command)],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    **options,
                )
            )
        yield running
    finally:
        for process in running:
            process.kill()
            process.communicate()


def outputs_of(running):
    """Wait for processes; return what each wrote, without what Gloo wrote."""
    outputs = [process.communicate(timeout=TIMEOUT_SECS) for process in running]
    return [
        ("".join(x for x in out.splitlines(True) if not x.startswith("[Gloo]")), err)
        for out, err in outputs
    ]


def run(script, *args, count=2, devices=2):
    """Run a script on several processes; return what each wrote to stdout.

    The script finds ``jax``, ``np``, ``jfleet`` and the mesh of all devices, ``MESH``.
    """
    command = ["-c", PREAMBLE + textwrap.dedent(script), *args]
    with started(command, environments(count, devices)) as running:
        outputs = outputs_of(running)
        codes = [process.returncode for process in running]
    assert codes == [0] * count, "\n".join(err for _, err in outputs)
    return [out for out, _ in outputs]
