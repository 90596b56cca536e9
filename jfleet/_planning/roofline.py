"""How long a step takes at least, from what it computes, moves and sends.

Every phase needs the time of its products at the peak rate, of its memory traffic at
full bandwidth, and of its collectives over the links. If all three overlap perfectly,
the longest counts; if nothing overlaps, their sum. The truth of a well-tuned program
lies between; the estimate is good for ranking plans, and for seeing what binds.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from jfleet._planning import kinds
from jfleet._planning.hardware import Hardware
from jfleet._planning.liveness import Run
from jfleet._planning.traffic import StepTraffic, Transfer
from jfleet._tree import dtype_bytes

GRADIENT, UPDATE = "gradient", "update"
PHASES = (GRADIENT, UPDATE)
NOTE = (
    "an estimate from peak rates, not a measurement: all overlapped to nothing "
    "overlapped"
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PhaseWork:
    """What one phase of a step does on one device."""

    name: str
    """``gradient`` (forward and backward) or ``update``."""
    half_flops: float
    """Operations of products of 16 bits or fewer."""
    full_flops: float
    """Operations of wider products."""
    memory_bytes: float
    """Bytes that kernels read and write."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PhaseTime:
    """Seconds that a phase needs for each resource alone."""

    name: str
    compute_seconds: float
    memory_seconds: float
    traffic_seconds: float

    @property
    def terms(self) -> dict[str, float]:
        """The three times by name."""
        return {
            "compute": self.compute_seconds,
            "memory": self.memory_seconds,
            "traffic": self.traffic_seconds,
        }

    @property
    def low_seconds(self) -> float:
        """If all of it overlaps."""
        return max(self.terms.values())

    @property
    def high_seconds(self) -> float:
        """If nothing overlaps."""
        return sum(self.terms.values())

    @property
    def binds(self) -> str:
        """The resource that takes longest."""
        return max(self.terms, key=lambda name: self.terms[name])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TimeEstimate:
    """An estimate of the time of one step; never a measurement."""

    hardware: Hardware
    phases: tuple[PhaseTime, ...]
    notes: tuple[str, ...]

    @property
    def low_seconds(self) -> float:
        """If everything within a phase overlaps."""
        return sum(p.low_seconds for p in self.phases)

    @property
    def high_seconds(self) -> float:
        """If nothing overlaps."""
        return sum(p.high_seconds for p in self.phases)


def step_work(run: Run) -> tuple[PhaseWork, ...]:
    """Products and memory traffic of a step on one device, by phase."""
    totals = {name: [0.0, 0.0, 0.0] for name in PHASES}
    for node, program, count in run.kernels:
        values = program.values
        made = [values[w] for w in node.writes]
        total = totals[UPDATE if _updates(v.kind for v in made) else GRADIENT]
        for op in node.ops:
            wide = bool(op.ins) and dtype_bytes(values[op.ins[0]].dtype) > 2
            total[int(wide)] += count * op.flops
        moved = sum(values[r].bytes for r in node.reads) + sum(v.bytes for v in made)
        total[2] += count * moved
    return tuple(
        PhaseWork(name=name, half_flops=h, full_flops=f, memory_bytes=m)
        for name, (h, f, m) in totals.items()
    )


def _updates(classes) -> bool:
    return any(k in (kinds.UPDATES, kinds.STATE, kinds.MASTERS) for k in classes)


def estimate(
    work: Sequence[PhaseWork],
    traffic: StepTraffic,
    sizes: Mapping[str, int],
    hardware: Hardware,
) -> TimeEstimate:
    """Seconds of a step on some hardware."""
    notes: list[str] = [NOTE]
    seconds = dict.fromkeys(PHASES, 0.0)
    for t in traffic.transfers:
        rate = _rate(t, sizes, hardware, notes)
        seconds[UPDATE if t.what == kinds.UPDATES else GRADIENT] += (
            t.share * t.wire_bytes / rate
        )
    phases = tuple(
        PhaseTime(
            name=w.name,
            compute_seconds=w.half_flops / hardware.flops
            + w.full_flops / (hardware.flops * hardware.float32_rate),
            memory_seconds=w.memory_bytes / hardware.memory_bandwidth,
            traffic_seconds=seconds[w.name],
        )
        for w in work
    )
    return TimeEstimate(
        hardware=hardware, phases=phases, notes=tuple(dict.fromkeys(notes))
    )


def _rate(t: Transfer, sizes: Mapping[str, int], hw: Hardware, notes: list[str]):
    """Bytes per second that a device can send for a collective.

    The last mesh axis is taken to connect the nearest chips. On a torus, mesh axes
    share its links evenly.
    """
    wide = [a for a in sizes if sizes[a] > 1]
    reach = 1
    for axis in reversed(wide):
        reach *= sizes[axis]
        if axis == next((a for a in wide if a in t.axes), None):
            break
    if reach > hw.near_devices:
        if hw.far_bandwidth is None:
            notes.append(
                f"{hw.name} connects {hw.near_devices} chips and this mesh is larger; "
                "what a chip sends beyond is not published, so the estimate takes the "
                "near links: give jfleet.Hardware(far_bandwidth=..) for your network"
            )
        else:
            return hw.far_bandwidth
    if not hw.torus_dims:
        return hw.link_bandwidth
    used = sum(a in t.axes for a in wide)
    return hw.link_bandwidth * used / max(len(wide), 1)
