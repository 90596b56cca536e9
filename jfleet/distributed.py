"""The optimizer of a strategy: an optax transformation that can say what it does.

``distributed_optimizer`` resolves a strategy once. ``minimize`` builds a training step
that does all that the strategy asks for. The result also goes wherever an optax
transformation goes; but what a strategy does to the *loss* (recompute, the casts of
amp) an ``update`` cannot do: ``wrap_loss`` must be applied to the loss by hand. What
needs the gradient of every replica works only where these exist, and ``update``
refuses elsewhere.

Note [axes in scope]: ``update`` looks whether the mesh axes are named axes of the
computation that is being traced (``shard_map``, ``vmap``). If they are, gradients are
those of one replica and it reduces them itself. If not, as under plain ``jax.jit``,
autodiff has already given the mean over all replicas.

Note [for a step builder]: ``resolution.local_axes`` are the axes that must be manual
(``shard_map``, with ``check_vma=False``); inside, ``transformation(axis_name=...)``
does everything from the accumulation of gradients to the averaging of parameters, and
its state is each replica's own. ``wrap_loss`` and ``loss_scale`` belong to the loss;
``_resolving.placement.placement_policy`` says where things live, given the parameters.
``gradient_merge_configs["sync"]`` may still be ``"auto"``: ``transformation`` takes it
as ``"last"`` where axes are in scope. adaptive_localsgd needs ``value=loss``.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from jfleet import mesh as meshes
from jfleet import train_step
from jfleet._errors import ConfigError
from jfleet._resolving.placement import needs_mesh, placed
from jfleet._resolving.resolution import Resolution
from jfleet._resolving.rules import Axes
from jfleet._settings.checks import SettingTypeError
from jfleet._types import AxisName
from jfleet.optax_meta import loss_scale
from jfleet.optax_meta.sharding import ShardedTransformation
from jfleet.resolver import build, resolve
from jfleet.strategy import DistributedStrategy


@dataclasses.dataclass(frozen=True)
class _Init:
    """What the optimizer was made from; also its ``init``."""

    base: Any
    resolution: Resolution
    mesh: Any

    def __call__(self, params: Any) -> Any:
        return build(self.resolution, self.base).init(params)


@dataclasses.dataclass(frozen=True)
class _Update:
    """``update`` for whatever is being traced; see Note [axes in scope]."""

    made: _Init

    def __call__(
        self,
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        loss_scale: Any = None,
        **extra: Any,
    ) -> tuple[Any, Any]:
        resolution = self.made.resolution
        scope = axes_in_scope(resolution)
        _check_replica_gradients(resolution, scope)
        updates = _with_current_scale(updates, state, loss_scale, resolution)
        tx = build(resolution, self.made.base, axis_name=scope or None)
        return tx.update(updates, state, params, **extra)


class DistributedOptimizer(optax.GradientTransformationExtraArgs):
    """An optax transformation with the resolution it was built from.

    Two made from equal arguments are equal, so a jitted step that carries one as static
    data is not compiled again.
    """

    __slots__ = ()

    @property
    def _made(self) -> _Init:
        made = self.init
        assert isinstance(made, _Init)
        return made

    @property
    def resolution(self) -> Resolution:
        """What runs, what does not, and why."""
        return self._made.resolution

    @property
    def base(self) -> Any:
        """The user's optimizer."""
        return self._made.base

    @property
    def mesh(self) -> Any:
        """The mesh it was resolved for, or None."""
        return self._made.mesh

    def explain(self) -> str:
        """Say what runs, what does not, why, and with which options."""
        text = self.resolution.explain()
        names = [r.name for r in self.resolution.rules if r.wrap_loss is not None]
        if not names:
            return text
        return (
            f"{text}\nNote: {' and '.join(names)} change the loss function. minimize "
            "does that; a step of your own that calls update must differentiate "
            "opt.wrap_loss(loss_fn), or they have no effect on it"
        )

    def minimize(
        self,
        loss_fn: Callable[..., Any],
        *,
        has_aux: bool = False,
        model_state: bool = False,
        rng: bool = False,
        donate: bool = True,
        per_replica: bool | None = None,
    ) -> train_step.TrainStep:
        """Build the jitted training step: ``state, metrics = step(state, batch)``.

        One call is one optimizer step. With gradient_merge the batch holds the rows of
        the whole window; micro batch j takes every k-th row, from row j, and no row
        leaves its device.

        Where a strategy needs the gradient of every replica (localsgd, dgc,
        fp16_allreduce, gradient_merge with sync="last", level ``os_g`` on one data
        axis) the loss is called with the rows of one replica, else with all rows. A
        mean over rows, or a pair (total, weight), gives the same result either way.

        Args:
            loss_fn: ``loss_fn(params[, model_state], batch[, rng])``. It returns the
                mean loss over the rows it got, or a pair (total, weight), which makes
                sum(total) / sum(weight) over all replicas and micro batches; followed
                by the new model state and the auxiliary result, where declared.
            has_aux: it also returns an auxiliary result: a tree whose floats are
                averaged and whose integers are summed over micro batches and replicas.
            model_state: it also takes and returns model state (batch statistics).
            rng: it also takes a random key; ``step(state, batch, rng)``.
            donate: let a step reuse the memory of the state that it gets.
            per_replica: True calls the loss with one replica's rows, also where the
                strategy needs it not; False asks for all rows always.

        Returns:
            A ``TrainStep``. Its metrics are replicated scalars: ``loss``,
            ``grad_norm`` (before clipping; infinite in a skipped step), ``clip_factor``
            (NaN under dgc, which clips locally), ``loss_scale``, ``skipped_steps``,
            ``synchronised``, ``aux``. Under dgc and localsgd the norm is the root mean
            square over the replicas. Under localsgd loss, norm and factor are those of
            the last synchronisation, because between two nothing is exchanged; aux is
            NaN or 0 there.

        Raises:
            ConfigError: a combination that no step can run; it names the remedy.
            ConfigTypeError: an argument of the wrong type.

        Example:
            >>> import jax.numpy as jnp, jfleet, optax
            >>> strategy = jfleet.DistributedStrategy(clip=True)
            >>> opt = jfleet.distributed_optimizer(optax.sgd(1.0), strategy)
            >>> step = opt.minimize(lambda w, x: jnp.mean(w * x))
            >>> state = opt.create(jnp.zeros(()))
            >>> state, metrics = step(state, jnp.full(8, 2.0))
            >>> print(state.params, metrics.grad_norm, metrics.clip_factor)
            -1.0 2.0 0.5
        """
        return train_step.minimize(
            *self._parts(),
            loss_fn,
            has_aux=has_aux,
            model_state=model_state,
            rng=rng,
            donate=donate,
            per_replica=per_replica,
        )

    def create(
        self, params: Any, *args: Any, model_state: Any = None
    ) -> train_step.TrainState:
        """Create the state of training where it belongs: split, on the mesh.

        Args:
            params: a tree of arrays, which stay valid; or a function that returns one.
                The latter is compiled, and no device ever holds all of a split state.
            *args: arguments of the function.
            model_state: what the model keeps beside its parameters; True if the
                function returns a pair (params, model_state).

        Raises:
            ConfigError: no parameters, or a split that the strategy does not know.

        Example:
            >>> import jax, jfleet, optax
            >>> strategy = jfleet.DistributedStrategy(clip=True)
            >>> opt = jfleet.distributed_optimizer(optax.adam(1e-3), strategy)
            >>> state = opt.create(lambda key: jax.random.normal(key, (4,)),
            ...                    jax.random.key(0))
            >>> state.params.shape, int(state.step)
            ((4,), 0)
        """
        return train_step.create(*self._parts(), params, *args, model_state=model_state)

    def params(self, state: train_step.TrainState) -> Any:
        """The parameters of a state: under localsgd, the mean of the replicas'."""
        return train_step.averaged(*self._parts(), state).params

    def model_state(self, state: train_step.TrainState) -> Any:
        """The model state of a state: under localsgd, the mean of the replicas'."""
        return train_step.averaged(*self._parts(), state).model_state

    def _parts(self) -> tuple[Any, Resolution, Any]:
        return self.base, self.resolution, self.mesh

    def transformation(
        self, *, axis_name: AxisName | None = None, totals: bool = False
    ) -> Any:
        """The composed transformation for known axes in scope, without checks.

        A step builder that runs it inside ``shard_map`` passes the axes; see
        ``jfleet.build``.
        """
        return build(self.resolution, self.base, axis_name=axis_name, totals=totals)

    def wrap_loss(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Apply what the strategy does to the loss: recompute, then the casts of amp.

        ``minimize`` does it by itself. In a step of your own it is up to you: without
        it, ``update`` trains in full precision and recomputes nothing. The result is
        not multiplied with the loss scale; see ``loss_scale``.
        """
        for wrap in self.resolution.loss_wrappers(self.base):
            loss_fn = wrap(loss_fn)
        return loss_fn

    def loss_scale(self, opt_state: Any) -> Any:
        """The factor for the next loss; 1.0 without loss scaling.

        Example:
            >>> import jax.numpy as jnp, jfleet, optax
            >>> strategy = jfleet.DistributedStrategy(amp=True)
            >>> strategy.amp_configs = {"dtype": "float16"}
            >>> opt = jfleet.distributed_optimizer(optax.sgd(0.1), strategy)
            >>> print(opt.loss_scale(opt.init(jnp.ones(2))))
            32768.0
        """
        return loss_scale(opt_state)

    def __repr__(self):
        return f"DistributedOptimizer({self.base!r}, applied={self.resolution.applied})"


def distributed_optimizer(
    base: Any,
    strategy: DistributedStrategy,
    *,
    mesh: Any = None,
    params: Any = None,
) -> Any:
    """Turn an optax optimizer into the one that a strategy asks for.

    Args:
        base: an optax transformation, or ``jfleet.optimizer(factory, ...)`` where a
            feature must read its hyperparameters (lars, lamb, dgc, adaptive_localsgd).
        strategy: what the user wants; it is read now and may change later.
        mesh: a Mesh or AbstractMesh. Default the mesh of ``jfleet.init``, which is
            called if the strategy needs a mesh and there is none.
        params: parameters or their shapes. ``auto`` decides better with them, and
            rules on parameter paths are checked.

    Returns:
        A DistributedOptimizer. Where the strategy shards and the mesh has devices, it
        is wrapped (``jfleet.optax_meta.sharding``) so that state is born split and
        stays so; its attributes stay reachable.

    Raises:
        ConfigError: a switch that the user set cannot run.
        SettingTypeError: an argument of the wrong type.

    Example:
        >>> import jax.numpy as jnp, jfleet, optax
        >>> strategy = jfleet.DistributedStrategy(gradient_merge=True)
        >>> strategy.gradient_merge_configs = {"k_steps": 2}
        >>> opt = jfleet.distributed_optimizer(optax.sgd(1.0), strategy)
        >>> params = jnp.zeros(())
        >>> state = opt.init(params)
        >>> for gradient in (1.0, 3.0):
        ...     updates, state = opt.update(jnp.asarray(gradient), state, params)
        >>> print(updates)
        -2.0
    """
    _check_arguments(base, strategy, mesh)
    if mesh is None:
        mesh = _default_mesh(strategy)
    shape = None if mesh is None else dict(mesh.shape)
    resolution = resolve(strategy, base=base, mesh_shape=shape, params=params)
    made = _Init(base, resolution, mesh)
    return placed(DistributedOptimizer(made, _Update(made)), params)


def axes_in_scope(resolution: Resolution) -> Axes:
    """The data axes that are named axes of the computation being traced."""
    return tuple(axis for axis in resolution.data_axes if _is_bound(axis))


def _is_bound(axis: str) -> bool:
    try:
        jax.lax.axis_size(axis)
    except NameError:
        return False
    return True


def _check_replica_gradients(resolution: Resolution, scope: Axes) -> None:
    """Refuse to do without the gradients of the replicas where they are needed."""
    missing = [
        a
        for a in resolution.local_axes
        if a not in scope and resolution.mesh_shape[a] > 1
    ]
    if not missing:
        return
    names = [
        rule.name
        for rule in resolution.rules
        if set(resolution.axes.get(rule.name, ())) & set(missing)
        and rule.replica_gradients
    ] or ["gradient_merge with sync='last'"]
    raise ConfigError(
        f"{' and '.join(names)} needs the gradient of every replica over "
        f"{'+'.join(missing)} (mesh {dict(resolution.mesh_shape)}), but here the "
        "gradient is already their mean; use opt.minimize(loss_fn), or call update "
        "inside jax.shard_map over these axes"
    )


def _with_current_scale(updates, state, given, resolution: Resolution) -> Any:
    """Make gradients carry the scale that the state will divide them by."""
    if not resolution.scales_loss:
        # A step that is written for every strategy passes its scale here too.
        if given is None:
            return updates
        return jax.tree.map(lambda g: (g / given).astype(g.dtype), updates)
    if given is None:
        raise ConfigError(
            "amp divides gradients by the loss scale, so update must know what the "
            "loss was multiplied with; call update(grads, state, params, loss_scale="
            "opt.loss_scale(state)) with the loss multiplied by it, or use "
            "opt.minimize(loss_fn)"
        )
    ratio = loss_scale(state) / given
    return jax.tree.map(lambda g: (g * ratio).astype(g.dtype), updates)


def _default_mesh(strategy: DistributedStrategy) -> Mesh | None:
    """The mesh of ``init``; it is called only if the strategy needs a mesh."""
    if meshes._current is not None or needs_mesh(strategy):
        return meshes.current_mesh()
    return None


def _check_arguments(base: Any, strategy: Any, mesh: Any) -> None:
    if not isinstance(strategy, DistributedStrategy):
        raise SettingTypeError(
            f"strategy must be a DistributedStrategy, got {type(strategy).__name__}"
        )
    if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
        raise SettingTypeError(
            f"mesh must be a Mesh or AbstractMesh, got {mesh!r}; use jfleet.init()"
        )
    inner = base.inner if isinstance(base, ShardedTransformation) else base
    if isinstance(inner, DistributedOptimizer):
        raise ConfigError(
            "base is a DistributedOptimizer already; pass the optimizer that it was "
            "made from (opt.base)"
        )
