"""The plans of all candidates, in the order in which auto would take them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jfleet._plan_text import human
from jfleet._planning.step_plan import StepPlan
from jfleet._tuning.candidates import Candidate

SAME = 0.01
"""Estimates this close are the same; then the simpler candidate wins."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """One candidate and what its step would take."""

    candidate: Candidate
    peak_bytes: int | None
    """Bytes that a device must have; None where it cannot run."""
    cost: float | None
    """Seconds, estimated; without a loss, bytes that a device sends."""
    plan: StepPlan | None = None
    """The plan behind the numbers, where the loss was given."""
    refused: str = ""
    """Why it cannot run."""

    def fits(self, memory_bytes: int | None) -> bool:
        """Whether it can run in that memory."""
        if self.peak_bytes is None:
            return False
        return memory_bytes is None or self.peak_bytes <= memory_bytes


def ranked(found: Sequence[Planned], memory_bytes: int | None) -> list[Planned]:
    """Those that fit, best first.

    The best is the simplest of those whose cost is within ``SAME`` of the least; the
    rest is ranked the same way, without it.
    """
    rest = [p for p in found if p.fits(memory_bytes) and p.cost is not None]
    order = []
    while rest:
        least = min(p.cost for p in rest if p.cost is not None)
        near = [p for p in rest if p.cost is not None and p.cost <= least * (1 + SAME)]
        best = min(near, key=lambda p: p.candidate.complexity)
        order.append(best)
        rest.remove(best)
    return order


def why_not(one: Planned, best: Planned, memory_bytes: int | None, unit: str) -> str:
    """Why a candidate lost, in words and numbers."""
    if one is best:
        return "chosen"
    if one.peak_bytes is None or one.cost is None:
        return f"cannot run: {one.refused}"
    if memory_bytes is not None and one.peak_bytes > memory_bytes:
        short = human(one.peak_bytes - memory_bytes)
        return f"does not fit: {short} more than there is"
    assert best.cost is not None
    ratio = one.cost / best.cost if best.cost else 1.0
    if ratio <= 1 + SAME:
        return "no faster, and less simple"
    return f"{ratio:.2f} times the {unit}"


def next_up(found: Sequence[Planned], best: Planned, memory_bytes: int | None) -> Any:
    """The fastest candidate that only memory rules out, or None."""
    if memory_bytes is None:
        return None
    better = [
        p
        for p in found
        if p.cost is not None
        and best.cost is not None
        and not p.fits(memory_bytes)
        and p.cost < best.cost * (1 - SAME)
    ]
    return min(
        better,
        key=lambda p: (p.cost or 0.0, p.peak_bytes or 0),
        default=None,
    )
