"""Group sharding: lay a training state out as ZeRO 1, 2 or 3 does.

    state --take_apart--> parts --plan--> specs --place--> new state

The level never changes values. The optax transformation comes back wrapped, so that
the user's own jitted step keeps the layout; at ``p_g_os`` the forward function comes
back wrapped as well, so that each parameter is gathered where it is used.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jfleet._errors import ConfigError, PlacementError
from jfleet._gather import rewrite
from jfleet._layout import (
    ParamLayout,
    Policy,
    named_sharding,
    param_layouts,
)
from jfleet._placing.match import ParamIndex
from jfleet._placing.padding import Padding, fit
from jfleet._states.adapters import (
    OPT_STATE,
    PARAMS,
    Parts,
    check_alive,
    take_apart,
    warn_tied,
)
from jfleet._states.buffers import place
from jfleet._states.placed import can_pin, placed
from jfleet._states.policy import make_policy
from jfleet._tree import Path, is_array, leaves_with_paths, path_str
from jfleet._types import AxisName
from jfleet.optax_meta.sharding import sharding, state_sharding
from jfleet.plan import Row, plan_parts, planned_rows, without_padding


def group_sharded_parallel(
    state: Any,
    level: str,
    *,
    mesh: Mesh | None = None,
    axis: AxisName | None = None,
    optimizer_axis: AxisName | None = None,
    rules: Any = (),
    exclude: Any = (),
    min_shard_size: int = 0,
    offload: bool = False,
    pad: bool = False,
    tx: Any = None,
) -> Any:
    """Lay a training state out at a ZeRO level.

    ============ ============================ ======================================
    level        split over the axis          bytes per device (float32 Adam, P
                                              parameters, D devices)
    ============ ============================ ======================================
    ``os``       optimizer state              4P + 8P/D
    ``os_g``     and gradients                4P + 8P/D, gradients 4P/D
    ``p_g_os``   and parameters               12P/D
    ============ ============================ ======================================

    Args:
        state: a flax ``TrainState`` or subclass; ``(nnx.Module, nnx.Optimizer)``; a
            pair ``(params, opt_state)`` or a mapping with those keys. Its leaves may be
            ``jax.ShapeDtypeStruct``; the result then carries shardings only.
        level: ``"os"``, ``"os_g"`` or ``"p_g_os"``.
        mesh: default the mesh the state lives on, else that of ``jfleet.init``.
        axis: mesh axis or axes to split over. Default the only axis, else the first of
            ``shard``, ``fsdp``, ``zero``, ``data`` in the mesh.
        optimizer_axis: axes for the optimizer state, if more than ``axis``.
        rules: pairs (regular expression on the parameter path, PartitionSpec).
        exclude: regular expressions; matching parameters stay whole.
        min_shard_size: arrays with fewer elements stay whole.
        offload: keep the optimizer state in pinned host memory between steps.
        pad: store arrays that no dim lets split with their largest dim padded by zeros.
            The optimizer sees the shapes without padding. At ``p_g_os`` the parameters
            of a ``TrainState`` are padded too, and ``apply_fn`` cuts them: code that
            reads ``state.params`` itself meets the larger shapes. Other states keep
            such parameters whole.
        tx: the optax transformation of a pair or mapping. The step must use
            ``jfleet.optax_meta.sharding(tx, jfleet.plan(...).policy)`` to keep the
            layout.

    Returns:
        A new state of the same type (a flax state: of a subclass of its class, whose
        ``replace`` keeps new parameters in place). The caller's objects and buffers
        stay valid. Calling it again with equal arguments changes nothing; with another
        level, it lays the state out anew.

    Raises:
        ConfigError: unknown level, bad axis, rule or size.
        ConfigTypeError: a state of an unknown type.
        PlacementError: a rule or spec that does not fit, or a parameter with NaN.
        DonatedBufferError: arrays that were donated to an earlier step.

    Example:
        >>> import jax, jax.numpy as jnp, optax, jfleet
        >>> from flax.training.train_state import TrainState
        >>> state = TrainState.create(
        ...     apply_fn=None, params={"w": jnp.ones((16, 4))}, tx=optax.adam(1e-3))
        >>> mesh = jfleet.init()
        >>> state = jfleet.group_sharded_parallel(state, level="p_g_os", mesh=mesh)
        >>> state.params["w"].sharding.spec
        P('data',)

    References:
        Rajbhandari et al, `ZeRO: Memory Optimizations Toward Training Trillion
        Parameter Models <https://arxiv.org/abs/1910.02054>`_, 2019.
    """
    parts = take_apart(state, tx)
    check_alive(parts)
    parts = without_padding(parts)
    policy = make_policy(
        parts,
        level,
        mesh=mesh,
        axis=axis,
        optimizer_axis=optimizer_axis,
        rules=rules,
        exclude=exclude,
        min_shard_size=min_shard_size,
        offload=offload,
        pad=pad,
    )
    _refuse_abstract(policy)
    _refuse_nan(parts, policy)
    warn_tied(parts, stacklevel=2)
    rows = planned_rows(plan_parts(parts, policy), parts)
    shardings = _shardings(rows, parts, policy)
    values = _place(_stored([leaf.value for leaf in parts.leaves], rows), shardings)
    _check_placed(parts, values, shardings)
    return _rebuild(parts, values, policy)


def create_sharded(
    init_fn: Callable[..., Any], *args: Any, level: str, tx: Any = None, **options: Any
) -> Any:
    """Create a state that is born sharded: no device ever holds all of it.

    Args:
        init_fn: returns a state that ``group_sharded_parallel`` takes; it is traced.
        *args: arguments of ``init_fn``, arrays such as a random key.
        level: as in ``group_sharded_parallel``.
        tx: as in ``group_sharded_parallel``.
        **options: ``mesh``, ``axis``, ``rules`` and so on, likewise.

    Returns:
        The state, with the values of ``init_fn(*args)``.

    Example:
        >>> import jax, optax, jfleet
        >>> from flax.training.train_state import TrainState
        >>> def init(key):
        ...     params = {"w": jax.random.normal(key, (16, 4))}
        ...     return TrainState.create(
        ...         apply_fn=None, params=params, tx=optax.adam(1e-3))
        >>> state = jfleet.create_sharded(
        ...     init, jax.random.key(0), level="os", mesh=jfleet.init())
        >>> state.opt_state[0].mu["w"].sharding.spec
        P('data',)
    """
    seen: list[Parts] = []

    def leaves_of(*args: Any) -> list[Any]:
        parts = take_apart(init_fn(*args), tx)
        seen.append(parts)
        return _distinct([_as_array(leaf.value) for leaf in parts.leaves])

    shapes = jax.eval_shape(leaves_of, *args)
    parts = _with_values(seen[-1], shapes)
    policy = make_policy(parts, level, **options)
    _refuse_abstract(policy)
    rows = planned_rows(plan_parts(parts, policy), parts)
    shardings = _shardings(rows, parts, policy)
    on_device = [named_sharding(policy.mesh, row.spec, len(row.shape)) for row in rows]
    values = jax.jit(
        lambda *args: _stored(leaves_of(*args), rows), out_shardings=on_device
    )(*args)
    if policy.offload:
        values = jax.device_put(values, shardings)
    _check_placed(parts, values, shardings)
    return _rebuild(parts, values, policy)


def _distinct(values: Sequence[Any]) -> list[Any]:
    """Copy, inside a trace, what stands in a list more than once."""
    seen: set[int] = set()
    out = []
    for value in values:
        out.append(jnp.copy(value) if id(value) in seen else value)
        seen.add(id(value))
    return out


def _with_values(parts: Parts, values: Sequence[Any]) -> Parts:
    leaves = [
        dataclasses.replace(leaf, value=value)
        for leaf, value in zip(parts.leaves, values, strict=True)
    ]
    return dataclasses.replace(parts, leaves=tuple(leaves))


def _refuse_abstract(policy: Policy) -> None:
    if isinstance(policy.mesh, AbstractMesh):
        raise ConfigError(
            f"mesh {dict(policy.mesh.shape)} is abstract: it can be planned with"
            " (jfleet.plan) but holds no arrays; pass a jax.sharding.Mesh"
        )


def _refuse_nan(parts: Parts, policy: Policy) -> None:
    """A parameter that is NaN at the start stays NaN: say so before it trains."""
    params = [
        leaf
        for leaf in parts.of_kind(PARAMS)
        if isinstance(leaf.value, jax.Array | np.ndarray)
        and not isinstance(leaf.value, jax.core.Tracer)
        and jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    found = _has_nan([leaf.value for leaf in params]) if params else []
    for leaf, nan in zip(params, found, strict=True):
        if nan:
            raise PlacementError(
                f"parameter {path_str(leaf.path)!r} of shape {leaf.shape} holds NaN"
                f" (level {policy.level}, mesh {dict(policy.mesh.shape)}, spec"
                f" {getattr(getattr(leaf.value, 'sharding', None), 'spec', None)});"
                " check its initializer, or load an earlier checkpoint"
            )


def _has_nan(values: Sequence[Any]) -> list[Any]:
    """Whether each array holds a NaN, in one program for all of them."""
    return jax.device_get(jax.jit(lambda xs: [jnp.isnan(x).any() for x in xs])(values))


def _shardings(
    rows: Sequence[Row], parts: Parts, policy: Policy
) -> list[NamedSharding]:
    return [
        state_sharding(policy, row.spec, leaf)
        if leaf.kind == OPT_STATE
        else named_sharding(policy.mesh, row.spec, len(leaf.shape))
        for row, leaf in zip(rows, parts.leaves, strict=True)
    ]


def _stored(values: Sequence[Any], rows: Sequence[Row]) -> list[Any]:
    """Bring every value into the shape in which it rests."""
    return [
        fit(v, row.stored_shape) if row.stored_shape != row.shape else v
        for v, row in zip(values, rows, strict=True)
    ]


def _place(values: Sequence[Any], shardings: Sequence[NamedSharding]) -> list[Any]:
    """Put every value on its sharding; abstract ones only learn it."""
    abstract = [isinstance(value, jax.ShapeDtypeStruct) for value in values]
    placed = iter(
        place(
            [_as_array(v) for v, a in zip(values, abstract, strict=True) if not a],
            [s for s, a in zip(shardings, abstract, strict=True) if not a],
        )
    )
    return [
        jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=s) if a else next(placed)
        for v, s, a in zip(values, shardings, abstract, strict=True)
    ]


def _as_array(value: Any) -> Any:
    """Python numbers become arrays of JAX's type for them, not weakly typed."""
    if is_array(value):
        return value
    array = np.asarray(value)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype))


def _check_placed(
    parts: Parts, values: Sequence[Any], shardings: Sequence[NamedSharding]
) -> None:
    for leaf, value, where in zip(parts.leaves, values, shardings, strict=True):
        actual = value.sharding
        if isinstance(value, jax.core.Tracer) or actual == where:
            continue
        if not actual.is_equivalent_to(where, len(leaf.shape)):
            raise PlacementError(
                f"{leaf.kind} {path_str(leaf.path)!r} of shape {leaf.shape} was"
                f" planned as {where} but JAX laid it out as {actual}; please report"
                " this with the mesh and the state's shapes"
            )


def _rebuild(parts: Parts, values: Sequence[Any], policy: Policy) -> Any:
    pins = parts.cls is not None and can_pin(parts.cls, policy)
    policy = dataclasses.replace(policy, split_updates=pins)
    tx = None if parts.tx is None else sharding(parts.tx, policy)
    state = parts.rebuild(values, tx, sharded_apply(parts.apply_fn, parts, policy))
    return placed(state) if pins else state


@dataclasses.dataclass(frozen=True)
class ShardedApply:
    """A forward function that gathers each sharded parameter where it is used."""

    fn: Any
    policy: Policy
    params: tuple[tuple[Path, tuple[int, ...]], ...]

    @property
    def __wrapped__(self) -> Any:
        """The function as the user wrote it."""
        return self.fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the forward function with its parameters gathered at use."""
        padding = Padding(self._layouts)

        def cut(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = padding.cut((args, kwargs), optimizer=False)
            return self.fn(*args, **kwargs)

        run = rewrite(
            self.fn if padding.is_empty else cut,
            self.specs_for,
            self.policy.mesh,
            self.policy.axes,
        )
        return run(*args, **kwargs)

    @property
    def _layouts(self) -> list[ParamLayout]:
        leaves = [(p, jax.ShapeDtypeStruct(s, np.float32)) for p, s in self.params]
        return param_layouts(leaves, self.policy)

    def specs_for(self, args: Any, kwargs: Any) -> list[PartitionSpec | None]:
        """Return the spec of every leaf of the arguments that is a parameter."""
        index = ParamIndex(self._layouts)
        found: list[PartitionSpec | None] = []
        for path, leaf in leaves_with_paths((args, kwargs)):
            layout = index.find(path)
            if layout is None or tuple(np.shape(leaf)) != layout.stored_param:
                found.append(None)
            else:
                found.append(layout.param.spec)
        return found


def sharded_apply(fn: Any, parts: Parts, policy: Policy) -> Any:
    """Wrap a forward function as the level asks; unwrap it first if need be."""
    fn = fn.fn if isinstance(fn, ShardedApply) else fn
    if fn is None or not policy.splits_params:
        return fn
    params = tuple((p.path, p.shape) for p in parts.of_kind(PARAMS))
    return ShardedApply(fn, policy, params)
