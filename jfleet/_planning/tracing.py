"""A step and its arguments as shapes: what there is to plan with."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend import core as jex
from jax.interpreters import partial_eval
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jfleet._errors import ConfigError, ConfigTypeError
from jfleet._layout import entries_of
from jfleet._planning import kinds
from jfleet._states.adapters import OPT_STATE, PARAMS, take_apart
from jfleet._step.birth import _Start
from jfleet._step.layout import Layout
from jfleet._step.loss import LossForm
from jfleet._step.setup import Setup, _check_rules
from jfleet._step.state import TrainState
from jfleet._tree import abstract, leaves_with_paths, path_str
from jfleet.train_step import _Step


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """One array that a step gets."""

    path: str
    kind: str
    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec
    donated: bool
    used: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedStep:
    """A step as a jaxpr, with all that its arguments say."""

    sizes: Mapping[str, int]
    """Mesh axes and sizes."""
    arguments: tuple[Argument, ...]
    jaxpr: Any
    """None where no loss was given."""
    setup: Setup | None = None
    """The strategy, where there is one."""
    layout: Layout | None = None
    """Its specs."""
    params: Any = None
    """Its parameters, as shapes."""
    level: str | None = None
    local_axes: tuple[str, ...] = ()
    """Axes over which every replica has a loss of its own."""


def auto_mesh(mesh: Any) -> AbstractMesh:
    """The mesh without its devices, and with Auto axes."""
    kinds_ = (AxisType.Auto,) * len(mesh.axis_names)
    return AbstractMesh(
        tuple(mesh.shape.values()), tuple(mesh.axis_names), axis_types=kinds_
    )


def abstract_setup(opt: Any, mesh: Any, platform: str | None = None) -> Setup:
    """What an optimizer's strategy needs of a step, on a mesh without devices."""
    mesh = opt.mesh if mesh is None else mesh
    if mesh is None:
        raise ConfigError(
            "plan_step needs a mesh; make the optimizer with mesh=, or pass one here: "
            "jax.sharding.AbstractMesh((8,), ('data',))"
        )
    known = dict(opt.resolution.mesh_shape)
    if known and known != dict(mesh.shape):
        raise ConfigError(
            f"the strategy was resolved for the mesh {known}, and mesh is "
            f"{dict(mesh.shape)}; make the optimizer with the mesh to plan for"
        )
    setup = Setup(opt.base, opt.resolution, auto_mesh(mesh), platform)
    _check_rules(setup)
    return setup


def abstract_state(
    setup: Setup, params: Any, model_state: Any
) -> tuple[TrainState, Layout]:
    """The state that ``opt.create`` would make, as shapes with shardings."""
    shapes, model_shapes = abstract(params), abstract(model_state)
    start = _Start(setup, setup.transformation(params), shapes, model_shapes)
    where = start.layout.shardings(start.state)
    return jax.tree.map(_with_sharding, start.state, where), start.layout


def _with_sharding(leaf: Any, where: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)


def trace_strategy(
    opt: Any,
    params: Any,
    loss_fn: Callable | None,
    batch: Any,
    *,
    mesh: Any,
    model_state: Any,
    has_aux: bool,
    rng: bool,
    donate: bool,
    per_replica: bool | None,
    platform: str | None = None,
) -> TracedStep:
    """Trace the step that ``opt.minimize(loss_fn)`` would compile."""
    setup = abstract_setup(opt, mesh, platform)
    state, layout = abstract_state(setup, params, model_state)
    options = setup._options("sharding")
    known = {
        "setup": setup,
        "layout": layout,
        "params": abstract(params),
        "level": None if options is None else options.level,
    }
    form = LossForm(
        fn=loss_fn or _no_loss,
        has_aux=has_aux,
        model_state=model_state is not None,
        rng=rng,
    )
    step = _Step(setup, form, per_replica)
    step.check()
    known["local_axes"] = step._local_axes(layout)
    sizes = dict(setup.mesh.shape)
    if loss_fn is None:
        arguments = _arguments((state,), (donate,))
        return TracedStep(sizes=sizes, arguments=arguments, jaxpr=None, **known)
    rows = _placed_batch(batch, setup)
    key = jax.eval_shape(lambda: jax.random.key(0)) if rng else None
    arguments = (state, rows) if key is None else (state, rows, key)
    run = step if rng else functools.partial(step, rng=None)
    traced = trace_function(run, arguments, sizes, donate=donate)
    return dataclasses.replace(traced, **known)


def _no_loss(*_: Any) -> Any:
    raise AssertionError("a plan without a loss traces nothing")


def _placed_batch(batch: Any, setup: Setup) -> Any:
    axes = setup.data_axes
    num = setup.size(axes) * setup.num_micro

    def place(leaf: Any) -> jax.ShapeDtypeStruct:
        if leaf.shape and leaf.shape[0] % num:
            raise ConfigError(
                f"the batch has {leaf.shape[0]} rows, which {setup.size(axes)} devices "
                f"x {setup.num_micro} micro batches do not divide; plan with a "
                f"multiple of {num} rows"
            )
        spec = PartitionSpec(axes) if leaf.shape else PartitionSpec()
        return _with_sharding(leaf, NamedSharding(setup.mesh, spec))

    return jax.tree.map(place, abstract(batch))


def trace_function(
    step: Callable, arguments: tuple, sizes: Mapping[str, int], *, donate: bool = True
) -> TracedStep:
    """Trace any step; its first argument is the state."""
    donated = (donate, *(False for _ in arguments[1:]))
    known = _arguments(arguments, donated)
    closed = jax.make_jaxpr(step)(*arguments)
    inner: Any = getattr(closed, "jaxpr", closed)
    pruned, used = partial_eval.dce_jaxpr(inner, [True] * len(inner.outvars))
    consts = getattr(closed, "consts", ())
    jaxpr = jex.ClosedJaxpr(pruned, consts) if closed is not inner else pruned
    # What a step does not use, jit does not hand to the compiled program.
    known = tuple(
        dataclasses.replace(a, used=u) for a, u in zip(known, used, strict=True)
    )
    return TracedStep(sizes=sizes, arguments=known, jaxpr=jaxpr)


def mesh_sizes(arguments: Any, mesh: Any) -> dict[str, int]:
    """Sizes of the mesh axes: of the mesh given, or of the one that arrays live on."""
    if mesh is not None:
        return dict(mesh.shape)
    for leaf in jax.tree.leaves(arguments):
        where = getattr(leaf, "sharding", None)
        if isinstance(where, NamedSharding):
            return dict(where.mesh.shape)
    raise ConfigError(
        "no argument lies on a mesh; pass mesh=, and a state with shardings such as "
        "that of jfleet.group_sharded_parallel(shapes, level, mesh=mesh)"
    )


def _arguments(arguments: tuple, donated: tuple[bool, ...]) -> tuple[Argument, ...]:
    found = []
    for place, argument in enumerate(arguments):
        classes = _state_kinds(argument) if place == 0 else {}
        for path, leaf in leaves_with_paths(argument):
            where = getattr(leaf, "sharding", None)
            spec = where.spec if isinstance(where, NamedSharding) else PartitionSpec()
            leaf = leaf if hasattr(leaf, "shape") else abstract(leaf)
            found.append(
                Argument(
                    path=path_str(path),
                    kind=classes.get(path, kinds.EXTRA) if not place else kinds.BATCH,
                    shape=tuple(leaf.shape),
                    dtype=leaf.dtype,
                    spec=spec,
                    donated=donated[place],
                )
            )
    return tuple(found)


def _state_kinds(state: Any) -> dict[Any, str]:
    """The class of every leaf of a state, by path."""
    names = {PARAMS: kinds.PARAMS, OPT_STATE: kinds.STATE}
    try:
        parts = take_apart(state)
    except ConfigTypeError:
        return {}
    by_id = {id(leaf.value): leaf.kind for leaf in parts.leaves}
    found = {}
    for path, leaf in leaves_with_paths(state):
        kind = names.get(by_id.get(id(leaf), ""), kinds.EXTRA)
        masters = kind == kinds.STATE and "master" in path
        found[path] = kinds.MASTERS if masters else kind
    return found


def argument_dims(argument: Argument) -> Any:
    """Mesh axes of each dim of an argument."""
    return entries_of(argument.spec, len(argument.shape))
