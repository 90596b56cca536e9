"""Results that take the memory of donated arguments, and the copies that this costs.

A new parameter may be written over the old one only when nothing reads the old one
any more. Where the data flow does not say so, the compiler copies the old one first,
and reads the copy from then on. In between, the memory of the old one may hold
something else.
"""

import dataclasses
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

from jfleet._planning.nodes import Fusion, Node
from jfleet._planning.program import Op, Value
from jfleet._planning.schedule import breadth_first, dependencies


def with_old_values(
    nodes: list[Node], fusion: Fusion, aliases: Mapping[int, int]
) -> list[Node]:
    """Add the copies that keep donated arguments alive.

    Args:
        nodes: of the whole step.
        fusion: where their values come from.
        aliases: for each result, the argument whose memory it takes.
    """
    order = breadth_first(nodes)
    above = _ancestors(order)
    writer = {w: n for n, node in enumerate(order) for w in node.writes}
    readers: dict[int, list[int]] = defaultdict(list)
    for n, node in enumerate(order):
        for r in node.reads:
            readers[r].append(n)
    copies = []
    values = fusion.program.values
    for result, argument in aliases.items():
        result, argument = fusion.root[result], fusion.root[argument]
        last = writer.get(result)
        if last is None:
            continue
        early = [n for n in readers[argument] if n != last]
        if all(above[last] >> n & 1 for n in early):
            continue
        old = values[argument]
        values.append(Value(old.bytes, old.kind, old.shape, old.dtype))
        copy = len(values) - 1
        fusion.root.append(copy)
        for n in readers[argument]:
            order[n].reads = (order[n].reads - {argument}) | {copy}
        copies.append(Node([Op("copy", (argument,), (copy,))], {argument}, [copy]))
    return [*copies, *order]


@dataclasses.dataclass(frozen=True, slots=True)
class Hole:
    """Memory of a donated argument, between its last reader and the new value."""

    bytes: int
    start: int
    end: int


def into_holes(buffers: Sequence[Any], holes: Sequence[Hole]) -> list[Any]:
    """The buffers that find no place in the memory of donated arguments.

    The largest choose first; each takes the smallest hole that it fits.
    """
    by_size = sorted(holes, key=lambda h: h.bytes)
    taken: dict[int, list[tuple[int, int]]] = defaultdict(list)
    left = []
    for b in sorted(buffers, key=lambda b: -b.bytes):
        for n, hole in enumerate(by_size):
            fits = hole.bytes >= b.bytes and hole.start < b.start and b.end < hole.end
            if fits and all(b.end < s or e < b.start for s, e in taken[n]):
                taken[n].append((b.start, b.end))
                break
        else:
            left.append(b)
    return left


def _ancestors(order: list[Node]) -> list[int]:
    """For every node, a bit for each that it waits for, directly or not."""
    before, _ = dependencies(order)
    above: list[int] = []
    for waits in before:
        bits = 0
        for m in waits:
            bits |= above[m] | 1 << m
        above.append(bits)
    return above


def matched(
    inputs: Sequence[tuple[int, object]], outputs: Sequence[tuple[int, object]]
) -> dict[int, int]:
    """Which result takes the memory of which donated argument: the first like it.

    Args:
        inputs: number and kind (shape, dtype, layout) of each donated argument.
        outputs: the same of each result.
    """
    free: dict[object, deque[int]] = defaultdict(deque)
    for i, key in inputs:
        free[key].append(i)
    return {o: free[key].popleft() for o, key in outputs if free[key]}
