"""How much memory buffers take once each has an address.

Buffers that live at different times share addresses, but not without gaps. Compilers
place the largest first, each where it leaves the smallest gap; so does this.
"""

from collections.abc import Sequence

from jfleet._planning.liveness import Buffer, peak

SMALL = 1 / 1000
"""Share of the peak below which a buffer fits into some gap."""


def heap_bytes(buffers: Sequence[Buffer]) -> int:
    """Bytes from the lowest to the highest address that is ever used."""
    best, _ = peak(buffers)
    large = [b for b in buffers if b.bytes >= best * SMALL]
    by_size = sorted(large, key=lambda b: (-b.bytes, b.start - b.end))
    by_time = sorted(large, key=lambda b: (b.start - b.end, -b.bytes))
    return max(min(_packed(by_size), _packed(by_time)), best)


def _packed(order: Sequence[Buffer]) -> int:
    placed: list[tuple[int, int, Buffer]] = []
    top = 0
    for b in order:
        taken = sorted(
            (at, end)
            for at, end, other in placed
            if other.start <= b.end and b.start <= other.end
        )
        at = _best_gap(taken, b.bytes)
        placed.append((at, at + b.bytes, b))
        top = max(top, at + b.bytes)
    return top


def _best_gap(taken: Sequence[tuple[int, int]], size: int) -> int:
    """The lowest address of the smallest gap that is large enough."""
    best, where, at = None, 0, 0
    for start, end in taken:
        gap = start - at
        if gap >= size and (best is None or gap < best):
            best, where = gap, at
        at = max(at, end)
    return at if best is None else where
