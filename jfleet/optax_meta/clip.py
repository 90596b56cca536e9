r"""Clip gradients by their global norm.

.. math:: g \leftarrow g \cdot \min(1, c / \lVert g \rVert)

The norm is the square root of the float32 (or wider) sum of squares of every gradient
element, each counted once however it is split or copied. It is computed so that it
neither overflows nor underflows, and the factor is applied in float32 even to 16-bit
gradients.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jfleet._types import AxisName, PyTree
from jfleet.optax_meta import _common as common
from jfleet.optax_meta._norms import clip_factor, total_norm


class ClipState(NamedTuple):
    """State of :func:`clip_by_global_norm`."""

    count: jax.Array  # steps so far; shape=(), dtype=int32
    norm: jax.Array  # global norm before clipping; shape=(), float32 or wider
    factor: jax.Array  # what the gradients were multiplied with; as norm


def clip_by_global_norm(
    max_norm: float | optax.Schedule,
    *,
    exclude: common.Rule = (),
    axis_name: AxisName | None = None,
    replicated: common.Rule = (),
) -> optax.GradientTransformationExtraArgs:
    """Scale all gradients so that their common norm is at most ``max_norm``.

    Args:
      max_norm: the limit c, or a schedule of it. A limit of 0 gives zeros, never NaN.
      exclude: rule on paths of frozen leaves. They do not count and are not scaled.
      axis_name: inside ``shard_map``: the axis over which gradients are split.
      replicated: rule on paths of leaves that every peer of ``axis_name`` holds whole.

    Returns:
      A transformation; its state tells the norm before clipping and the factor.

    Raises:
      ConfigError: if ``max_norm`` is negative.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> tx = clip_by_global_norm(1.0)
      >>> grads = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
      >>> updates, state = tx.update(grads, tx.init(grads))
      >>> float(state.norm), [round(float(x[0]), 3) for x in updates.values()]
      (5.0, [0.6, 0.8])
    """
    if not callable(max_norm):
        common.check_number("max_norm", max_norm, low=0)
    common.check_axis_name(axis_name)
    common.check_rule("exclude", exclude)
    common.check_rule("replicated", replicated)

    def init(params: PyTree) -> ClipState:
        dtype = common.tree_wide_dtype(params)
        return ClipState(
            count=jnp.zeros((), jnp.int32),
            norm=jnp.zeros((), dtype),
            factor=jnp.ones((), dtype),
        )

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        norm = global_norm(
            updates, exclude=exclude, axis_name=axis_name, replicated=replicated
        ).astype(state.norm.dtype)
        limit = jnp.asarray(common.rate_at(max_norm, state.count), norm.dtype)
        factor = clip_factor(norm, limit)
        frozen = common.mask_of(exclude, updates, "exclude")
        updates = jax.tree.map(
            lambda g, skip: g if skip else scaled(g, factor), updates, frozen
        )
        count = common.increment(state.count)
        return updates, ClipState(count=count, norm=norm, factor=factor)

    return optax.GradientTransformationExtraArgs(init, update)


def global_norm(
    tree: PyTree,
    *,
    exclude: common.Rule = (),
    axis_name: AxisName | None = None,
    replicated: common.Rule = (),
    plain: bool = False,
) -> jax.Array:
    """Return the norm over all floating leaves; arguments as above.

    With ``plain`` it is the root of the sum of squares as it comes, which costs one
    pass over the tree and needs no branch, but is infinite beyond 1e19 in float32.
    """
    rows = zip(
        jax.tree.leaves(tree),
        jax.tree.leaves(common.mask_of(exclude, tree, "exclude")),
        jax.tree.leaves(common.mask_of(replicated, tree, "replicated")),
        strict=True,
    )
    rows = [(x, whole) for x, skip, whole in rows if not skip and common.is_float(x)]
    split = [bool(axis_name) and not whole for _, whole in rows]
    return total_norm([x for x, _ in rows], split, axis_name, plain=plain)


def scaled(leaf: Any, factor: jax.Array) -> Any:
    """Multiply in float32 or wider, and keep the dtype of the leaf."""
    if not common.is_float(leaf):
        return leaf
    return (common.wide(leaf) * factor).astype(leaf.dtype)
