"""``devices``: what JAX sees, on all processes."""

import argparse
import json
from typing import Any

import jax
from rich.table import Table

from jfleet import processes
from jfleet._commands._console import make_console
from jfleet._errors import JfleetError
from jfleet._plan_text import human


def add_parser(subparsers: Any) -> None:
    """Add the parser of this command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "devices",
        help="list the devices that JAX sees",
        description="List the devices that JAX sees. Started once per process (by"
        " launch, srun, ...) it connects them, lists all devices, and process 0 writes."
        " Memory is known for the devices of the process that writes, where the"
        " platform tells.",
    )
    parser.add_argument("--json", action="store_true", help="write JSON")


def run(args: argparse.Namespace) -> int:
    """List the devices."""
    found = describe()
    if jax.process_index() == 0:
        print(json.dumps(found, indent=1)) if args.json else _show(found)
    return 0


def describe() -> dict[str, Any]:
    """Everything that the command writes, as JSON has it.

    Raises:
        JfleetError: JAX finds no devices on the platform that it is told to use.
    """
    processes.start("auto")
    try:
        devices = jax.devices()
    except RuntimeError as error:
        raise JfleetError(
            f"JAX finds no devices: {error}; set JAX_PLATFORMS to a platform that this"
            " machine has, such as cpu"
        ) from error
    return {
        "platform": jax.default_backend(),
        "num_devices": len(devices),
        "num_processes": jax.process_count(),
        "devices": [_row(device) for device in devices],
    }


def _row(device: jax.Device) -> dict[str, Any]:
    memory = _memory(device)
    return {
        "id": device.id,
        "process": device.process_index,
        "platform": device.platform,
        "kind": device.device_kind,
        "memory_bytes": memory.get("bytes_limit"),
        "used_bytes": memory.get("bytes_in_use"),
    }


def _memory(device: jax.Device) -> dict[str, int]:
    if device.process_index != jax.process_index():
        return {}
    try:
        return device.memory_stats() or {}
    except jax.errors.JaxRuntimeError:  # a platform that does not count
        return {}


def _show(found: dict[str, Any]) -> None:
    table = Table(
        title=f"{found['num_devices']} devices of platform {found['platform']},"
        f" processes: {found['num_processes']}",
        title_justify="left",
    )
    for name in ("id", "process", "kind", "memory", "in use"):
        table.add_column(name, justify="left" if name == "kind" else "right")
    for row in found["devices"]:
        sizes = (row["memory_bytes"], row["used_bytes"])
        known = ["unknown" if size is None else human(size) for size in sizes]
        table.add_row(str(row["id"]), str(row["process"]), row["kind"], *known)
    make_console().print(table)
