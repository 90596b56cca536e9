r"""Reduce gradients over the replicas in 16 bits.

.. math:: g = \sum_i \operatorname{cast}_{16}(g_i / N)

The sum on the wire is in the 16-bit dtype; the result is cast back before anything else
sees it. A sum that overflows skips the step. Scaling each tensor by a power of two
avoids both overflow and underflow; error feedback carries the rounding to the next
step. Only gradients of 32 bits or more are cast, others are averaged as they are.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jfleet._types import AxisName, PyTree
from jfleet.optax_meta import _collectives as collectives
from jfleet.optax_meta import _common as common
from jfleet.optax_meta._rounding import round_to

DTYPES = {
    "float16": jnp.float16,
    "fp16": jnp.float16,
    "bfloat16": jnp.bfloat16,
    "bf16": jnp.bfloat16,
    "float32": jnp.float32,
}
ORDERS = ("scale_then_cast", "cast_then_scale", "sum_then_scale")
LIMIT = 2.0**15  # with scale=True, no partial sum of float16 exceeds this


class Fp16AllreduceState(NamedTuple):
    """State of :func:`fp16_allreduce`."""

    found_inf: jax.Array  # whether the last reduction overflowed; shape=(), dtype=bool
    num_skipped: jax.Array  # overflowed steps so far; shape=(), dtype=int32
    residual: PyTree  # rounding left behind, the replica's own; None without feedback
    inner: PyTree  # state of the inner transformation


def fp16_allreduce(
    inner: optax.GradientTransformation,
    *,
    dtype: str = "float16",
    order: str = "scale_then_cast",
    scale: bool = False,
    error_feedback: bool = False,
    on_overflow: str = "skip",
    axis_name: AxisName | None = None,
    sum_leaf: Callable[[jax.Array, int], jax.Array] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Average gradients over ``axis_name`` in 16 bits, then run ``inner``.

    Without ``scale``, float16 loses magnitudes above 65504 and, after division by N,
    below 3e-8; with ``order="scale_then_cast"`` a gradient of all replicas must thus be
    larger than about N * 3e-8.

    Args:
      inner: what follows the reduction.
      dtype: ``"float16"``, ``"bfloat16"``, or ``"float32"`` for a plain mean.
      order: ``"scale_then_cast"`` sums ``cast(g / N)``; ``"cast_then_scale"`` sums
        ``cast(cast(g) / N)``; ``"sum_then_scale"`` is ``cast(sum of cast(g) / N)``.
      scale: multiply each tensor with a power of two, the same on all replicas, so that
        neither the cast nor the sum can overflow. Costs one small reduction.
      error_feedback: add what the replica's own rounding lost to the next gradient.
        What the 16-bit sum rounds is not known to any replica.
      on_overflow: ``"skip"`` leaves parameters and state as they are in a step whose
        reduced gradient is not finite; ``"pass"`` hands it on.
      axis_name: axis of the replicas.
      sum_leaf: how leaf number i is summed, ``sum_leaf(x, i)``; default an all-reduce.
        A reduce-scatter may return one part of the sum, which ``inner`` then gets.

    Raises:
      ConfigError: if a choice is unknown.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> tx = fp16_allreduce(optax.sgd(1.0), axis_name="replica")
      >>> def step(grad):
      ...     w = jnp.zeros(())
      ...     update, state = tx.update(grad, tx.init(w), w)
      ...     return update, state.found_inf
      >>> updates, skipped = jax.vmap(step, axis_name="replica")(jnp.array([1.0, 2e5]))
      >>> print(updates, skipped)
      [0. 0.] [ True  True]
    """
    inner = common.lift(inner)
    common.check_choice("dtype", dtype, tuple(DTYPES))
    common.check_choice("order", order, ORDERS)
    common.check_flag("scale", scale)
    common.check_flag("error_feedback", error_feedback)
    common.check_choice("on_overflow", on_overflow, ("skip", "pass"))
    common.check_axis_name(axis_name)
    wire = jnp.dtype(DTYPES[dtype])
    scattered = sum_leaf is not None

    def total_of(x: jax.Array, i: int) -> jax.Array:
        return collectives.psum(x, axis_name) if sum_leaf is None else sum_leaf(x, i)

    def plain_mean(x: jax.Array, i: int) -> jax.Array:
        if sum_leaf is None or not common.is_float(x):
            return collectives.pmean(x, axis_name)
        return (sum_leaf(common.wide(x), i) / collectives.size(axis_name)).astype(
            x.dtype
        )

    def is_cast(x) -> bool:
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        narrower = floating and jnp.finfo(wire).bits < 32 <= jnp.finfo(x.dtype).bits
        return bool(narrower)

    def init(params: PyTree) -> Fp16AllreduceState:
        return Fp16AllreduceState(
            found_inf=jnp.zeros((), bool),
            num_skipped=jnp.zeros((), jnp.int32),
            residual=jax.tree.map(_first_residual, params),
            inner=inner.init(params),
        )

    def _first_residual(p):
        return jnp.zeros_like(p) if error_feedback and is_cast(p) else None

    def update(updates, state, params=None, **extra_args):
        if jnp.finfo(wire).bits >= 32:
            leaves, treedef = jax.tree.flatten(updates)
            means = [plain_mean(x, i) for i, x in enumerate(leaves)]
            reduced = treedef.unflatten(means)
            new, inner_state = inner.update(reduced, state.inner, params, **extra_args)
            return new, state._replace(inner=inner_state)
        reduced, residual, found = _reduced(updates, state.residual)
        new, inner_state = inner.update(reduced, state.inner, params, **extra_args)
        if on_overflow == "skip":
            new = common.select(found, jax.tree.map(jnp.zeros_like, new), new)
            inner_state = common.select(found, state.inner, inner_state)
        # What overflowed has no residual; keep the last one.
        residual = common.select(found, state.residual, residual)
        return new, Fp16AllreduceState(
            found_inf=found,
            num_skipped=state.num_skipped + found,
            residual=residual,
            inner=inner_state,
        )

    def _reduced(updates, residual):
        leaves, treedef = jax.tree.flatten(updates)
        carried = treedef.flatten_up_to(residual)
        cast = [is_cast(g) for g in leaves]
        sums = [
            g if e is None else g + e.astype(g.dtype)
            for g, e in zip(leaves, carried, strict=True)
        ]
        scales = _scales([g for g, c in zip(sums, cast, strict=True) if c])
        out, left = [], []
        for i, (g, e, c) in enumerate(zip(sums, carried, cast, strict=True)):
            if not c:
                out.append(plain_mean(g, i))
                left.append(None)
                continue
            mean, rest = _reduce_leaf(g, scales.pop(0), i)
            out.append(mean)
            left.append(None if e is None else rest)
        # Where every replica holds the same sums, all agree without asking.
        flags = [~jnp.all(jnp.isfinite(x)) for x, c in zip(out, cast, strict=True) if c]
        found = jnp.any(jnp.stack(flags)) if flags else jnp.zeros((), bool)
        if scattered and flags:
            found = collectives.pany(found, axis_name)
        return treedef.unflatten(out), treedef.unflatten(left), found

    def _scales(leaves: list[jax.Array]) -> list[Any]:
        if not scale or not leaves:
            return [1.0] * len(leaves)
        tops = [jnp.max(jnp.abs(g), initial=0).astype(jnp.float32) for g in leaves]
        tops = collectives.pmax(jnp.stack(tops), axis_name)
        terms = collectives.size(axis_name) if order == "sum_then_scale" else 1
        usable = (tops > 0) & jnp.isfinite(tops)
        ratio = LIMIT / terms / jnp.clip(jnp.where(usable, tops, 1), min=1e-30)
        _, exponent = jnp.frexp(ratio)
        scales = jnp.where(usable, jnp.ldexp(jnp.ones_like(ratio), exponent - 1), 1)
        return list(scales)

    def _reduce_leaf(g: jax.Array, by: Any, i: int) -> tuple[jax.Array, jax.Array]:
        """Return the mean over the replicas, and what this one's rounding lost of g."""
        num = collectives.size(axis_name)
        by = jnp.asarray(by, g.dtype)
        scaled = g * by
        if order == "scale_then_cast":
            sent = round_to(scaled / num, wire)
        elif order == "cast_then_scale":
            sent = round_to(round_to(scaled, wire) / num, wire)
        else:
            sent = round_to(scaled, wire)
        total = total_of(sent.astype(wire), i).astype(g.dtype)
        total = round_to(total, wire)
        if order == "sum_then_scale":
            return round_to(total / num, wire) / by, g - sent / by
        return total / by, g - sent * num / by

    return optax.GradientTransformationExtraArgs(init, update)


def replica_mean(
    *, axis_name: AxisName | None = None, reduce: str = "mean"
) -> optax.GradientTransformationExtraArgs:
    """Reduce gradients over the replicas in float32 or wider; keeps no state.

    Args:
      axis_name: axis of the replicas.
      reduce: ``"mean"`` or ``"sum"``.
    """
    common.check_axis_name(axis_name)
    common.check_choice("reduce", reduce, ("mean", "sum"))

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        return collectives.reduce(updates, axis_name, reduce), state

    def init(params):
        del params
        return optax.EmptyState()

    return optax.GradientTransformationExtraArgs(init, update)
