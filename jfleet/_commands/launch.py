"""``launch``: the processes of a script on one host."""

import argparse
import os
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jfleet._commands._supervise import Supervisor
from jfleet._errors import ConfigError

HOST = "127.0.0.1"
GRACE_SECS = 10.0


def add_parser(subparsers: Any) -> None:
    """Add the parser of this command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "launch",
        help="start a script in several processes on this host",
        description="Start a script in several processes on this host, connected so"
        " that jfleet.init makes one mesh of their devices. Their lines are passed on"
        " with the number of the process in front. When one fails the others are"
        " ended, and its exit code is that of launch (128 + n if signal n ended it)."
        " Options of launch stand before the script.",
    )
    add = parser.add_argument
    add("--processes", type=int, required=True, metavar="N", help="how many")
    add(
        "--devices-per-process",
        type=int,
        metavar="D",
        help="on CPU, simulate D devices in each process; on GPU, give each D of this"
        " host's (default: what the environment says; one GPU each)",
    )
    add("--port", type=int, help="where process 0 listens (default: one that is free)")
    add(
        "--grace",
        type=float,
        default=GRACE_SECS,
        metavar="SECONDS",
        help="time from SIGTERM to SIGKILL (default: %(default)g)",
    )
    add("script", help="Python file")
    add("args", nargs=argparse.REMAINDER, help="its arguments")


def run(args: argparse.Namespace) -> int:
    """Start the processes and see to their end; return the first failing exit code."""
    _check(args)
    port = _free_port() if args.port is None else args.port
    command = [sys.executable, args.script, *args.args]
    environments = [
        environment(os.environ, rank, args.processes, args.devices_per_process, port)
        for rank in range(args.processes)
    ]
    return Supervisor(command, environments, args.grace).run()


def environment(
    env: Mapping[str, str], rank: int, count: int, num_devices: int | None, port: int
) -> dict[str, str]:
    """The environment of one process.

    ``JAX_LOCAL_DEVICE_IDS`` chooses GPUs and means nothing on CPU; the number of CPU
    devices means nothing on GPU. So the platform need not be known here.
    """
    address = f"{HOST}:{port}"
    first, own = (rank, 1) if num_devices is None else (rank * num_devices, num_devices)
    new = {
        **env,
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(rank),
        "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, range(first, first + own))),
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "PYTHONUNBUFFERED": "1",
    }
    if num_devices is not None:
        new["JAX_NUM_CPU_DEVICES"] = str(num_devices)
        flags = env.get("XLA_FLAGS", "")
        new["XLA_FLAGS"] = re.sub(
            r"--xla_force_host_platform_device_count=\S*", "", flags
        ).strip()
    return new


def _check(args: argparse.Namespace) -> None:
    """Raise unless the arguments can work.

    Raises:
        ConfigError: a number out of range, no such script, or a port in use.
    """
    if not hasattr(os, "killpg"):
        raise ConfigError(
            "launch needs process groups, which this system lacks; start the processes"
            " by hand with JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID"
        )
    for name in ("processes", "devices_per_process"):
        value = getattr(args, name)
        if value is not None and value < 1:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} must be at least 1, got {value}")
    if not 0 <= args.grace < float("inf"):
        raise ConfigError(f"--grace must be at least 0 seconds, got {args.grace:g}")
    if not Path(args.script).is_file():
        raise ConfigError(
            f"script {args.script!r} must be a Python file, and there is none of that"
            " name; options of launch stand before it, its own behind"
        )
    if args.port is not None:
        _check_port(args.port)


def _check_port(port: int) -> None:
    if not 1 <= port <= 65535:
        raise ConfigError(f"--port must lie in 1..65535, got {port}")
    try:
        with socket.socket() as probe:
            # What lingers from a run that has ended does not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
    except OSError as error:
        raise ConfigError(
            f"--port {port} cannot be used ({error.strerror}); give another, or none to"
            " get one that is free"
        ) from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]
