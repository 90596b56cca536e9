"""Options that say where a step would run, and how it is trained."""

import argparse
import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from jfleet._errors import ConfigError
from jfleet._planning.hardware import HARDWARE, Hardware, hardware_of
from jfleet._tuning.target import topology_devices
from jfleet._types import LEVELS
from jfleet.strategy import DistributedStrategy

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}
_UNITS |= {f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where a step would run."""

    mesh_shape: dict[str, int]
    devices: Sequence[Any] | None = None
    """The chips of a topology, where one was named."""
    topology: str | None = None
    hardware: Hardware | None = None
    memory_bytes: int | None = None
    """What the user says that a device has."""
    fixed: bool = True
    """Did the user choose the mesh, and not only a number of devices?"""

    @property
    def mesh(self) -> AbstractMesh:
        """The mesh, without devices."""
        sizes, names = tuple(self.mesh_shape.values()), tuple(self.mesh_shape)
        return AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))

    @property
    def compiler(self) -> str | None:
        """The compiler of a topology; else whatever the hardware needs."""
        return None if self.topology is None else "tpu"

    @property
    def num_devices(self) -> int:
        """How many devices."""
        return math.prod(self.mesh_shape.values())


def add_place_options(parser: argparse.ArgumentParser) -> None:
    """Add the options about devices."""
    add = parser.add_argument
    add(
        "--mesh",
        metavar="AXIS=N,..",
        help="mesh axes and sizes, such as data=8 or replica=2,shard=4; one size may be"
        " -1, for the rest of the devices",
    )
    add("--devices", type=int, metavar="N", help="number of devices")
    add(
        "--topology",
        metavar="CHIP:AxB",
        help="compile the step with the compiler of this TPU topology, such as"
        " v5e:16x16; no TPU need be there, but the extra jfleet[tpu] installed",
    )


def add_strategy_options(parser: argparse.ArgumentParser) -> None:
    """Add the options about the strategy."""
    add = parser.add_argument
    add("--level", metavar="LEVEL", help=f"level of sharding: {', '.join(LEVELS)}")
    add(
        "--strategy",
        metavar="FILE",
        help="a strategy as JSON, from DistributedStrategy.to_json; --level overrides"
        " its level",
    )


def place_of(
    args: argparse.Namespace,
    strategy: DistributedStrategy | None = None,
    devices: Sequence[Any] | None = None,
) -> Place:
    """Read the options about devices.

    Args:
        args: the parsed words.
        strategy: its ``hybrid_configs`` give the mesh where no option does.
        devices: the chips of the topology, if ``topology_of`` was asked for them.

    Raises:
        ConfigError: an option that makes no sense, or two that disagree.
    """
    num = args.devices
    if num is not None and num < 1:
        raise ConfigError(f"--devices must be at least 1, got {num}")
    if devices is not None:
        if num not in (None, len(devices)):
            raise ConfigError(
                f"--topology {args.topology} has {len(devices)} chips, and --devices "
                f"is {num}; leave --devices away"
            )
        num = len(devices)
    given = None if args.mesh is None else parse_mesh(args.mesh)
    if given is None and strategy is not None and strategy.is_set("hybrid_configs"):
        given = strategy.mesh_shape()
    if given is None:
        shape = {"data": jax.device_count() if num is None else num}
    else:
        shape = _filled(given, num)
    return Place(
        mesh_shape=shape,
        devices=devices,
        topology=args.topology,
        hardware=_hardware(args),
        memory_bytes=_memory(args),
        fixed=given is not None,
    )


def chips_of(args: argparse.Namespace) -> Sequence[Any] | None:
    """The chips of the topology that was named, if one was.

    To be called before anything starts JAX's backends: the compiler must be told that
    it has no TPU before it looks for one.

    Raises:
        ConfigError: an unknown topology.
        DistributedError: its compiler is not installed.
    """
    return None if args.topology is None else topology_devices(args.topology)


def _hardware(args: argparse.Namespace) -> Hardware | None:
    named = getattr(args, "hardware", None)
    if named is not None or args.topology is None:
        return hardware_of(named)
    return HARDWARE.get(args.topology.partition(":")[0])


def _memory(args: argparse.Namespace) -> int | None:
    text = getattr(args, "memory", None)
    return None if text is None else parse_bytes(text)


def parse_bytes(text: str) -> int:
    """Read a number of bytes.

    >>> parse_bytes("16GiB"), parse_bytes("1.5 GB"), parse_bytes("4096")
    (17179869184, 1500000000, 4096)
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?B|B|)", text.strip())
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if size < 1:
        raise ConfigError(
            f"--memory must be a size above 0 such as 16GiB, 80GB or 8e9 written out, "
            f"got {text!r}"
        )
    return size


def parse_mesh(text: str) -> dict[str, int]:
    """Read axes and sizes.

    >>> parse_mesh("replica=2,shard=-1")
    {'replica': 2, 'shard': -1}
    """
    shape: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*(-1|[1-9]\d*)\s*", part)
        if match is None or match[1] in shape:
            raise ConfigError(
                "--mesh must name distinct axes with sizes of at least 1, such as "
                f"data=8 or replica=2,shard=4, got {text!r}"
            )
        shape[match[1]] = int(match[2])
    if list(shape.values()).count(-1) > 1:
        raise ConfigError(f"--mesh: only one size may be -1, got {text!r}")
    return shape


def _filled(given: dict[str, int], num: int | None) -> dict[str, int]:
    """Compute the size that is -1, and check that the number of devices agrees."""
    known = math.prod(n for n in given.values() if n != -1)
    text = ",".join(f"{axis}={n}" for axis, n in given.items())
    if -1 not in given.values():
        if num not in (None, known):
            raise ConfigError(f"the mesh {text} has {known} devices, not {num}")
        return given
    num = jax.device_count() if num is None else num
    if num % known:
        raise ConfigError(f"the mesh {text} does not divide {num} devices")
    return {axis: num // known if n == -1 else n for axis, n in given.items()}


def strategy_of(
    args: argparse.Namespace, default: DistributedStrategy | None
) -> DistributedStrategy | None:
    """The strategy that the options ask for, or None where they leave it open.

    Raises:
        ConfigError: an unknown level, or a file that holds no strategy.
    """
    if args.level is not None and args.level not in LEVELS:
        raise ConfigError(f"--level must be one of {', '.join(LEVELS)}: {args.level!r}")
    strategy = default
    if args.strategy is not None:
        try:
            text = Path(args.strategy).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--strategy {args.strategy}: {error}") from error
        strategy = DistributedStrategy.from_json(text)
    if args.level is None:
        return strategy
    return at_level(strategy, args.level)


def at_level(strategy: DistributedStrategy | None, level: str | None) -> Any:
    """A copy of a strategy at another level of sharding; None: without sharding."""
    strategy = DistributedStrategy() if strategy is None else strategy.copy()
    if level is None:
        strategy.unset("sharding", "sharding_configs")
        return strategy
    strategy.sharding = True
    strategy.sharding_configs = {"level": level}
    return strategy
