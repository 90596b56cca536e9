"""States that are born where they belong: no device ever holds all of a split state."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jfleet._errors import ConfigError, ConfigTypeError
from jfleet._layout import Policy
from jfleet._states.adapters import take_apart, warn_tied
from jfleet._states.buffers import own, place
from jfleet._step import replicas
from jfleet._step.layout import Layout, layout_of
from jfleet._step.setup import Setup
from jfleet._step.state import TrainState
from jfleet._step.update import nothing_shown
from jfleet._tree import abstract, is_array, path_str
from jfleet.optax_meta.sharding import ShardedTransformation


def born(setup: Setup, params: Any, args: tuple, model_state: Any) -> TrainState:
    """Create a state from parameters, or from a function that makes them.

    Args:
        setup: what the step needs.
        params: a tree of arrays, or a function that returns one; with
            ``model_state=True``, one that returns (params, model_state).
        args: arguments of the function.
        model_state: a tree of arrays, None, or True.

    Raises:
        ConfigError: no parameters, or parameters that are split in a way that the
            strategy does not know.
    """
    make = _maker(params, args, model_state)
    given = not callable(params)
    shapes, model_shapes = (
        jax.eval_shape(make, *args) if make else _shapes(params, model_state)
    )
    if not jax.tree.leaves(shapes):
        raise ConfigError("params must hold at least one array, got an empty tree")
    known = params if given else shapes
    tx = setup.transformation(known)
    if given and not isinstance(tx, ShardedTransformation):
        _refuse_split(params)
    if given:
        warn_tied(take_apart({"params": params}), stacklevel=4)
    whole = _Start(setup, tx, shapes, model_shapes)
    if make is None:
        values = whole.placed(params, model_state)
    else:
        values = jax.jit(make, out_shardings=whole.first_shardings())(*args)
        values = _distinct(values)
    return whole.finish(*values)


def _maker(params: Any, args: tuple, model_state: Any) -> Callable | None:
    if not callable(params):
        if args:
            raise ConfigTypeError(
                f"create got {len(args)} more arguments beside params; they are for a "
                "function: opt.create(init_fn, *args)"
            )
        if model_state is True:
            raise ConfigTypeError(
                "model_state=True is for a function that returns (params, model_state);"
                " pass the model state itself"
            )
        return None

    def make(*args: Any) -> tuple:
        made = params(*args)
        if model_state is not True:
            return _arrays(made), _arrays(model_state)
        if not (isinstance(made, tuple) and len(made) == 2):
            raise ConfigTypeError(
                "with model_state=True the function must return (params, model_state), "
                f"got {type(made).__name__}"
            )
        return _arrays(made[0]), _arrays(made[1])

    return make


def _arrays(tree: Any) -> Any:
    return jax.tree.map(jnp.array, tree)


def _shapes(params: Any, model_state: Any) -> tuple[Any, Any]:
    for leaf in jax.tree.leaves((params, model_state)):
        if not is_array(leaf) and not isinstance(leaf, bool | int | float | complex):
            raise ConfigTypeError(
                "params must be a tree of arrays or a function that makes one, got a "
                f"leaf of type {type(leaf).__name__}; for an nnx module, pass the state"
                " of flax.nnx.split(module, nnx.Param, ...)"
            )
    return abstract(params), abstract(model_state)


def _refuse_split(params: Any) -> None:
    for leaf in take_apart({"params": params}).leaves:
        where = getattr(leaf.value, "sharding", None)
        if isinstance(where, NamedSharding) and any(where.spec):
            raise ConfigError(
                f"parameter {path_str(leaf.path)!r} comes split as {where.spec}, but "
                "the strategy says nothing of that; set strategy.tensor_parallel = "
                "True or strategy.sharding = True"
            )


def _distinct(tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(own(leaves))


class _Start:
    """Builds the state from placed parameters."""

    def __init__(self, setup: Setup, tx: Any, shapes: Any, model_shapes: Any):
        self.setup, self.tx = setup, tx
        self.shapes, self.model_shapes = shapes, model_shapes
        opt_shapes = jax.eval_shape(self._window_init, shapes)
        self.own_state = replicas.owned(opt_shapes, setup.own_params)
        state = jax.eval_shape(self._whole, shapes, model_shapes)
        self.layout: Layout = layout_of(setup, tx, state.params, state.opt_state)
        self.state = state

    def _window_init(self, params: Any) -> Any:
        tx = self.tx
        inner = tx.inner if isinstance(tx, ShardedTransformation) else tx
        return inner.init(params)

    def first_shardings(self) -> tuple[Any, Any]:
        """Where the parameters and model state of one replica are born."""
        layout = self.layout
        params = jax.tree.map(lambda s: layout.sharding(s, False), layout.params)
        whole = NamedSharding(self.setup.mesh, jax.sharding.PartitionSpec())
        return params, jax.tree.map(lambda _: whole, self.model_shapes)

    def placed(self, params: Any, model_state: Any) -> tuple[Any, Any]:
        """Copies of given arrays on their shardings."""
        tree = (params, model_state)
        leaves, treedef = jax.tree.flatten(tree)
        wanted = treedef.flatten_up_to(self.first_shardings())
        leaves = [_as_array(x) for x in leaves]
        return treedef.unflatten(place(leaves, wanted))

    def _rest(self, params: Any, model_state: Any) -> TrainState:
        """Everything but the parameters, which stay where they are."""
        setup = self.setup
        opt_state = self._window_init(params)
        reducer = setup.reducer()
        residual = None if reducer is None else reducer.init(params)
        residual = _per_device(residual, setup.size(setup.resolution.local_axes))
        num = setup.size(setup.own_axes)
        lead = setup.own_params
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=replicas.spread(params, replicas.everywhere(params, True), num)
            if lead
            else None,
            opt_state=replicas.spread(opt_state, self.own_state, num),
            model_state=replicas.spread(
                model_state, replicas.everywhere(model_state, lead), num
            ),
            replica_state=residual,
            shown=nothing_shown(params) if lead else None,
            tx=self.tx,
        )

    def _whole(self, params: Any, model_state: Any) -> TrainState:
        state = self._rest(params, model_state)
        return state if self.setup.own_params else state.replace(params=params)

    def finish(self, params: Any, model_state: Any) -> TrainState:
        """Compile and run the birth of everything else."""
        where = self.layout.shardings(self.state)
        on_device = jax.tree.map(lambda s: s.with_memory_kind(None), where)
        lead = self.setup.own_params
        out = on_device if lead else on_device.replace(params=None)
        state = jax.jit(self._rest, out_shardings=out)(params, model_state)
        state = state if lead else state.replace(params=params)
        policy: Policy | None = self.layout.policy
        if policy is not None and policy.offload:
            state = jax.device_put(state, where)
        return _distinct(state)


def _per_device(reducer_state: Any, num_local: int) -> Any:
    """Residuals get a dim over all local replicas."""
    if reducer_state is None:
        return None
    residual = jax.tree.map(
        lambda x: jnp.zeros((num_local, *x.shape), x.dtype), reducer_state.residual
    )
    return reducer_state._replace(residual=residual)


def _as_array(value: Any) -> Any:
    if is_array(value):
        if jax.process_count() > 1 and isinstance(value, jax.Array):
            return np.asarray(value) if value.is_fully_addressable else value
        return value
    array = np.asarray(value)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
