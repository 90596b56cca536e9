r"""Merge the gradients of k micro batches into one step.

.. math:: A \leftarrow A + g; \qquad \text{every k-th time: step with } A / k, \;
          A \leftarrow 0

The accumulator is float32 or wider whatever the parameters are. Clipping, decay, the
inner optimizer, its schedules and its collectives run once per window, on the merged
gradient; between windows nothing moves.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jfleet._errors import ConfigError
from jfleet._types import AxisName, PyTree
from jfleet.optax_meta import _collectives as collectives
from jfleet.optax_meta import _common as common


class GradientMergeState(NamedTuple):
    """State of :func:`gradient_merge`."""

    count: jax.Array  # micro steps in the open window; shape=(), dtype=int32
    num_steps: jax.Array  # optimizer steps so far; shape=(), dtype=int32
    weight: jax.Array  # weight of the open window; shape=(), float32 or wider
    acc: PyTree  # weighted sum of gradients, float32 or wider, like the parameters
    inner: PyTree  # state of the inner transformation


def gradient_merge(
    inner: optax.GradientTransformation,
    k_steps: int = 1,
    avg: bool = True,
    *,
    sync: str = "last",
    reduce: str = "mean",
    gradients: str = "mean",
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Run ``inner`` on every k-th call, with what the last k calls brought.

    ``update`` takes two more keyword arguments. ``flush=True`` closes the window with
    this call; ``update(None, state, params, flush=True)`` closes it without another
    micro batch. The average is over the micro batches seen. ``weight`` is the weight
    of this micro batch (say, its number of valid tokens); without it, each micro batch
    counts the same.

    Args:
      inner: what runs once per window.
      k_steps: micro steps per window.
      avg: step with the (weighted) average of the window; otherwise with the sum.
      sync: with ``"last"``, replicas accumulate alone and reduce once per window; with
        ``"each"`` they reduce every micro step. The result is the same.
      reduce: ``"mean"`` or ``"sum"`` over the replicas.
      gradients: ``"mean"`` if gradients are those of a micro batch's mean loss,
        ``"total"`` if of its total loss; then ``weight`` must be passed, and the result
        is exactly the sum of totals over the sum of weights.
      axis_name: axis of the replicas. Leave it out if ``inner`` reduces by itself.

    Raises:
      ConfigError: if ``k_steps`` is below 1 or a choice is unknown.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> tx = gradient_merge(optax.sgd(1.0), k_steps=2)
      >>> w = jnp.zeros(())
      >>> state = tx.init(w)
      >>> for g in [1.0, 3.0]:
      ...     update, state = tx.update(jnp.asarray(g), state, w)
      ...     print(float(update))
      0.0
      -2.0
    """
    inner = common.lift(inner)
    common.check_count("k_steps", k_steps, low=1)
    common.check_flag("avg", avg)
    common.check_choice("sync", sync, ("last", "each"))
    common.check_choice("reduce", reduce, ("mean", "sum"))
    common.check_choice("gradients", gradients, ("mean", "total"))
    common.check_axis_name(axis_name)
    if gradients == "total" and not (avg and reduce == "mean"):
        raise ConfigError(
            "gradients must be 'mean' where avg is False or reduce is 'sum', got "
            "'total'; totals are always divided by the total weight"
        )
    always = not isinstance(k_steps, jax.Array) and k_steps == 1

    def init(params: PyTree) -> GradientMergeState:
        return GradientMergeState(
            count=jnp.zeros((), jnp.int32),
            num_steps=jnp.zeros((), jnp.int32),
            weight=jnp.zeros((), common.tree_wide_dtype(params)),
            acc=jax.tree.map(lambda p: jnp.zeros_like(common.wide(p)), params),
            inner=inner.init(params),
        )

    def update(updates, state, params=None, *, flush=False, weight=None, **extra_args):
        _check_call(updates, flush, weight)
        if always and updates is not None and weight is None:
            return _plain(updates, state, params, extra_args)
        if updates is None:
            like = state.acc if params is None else params
        else:
            like, state = updates, _add(updates, weight, state)

        def close():
            return _close(like, state, params, extra_args)

        shapes = jax.eval_shape(close)[0]
        return collectives.cond(
            (jnp.asarray(flush) & (state.count > 0)) | (state.count >= k_steps),
            close,
            lambda: (jax.tree.map(_zeros, shapes), state),
        )

    def _check_call(updates, flush, weight):
        if updates is None and flush is False:
            raise ConfigError("updates must be gradients, got None; pass flush=True")
        if updates is not None and gradients == "total" and weight is None:
            raise ConfigError(
                "weight must be passed to update where gradients is 'total', got None"
            )

    def _plain(updates, state, params, extra_args):
        updates = collectives.reduce(updates, axis_name, reduce)
        updates, inner_state = inner.update(updates, state.inner, params, **extra_args)
        num_steps = common.increment(state.num_steps)
        return updates, state._replace(num_steps=num_steps, inner=inner_state)

    def _add(updates, weight, state):
        weight = jnp.asarray(1 if weight is None else weight, state.weight.dtype)
        counted = jax.tree.map(lambda g: _weighted(g, weight), updates)
        if sync == "each":
            counted, weight = _reduced(counted, weight)
        return state._replace(
            count=common.increment(state.count),
            weight=state.weight + weight,
            acc=jax.tree.map(lambda a, g: a + g.astype(a.dtype), state.acc, counted),
        )

    def _weighted(g, weight):
        g = common.wide(g)
        if gradients == "total":
            return g
        # A micro batch without valid items has weight 0 and, often, a gradient of NaN.
        return jnp.where(
            weight == 0, jnp.zeros_like(g), g * weight.astype(g.real.dtype)
        )

    def _reduced(total, weight):
        if reduce == "sum":
            # Means of weights: every replica counts fully.
            return collectives.psum(total, axis_name), collectives.pmean(
                weight, axis_name
            )
        return collectives.pmean((total, weight), axis_name)

    def _close(like, state, params, extra_args):
        total, weight = state.acc, state.weight
        if sync == "last":
            total, weight = _reduced(total, weight)
        if avg:
            safe = jnp.where(weight == 0, jnp.ones_like(weight), weight)
            total = jax.tree.map(lambda a: a / safe.astype(a.real.dtype), total)
        updates, inner_state = common.update_in_own_types(
            inner, total, like, state.inner, params, extra_args
        )
        return updates, GradientMergeState(
            count=jnp.zeros_like(state.count),
            num_steps=common.increment(state.num_steps),
            weight=jnp.zeros_like(state.weight),
            acc=jax.tree.map(jnp.zeros_like, state.acc),
            inner=inner_state,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _zeros(shape: Any) -> jax.Array:
    return jnp.zeros(shape.shape, shape.dtype)
