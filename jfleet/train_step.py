"""The training step of a strategy: ``opt.minimize`` and ``opt.create``.

    local     each replica takes the gradient of its own rows   (where it is needed)
    boundary  one reduction: mean, reduce-scatter, 16-bit mean, or none
    global    unscale, check, clip, base optimizer, placement

One call is one optimizer step. With gradient_merge the batch is the whole window; it is
split into micro batches on the devices where its rows lie.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jfleet._errors import ConfigError, ConfigTypeError, DonatedBufferError, listing
from jfleet._gather import FirstArgument, rewrite
from jfleet._states.buffers import is_deleted
from jfleet._step import replicas
from jfleet._step.birth import born
from jfleet._step.layout import Layout, layout_of_state
from jfleet._step.local import Gradient, local_gradient
from jfleet._step.loss import LossForm, check_rows, window
from jfleet._step.setup import Setup, setup_of
from jfleet._step.state import Metrics as Metrics
from jfleet._step.state import TrainState as TrainState
from jfleet._step.update import apply
from jfleet._tree import is_array, leaves_with_paths, path_str
from jfleet.mesh import shard_batch
from jfleet.optax_meta import loss_scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainStep:
    """A jitted step: ``state, metrics = step(state, batch[, rng])``."""

    setup: Setup
    form: LossForm
    per_replica: bool | None
    donate: bool
    jitted: Any = dataclasses.field(compare=False, repr=False)

    def __call__(self, state: TrainState, batch: Any, rng: Any = None) -> tuple:
        """Run one optimizer step.

        Args:
            state: from ``opt.create``; donated, unless minimize was told otherwise.
            batch: the rows of all replicas (and micro batches). Arrays that are not on
                the mesh yet are laid out as by ``jfleet.shard_batch``.
            rng: a random key, where the loss takes one. The step number, the micro
                batch and, where each replica has a loss of its own, the replica are
                folded in, so the same key can be passed in every step.

        Returns:
            The new state, and ``Metrics``.
        """
        return self.jitted(*self._arguments(state, batch, rng))

    def lower(self, state: TrainState, batch: Any, rng: Any = None) -> Any:
        """Lower for ahead-of-time compilation; arguments may be abstract."""
        return self.jitted.lower(*self._arguments(state, batch, rng))

    def _arguments(self, state: TrainState, batch: Any, rng: Any) -> tuple:
        _check_state(state)
        if self.form.rng != (rng is not None):
            what = "takes a random key" if self.form.rng else "takes no random key"
            raise ConfigTypeError(
                f"this step {what}, got rng={rng!r}; minimize was called with rng="
                f"{self.form.rng}"
            )
        return state, _placed(self.setup, batch), rng


def _check_state(state: Any) -> None:
    if not isinstance(state, TrainState):
        raise ConfigTypeError(
            f"state must be the TrainState of opt.create, got {type(state).__name__}"
        )
    if any(map(is_deleted, jax.tree.leaves(state))):
        dead = [path_str(p) for p, x in leaves_with_paths(state) if is_deleted(x)]
        raise DonatedBufferError(
            f"the state holds {len(dead)} deleted arrays ({listing(dead, 5)}): they "
            "were donated to an earlier step; use the state that the step returned, or "
            "minimize(..., donate=False)"
        )


def _placed(setup: Setup, batch: Any) -> Any:
    """Lay out what is not on the mesh yet."""
    axes = setup.data_axes

    def place(leaf: Any) -> Any:
        if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
            return leaf
        if is_array(leaf) and isinstance(
            where := getattr(leaf, "sharding", None), NamedSharding
        ):
            if where.mesh == setup.mesh:
                return leaf
            if where.mesh.devices.tolist() == setup.mesh.devices.tolist():
                return jax.device_put(leaf, NamedSharding(setup.mesh, where.spec))
        return shard_batch(leaf, mesh=setup.mesh, axis=axes)

    # With several processes each has its own rows only.
    replicas = max(setup.size(setup.data_axes) // jax.process_count(), 1)
    check_rows(batch, replicas, setup.num_micro)
    return jax.tree.map(place, batch)


def minimize(
    base: Any,
    resolution: Any,
    mesh: Any,
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    model_state: bool = False,
    rng: bool = False,
    donate: bool = True,
    per_replica: bool | None = None,
) -> TrainStep:
    """Build the step; see ``DistributedOptimizer.minimize``."""
    if not callable(loss_fn):
        raise ConfigTypeError(f"loss_fn must be a function, got {loss_fn!r}")
    for name, value in (
        ("has_aux", has_aux),
        ("model_state", model_state),
        ("rng", rng),
        ("donate", donate),
    ):
        if not isinstance(value, bool):
            raise ConfigTypeError(f"{name} must be True or False, got {value!r}")
    setup = setup_of(base, resolution, mesh)
    form = LossForm(fn=loss_fn, has_aux=has_aux, model_state=model_state, rng=rng)
    run = _Step(setup, form, per_replica)
    run.check()
    jitted = jax.jit(run, donate_argnums=(0,) if donate else ())
    return TrainStep(
        setup=setup, form=form, per_replica=per_replica, donate=donate, jitted=jitted
    )


@dataclasses.dataclass(frozen=True)
class _Step:
    """The function that is compiled."""

    setup: Setup
    form: LossForm
    per_replica: bool | None

    def check(self) -> None:
        needed = self.setup.resolution.local_axes
        if self.per_replica and "sync_batch_norm" in self.setup.resolution:
            raise ConfigError(
                "per_replica=True gives every replica statistics of its own, which "
                "sync_batch_norm is to avoid; leave per_replica None"
            )
        if self.per_replica is False and needed:
            raise ConfigError(
                "per_replica is False, but this strategy needs the loss of every "
                f"replica over {'+'.join(needed)}; leave it None"
            )

    def __call__(self, state: TrainState, batch: Any, rng: Any) -> tuple:
        layout = layout_of_state(self.setup, state)
        _check_has_state(self.form, state)
        scale = loss_scale(state.opt_state)
        if rng is not None:
            rng = jax.random.fold_in(rng, state.step)
        axes = self._local_axes(layout)
        if axes or self.setup.num_micro > 1:
            num_replicas = self.setup.size(self.setup.data_axes)
            check_rows(batch, num_replicas, self.setup.num_micro)
        if axes:
            wrap = _Wrap(layout, axes)
            gradient = local_gradient(
                layout, axes, self.form, wrap, state, batch, rng, scale
            )
        else:
            gradient = self._global(layout, state, batch, rng, scale)
        gradient = gradient._replace(grads=layout.pin_grads(gradient.grads))
        new, metrics = apply(layout, state, gradient, scale)
        new = jax.tree.map(_pin, new, layout.shardings(new))
        return new, _pin_scalars(layout, metrics)

    def _local_axes(self, layout: Layout) -> tuple[str, ...]:
        """Axes over which every replica has a loss of its own."""
        setup = self.setup
        needed = setup.resolution.local_axes
        if needed or self.per_replica is False:
            return needed
        if self.per_replica:
            return setup.data_axes
        whole = self.form.model_state or self.form.rng
        special = {"tensor_parallel", "sync_batch_norm"}
        # What depends on the whole batch must not change with the level.
        if whole or special & set(setup.resolution.applied):
            return ()
        policy = layout.policy
        if policy is None or not policy.splits_grads:
            # The sum of a window is whole on every device: one reduction is enough.
            several = setup.num_micro > 1 and setup.size(setup.data_axes) > 1
            return setup.data_axes if several and setup.sync == "auto" else ()
        # Only a reduce-scatter by hand shows the saving of os_g on every backend.
        one_axis = policy.axes == policy.optimizer_axes == setup.data_axes
        fits = policy.level == "os_g" and one_axis and len(policy.axes) == 1
        fits = fits and setup.size(policy.axes) > 1 and setup.num_micro == 1
        return policy.axes if fits and setup.scatters_by_hand else ()

    def _global(
        self, layout: Layout, state: TrainState, batch: Any, rng: Any, scale: Any
    ) -> Gradient:
        setup = self.setup
        wrap = _Wrap(layout, ())(state.params)

        def loss(params: Any, model_state: Any, rows: Any, key: Any) -> Any:
            fn = wrap(lambda p, b, k: self.form(p, model_state, b, k))
            return self.form.read(fn(params, rows, key))

        sums = window(
            loss,
            state.params,
            state.model_state,
            batch,
            rng,
            scale=scale,
            num_micro=setup.num_micro,
            pin=layout.pin_grads,
        )
        if sums.weight is not None and not setup.averages:
            raise ConfigError(
                "gradient_merge_configs['avg'] is False, but loss_fn returns (total, "
                "weight), which is always divided by the whole weight; set avg=True "
                "or return the mean"
            )
        count = sums.weight if sums.weight is not None else setup.num_micro
        count = jnp.where(count == 0, 1, count) if sums.weight is not None else count
        divided = sums.weight is not None or (setup.averages and setup.num_micro > 1)
        grads = sums.grads
        if divided:
            grads = jax.tree.map(lambda g: (g / count).astype(g.dtype), grads)
        return Gradient(
            grads=grads,
            loss=sums.total / count,
            found_inf=None,
            model_state=sums.model_state,
            replica_state=state.replica_state,
            aux=sums.aux,
        )


def _pin_scalars(layout: Layout, metrics: Metrics) -> Metrics:
    """Larger auxiliary results stay where they are."""
    return jax.tree.map(lambda x: x if x.ndim else layout.pin(x), metrics)


def _pin(x: jax.Array, where: NamedSharding) -> jax.Array:
    if where.memory_kind == "pinned_host":
        return jax.device_put(x, where)
    return jax.lax.with_sharding_constraint(x, where)


def _check_has_state(form: LossForm, state: TrainState) -> None:
    if form.model_state and state.model_state is None:
        raise ConfigError(
            "minimize was told model_state=True, but the state has none; pass "
            "model_state= to opt.create"
        )


@dataclasses.dataclass(frozen=True)
class _Wrap:
    """What the strategy does to a loss of (params, batch, rng)."""

    layout: Layout
    manual: tuple[str, ...]

    def __call__(self, params: Any) -> Callable[[Callable], Callable]:
        """Wrap a loss of these parameters; gather them at use at level p_g_os."""
        policy, wrap_loss = self.layout.policy, self.layout.setup.wrap_loss
        if policy is None or not policy.splits_params:
            return wrap_loss
        specs = jax.tree.leaves(self.layout.params)
        pairs = [
            (path, spec)
            for (path, _), spec in zip(leaves_with_paths(params), specs, strict=True)
            if any(spec)
        ]
        axes = [a for a in policy.axes if a not in self.manual]
        if not axes or not pairs:
            return wrap_loss
        where = FirstArgument(tuple(pairs))
        return lambda loss: rewrite(wrap_loss(loss), where, policy.mesh, axes)


def create(
    base: Any,
    resolution: Any,
    mesh: Any,
    params: Any,
    *args: Any,
    model_state: Any = None,
) -> TrainState:
    """Create a placed state; see ``DistributedOptimizer.create``."""
    return born(setup_of(base, resolution, mesh), params, args, model_state)


def averaged(base: Any, resolution: Any, mesh: Any, state: TrainState) -> TrainState:
    """The state with one model in it: the mean of the replicas, where they differ."""
    setup = setup_of(base, resolution, mesh)
    _check_state(state)
    if not setup.own_params:
        return state
    layout = layout_of_state(setup, state)

    def one(params: Any, model_state: Any) -> tuple:
        params, model_state = replicas.mean(params), replicas.mean(model_state)
        return layout.pin(params, layout.params), layout.pin(model_state)

    params, model_state = jax.jit(one)(state.params, state.model_state)
    return state.replace(params=params, model_state=model_state)
