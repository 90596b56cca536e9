"""Averaging the parameters of replicas; the common part of the LocalSGD variants."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jfleet._types import AxisName, PyTree
from jfleet.optax_meta import _collectives as collectives
from jfleet.optax_meta import _common as common


@dataclasses.dataclass(frozen=True, slots=True)
class Averaging:
    """How replicas meet: plain mean, or a step of an outer optimizer."""

    axis_name: AxisName | None
    average_state: bool
    outer: optax.GradientTransformationExtraArgs | None

    def __post_init__(self):
        common.check_axis_name(self.axis_name)
        common.check_flag("average_state", self.average_state)

    def init(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """Return the anchor (parameters of the last meeting) and the outer state."""
        if self.outer is None:
            return None, None
        anchor = jax.tree.map(lambda p: jnp.array(common.wide(p)), params)
        return anchor, self.outer.init(anchor)

    def needed(self) -> bool:
        """False where a meeting would change nothing: one replica, plain mean."""
        return self.outer is not None or collectives.size(self.axis_name) > 1

    def meet(self, updates: PyTree, inner: PyTree, params: PyTree, state: Any) -> tuple:
        """Return (updates, inner, anchor, outer) of a step that synchronises.

        The updates lead from each replica's own parameters to the common target. They
        are plain arrays, added by ``optax.apply_updates`` to parameters that differ
        between replicas: where a replica's parameter is more than twice as large as the
        target, that addition may round the last digit.
        """
        moved = optax.apply_updates(params, updates)
        mean = collectives.pmean(jax.tree.map(common.wide, moved), self.axis_name)
        anchor, outer_state = state.anchor, state.outer
        if self.outer is not None:
            change = jax.tree.map(lambda a, m: a - m, anchor, mean)
            step, outer_state = self.outer.update(change, outer_state, anchor)
            mean = anchor = optax.apply_updates(anchor, step)
        if self.average_state:
            inner = collectives.pmean(inner, self.axis_name)
        updates = jax.tree.map(_towards, mean, moved, params, updates)
        return updates, inner, anchor, outer_state


def _towards(target: Any, moved: Any, param: Any, update: Any) -> Any:
    if not common.is_float(param):
        return update
    target = target.astype(param.dtype)
    change = common.wide(target) - common.wide(param)
    return jnp.where(target == moved, update, change.astype(update.dtype))


def step_or_meet(
    meets: jax.Array | bool,
    averaging: Averaging,
    updates: PyTree,
    inner: PyTree,
    params: PyTree,
    state: Any,
) -> tuple:
    """``meet`` under a condition; without a meeting there is no collective."""

    def alone():
        return updates, inner, state.anchor, state.outer

    if not averaging.needed():
        return alone()
    if meets is True:
        return averaging.meet(updates, inner, params, state)
    return collectives.cond(
        meets, lambda: averaging.meet(updates, inner, params, state), alone
    )


def sync_model_state(
    model_state: PyTree, synced: jax.Array, *, axis_name: AxisName | None = None
) -> PyTree:
    """Average what a model keeps beside its parameters, such as batch statistics.

    Args:
      model_state: the replica's own statistics; only floating leaves are averaged.
      synced: the field ``synced`` of the state of a LocalSGD variant.
      axis_name: axis of the replicas.

    Returns:
      The mean over the replicas if ``synced``, else ``model_state`` as it is; without
      a collective in that case.
    """
    common.check_axis_name(axis_name)
    if collectives.size(axis_name) == 1:
        return model_state
    return collectives.cond(
        synced,
        lambda: collectives.pmean(model_state, axis_name),
        lambda: model_state,
    )
