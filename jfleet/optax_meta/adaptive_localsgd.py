r"""LocalSGD whose period follows the loss and the learning rate (AdaComm).

.. math:: k = \operatorname{clip}\left(\left\lceil
          \sqrt{\frac{\eta_0}{\eta} \frac{F}{F_0}} \, k_0 \right\rceil,
          1, k_{max}\right)

:math:`F` is the mean loss of the replicas and :math:`\eta` the learning rate, now and
(with index 0) at the first step. The form ``"fleet"`` has :math:`k_0` inside the root.
Early, when the loss is high, replicas communicate rarely; later, often.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jfleet._errors import ConfigError
from jfleet._types import AxisName, PyTree
from jfleet.optax_meta import _collectives as collectives
from jfleet.optax_meta import _common as common
from jfleet.optax_meta._averaging import Averaging, step_or_meet

REASONS = (
    "the period follows the loss and the learning rate",
    "the mean loss is negative or not finite: the period stays",
    "the loss of the first step is not positive and finite: the period stays",
    "the learning rate, now or at the first step, is not positive: the period stays",
)


class AdaptiveLocalsgdState(NamedTuple):
    """State of :func:`adaptive_localsgd`."""

    count: jax.Array  # steps so far, t; shape=(), dtype=int32
    last_sync: jax.Array  # t of the last synchronisation; shape=(), dtype=int32
    synced: jax.Array  # whether the last step synchronised; shape=(), dtype=bool
    num_syncs: jax.Array  # synchronisations so far; shape=(), dtype=int32
    k_steps: jax.Array  # the period now; shape=(), dtype=int32
    start_loss: jax.Array  # mean loss of the first step; shape=(), float32 or wider
    start_rate: jax.Array  # learning rate of the first step; as start_loss
    reason: jax.Array  # index into REASONS, of the last choice; shape=(), dtype=int32
    anchor: PyTree  # parameters at the last sync, float32 or wider; None without outer
    outer: PyTree  # state of the outer optimizer; None without outer
    inner: PyTree  # state of the inner transformation, the replica's own


def adaptive_localsgd(
    inner: optax.GradientTransformation,
    init_k_steps: int = 1,
    begin_step: int = 1,
    *,
    learning_rate: optax.ScalarOrSchedule,
    max_k_steps: int = 16,
    form: str = "paper",
    average_state: bool = False,
    outer: optax.GradientTransformation | None = None,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Average the parameters of the replicas after a number of steps that adapts.

    Like ``localsgd``; the period is chosen anew at each synchronisation after
    ``begin_step``. ``update`` needs the replica's loss as keyword argument ``value``.

    Args:
      inner: optimizer of one replica.
      init_k_steps: the period at first, k0.
      begin_step: synchronise after each of the first ``begin_step`` steps.
      learning_rate: the rate of ``inner``, a number or a schedule of its step count.
      max_k_steps: the largest period.
      form: ``"paper"`` (k0 multiplies the root) or ``"fleet"`` (k0 inside the root;
        ``"paddle"`` is the same).
      average_state: also average the floating leaves of the inner state.
      outer: optimizer for the averaged change, see ``localsgd``.
      axis_name: axis of the replicas.

    Raises:
      ConfigError: if a period is below 1, a choice is unknown, or ``value`` is missing.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> tx = adaptive_localsgd(optax.sgd(0.1), init_k_steps=4, learning_rate=0.1)
      >>> w = jnp.ones(())
      >>> state = tx.init(w)
      >>> for loss in [8.0, 4.0, 4.0, 4.0, 2.0]:
      ...     _, state = tx.update(w, state, w, value=loss)
      >>> int(state.k_steps), REASONS[int(state.reason)]
      (2, 'the period follows the loss and the learning rate')

    References:
      Wang, Joshi, `Adaptive Communication Strategies to Achieve the Best Error-Runtime
      Trade-off in Local-Update SGD <https://arxiv.org/abs/1810.08313>`_, 2018
    """
    inner = common.lift(inner)
    common.check_count("init_k_steps", init_k_steps, low=1)
    common.check_count("begin_step", begin_step, low=0)
    common.check_count("max_k_steps", max_k_steps, low=1)
    common.check_rate("learning_rate", learning_rate)
    common.check_choice("form", form, ("paper", "fleet", "paddle"))
    outer = None if outer is None else common.lift(outer, "outer")
    averaging = Averaging(axis_name, average_state, outer)

    def init(params: PyTree) -> AdaptiveLocalsgdState:
        anchor, outer_state = averaging.init(params)
        dtype = common.tree_wide_dtype(params)
        return AdaptiveLocalsgdState(
            count=jnp.zeros((), jnp.int32),
            last_sync=jnp.asarray(begin_step, jnp.int32),
            synced=jnp.zeros((), bool),
            num_syncs=jnp.zeros((), jnp.int32),
            k_steps=jnp.asarray(init_k_steps, jnp.int32),
            start_loss=jnp.zeros((), dtype),
            start_rate=jnp.zeros((), dtype),
            reason=jnp.zeros((), jnp.int32),
            anchor=anchor,
            outer=outer_state,
            inner=inner.init(params),
        )

    def update(updates, state, params=None, *, value=None, **extra_args):
        common.need_params(params, "adaptive_localsgd")
        if value is None:
            raise ConfigError(
                "value must be the loss of this replica, got None; "
                "call update(grads, state, params, value=loss)"
            )
        updates, inner_state = inner.update(
            updates, state.inner, params, value=value, **extra_args
        )
        count = common.increment(state.count)
        due = (count <= begin_step) | (count - state.last_sync >= state.k_steps)
        updates, inner_state, anchor, outer_state = step_or_meet(
            due, averaging, updates, inner_state, params, state
        )
        state = _with_period(state, count, due, value)
        return updates, state._replace(
            count=count,
            last_sync=jnp.where(due, count, state.last_sync),
            synced=due,
            num_syncs=state.num_syncs + due,
            anchor=anchor,
            outer=outer_state,
            inner=inner_state,
        )

    def _with_period(state, count, due, value):
        first = count == 1
        dtype = state.start_loss.dtype
        value = jnp.asarray(value, dtype)
        loss = value
        if collectives.size(axis_name) > 1:
            loss = collectives.cond(
                due | first, lambda: collectives.pmean(value, axis_name), lambda: value
            )
        rate = jnp.asarray(common.rate_at(learning_rate, state.count), dtype)
        start_loss = jnp.where(first, loss, state.start_loss)
        start_rate = jnp.where(first, rate, state.start_rate)
        k_steps, reason = _period(loss, rate, start_loss, start_rate)
        choose = due & (count > begin_step)
        return state._replace(
            k_steps=jnp.where(choose & (reason == 0), k_steps, state.k_steps),
            start_loss=start_loss,
            start_rate=start_rate,
            reason=jnp.where(choose, reason, state.reason),
        )

    def _period(loss, rate, start_loss, start_rate) -> tuple[Any, Any]:
        rates_ok = (rate > 0) & (start_rate > 0)
        start_ok = (start_loss > 0) & jnp.isfinite(start_loss)
        loss_ok = (loss >= 0) & jnp.isfinite(loss)
        reason = jnp.where(
            loss_ok, jnp.where(start_ok, jnp.where(rates_ok, 0, 3), 2), 1
        ).astype(jnp.int32)
        ratio = (start_rate / jnp.where(rates_ok, rate, 1)) * (
            loss / jnp.where(start_ok, start_loss, 1)
        )
        k0 = jnp.asarray(init_k_steps, ratio.dtype)
        exact = jnp.sqrt(ratio) * k0 if form == "paper" else jnp.sqrt(ratio * k0)
        # 0.3 / 0.1 is a little more than 3 in floating point; do not round that up.
        exact = exact * (1 - 4 * jnp.finfo(exact.dtype).eps)
        limited = jnp.clip(jnp.nan_to_num(jnp.ceil(exact), nan=1.0), 1, max_k_steps)
        return limited.astype(jnp.int32), reason

    return optax.GradientTransformationExtraArgs(init, update)
