"""State that differs between replicas: which leaves, and their leading replica dim."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jfleet.optax_meta import (
    AdaptiveLocalsgdState,
    DgcState,
    LocalsgdState,
    LossScaleState,
    MasterWeightsState,
)

_SHARED = {
    LocalsgdState: lambda own: {"inner"},
    AdaptiveLocalsgdState: lambda own: {"inner"},
    LossScaleState: lambda own: {"inner"},
    DgcState: lambda own: {"u", "v"},
    MasterWeightsState: lambda own: {"inner"} | ({"master"} if own else set()),
}
"""For each state, the fields that may differ between replicas."""


def owned(opt_state: Any, own_params: bool) -> Any:
    """A tree of bools: whether a leaf of an optimizer state is each replica's own.

    Args:
        opt_state: the state of one replica.
        own_params: whether parameters differ between replicas.
    """
    return _owned(opt_state, own_params, own_params)


def _owned(node: Any, own_params: bool, default: bool) -> Any:
    if type(node) in _SHARED:
        differing = _SHARED[type(node)](own_params)
        return type(node)(
            *(
                _owned(value, own_params, own_params or isinstance(node, DgcState))
                if name in differing
                else jax.tree.map(lambda _: False, value)
                for name, value in zip(node._fields, node, strict=True)
            )
        )
    known = tuple(_SHARED)
    return jax.tree.map(
        lambda x: _owned(x, own_params, default) if isinstance(x, known) else default,
        node,
        is_leaf=lambda x: isinstance(x, known),
    )


def everywhere(tree: Any, own: bool) -> Any:
    """The same bool for every leaf."""
    return jax.tree.map(lambda _: own, tree)


def spread(tree: Any, own: Any, num_replicas: int) -> Any:
    """Give the own leaves a leading dim with one entry per replica."""
    return jax.tree.map(
        lambda x, o: jnp.broadcast_to(x, (num_replicas, *x.shape)) if o else x,
        tree,
        own,
    )


def squeeze(tree: Any, own: Any) -> Any:
    """Inside ``shard_map``: take the replica dim, of size 1 there, away."""
    return jax.tree.map(lambda x, o: x[0] if o else x, tree, own)


def expand(tree: Any, own: Any) -> Any:
    """Put the replica dim back."""
    return jax.tree.map(lambda x, o: x[None] if o else x, tree, own)


def without_dim(tree: Any, own: Any) -> Any:
    """Shapes of one replica's part."""
    return jax.tree.map(
        lambda x, o: jax.ShapeDtypeStruct(x.shape[1:] if o else x.shape, x.dtype),
        tree,
        own,
    )


def mean(tree: Any) -> Any:
    """Mean over the leading dim in float32 or wider; of integers, the first."""

    def of(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x[0]
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        return jnp.mean(wide, axis=0).astype(x.dtype)

    return jax.tree.map(of, tree)


def size(mesh: Any, axes: tuple[str, ...]) -> int:
    """Number of replicas."""
    return math.prod(mesh.shape[a] for a in axes)
