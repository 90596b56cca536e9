"""What devices send each other in one optimizer step."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable

from jfleet._hlo import wire_bytes
from jfleet._planning.program import Exchange, Place, Program, walk
from jfleet._planning.tracing import TracedStep


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """Collectives of one kind, along the same axes, of the same class."""

    kind: str
    """``all-reduce``, ``all-gather``, ``reduce-scatter``, ..."""
    axes: tuple[str, ...]
    """Mesh axes along which devices exchange."""
    what: str
    """Class of memory that travels: gradients, gathered parameters, ..."""
    dtype: str
    """Type of the elements."""
    group_size: int
    """Devices that take part together."""
    count: float
    """How many run in one step."""
    bytes: float
    """Sizes of the whole arrays, added up over the step."""
    in_loop: bool
    """Do they run inside a loop?"""
    in_conditional: bool
    """Do they run in a branch, so perhaps not at all?"""
    share: float = 1.0
    """Share of the steps in which they run, where that is known."""

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends in a step in which they run."""
        return wire_bytes(self.kind, self.bytes, self.group_size)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepTraffic:
    """The collectives of one step."""

    transfers: tuple[Transfer, ...]
    """Largest first."""
    complete: bool
    """False where no loss was given: then the use of parameters is a guess."""

    def bytes_by_kind(self) -> dict[str, float]:
        """Bytes of the whole arrays by kind, each branch counted once."""
        total: dict[str, float] = defaultdict(float)
        for t in self.transfers:
            total[t.kind] += t.bytes
        return dict(total)

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends per step, on average over the steps."""
        return sum(t.share * t.wire_bytes for t in self.transfers)


def step_traffic(traced: TracedStep, program: Program) -> StepTraffic:
    """The collectives of a step whose loss was given."""
    found: dict[tuple, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for op, place in walk(program):
        if op.exchange is not None:
            total = found[_key(op.exchange, place)]
            total[0] += place.count
            total[1] += place.count * op.exchange.bytes
    return traffic_of(
        (
            Transfer(
                kind=kind,
                axes=axes,
                what=what,
                dtype=dtype,
                group_size=size,
                count=count,
                bytes=total,
                in_loop=in_loop,
                in_conditional=in_conditional,
                share=_share(traced, axes, in_conditional),
            )
            for (kind, axes, what, dtype, size, in_loop, in_conditional), (
                count,
                total,
            ) in found.items()
        ),
        complete=True,
    )


def _key(exchange: Exchange, place: Place) -> tuple:
    return (
        exchange.kind,
        exchange.axes,
        exchange.memory_kind,
        exchange.dtype,
        exchange.group_size,
        place.in_loop,
        place.in_conditional,
    )


def traffic_of(transfers: Iterable[Transfer], *, complete: bool) -> StepTraffic:
    """Traffic with the largest transfers first."""
    order = sorted(transfers, key=lambda t: (-t.wire_bytes, t.kind, t.axes))
    return StepTraffic(transfers=tuple(order), complete=complete)


def _share(traced: TracedStep, axes: tuple[str, ...], in_conditional: bool) -> float:
    """Under localsgd replicas meet in one step of ``k_steps``."""
    setup = traced.setup
    if setup is None or not in_conditional or not setup.own_params:
        return 1.0
    if not set(axes) <= set(setup.own_axes):
        return 1.0
    return 1 / sync_interval(traced)


def sync_interval(traced: TracedStep) -> int:
    """Steps between two meetings of replicas; the shortest, where it adapts."""
    assert traced.setup is not None
    for name, field in (
        ("localsgd", "k_steps"),
        ("adaptive_localsgd", "init_k_steps"),
    ):
        options = traced.setup._options(name)
        if options is not None:
            return max(getattr(options, field), 1)
    return 1
