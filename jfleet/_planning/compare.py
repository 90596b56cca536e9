"""A plan beside what the compiler says of the compiled step."""

import dataclasses
import json
from typing import Any

from jfleet._errors import ConfigTypeError
from jfleet._hlo import collectives
from jfleet._plan_text import human


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One number of both."""

    name: str
    planned: float
    compiled: float

    @property
    def difference(self) -> float:
        """Relative to the compiled number: 0.1 means planned too high by a tenth."""
        if self.planned == self.compiled:
            return 0.0
        return self.planned / self.compiled - 1 if self.compiled else float("inf")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Memory and collectives, planned and compiled."""

    memory: tuple[Compared, ...]
    """``arguments``, ``outputs``, ``donated``, ``temporaries``, ``peak``."""
    traffic: tuple[Compared, ...]
    """Bytes of whole arrays by kind of collective, and ``all collectives``."""

    def of(self, name: str) -> Compared:
        """One row by name."""
        return next(r for r in (*self.memory, *self.traffic) if r.name == name)

    def differing(self, tolerance: float = 0.1) -> list[Compared]:
        """Rows that differ by more than ``tolerance``."""
        rows = (*self.memory, *self.traffic)
        return [r for r in rows if abs(r.difference) > tolerance]

    def to_json(self, *, indent: int | None = None) -> str:
        """Both columns and the differences."""
        rows = {
            part: [
                dataclasses.asdict(r) | {"difference": r.difference}
                for r in getattr(self, part)
            ]
            for part in ("memory", "traffic")
        }
        return json.dumps(rows, indent=indent)

    def __str__(self) -> str:
        lines = [f"{'per device':<18}{'planned':>12}{'compiled':>12}{'differs':>10}"]
        for row in (*self.memory, *self.traffic):
            lines.append(
                f"{row.name:<18}{human(row.planned):>12}{human(row.compiled):>12}"
                f"{row.difference:>+10.1%}"
            )
        return "\n".join(lines)


def compare(plan: Any, compiled: Any) -> Comparison:
    """See ``StepPlan.compare``."""
    if not hasattr(compiled, "memory_analysis"):
        raise ConfigTypeError(
            "compare takes a compiled step, step.lower(state, batch).compile(), got "
            f"{type(compiled).__name__}"
        )
    found, memory = compiled.memory_analysis(), plan.memory
    pairs = {
        "arguments": (memory.arguments_bytes, found.argument_size_in_bytes),
        "outputs": (memory.output_bytes, found.output_size_in_bytes),
        "donated": (memory.donated_bytes, found.alias_size_in_bytes),
        "temporaries": (memory.temporary_bytes, found.temp_size_in_bytes),
        "peak": (memory.peak_bytes, peak_of(found)),
    }
    sent: dict[str, float] = {}
    for c in collectives(compiled):
        sent[c.kind] = sent.get(c.kind, 0) + c.bytes * c.count
    planned = plan.traffic.bytes_by_kind()
    names = sorted(sent.keys() | planned.keys())
    traffic = [(n, planned.get(n, 0), sent.get(n, 0)) for n in names]
    traffic.append(("all collectives", sum(planned.values()), sum(sent.values())))
    return Comparison(
        memory=tuple(
            Compared(name=n, planned=p, compiled=c) for n, (p, c) in pairs.items()
        ),
        traffic=tuple(Compared(name=n, planned=p, compiled=c) for n, p, c in traffic),
    )


def peak_of(found: Any) -> int:
    """Bytes that a compiled program needs, from its memory analysis."""
    return (
        found.argument_size_in_bytes
        + found.output_size_in_bytes
        - found.alias_size_in_bytes
        + found.temp_size_in_bytes
    )
