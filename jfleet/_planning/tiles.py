"""What one device holds of an array: which dims are split, and over which mesh axes.

``Dims`` has a tuple of mesh axes for every dim of an array: ``(("data",), ())``. An
axis of size one may stand in it as well; it marks the rows of a batch where a loss
sees those of one replica only.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jfleet._tree import dtype_bytes

Dims = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """A value of the step, as the walk sees it."""

    id: int
    """Its number in the program that is being built."""
    shape: tuple[int, ...]
    """Shape of the whole array; inside ``shard_map`` whole over the other axes."""
    dtype: Any
    dims: Dims
    kind: str
    """Class of memory; one of ``kinds``."""


def whole(num_dims: int) -> Dims:
    """Dims of an array that nothing splits."""
    return ((),) * num_dims


def num_parts(axes: Iterable[str], sizes: Mapping[str, int]) -> int:
    """Into how many pieces some axes split a dim."""
    return math.prod(sizes.get(a, 1) for a in axes)


def local_shape(
    shape: Sequence[int], dims: Dims, sizes: Mapping[str, int]
) -> tuple[int, ...]:
    """Shape of one device's part; the largest one where dims do not divide."""
    return tuple(
        -(-n // num_parts(axes, sizes)) for n, axes in zip(shape, dims, strict=True)
    )


def local_bytes(
    shape: Sequence[int], dtype: Any, dims: Dims, sizes: Mapping[str, int]
) -> int:
    """Bytes of one device's part."""
    return math.prod(local_shape(shape, dims, sizes)) * dtype_bytes(dtype)


def axes_of(dims: Dims) -> tuple[str, ...]:
    """All axes that split an array, in the order of its dims."""
    return tuple(a for entry in dims for a in entry)


def merge(candidates: Sequence[Dims]) -> Dims:
    """Dims that suit arrays of one shape: each dim as the first that splits it does.

    An axis splits one dim only.

    >>> merge([(("x",), ()), ((), ("y",)), (("y",), ())])
    (('x',), ('y',))
    """
    out: list[tuple[str, ...]] = [()] * len(candidates[0])
    used: set[str] = set()
    for dims in candidates:
        for i, entry in enumerate(dims):
            if entry and not out[i] and not used.intersection(entry):
                out[i] = entry
                used.update(entry)
    return tuple(out)


def reshaped(
    old: Sequence[int], dims: Dims, new: Sequence[int], sizes: Mapping[str, int]
) -> Dims:
    """Dims after a reshape; a split that cannot be kept is left out.

    In row-major order a split dim must stay the outer part of the dim that it lands
    in.

    >>> reshaped((4, 6), (("x",), ()), (24,), {"x": 2})
    (('x',),)
    """
    out: list[tuple[str, ...]] = [()] * len(new)
    for i, entry in enumerate(dims):
        if not entry:
            continue
        outer, pieces = math.prod(old[:i]), num_parts(entry, sizes)
        places = [
            j
            for j in range(len(new))
            if math.prod(new[:j]) == outer and new[j] % pieces == 0 and not out[j]
        ]
        if places:
            out[places[-1]] = entry
    return tuple(out)


def without(dims: Dims, drop: Iterable[str]) -> Dims:
    """Dims with some axes left out."""
    drop = set(drop)
    return tuple(tuple(a for a in entry if a not in drop) for entry in dims)
