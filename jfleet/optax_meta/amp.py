r"""Mixed precision: loss scaling, skipped steps, float32 master weights.

With loss scale s, the loss is multiplied by s before it is differentiated and the
gradients are divided by s, in float32, before anything else looks at them:

.. math:: g = \nabla (s L) / s

If any gradient is not finite, the whole step is skipped, on every device. The scale
grows after ``incr_every`` finite steps in a row and shrinks after ``decr_every`` bad
ones. :func:`master_weights` keeps float32 parameters where the model holds 16-bit ones.
The functions that wrap a loss are in ``_loss.py``.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jfleet._errors import ConfigError
from jfleet._types import AxisName, PyTree
from jfleet.optax_meta import _collectives as collectives
from jfleet.optax_meta import _common as common
from jfleet.optax_meta._loss import cast_loss as cast_loss
from jfleet.optax_meta._loss import cast_params as cast_params
from jfleet.optax_meta._loss import scale_loss as scale_loss
from jfleet.optax_meta._loss import scaled_value_and_grad as scaled_value_and_grad
from jfleet.optax_meta._rounding import round_to


class LossScaleState(NamedTuple):
    """State of :func:`dynamic_loss_scaling`."""

    scale: jax.Array  # for the next loss; shape=(), float32 or wider
    good: jax.Array  # finite steps in a row; shape=(), dtype=int32
    bad: jax.Array  # non-finite steps in a row; shape=(), dtype=int32
    found_inf: jax.Array  # whether the last step overflowed; shape=(), dtype=bool
    num_skipped: jax.Array  # overflowed steps so far; shape=(), dtype=int32
    inner: PyTree  # state of the inner transformation


def dynamic_loss_scaling(
    inner: optax.GradientTransformation,
    *,
    init_scale: float = 32768.0,
    incr_every: int = 1000,
    decr_every: int = 2,
    incr_ratio: float = 2.0,
    decr_ratio: float = 0.8,
    floor: float = 1.0,
    dynamic: bool = True,
    on_overflow: str = "skip",
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Unscale gradients in float32, skip steps that overflowed, and adapt the scale.

    Multiply the loss with ``state.scale`` (see ``loss_scale``). The inner
    transformation sees true gradients: clipping, norms and accumulation in it are
    independent of the scale. On a skipped step its parameters, state, schedules and
    counters do not move. ``update(..., move=True)`` returns the new parameters in place
    of the updates: a step that is skipped then touches nothing.

    Args:
      inner: what follows: clipping, the optimizer.
      init_scale: first scale; the only one if not ``dynamic``.
      incr_every: finite steps in a row until the scale grows.
      decr_every: non-finite steps in a row until it shrinks.
      incr_ratio: factor of growth; no growth beyond the largest float32.
      decr_ratio: factor of shrinking.
      floor: smallest scale.
      dynamic: whether the scale changes. Overflow skips in any case.
      on_overflow: ``"skip"``, or ``"zero_grad"`` to let ``inner`` step with gradient
        zero, which still moves momentum.
      axis_name: axis over which gradients are split or the replicas' own: an overflow
        on one device counts on all. Gradients are not reduced here.

    Raises:
      ConfigError: if a number is out of range.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> tx = dynamic_loss_scaling(optax.sgd(1.0), init_scale=4.0, decr_every=1)
      >>> w = jnp.zeros(())
      >>> state = tx.init(w)
      >>> update, state = tx.update(4.0 * jnp.ones(()), state, w)
      >>> print(update, state.scale)
      -1.0 4.0
      >>> update, state = tx.update(jnp.asarray(jnp.inf), state, w)
      >>> print(update, state.scale, int(state.num_skipped))
      0.0 3.2 1

    References:
      Micikevicius et al., `Mixed Precision Training
      <https://arxiv.org/abs/1710.03740>`_, 2018
    """
    inner = common.lift(inner)
    common.check_number("floor", floor, low=0, open_low=True)
    largest = float(jnp.finfo(jnp.float32).max)
    common.check_number("init_scale", init_scale, low=0, high=largest, open_low=True)
    common.check_count("incr_every", incr_every, low=1)
    common.check_count("decr_every", decr_every, low=1)
    common.check_number("incr_ratio", incr_ratio, low=1)
    common.check_number("decr_ratio", decr_ratio, low=0, high=1, open_low=True)
    common.check_flag("dynamic", dynamic)
    common.check_choice("on_overflow", on_overflow, ("skip", "zero_grad"))
    common.check_axis_name(axis_name)

    def init(params: PyTree) -> LossScaleState:
        dtype = common.tree_wide_dtype(params)
        return LossScaleState(
            scale=jnp.asarray(init_scale, dtype),
            good=jnp.zeros((), jnp.int32),
            bad=jnp.zeros((), jnp.int32),
            found_inf=jnp.zeros((), bool),
            num_skipped=jnp.zeros((), jnp.int32),
            inner=inner.init(params),
        )

    def update(updates, state, params=None, *, move=False, **extra_args):
        found = collectives.pany(not_finite(updates), axis_name)
        if move:
            common.need_params(params, "move=True")

        def step(found):
            grads = jax.tree.map(lambda g: _unscaled(g, state.scale, found), updates)
            new, inner_state = common.update_in_own_types(
                inner, grads, updates, state.inner, params, extra_args
            )
            if move and params is not None:
                new = optax.apply_updates(params, new)
            return new, inner_state

        def skip():
            if move:
                return params, state.inner
            shapes = jax.eval_shape(lambda: step(None))[0]
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            return zeros, state.inner

        if on_overflow == "skip":
            # The usual branch is the true one: XLA lets only that update in place.
            new_updates, inner_state = collectives.cond(
                ~found, lambda: step(None), skip
            )
        else:
            new_updates, inner_state = step(found)
        scale, good, bad = _machine(state, found)
        return new_updates, LossScaleState(
            scale=scale,
            good=good,
            bad=bad,
            found_inf=found,
            num_skipped=state.num_skipped + found,
            inner=inner_state,
        )

    def _machine(state, found):
        if not dynamic:
            return state.scale, state.good, state.bad
        good = jnp.where(found, 0, common.increment(state.good))
        bad = jnp.where(found, common.increment(state.bad), 0)
        grow, shrink = good == incr_every, bad == decr_every
        dtype = state.scale.dtype
        larger = state.scale * jnp.asarray(incr_ratio, dtype)
        larger = jnp.where(larger <= largest, larger, state.scale)
        smaller = state.scale * jnp.asarray(decr_ratio, dtype)
        smaller = jnp.maximum(jnp.asarray(floor, dtype), smaller)
        scale = jnp.where(grow, larger, jnp.where(shrink, smaller, state.scale))
        return scale, jnp.where(grow, 0, good), jnp.where(shrink, 0, bad)

    return optax.GradientTransformationExtraArgs(init, update)


def not_finite(tree: PyTree) -> jax.Array:
    """True if any element of any leaf is infinite or NaN in float32."""
    flags = [
        ~jnp.all(jnp.isfinite(_as_float32(x)))
        for x in jax.tree.leaves(tree)
        if common.is_float(x)
    ]
    return jnp.any(jnp.stack(flags)) if flags else jnp.zeros((), bool)


def _as_float32(x: jax.Array) -> jax.Array:
    """A wider gradient counts as overflowed where float32 would have."""
    wider = jnp.finfo(x.dtype).bits > 32 and not jnp.iscomplexobj(x)
    return x.astype(jnp.float32) if wider else x


def _unscaled(g: jax.Array, scale: jax.Array, found: jax.Array | None) -> jax.Array:
    """Divide by the scale; zero where ``found``."""
    if not common.is_float(g):
        return g
    g = common.wide(g)
    unscaled = g / scale.astype(g.real.dtype)
    return unscaled if found is None else jnp.where(found, jnp.zeros_like(g), unscaled)


def loss_scale(opt_state: PyTree) -> jax.Array | float:
    """Return the scale for the next loss, wherever it is in an optimizer state.

    Without loss scaling in the state it is 1.0.
    """

    def found(node):
        return isinstance(node, LossScaleState)

    nodes = [s for s in jax.tree.leaves(opt_state, is_leaf=found) if found(s)]
    return nodes[0].scale if nodes else 1.0


class MasterWeightsState(NamedTuple):
    """State of :func:`master_weights`."""

    master: PyTree  # like the parameters: float32 for 16-bit leaves, None for others
    inner: PyTree  # state of the inner transformation on the masters


def master_weights(
    inner: optax.GradientTransformation,
    *,
    master_dtype: jax.typing.DTypeLike = "float32",
) -> optax.GradientTransformationExtraArgs:
    """Optimize float32 copies of 16-bit parameters.

    The inner transformation sees float32 parameters and gradients, and its state is
    float32. After ``optax.apply_updates`` every parameter equals its master, rounded to
    the dtype of the parameter, bit for bit. To make that possible the update of a
    16-bit leaf is float32 (a 16-bit difference cannot hit every target), and it must be
    applied as it is: this transformation comes last. Leaves of 32 bits or more have no
    master and pass unchanged.

    Args:
      inner: the optimizer.
      master_dtype: dtype of the masters.

    Raises:
      ConfigError: if ``master_dtype`` has fewer than 32 bits.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> tx = master_weights(optax.sgd(1e-3))
      >>> w = jnp.ones((), jnp.bfloat16)
      >>> state = tx.init(w)
      >>> for _ in range(100):
      ...     update, state = tx.update(jnp.ones((), jnp.bfloat16), state, w)
      ...     w = optax.apply_updates(w, update)
      >>> print(w, f"{float(state.master):.4f}")
      0.898438 0.9000
    """
    inner = common.lift(inner)
    dtype = jnp.dtype(master_dtype)
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits < 32:
        raise ConfigError(
            f"master_dtype must be a float of 32 bits or more, got {master_dtype!r}"
        )

    def is_low(p) -> bool:
        return jnp.issubdtype(p.dtype, jnp.floating) and jnp.finfo(p.dtype).bits < 32

    def init(params: PyTree) -> MasterWeightsState:
        master = jax.tree.map(lambda p: p.astype(dtype) if is_low(p) else None, params)
        return MasterWeightsState(master, inner.init(_masters(params, master)))

    def update(updates, state, params=None, **extra_args):
        common.need_params(params, "master_weights")
        weights = _masters(params, state.master)
        grads = jax.tree.map(
            lambda g, p: g.astype(dtype) if is_low(p) else g, updates, params
        )
        steps, inner_state = inner.update(grads, state.inner, weights, **extra_args)
        pairs = jax.tree.map(_towards, params, state.master, steps)
        treedef = jax.tree.structure(params)
        flat = treedef.flatten_up_to(pairs)
        master = treedef.unflatten([m for _, m in flat])
        new_updates = treedef.unflatten([u for u, _ in flat])
        return new_updates, MasterWeightsState(master, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _masters(params: PyTree, master: PyTree) -> PyTree:
    return jax.tree.map(lambda p, m: p if m is None else m, params, master)


def _towards(param: jax.Array, master: jax.Array | None, step: jax.Array):
    """Update of the parameter and new master, so that both agree after the addition.

    The addition ``param + update`` happens in the dtype of the master. It misses the
    target only where the parameter is some 2**16 times larger than the target: then the
    update itself is rounded. The master takes the value that was reached, which is
    within that one rounding of a float32 sum.
    """
    if master is None:
        return step, None
    moved = master + step.astype(master.dtype)
    target = round_to(moved, param.dtype)
    here = param.astype(master.dtype)
    update = target - here
    reached = round_to(here + update, param.dtype)
    # NaN and infinity are kept as they are.
    missed = (reached != target) & jnp.isfinite(reached)
    return update, jnp.where(missed, reached, moved)
