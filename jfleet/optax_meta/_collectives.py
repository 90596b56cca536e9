"""Collectives over named axes that do nothing where there are no peers.

Every function takes ``axis_name``: a name, a tuple of names, or ``None`` for "this is
the only replica". The names come from ``jax.shard_map`` or ``jax.vmap(axis_name=...)``.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jfleet._types import AxisName, PyTree


def size(axis_name: AxisName | None) -> int:
    """Number of replicas, known while tracing; 1 without an axis."""
    return jax.lax.axis_size(axis_name) if axis_name else 1


def psum(tree: PyTree, axis_name: AxisName | None) -> PyTree:
    """Sum of every leaf over the replicas, in the leaf's own dtype."""
    return jax.lax.psum(tree, axis_name) if axis_name else tree


def pmax(tree: PyTree, axis_name: AxisName | None) -> PyTree:
    """Maximum of every leaf over the replicas."""
    return jax.lax.pmax(tree, axis_name) if axis_name else tree


def pany(flag: jax.Array, axis_name: AxisName | None) -> jax.Array:
    """True on every replica if it is true on one of them."""
    if not axis_name:
        return flag
    return jax.lax.pmax(flag.astype(jnp.int32), axis_name) > 0


def pmean(tree: PyTree, axis_name: AxisName | None) -> PyTree:
    """Mean of the floating leaves over the replicas, taken in float32 or wider.

    Integer leaves, random keys and booleans have no mean; they stay as they are.
    """
    if not axis_name:
        return tree
    return jax.tree.map(lambda x: _mean_leaf(x, axis_name), tree)


def _mean_leaf(x: jax.Array, axis_name: AxisName) -> jax.Array:
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jax.lax.pmean(wide, axis_name).astype(x.dtype)


def reduce(tree: PyTree, axis_name: AxisName | None, how: str) -> PyTree:
    """``how`` is ``"mean"`` or ``"sum"``; accumulates in float32 or wider."""
    if how == "mean" or not axis_name:
        return pmean(tree, axis_name)
    return jax.tree.map(lambda x: _sum_leaf(x, axis_name), tree)


def _sum_leaf(x: jax.Array, axis_name: AxisName) -> jax.Array:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jax.lax.psum(wide, axis_name).astype(x.dtype)


def cond(
    predicate: Any, on_true: Callable[[], Any], on_false: Callable[[], Any]
) -> Any:
    """``jax.lax.cond`` whose branches may differ in what they vary over.

    Under ``shard_map`` a value is typed by the axes over which it differs. A branch
    that reduces and one that does not would then be rejected; both get the union.
    Outside of a trace only the branch itself runs, operation by operation.
    """
    if not isinstance(predicate, jax.core.Tracer):
        return on_true() if predicate else on_false()
    return switch(jnp.asarray(predicate).astype(jnp.int32), [on_false, on_true])


def switch(index: jax.Array, branches: list[Callable[..., Any]]) -> Any:
    """``jax.lax.switch`` over branches without operands; see :func:`cond`."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return jax.lax.switch(index, branches)
    types = [jax.tree.map(_varying, jax.eval_shape(branch)) for branch in branches]
    leaves = [jax.tree.leaves(t, is_leaf=_is_axes) for t in types]
    wanted = [frozenset().union(*axes) for axes in zip(*leaves, strict=True)]
    return jax.lax.switch(index, [_varied(b, wanted) for b in branches])


def _varied(branch: Callable[[], Any], wanted: list[frozenset]) -> Callable[[], Any]:
    def widened():
        leaves, treedef = jax.tree.flatten(branch())
        return treedef.unflatten(
            [_vary(x, axes) for x, axes in zip(leaves, wanted, strict=True)]
        )

    return widened


def _vary(x: Any, axes: frozenset) -> Any:
    missing = axes - _varying(jax.typeof(x))
    return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def _varying(aval: Any) -> frozenset:
    kind = getattr(aval, "manual_axis_type", None)
    return frozenset(getattr(kind, "varying", None) or ())


def _is_axes(x: Any) -> bool:
    return isinstance(x, frozenset)
