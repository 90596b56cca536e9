"""Rectangles whose areas are to scale, as close to squares as they get.

Rows of rectangles are laid along the shorter side of what is left, and a row takes one
more as long as that makes its worst rectangle less elongated.

References:
    Mark Bruls, Kees Huizing, Jarke J. van Wijk, "Squarified Treemaps", 2000.
"""

from collections.abc import Sequence

Box = tuple[float, float, float, float]
"""Left, top, width, height."""


def squarified(sizes: Sequence[float], box: Box) -> list[Box]:
    """Fill a box with a rectangle for each size.

    Args:
        sizes: above 0, largest first.
        box: what to fill.

    Returns:
        A box for each size; areas are in proportion to the sizes.

    Example:
        >>> squarified([2, 1, 1], (0, 0, 2, 2))
        [(0, 0.0, 1.0, 2.0), (1.0, 0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.0)]
    """
    found: list[Box] = []
    left, top, width, height = box
    rest = list(sizes)
    while rest:
        scale = width * height / sum(rest)
        side = min(width, height)
        count = _row_length([size * scale for size in rest], side)
        row, rest = rest[:count], rest[count:]
        depth = sum(row) * scale / side if side else 0.0
        at = 0.0
        for size in row:
            length = size / sum(row) * side
            if width >= height:
                found.append((left, top + at, depth, length))
            else:
                found.append((left + at, top, length, depth))
            at += length
        if width >= height:
            left, width = left + depth, max(width - depth, 0.0)
        else:
            top, height = top + depth, max(height - depth, 0.0)
    return found


def _row_length(areas: Sequence[float], side: float) -> int:
    """How many rectangles the next row takes."""
    best, total = float("inf"), 0.0
    for count, area in enumerate(areas):
        total += area
        worst = _elongation(areas[0], area, total, side)
        if count and worst > best:
            return count
        best = worst
    return len(areas)


def _elongation(largest: float, least: float, total: float, side: float) -> float:
    """The most elongated rectangle of a row: longer by shorter side."""
    if not side or not least:
        return float("inf")
    depth = total / side
    return max(largest / depth**2, depth**2 / least)
