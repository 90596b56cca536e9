"""From a reduced gradient to the new state and the metrics.

Global region: plain optax on global arrays. Where replicas keep state of their own, the
same runs inside ``shard_map`` over the replica axes, each replica on its part.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from jfleet._layout import canonical
from jfleet._step import replicas
from jfleet._step.layout import Layout
from jfleet._step.local import Gradient
from jfleet._step.setup import Setup
from jfleet._step.state import Metrics, TrainState
from jfleet.optax_meta import (
    AdaptiveLocalsgdState,
    ClipState,
    DgcState,
    LocalsgdState,
    LossScaleState,
    global_norm,
    sync_model_state,
)
from jfleet.optax_meta import _collectives as collectives
from jfleet.optax_meta import _common as common
from jfleet.optax_meta.sharding import ShardedTransformation, sharding


class Shown(NamedTuple):
    """The metrics that need a mean over the replicas."""

    loss: jax.Array
    grad_norm: jax.Array
    clip_factor: jax.Array


def nothing_shown(params: Any) -> Shown:
    """Before the first synchronisation."""
    nan = jnp.full((), jnp.nan, common.tree_wide_dtype(params))
    return Shown(nan, nan, nan)


def find(opt_state: Any, *kinds: type) -> Any:
    """The first state of one of these kinds in an optimizer state, or None."""

    def wanted(node: Any) -> bool:
        return isinstance(node, kinds)

    nodes = jax.tree.leaves(opt_state, is_leaf=wanted)
    return next((n for n in nodes if wanted(n)), None)


def num_skipped(state: TrainState) -> jax.Array:
    """Steps that an overflow skipped so far."""
    found = find(state.opt_state, LossScaleState) or state.replica_state
    return jnp.zeros((), jnp.int32) if found is None else found.num_skipped


def apply(layout: Layout, state: TrainState, gradient: Gradient, scale: Any) -> tuple:
    """Return the new state and the metrics."""
    run = _apply_per_replica if layout.setup.own_axes else _apply_global
    state, shown, aux, synchronised = run(layout, state, gradient, scale)
    # The rate of the optimizer may be another than when the state was made.
    tx = layout.setup.window()
    if isinstance(state.tx, ShardedTransformation):
        tx = sharding(tx, state.tx.policy)
    state = state.replace(
        step=optax.safe_increment(state.step),
        replica_state=gradient.replica_state,
        tx=tx,
    )
    shown = _of_skipped(shown, _overflow(state, gradient))
    metrics = Metrics(
        loss=shown.loss,
        grad_norm=shown.grad_norm,
        clip_factor=shown.clip_factor,
        loss_scale=jnp.asarray(scale, jnp.float32),
        skipped_steps=num_skipped(state),
        synchronised=synchronised,
        aux=aux,
    )
    return state, metrics


def _overflow(state: TrainState, gradient: Gradient) -> Any:
    """Whether this step was skipped; None where no step ever is."""
    scaler = find(state.opt_state, LossScaleState)
    return gradient.found_inf if scaler is None else scaler.found_inf


def _of_skipped(shown: Shown, found: Any) -> Shown:
    """A skipped step did not come as far as the clip."""
    if found is None:
        return shown
    return shown._replace(
        grad_norm=jnp.where(found, jnp.inf, shown.grad_norm),
        clip_factor=jnp.where(found, 1, shown.clip_factor),
    )


def _apply_global(
    layout: Layout, state: TrainState, gradient: Gradient, scale: Any
) -> tuple:
    tx = layout.setup.window()
    if layout.policy is not None:
        tx = sharding(tx, layout.policy)
    params, opt_state = _stepped(
        tx, state.params, state.opt_state, gradient, gradient.loss
    )
    if layout.policy is not None:  # shards are added, and their sum is gathered
        params = layout.pin(params, layout.moved)
    if layout.policy is None:  # keep its squares apart from those of the optimizer
        grads = jax.lax.optimization_barrier(gradient.grads)
    else:  # the norm of whole gradients would make them whole
        grads = layout.pin_split(gradient.grads)
    shown = _shown(layout.setup, opt_state, gradient, grads, scale)
    new = state.replace(
        params=params, opt_state=opt_state, model_state=gradient.model_state
    )
    return new, shown, gradient.aux, jnp.ones((), bool)


def _stepped(
    tx: Any, params: Any, opt_state: Any, gradient: Gradient, loss: Any
) -> tuple[Any, Any]:
    """New parameters and optimizer state; neither moves where the sum overflowed."""
    extra: dict[str, Any] = {"value": loss}
    moves = isinstance(opt_state, LossScaleState)
    if moves:  # the addition belongs into the branch that is skipped
        extra["move"] = True
    updates, new_state = common.update_in_own_types(
        tx, gradient.grads, params, opt_state, params, extra
    )
    new_params = updates if moves else optax.apply_updates(params, updates)
    if gradient.found_inf is None or find(opt_state, LossScaleState) is not None:
        return new_params, new_state
    return common.select(
        gradient.found_inf, (params, opt_state), (new_params, new_state)
    )


def _shown(
    setup: Setup, opt_state: Any, gradient: Gradient, grads: Any, scale: Any
) -> Shown:
    """Loss, norm before clipping and clip factor, of one replica or of all.

    ``grads`` are the gradients to take the norm of, where no clip has it.
    """
    clip = find(opt_state, ClipState)
    if clip is not None:
        norm, factor = clip.norm, clip.factor
    else:
        # Nothing depends on it: a branch for extreme numbers would hold the gradient.
        norm = global_norm(grads, exclude=setup.clip_exclude(), plain=True)
        norm = norm * setup.num_summed / jnp.asarray(scale, norm.dtype)
        unknown = find(opt_state, DgcState) is not None and "clip" in setup.resolution
        factor = jnp.full_like(norm, jnp.nan if unknown else 1)
    return Shown(gradient.loss, norm, factor)


def _apply_per_replica(
    layout: Layout, state: TrainState, gradient: Gradient, scale: Any
) -> tuple:
    setup = layout.setup
    own = canonical([setup.own_axes])
    params_spec = own if setup.own_params else P()
    state_specs = jax.tree.map(lambda o: own if o else P(), layout.own_state)
    gradient_specs = Gradient(own, own, P(), params_spec, P(), own)
    mapped = jax.shard_map(
        _Replica(layout).run,
        mesh=setup.mesh,
        in_specs=(params_spec, state_specs, gradient_specs, P(), P()),
        out_specs=(params_spec, state_specs, params_spec, P(), P(), P()),
        axis_names=set(setup.own_axes),
        check_vma=False,
    )
    # What the reducer keeps lies over other axes and has no business here.
    inside = gradient._replace(replica_state=None)
    params, opt_state, model_state, shown, aux, synced = mapped(
        state.params, state.opt_state, inside, scale, state.shown
    )
    new = state.replace(params=params, opt_state=opt_state, model_state=model_state)
    if setup.own_params:
        new = new.replace(shown=shown)
    return new, shown, aux, synced


class _Replica:
    """What one replica does."""

    def __init__(self, layout: Layout):
        self.layout, self.setup = layout, layout.setup

    def run(self, params, opt_state, gradient, scale, shown) -> tuple:
        setup, axes = self.setup, self.setup.own_axes
        own_state = self.layout.own_state
        everywhere = replicas.everywhere
        own_params = everywhere(params, setup.own_params)
        own_model = everywhere(gradient.model_state, setup.own_params)
        params = replicas.squeeze(params, own_params)
        opt_state = replicas.squeeze(opt_state, own_state)
        gradient = gradient._replace(
            grads=replicas.squeeze(gradient.grads, everywhere(gradient.grads, True)),
            loss=gradient.loss[0],
            aux=replicas.squeeze(gradient.aux, everywhere(gradient.aux, True)),
            model_state=replicas.squeeze(gradient.model_state, own_model),
        )
        tx = setup.replica_transformation(axes)
        before = find(opt_state, LocalsgdState, AdaptiveLocalsgdState)
        params, opt_state = _stepped(tx, params, opt_state, gradient, gradient.loss)
        model_state, synced = gradient.model_state, jnp.ones((), bool)
        if before is not None:
            after = find(opt_state, LocalsgdState, AdaptiveLocalsgdState)
            synced = after.num_syncs > before.num_syncs
            model_state = sync_model_state(model_state, synced, axis_name=axes)
        now = _shown(setup, opt_state, gradient, gradient.grads, scale)
        if before is None:
            shown, aux = self._over_replicas(now, gradient.aux)
        else:
            # No collective between two synchronisations: the last metrics stay.
            now = Shown(*(x.astype(y.dtype) for x, y in zip(now, shown, strict=True)))
            last = (shown, jax.tree.map(_unknown, gradient.aux))
            shown, aux = collectives.cond(
                synced, lambda: self._over_replicas(now, gradient.aux), lambda: last
            )
        return (
            replicas.expand(params, own_params),
            replicas.expand(opt_state, own_state),
            replicas.expand(model_state, own_model),
            shown,
            aux,
            synced,
        )

    def _over_replicas(self, shown: Shown, aux: Any) -> tuple[Shown, Any]:
        axes = self.setup.own_axes
        square = collectives.pmean(jnp.square(shown.grad_norm), axes)
        means = Shown(
            loss=collectives.pmean(shown.loss, axes),
            grad_norm=jnp.sqrt(square),
            clip_factor=collectives.pmean(shown.clip_factor, axes),
        )
        return means, jax.tree.map(self._aux, aux)

    def _aux(self, x: jax.Array) -> jax.Array:
        over = self.setup.own_axes
        inexact = jnp.issubdtype(x.dtype, jnp.inexact)
        return collectives.pmean(x, over) if inexact else collectives.psum(x, over)


def _unknown(x: jax.Array) -> jax.Array:
    inexact = jnp.issubdtype(x.dtype, jnp.inexact)
    return jnp.full_like(x, jnp.nan) if inexact else jnp.zeros_like(x)
