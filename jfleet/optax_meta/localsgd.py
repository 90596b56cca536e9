r"""LocalSGD: replicas step alone and average their parameters now and then.

.. math:: w_i \leftarrow \text{inner step of replica } i; \qquad
          \text{at a sync: } w_i \leftarrow \tfrac1N \sum_j w_j

Replicas synchronise after every step while t <= ``begin_step`` and then whenever
``k_steps`` steps have passed since the last time. Between two synchronisations there is
no communication. Only parameters are averaged, never the optimizer state, unless asked.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jfleet._types import AxisName, PyTree
from jfleet.optax_meta import _common as common
from jfleet.optax_meta._averaging import Averaging, step_or_meet


class LocalsgdState(NamedTuple):
    """State of :func:`localsgd`."""

    count: jax.Array  # steps so far, t; shape=(), dtype=int32
    last_sync: jax.Array  # t of the last synchronisation; shape=(), dtype=int32
    synced: jax.Array  # whether the last step synchronised; shape=(), dtype=bool
    num_syncs: jax.Array  # synchronisations so far; shape=(), dtype=int32
    anchor: PyTree  # parameters at the last sync, float32 or wider; None without outer
    outer: PyTree  # state of the outer optimizer; None without outer
    inner: PyTree  # state of the inner transformation, the replica's own


def localsgd(
    inner: optax.GradientTransformation,
    k_steps: int = 1,
    begin_step: int = 1,
    *,
    average_state: bool = False,
    outer: optax.GradientTransformation | None = None,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Let every replica take its own inner steps; average the parameters every k.

    Runs inside ``shard_map`` or ``vmap`` over ``axis_name``, with gradients, parameters
    and state that are the replica's own. The updates must be applied as they are, so
    this transformation comes last. Without ``axis_name`` it is the inner optimizer.

    Args:
      inner: optimizer of one replica.
      k_steps: steps between two synchronisations.
      begin_step: synchronise after each of the first ``begin_step`` steps.
      average_state: also average the floating leaves of the inner state.
      outer: optimizer for the averaged change (DiLoCo): its gradient is the parameters
        at the last sync minus the mean now. ``optax.sgd(1.0)`` is plain averaging.
      axis_name: axis of the replicas.

    Raises:
      ConfigError: if ``k_steps`` is below 1 or ``begin_step`` below 0.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> tx = localsgd(optax.sgd(1.0), k_steps=2, begin_step=0, axis_name="replica")
      >>> def two_steps(grad):
      ...     w = jnp.zeros(())
      ...     state = tx.init(w)
      ...     for _ in range(2):
      ...         update, state = tx.update(grad, state, w)
      ...         w = w + update
      ...     return w
      >>> print(jax.vmap(two_steps, axis_name="replica")(jnp.array([1.0, 3.0])))
      [-4. -4.]

    References:
      Lin et al., `Don't Use Large Mini-Batches, Use Local SGD
      <https://arxiv.org/abs/1808.07217>`_, 2018;
      Stich, `Local SGD Converges Fast and Communicates Little
      <https://arxiv.org/abs/1805.09767>`_, 2018;
      Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_, 2023
    """
    inner = common.lift(inner)
    common.check_count("k_steps", k_steps, low=1)
    common.check_count("begin_step", begin_step, low=0)
    outer = None if outer is None else common.lift(outer, "outer")
    averaging = Averaging(axis_name, average_state, outer)
    always = not isinstance(k_steps, jax.Array) and k_steps == 1

    def init(params: PyTree) -> LocalsgdState:
        anchor, outer_state = averaging.init(params)
        return LocalsgdState(
            count=jnp.zeros((), jnp.int32),
            last_sync=jnp.asarray(begin_step, jnp.int32),
            synced=jnp.zeros((), bool),
            num_syncs=jnp.zeros((), jnp.int32),
            anchor=anchor,
            outer=outer_state,
            inner=inner.init(params),
        )

    def update(updates, state, params=None, **extra_args):
        common.need_params(params, "localsgd")
        updates, inner_state = inner.update(updates, state.inner, params, **extra_args)
        count = common.increment(state.count)
        due = (count <= begin_step) | (count - state.last_sync >= k_steps)
        updates, inner_state, anchor, outer_state = step_or_meet(
            True if always else due, averaging, updates, inner_state, params, state
        )
        return updates, LocalsgdState(
            count=count,
            last_sync=jnp.where(due, count, state.last_sync),
            synced=due,
            num_syncs=state.num_syncs + due,
            anchor=anchor,
            outer=outer_state,
            inner=inner_state,
        )

    return optax.GradientTransformationExtraArgs(init, update)
