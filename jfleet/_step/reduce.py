"""The boundary: one reduction of gradients that every replica has of its own.

Runs inside ``shard_map``. Where a gradient is to lie split over the axes that are
reduced, it is a reduce-scatter; else an all-reduce.

Note [Gloo]: between processes on CPU, jax before 0.12 reduce-scatters wrong numbers
now and then. There the sum is an all-reduce, of which each device keeps its part.
"""

import math
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jfleet._layout import entries_of
from jfleet.optax_meta import _common as common

Axes = tuple[str, ...]
_GLOO_FIXED = (0, 12)


def scatter_is_safe() -> bool:
    """Whether reduce-scatter gives right numbers here; see Note [Gloo]."""
    version = tuple(int(x) for x in jax.__version__.split(".")[:2])
    several = jax.process_count() > 1 and jax.default_backend() == "cpu"
    return not several or version >= _GLOO_FIXED


def scattered_spec(spec: PartitionSpec, num_dims: int, axes: Axes) -> list[Axes]:
    """For every dim, those of its axes over which the gradient is scattered."""
    return [
        tuple(a for a in entry if a in axes) for entry in entries_of(spec, num_dims)
    ]


def mean(grads: Any, specs: Any, axes: Axes) -> Any:
    """Mean over ``axes`` in float32 or wider, split as ``specs`` say."""
    if not axes:
        return grads
    leaves, treedef = jax.tree.flatten(grads)
    parts = [
        scattered_spec(s, g.ndim, axes)
        for g, s in zip(leaves, treedef.flatten_up_to(specs), strict=True)
    ]
    wide = [common.wide(g) for g in leaves]
    if scatter_is_safe():
        summed = _scatter(wide, parts, axes)
    else:
        sums = jax.lax.psum(wide, axes)
        summed = [_slice(g, p) for g, p in zip(sums, parts, strict=True)]
    count = math.prod(jax.lax.axis_size(a) for a in axes)
    return treedef.unflatten([g / count if common.is_float(g) else g for g in summed])


def _scatter(leaves: list[Any], parts: list[list[Axes]], axes: Axes) -> list[Any]:
    """Reduce-scatter over what splits a leaf, then all-reduce over the rest."""
    done = [_scatter_leaf(g, p) for g, p in zip(leaves, parts, strict=True)]
    groups: dict[Axes, list[int]] = {}
    for i, part in enumerate(parts):
        used = {a for entry in part for a in entry}
        rest = tuple(a for a in axes if a not in used)
        groups.setdefault(rest, []).append(i)
    for rest, where in groups.items():
        if rest:
            sums = jax.lax.psum([done[i] for i in where], rest)
            for i, x in zip(where, sums, strict=True):
                done[i] = x
    return done


def _scatter_leaf(g: jax.Array, part: list[Axes]) -> jax.Array:
    for dim, entry in enumerate(part):
        for axis in entry:
            g = jax.lax.psum_scatter(g, axis, scatter_dimension=dim, tiled=True)
    return g


def sum_leaf(g: jax.Array, spec: PartitionSpec, axes: Axes) -> jax.Array:
    """Sum one gradient over ``axes`` in its own dtype, split as its spec says."""
    part = scattered_spec(spec, g.ndim, axes)
    if not scatter_is_safe():
        return _slice(jax.lax.psum(g, axes), part)
    return _scatter([g], [part], axes)[0]


def _slice(g: jax.Array, part: list[Axes]) -> jax.Array:
    for dim, entry in enumerate(part):
        for axis in entry:
            size = g.shape[dim] // jax.lax.axis_size(axis)
            start = jax.lax.axis_index(axis) * size
            g = jax.lax.dynamic_slice_in_dim(g, start, size, axis=dim)
    return g
