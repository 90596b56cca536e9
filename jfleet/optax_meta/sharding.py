"""sharding: keep an optimizer's state, gradients and updates where the plan says.

The values are those of the inner optimizer; only the layout changes. The constraints
ride inside ``update``, so a plain ``jax.jit`` around the user's step keeps the layout
without ``out_shardings``: state stays split, and what ``apply_updates`` adds to the
parameters already lies like the parameters.

    g   -> spec of gradients      (levels os_g, p_g_os)
    s   -> spec of optimizer state
    u, s' = inner.update(g, s, p)
    s'  -> spec of optimizer state
    u   -> spec of parameters
"""

import dataclasses
import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jfleet._errors import ConfigError, ConfigTypeError, PlacementError, nearest
from jfleet._layout import (
    Policy,
    constrain,
    is_explicit,
    named_sharding,
    param_layouts,
)
from jfleet._placing.match import ParamIndex, optimizer_decisions
from jfleet._placing.padding import Padding
from jfleet._placing.policy import checked_policy
from jfleet._tree import Path, is_array, leaves_with_paths, path_str


class Layouts:
    """The specs of one optimizer's trees, derived from the shapes of the parameters."""

    def __init__(self, params: Any, policy: Policy):
        self.policy = policy
        layouts = param_layouts(leaves_with_paths(params), policy)
        self._index = ParamIndex(layouts)
        self.padding = Padding(layouts)

    def opt_state(self, state: Any, *, stored: bool = True) -> Any:
        """Spec tree of an optimizer state, in its stored or its logical shapes.

        What is padded at rest has no spec in its logical shape: None.
        """
        leaves = leaves_with_paths(state)
        specs: list[PartitionSpec | None] = [
            d.spec for d in optimizer_decisions(leaves, self._index, self.policy)
        ]
        if not stored and not self.padding.is_empty:
            for i, (path, leaf) in enumerate(leaves):
                shapes = self.padding.shapes(path, optimizer=True)
                if shapes is not None and tuple(leaf.shape) == shapes[0]:
                    specs[i] = None
        return _unflatten(state, specs)

    def grads(self, tree: Any) -> Any:
        """Spec tree of gradients; None for what is not shaped like a parameter."""
        return self._like_params(tree, "grad")

    def updates(self, tree: Any) -> Any:
        """Spec tree of updates: like the parameters, or like the optimizer state."""
        return self._like_params(
            tree, "optimizer" if self.policy.split_updates else "param"
        )

    def params(self, tree: Any) -> Any:
        """Spec tree of parameters at rest."""
        return self._like_params(tree, "param")

    def _like_params(self, tree: Any, which: str) -> Any:
        specs = []
        for path, leaf in leaves_with_paths(tree):
            layout = self._index.find(path)
            shape = layout and (
                layout.shape if which == "grad" else layout.stored_param
            )
            known = layout is not None and tuple(leaf.shape) == shape
            specs.append(getattr(layout, which).spec if known else None)
        return _unflatten(tree, specs)


def _unflatten(like: Any, leaves: Sequence[Any]) -> Any:
    """A tree like ``like``, whose leaves may be None."""
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


@dataclasses.dataclass(frozen=True)
class _Init:
    """``init`` whose state is born on its specs."""

    inner: Any
    policy: Policy

    def __call__(self, params: Any) -> Any:
        layouts = Layouts(params, self.policy)

        def init(params: Any) -> Any:
            params = layouts.padding.cut(params, optimizer=False)
            return layouts.padding.stored(self.inner.init(params), optimizer=True)

        shapes = jax.eval_shape(init, params)
        specs = layouts.opt_state(shapes)
        born = jax.tree.map(partial(_sharding, self.policy.mesh), shapes, specs)
        state = jax.jit(init, out_shardings=born)(params)
        return _to_rest(state, specs, self.policy)


@dataclasses.dataclass(frozen=True)
class _Update:
    """``update`` that pins what goes in and what comes out."""

    inner: Any
    policy: Policy

    def __call__(
        self, updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, Any]:
        policy = self.policy
        if params is not None:
            check_gradients(updates, params, policy)
        layouts = Layouts(updates if params is None else params, policy)
        specs = layouts.opt_state(state)
        state = _to_device(state, specs, policy)
        cut = layouts.padding.cut
        updates, params = (cut(tree, optimizer=False) for tree in (updates, params))
        if policy.splits_grads:
            updates = constrain(updates, layouts.grads(updates), policy.mesh)
        run = self._explicit if is_explicit(policy.mesh) else self._auto
        updates, state = run(layouts, updates, state, params, extra)
        return updates, _to_rest(state, layouts.opt_state(state), policy)

    def _inner(self, updates: Any, state: Any, params: Any, extra: dict) -> Any:
        update = optax.with_extra_args_support(self.inner).update
        return update(updates, state, params, **extra)

    def _auto(self, layouts, updates, state, params, extra) -> tuple[Any, Any]:
        mesh = self.policy.mesh
        state = constrain(state, layouts.opt_state(state), mesh)
        state = layouts.padding.cut(state, optimizer=True)
        updates, state = self._inner(updates, state, params, extra)
        # Pinned in both shapes: padding a loose array could gather it first.
        state = constrain(state, layouts.opt_state(state, stored=False), mesh)
        state = layouts.padding.stored(state, optimizer=True)
        state = constrain(state, layouts.opt_state(state), mesh)
        updates = layouts.padding.stored(updates, optimizer=False)
        return constrain(updates, layouts.updates(updates), mesh), state

    def _explicit(self, layouts, updates, state, params, extra) -> tuple[Any, Any]:
        """Explicit axes: the inner optimizer was not written for typed shardings.

        It runs with Auto axes; its results get their types back at the border.
        """
        mesh = self.policy.mesh
        arrays, static = partition_arrays(extra)

        def inner(updates, state, params, arrays):
            return self._inner(updates, state, params, {**arrays, **static})

        shapes = jax.eval_shape(inner, updates, state, params, arrays)
        specs = (layouts.updates(shapes[0]), layouts.opt_state(shapes[1]))
        out = jax.tree.map(partial(_sharding, mesh), shapes, specs)
        run: Any = jax.sharding.auto_axes(inner, axes=mesh.axis_names, out_sharding=out)
        return run(updates, state, params, arrays)


def check_gradients(grads: Any, params: Any, policy: Policy) -> None:
    """Raise PlacementError unless there is a gradient for every parameter."""
    if jax.tree.structure(grads) == jax.tree.structure(params):
        return
    # optax.lookahead pairs parameters, so a gradient's path may be a suffix only.
    have = {path for path, _ in leaves_with_paths(grads)}
    covered: set[Path] = set()
    for path, leaf in leaves_with_paths(params):
        suffixes = {path[i:] for i in range(len(path) + 1)} & have
        if not suffixes:
            raise PlacementError(
                f"the gradients lack parameter {path_str(path)!r} of shape"
                f" {tuple(leaf.shape)} (level {policy.level}, mesh"
                f" {dict(policy.mesh.shape)}); pass one for every parameter that the"
                " optimizer has, zeros where there is none"
            )
        covered |= suffixes
    if have - covered:
        name = path_str(min(have - covered))
        raise PlacementError(
            f"the gradients have {name!r}, which is no parameter; take them with"
            " respect to the same tree that is passed as params"
        )


def partition_arrays(extra: dict[str, Any]) -> tuple[dict, dict]:
    """Split extra arguments into those that are trees of arrays and the others."""
    arrays = {k: v for k, v in extra.items() if all(map(is_array, jax.tree.leaves(v)))}
    return arrays, {k: v for k, v in extra.items() if k not in arrays}


def _sharding(mesh: Any, leaf: Any, spec: PartitionSpec | None) -> NamedSharding:
    return named_sharding(mesh, spec or PartitionSpec(), len(leaf.shape))


def state_sharding(policy: Policy, spec: PartitionSpec, leaf: Any) -> NamedSharding:
    """Where an optimizer-state leaf rests: on the devices, or offloaded.

    Scalars stay on the devices: they cost nothing and every step reads them.
    """
    host = "pinned_host" if policy.offload and leaf.shape else None
    return named_sharding(policy.mesh, spec, len(leaf.shape), host)


def _to_rest(state: Any, specs: Any, policy: Policy) -> Any:
    """Move the state to host memory where it is offloaded."""
    if not policy.offload:
        return state
    return jax.tree.map(
        lambda x, spec: jax.device_put(x, state_sharding(policy, spec, x)),
        state,
        specs,
    )


def _to_device(state: Any, specs: Any, policy: Policy) -> Any:
    """Bring an offloaded state to the devices."""
    if not policy.offload:
        return state
    return jax.tree.map(
        lambda x, spec: jax.device_put(
            x, named_sharding(policy.mesh, spec, x.ndim, "device")
        ),
        state,
        specs,
    )


class ShardedTransformation(optax.GradientTransformationExtraArgs):
    """An optax transformation that knows its inner one and its policy.

    Compares equal to another with an equal inner transformation and policy, so that a
    jitted step that closes over it, or carries it as static data, is not compiled
    again. Attributes of the inner transformation stay reachable.
    """

    __slots__ = ()

    @property
    def inner(self) -> Any:
        """The transformation that was wrapped."""
        return cast(_Init, self.init).inner

    @property
    def policy(self) -> Policy:
        """Where things live."""
        return cast(_Init, self.init).policy

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(cast(_Init, self.init).inner, name)


def sharding(
    inner: Any, policy: Policy | None = None, **options: Any
) -> ShardedTransformation:
    """Wrap an optax transformation so that it keeps a layout.

    Args:
        inner: any optax transformation; one that is wrapped already is unwrapped first.
        policy: where things live, from ``jfleet.plan(...).policy``; it remembers the
            specs that parameters came with.
        **options: without a policy, ``level`` and ``mesh``, and perhaps ``axis``,
            ``optimizer_axis``, ``rules``, ``exclude``, ``min_shard_size``, ``offload``
            of ``jfleet.group_sharded_parallel``.

    Returns:
        A transformation with the same values, whose ``init`` is born sharded.

    Raises:
        ConfigError: a policy and options, or options that cannot work.
        ConfigTypeError: an option that does not exist or has the wrong type.

    Example:
        >>> import jax.numpy as jnp, optax, jfleet
        >>> tx = sharding(optax.adam(1e-3), level="os", mesh=jfleet.init())
        >>> tx.init({"w": jnp.ones((16, 4))})[0].mu["w"].sharding.spec
        P('data',)

    References:
        Rajbhandari et al, `ZeRO: Memory Optimizations Toward Training Trillion
        Parameter Models <https://arxiv.org/abs/1910.02054>`_, 2019.
    """
    if policy is None:
        policy = _policy_of(options)
    elif options:
        raise ConfigError(f"pass a policy or options, not both; got {sorted(options)}")
    inner = unwrapped(inner)
    return ShardedTransformation(_Init(inner, policy), _Update(inner, policy))


def _policy_of(options: dict[str, Any]) -> Policy:
    known = inspect.signature(checked_policy).parameters.keys() - {"pad"}
    unknown = sorted(options.keys() - known)
    if unknown:
        raise ConfigTypeError(
            f"sharding has no option {unknown[0]!r}{nearest(unknown[0], known)}"
        )
    missing = sorted({"level", "mesh"} - options.keys())
    if missing:
        raise ConfigTypeError(f"sharding needs a policy, or {missing[0]}=")
    return checked_policy(options.pop("level"), **options)


def unwrapped(tx: Any) -> Any:
    """Return the transformation inside a sharded one, else ``tx`` itself."""
    return tx.inner if isinstance(tx, ShardedTransformation) else tx
