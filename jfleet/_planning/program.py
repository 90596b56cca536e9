"""What one device runs in a step: operations on values, with bytes and collectives."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """One collective, as predicted."""

    kind: str
    """``all-reduce``, ``all-gather``, ``reduce-scatter``, ``all-to-all``, ..."""
    axes: tuple[str, ...]
    """Mesh axes along which the devices exchange."""
    group_size: int
    """Devices that take part together."""
    bytes: int
    """Size of the whole array in one group, once."""
    dtype: str
    """Type of its elements."""
    memory_kind: str
    """Class of what is exchanged."""


@dataclasses.dataclass(slots=True)
class Value:
    """An array on one device."""

    bytes: int
    kind: str
    shape: tuple[int, ...]
    dtype: Any


Origin = tuple[Any, ...]
"""Where an operation comes from: numbers of equations, from the outside in."""


@dataclasses.dataclass(slots=True)
class Op:
    """One operation of the program."""

    name: str
    """The primitive, or ``slice``, ``barrier``, or a kind of collective."""
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    flops: float = 0.0
    """Multiplications and additions of products, on one device."""
    exchange: Exchange | None = None
    bodies: tuple["Program", ...] = ()
    """What a loop or a branch runs; its inputs are ``ins`` in order."""
    trips: int = 1
    """Turns of a loop."""
    loop: "Loop | None" = None
    origin: Origin = ()
    info: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    """How the operands and results of a loop enter and leave its body."""

    num_consts: int
    num_carry: int
    known_trips: bool = True


@dataclasses.dataclass(slots=True)
class Program:
    """Operations in an order that can run."""

    values: list[Value] = dataclasses.field(default_factory=list)
    ops: list[Op] = dataclasses.field(default_factory=list)
    inputs: list[int] = dataclasses.field(default_factory=list)
    outputs: list[int] = dataclasses.field(default_factory=list)

    def new(self, shape: Sequence[int], dtype: Any, size: int, kind: str) -> int:
        """Add a value; return its number."""
        self.values.append(Value(size, kind, tuple(shape), dtype))
        return len(self.values) - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where in the step an operation stands."""

    count: float = 1
    """How often it runs in one step."""
    in_loop: bool = False
    in_conditional: bool = False
    known_trips: bool = True


def walk(program: Program, place: Place | None = None) -> Iterator[tuple[Op, Place]]:
    """All operations with their places, inner ones after their loop."""
    place = place or Place()
    for op in program.ops:
        yield op, place
        for body in op.bodies:
            yield from walk(body, _inside(op, place))


def _inside(op: Op, place: Place) -> Place:
    if op.loop is None:
        return dataclasses.replace(place, in_conditional=True)
    return Place(
        count=place.count * op.trips,
        in_loop=True,
        in_conditional=place.in_conditional,
        known_trips=place.known_trips and op.loop.known_trips,
    )


def group_size(axes: Sequence[str], sizes: Any) -> int:
    """Devices along some axes."""
    return math.prod(sizes.get(a, 1) for a in axes)
