"""Arrays that rest in a larger shape than they have.

Where no dim of an array is a multiple of the devices, JAX cannot split it. With
``pad=True`` it rests with its largest dim padded by zeros, and every computation first
cuts it back: the optimizer and the model see the shape they know, so nothing about
their mathematics changes.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jfleet._layout import ParamLayout
from jfleet._placing.match import ParamIndex
from jfleet._tree import Path, leaves_with_paths


def fit(x: Any, shape: tuple[int, ...]) -> Any:
    """Cut or pad an array to ``shape``; abstract arrays change their shape.

    >>> fit(jnp.ones((2, 3)), (2, 2)).shape, float(fit(jnp.ones(2), (4,)).sum())
    ((2, 2), 2.0)
    """
    old = tuple(x.shape)
    if old == shape:
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, x.dtype)
    if any(new < size for new, size in zip(shape, old, strict=True)):
        return jax.lax.slice(x, (0,) * x.ndim, shape)
    widths = [(0, new - size) for new, size in zip(shape, old, strict=True)]
    return jnp.pad(x, widths)


class Padding:
    """Which leaves are stored padded, found as the layout finds its specs."""

    def __init__(self, layouts: Iterable[ParamLayout]):
        self._index = ParamIndex(p for p in layouts if p.is_padded)
        self.is_empty = not len(self._index)

    def shapes(
        self, path: Path, *, optimizer: bool
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return (logical shape, stored shape) of a leaf's parameter, if padded."""
        layout = self._index.find(path)
        if layout is None:
            return None
        stored = layout.stored_optimizer if optimizer else layout.stored_param
        return None if stored == layout.shape else (layout.shape, stored)

    def stored(self, tree: Any, *, optimizer: bool) -> Any:
        """Pad the leaves of a tree that rest padded."""
        return self._map(tree, optimizer, old=0, new=1)

    def cut(self, tree: Any, *, optimizer: bool) -> Any:
        """Cut the leaves of a tree to the shapes that computations know."""
        return self._map(tree, optimizer, old=1, new=0)

    def _map(self, tree: Any, optimizer: bool, *, old: int, new: int) -> Any:
        if self.is_empty:
            return tree
        leaves = []
        for path, leaf in leaves_with_paths(tree):
            shapes = self.shapes(path, optimizer=optimizer)
            fits = shapes is not None and jnp.shape(leaf) == shapes[old]
            leaves.append(fit(leaf, shapes[new]) if fits and shapes else leaf)
        return jax.tree.unflatten(jax.tree.structure(tree), leaves)
