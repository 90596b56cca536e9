"""Where every array of a training state lives.

Specs come from the policy that the state's transformation carries; arrays with a
replica dim get the replica axes in front.
"""

import dataclasses
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jfleet._errors import ConfigError
from jfleet._layout import Policy, canonical, entries_of, without_axes
from jfleet._step import replicas
from jfleet._step.setup import Setup
from jfleet._step.state import TrainState
from jfleet._tree import abstract, leaves_with_paths, path_str
from jfleet.optax_meta.sharding import Layouts, ShardedTransformation, state_sharding


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Specs of one state, and which of its leaves are each replica's own."""

    setup: Setup
    policy: Policy | None
    params: Any
    """Specs of the parameters of one replica."""
    moved: Any
    """Specs of the sum of parameters and updates, before it is gathered."""
    grads: Any
    """Specs of their gradients."""
    opt_state: Any
    """Specs of the optimizer state of one replica."""
    own_state: Any
    """For every leaf of the optimizer state, whether it has a replica dim."""

    def own_params(self, tree: Any) -> Any:
        """Whether parameters and model state have a replica dim."""
        return replicas.everywhere(tree, self.setup.own_params)

    def pin(self, tree: Any, specs: Any = None) -> Any:
        """Constrain a tree to specs, whole by default."""
        specs = _whole(tree) if specs is None else specs

        def one(x: jax.Array, spec: PartitionSpec) -> jax.Array:
            return jax.lax.with_sharding_constraint(x, self.sharding(spec, False))

        return jax.tree.map(one, tree, specs)

    def pin_split(self, grads: Any) -> Any:
        """Constrain gradients to the split that their update has, where it fits."""

        def one(x: jax.Array, spec: PartitionSpec) -> jax.Array:
            sizes = [self.setup.size(e) for e in entries_of(spec, x.ndim)]
            if any(n % size for n, size in zip(x.shape, sizes, strict=True)):
                return x  # it is padded before it is split
            return jax.lax.with_sharding_constraint(x, self.sharding(spec, False))

        return jax.tree.map(one, grads, self.moved)

    def pin_grads(self, grads: Any) -> Any:
        """Constrain those gradients that are split.

        To pin the others as whole would cost memory: what follows may split them.
        """
        own = bool(self.setup.own_axes)

        def one(x: jax.Array, spec: PartitionSpec) -> jax.Array:
            if not any(spec):
                return x
            return jax.lax.with_sharding_constraint(x, self.sharding(spec, own))

        return jax.tree.map(one, grads, self.grads)

    def pin_grads_inside(self, grads: Any) -> Any:
        """The same inside ``shard_map``, over the axes that are not manual there."""
        mesh = jax.sharding.get_abstract_mesh()

        def one(x: jax.Array, spec: PartitionSpec) -> jax.Array:
            spec = without_axes(spec, mesh.manual_axes)
            if not any(spec):
                return x
            return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

        return jax.tree.map(one, grads, self.grads)

    def sharding(self, spec: PartitionSpec, own: bool) -> NamedSharding:
        """The sharding of an array."""
        return NamedSharding(self.setup.mesh, self.spec(spec, own))

    def spec(self, spec: PartitionSpec, own: bool) -> PartitionSpec:
        """The spec of an array, with its replica dim if it has one."""
        return _with_replicas(spec, self.setup.own_axes) if own else spec

    def shardings(self, state: TrainState) -> TrainState:
        """The sharding of every leaf of a state."""
        own = self.setup.own_params

        def rest(tree: Any, own: bool = False) -> Any:
            return jax.tree.map(lambda _: self.sharding(PartitionSpec(), own), tree)

        def of_params(tree: Any, specs: Any, own: Any) -> Any:
            return jax.tree.map(lambda _, s, o: self.sharding(s, o), tree, specs, own)

        opt_state = of_params(state.opt_state, self.opt_state, self.own_state)
        if self.policy is not None and self.policy.offload:
            policy = self.policy
            opt_state = jax.tree.map(
                lambda x, s: state_sharding(policy, s, x),
                state.opt_state,
                self.opt_state,
            )
        return state.replace(
            step=rest(state.step),
            params=of_params(state.params, self.params, self.own_params(state.params)),
            opt_state=opt_state,
            model_state=rest(state.model_state, own),
            replica_state=_residual_shardings(self.setup, state.replica_state),
            shown=rest(state.shown),
        )


def _with_replicas(spec: PartitionSpec, axes: tuple[str, ...]) -> PartitionSpec:
    """A spec with a replica dim in front."""
    return canonical([axes, *entries_of(spec, len(spec))])


def _residual_shardings(setup: Setup, replica_state: Any) -> Any:
    """Residuals lie over all local axes; counters are whole."""
    axes = setup.resolution.local_axes

    def one(x: Any) -> NamedSharding:
        spec = canonical([axes]) if x.shape else PartitionSpec()
        return NamedSharding(setup.mesh, spec)

    return jax.tree.map(one, replica_state)


def layout_of(setup: Setup, tx: Any, params: Any, opt_state: Any) -> Layout:
    """Derive the specs from shapes that have replica dims already.

    Args:
        setup: what the step needs.
        tx: the transformation of the state, with its policy if it has one.
        params: the parameters of the state, arrays or shapes.
        opt_state: the optimizer state, likewise.

    Raises:
        ConfigError: a state that is split over the axes between replicas.
    """
    policy = tx.policy if isinstance(tx, ShardedTransformation) else None
    own = replicas.everywhere(params, setup.own_params)
    params = replicas.without_dim(params, own)
    own_state = replicas.owned(opt_state, setup.own_params)
    opt_state = replicas.without_dim(opt_state, own_state)
    if policy is None:
        return Layout(
            setup=setup,
            policy=None,
            params=_whole(params),
            moved=_whole(params),
            grads=_whole(params),
            opt_state=_whole(opt_state),
            own_state=own_state,
        )
    used = {*policy.axes, *policy.optimizer_axes}
    clash = [a for a in setup.own_axes if a in used and setup.mesh.shape[a] > 1]
    if clash:
        raise ConfigError(
            f"the state is split over {'+'.join(clash)}, over which this strategy "
            "keeps state per replica; split it over another axis, on a mesh such as "
            "{'replica': 2, 'shard': 4}"
        )
    if policy.pad and setup.own_axes:
        raise ConfigError(
            "a state that keeps parts per replica (over "
            f"{'+'.join(setup.own_axes)}) cannot be padded; lay it out without pad"
        )
    # The step pins the sum of parameters and updates, so that updates may be split.
    policy = dataclasses.replace(policy, mesh=setup.mesh, split_updates=True)
    layouts = Layouts(params, policy)
    return Layout(
        setup=setup,
        policy=policy,
        params=layouts.params(params),
        moved=layouts.updates(params),
        grads=layouts.grads(params),
        opt_state=layouts.opt_state(opt_state),
        own_state=own_state,
    )


def layout_of_state(setup: Setup, state: TrainState) -> Layout:
    """The layout of a state.

    Raises:
        ConfigError: a state that another strategy or optimizer made.
    """
    params, opt_state = abstract(state.params), abstract(state.opt_state)
    one = replicas.without_dim(params, replicas.everywhere(params, setup.own_params))
    wanted = jax.tree.structure(jax.eval_shape(setup.window().init, one))
    if wanted != jax.tree.structure(opt_state):
        raise ConfigError(
            "the optimizer state is not one of this optimizer and strategy: it has "
            f"{jax.tree.structure(opt_state)}, wanted {wanted}; make the state by "
            "create of the same distributed_optimizer"
        )
    if (state.replica_state is None) != (setup.reducer() is None):
        raise ConfigError(
            "fp16_allreduce keeps state between steps, and the state has "
            f"{'none' if state.replica_state is None else 'some, but it is off'}; make "
            "the state by create of the same distributed_optimizer"
        )
    num = setup.size(setup.own_axes)
    for path, leaf in leaves_with_paths(params) if setup.own_params else ():
        if leaf.shape[:1] != (num,):
            raise ConfigError(
                f"parameter {path_str(path)!r} must have one entry for each of {num} "
                f"replicas, got shape {leaf.shape}; make the state by create for this "
                "mesh"
            )
    return layout_of(setup, state.tx, params, opt_state)


def _whole(tree: Any) -> Any:
    return jax.tree.map(lambda _: PartitionSpec(), tree)
