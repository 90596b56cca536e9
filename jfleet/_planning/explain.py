"""Read a compiled step: what it sends, what it holds, what should not be there."""

import dataclasses
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jfleet._errors import ConfigError, ConfigTypeError
from jfleet._hlo import Collective, collectives
from jfleet._planning.compare import peak_of
from jfleet._planning.flags import Flag, flags_of
from jfleet._planning.inputs import Input, inputs_of, mesh_of
from jfleet._planning.report import explain_text
from jfleet._types import LEVELS
from jfleet.train_step import TrainStep

LARGE_BYTES = 2**26


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """Collectives of one kind along the same axes."""

    kind: str
    axes: tuple[str, ...]
    """Mesh axes; empty where the groups follow none, or no mesh is known."""
    group_size: int
    count: int
    """Runs in one execution."""
    bytes: int
    """Sizes of the whole arrays, added up over the execution."""
    wire_bytes: float
    """What one device sends."""
    in_loop: bool
    in_conditional: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a compiled step does; ``print`` it."""

    level: str | None
    mesh_shape: tuple[tuple[str, int], ...]
    sent: tuple[Sent, ...]
    """Largest first."""
    arguments_bytes: int
    output_bytes: int
    donated_bytes: int
    temporary_bytes: int
    peak_bytes: int
    """Arguments, temporaries, and results that take no memory of arguments."""
    classes: tuple[tuple[str, int, int], ...]
    """Class of arguments, bytes on each device, bytes of the whole arrays."""
    flags: tuple[Flag, ...]
    """What should not be there, worst first; empty is good."""

    @property
    def wire_bytes(self) -> float:
        """What one device sends in one execution."""
        return sum(s.wire_bytes for s in self.sent)

    def to_json(self, *, indent: int | None = None) -> str:
        """Everything, as JSON."""
        plain = dataclasses.asdict(self) | {"wire_bytes": self.wire_bytes}
        return json.dumps(plain, indent=indent)

    def __str__(self) -> str:
        return explain_text(self)


def explain(
    program: Any,
    *arguments: Any,
    mesh: Any = None,
    level: str | None = None,
    large_bytes: int = LARGE_BYTES,
) -> Report:
    """Say what a compiled step sends and holds, and what should not be there.

    Args:
        program: what ``jax.jit(f).lower(...).compile()`` returns; or what ``lower``
            returns, a ``TrainStep`` or a jitted function, which are compiled here.
        *arguments: state, batch and whatever else to lower the latter two for.
        mesh: the mesh, where the arguments of the program do not tell it.
        level: the level that the state should have, for what counts as a mistake;
            of a ``TrainStep`` it is known.
        large_bytes: arrays from this size on should not lie whole on every device.

    Returns:
        Collectives by kind and mesh axis, memory, and flags.

    Raises:
        ConfigError: an unknown level, or arguments for a compiled program.
        ConfigTypeError: something that is no program.

    Example:
        >>> import jax, jax.numpy as jnp, jfleet
        >>> from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        >>> mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
        >>> x = jax.device_put(jnp.ones((16, 4)), NamedSharding(mesh, P("data")))
        >>> report = explain(jax.jit(jnp.sum), x)
        >>> [(s.kind, s.axes, s.bytes) for s in report.sent]
        [('all-reduce', ('data',), 4)]
    """
    if level is not None and level not in LEVELS:
        raise ConfigError(f"level must be one of {list(LEVELS)}, got {level!r}")
    num_micro = 1
    if isinstance(program, TrainStep):
        options = program.setup._options("sharding")
        level = level or (None if options is None else options.level)
        num_micro = program.setup.num_micro
    compiled = _compiled(program, arguments)
    found = collectives(compiled)
    known = (dict(mesh.shape), mesh) if mesh is not None else mesh_of(compiled)
    sizes = {} if known is None else known[0]
    memory, inputs = compiled.memory_analysis(), inputs_of(compiled)
    return Report(
        level=level,
        mesh_shape=tuple(sizes.items()),
        sent=_sent(found, _AxisNames(sizes)),
        arguments_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        donated_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        peak_bytes=peak_of(memory),
        classes=_classes(inputs),
        flags=flags_of(
            found,
            inputs,
            memory,
            level=level,
            num_devices=math.prod(sizes.values()),
            num_micro=num_micro,
            large_bytes=large_bytes,
        ),
    )


def _compiled(program: Any, arguments: Sequence[Any]) -> Any:
    if hasattr(program, "memory_analysis") and hasattr(program, "as_text"):
        if arguments:
            raise ConfigError("a compiled program takes no arguments to lower it for")
        return program
    if hasattr(program, "compile"):
        return program.compile()
    if hasattr(program, "lower"):
        return program.lower(*arguments).compile()
    raise ConfigTypeError(
        "explain takes a compiled or lowered program, a TrainStep or a jitted function "
        f"with its arguments, got {type(program).__name__}"
    )


class _AxisNames:
    """From groups of devices to mesh axes."""

    def __init__(self, sizes: Mapping[str, int]):
        grid = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        wide = [i for i, n in enumerate(grid.shape) if n > 1]
        names = tuple(sizes)
        self.known: dict[frozenset, tuple[str, ...]] = {}
        for count in range(1, len(wide) + 1):
            for chosen in itertools.combinations(wide, count):
                rest = [i for i in range(grid.ndim) if i not in chosen]
                size = math.prod(grid.shape[i] for i in chosen)
                groups = grid.transpose(*rest, *chosen).reshape(-1, size)
                key = frozenset(frozenset(map(int, g)) for g in groups)
                self.known.setdefault(key, tuple(names[i] for i in chosen))
        self.all = tuple(names[i] for i in wide)

    def of(self, one: Collective) -> tuple[str, ...]:
        """The axes along which a collective runs."""
        if not one.groups:
            return self.all
        return self.known.get(frozenset(map(frozenset, one.groups)), ())


def _sent(found: Iterable[Collective], names: _AxisNames) -> tuple[Sent, ...]:
    groups: dict[tuple, list[Collective]] = defaultdict(list)
    for c in found:
        key = (c.kind, names.of(c), c.group_size, c.in_loop, c.in_conditional)
        groups[key].append(c)
    rows = [
        Sent(
            kind=kind,
            axes=axes,
            group_size=size,
            count=sum(c.count for c in members),
            bytes=sum(c.count * c.bytes for c in members),
            wire_bytes=sum(c.wire_bytes for c in members),
            in_loop=in_loop,
            in_conditional=in_conditional,
        )
        for (kind, axes, size, in_loop, in_conditional), members in groups.items()
    ]
    return tuple(sorted(rows, key=lambda r: (-r.wire_bytes, r.kind, r.axes)))


def _classes(inputs: Sequence[Input]) -> tuple[tuple[str, int, int], ...]:
    total: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for i in inputs:
        size = total[i.kind or "other arguments"]
        size[0] += i.device_bytes
        size[1] += i.total_bytes
    return tuple((kind, local, whole) for kind, (local, whole) in total.items())
