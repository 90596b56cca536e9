"""From a resolution to a placement policy: sharding and tensor parallelism."""

import dataclasses
import re
import warnings
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from jfleet._errors import JfleetWarning, PlacementError, listing
from jfleet._layout import Policy, canonical, check_spec, entries_of
from jfleet._resolving.resolution import Resolution
from jfleet._states.adapters import PARAMS, Leaf, Parts, take_apart
from jfleet._states.policy import make_policy
from jfleet._tree import Path, path_str
from jfleet.optax_meta.sharding import sharding
from jfleet.strategy import DistributedStrategy

INDIFFERENT = {
    *("amp", "recompute", "gradient_merge", "clip", "lars", "lamb"),
    *("sync_batch_norm", "extensions"),
}
"""Settings that mean the same on any number of devices."""


def needs_mesh(strategy: DistributedStrategy) -> bool:
    """Whether a strategy cannot be resolved without knowing the devices."""
    given = strategy.to_dict()
    if strategy.options("gradient_merge_configs").sync == "last":
        return True
    names = {name.removesuffix("_configs") for name, value in given.items() if value}
    return "auto" in given.values() or not names <= INDIFFERENT


def placement_policy(resolution: Resolution, mesh: Any, params: Any) -> Policy | None:
    """Return where state lives, or None where the strategy does not say.

    Args:
        resolution: what runs.
        mesh: a Mesh or AbstractMesh, the one it was resolved for.
        params: parameters or their shapes; arrays that are split already keep that.

    Raises:
        PlacementError: a rule that matches no parameter or does not fit one.
    """
    if not {"sharding", "tensor_parallel"} & set(resolution.applied):
        return None
    parts = take_apart({"params": params})
    options = resolution.options("sharding")
    if options is None:
        # No axis to split over: parameters, gradients and state keep the specs of
        # tensor parallelism and are whole otherwise.
        first = tuple(mesh.shape)[:1]
        policy = make_policy(parts, "p_g_os", mesh=mesh, axis=first)
        policy = dataclasses.replace(policy, axes=(), optimizer_axes=())
    else:
        policy = make_policy(
            parts,
            options.level,
            mesh=mesh,
            axis=resolution.axes["sharding"],
            optimizer_axis=options.optimizer_axis,
            rules=options.rules,
            exclude=options.exclude,
            min_shard_size=options.min_shard_size,
            offload=options.offload,
        )
    if "tensor_parallel" in resolution:
        rules = resolution.options("tensor_parallel").rules
        kept = {**dict(policy.kept), **_specs_of_rules(rules, parts, mesh)}
        policy = dataclasses.replace(policy, kept=tuple(kept.items()))
        _check_split(resolution, policy)
    return policy


def _specs_of_rules(rules: Any, parts: Parts, mesh: Any) -> dict[Path, PartitionSpec]:
    """The specs that the rules of tensor parallelism give; the first match decides."""
    leaves = parts.of_kind(PARAMS)
    found: dict[Path, PartitionSpec] = {}
    for pattern, entries in rules:
        matching = [p for p in leaves if re.search(pattern, path_str(p.path))]
        if not matching:
            names = listing((path_str(p.path) for p in leaves), limit=5)
            raise PlacementError(
                f"tensor_parallel_configs['rules']: {pattern!r} matches no parameter; "
                f"the paths are {names}"
            )
        for leaf in matching:
            if leaf.path not in found:
                found[leaf.path] = _checked(leaf, pattern, entries, mesh)
    return found


def _checked(leaf: Leaf, pattern: str, entries: Any, mesh: Any) -> PartitionSpec:
    spec = PartitionSpec(*entries)
    origin = f"tensor_parallel_configs rule {pattern!r}"
    check_spec(spec, leaf.shape, mesh, leaf.path, origin)
    return canonical(entries_of(spec, len(leaf.shape)))


def _check_split(resolution: Resolution, policy: Policy) -> None:
    """Refuse tensor parallelism that would split nothing."""
    axis = resolution.options("tensor_parallel").axis
    split = [s for _, s in policy.kept if axis in str(s)]
    if not split and resolution.mesh_shape[axis] > 1:
        raise PlacementError(
            f"tensor_parallel splits nothing: no parameter has a spec with {axis!r}; "
            "set tensor_parallel_configs={'rules': [(pattern, spec)]}, or give "
            "parameters that carry their specs"
        )


def placed(optimizer: Any, params: Any) -> Any:
    """Wrap an optimizer so that it keeps its placement, where it has one."""
    resolution, mesh = optimizer.resolution, optimizer.mesh
    if not isinstance(mesh, Mesh):
        return optimizer
    if "tensor_parallel" in resolution and params is None:
        warnings.warn(
            "tensor_parallel reads specs from the parameters: pass params= to "
            "distributed_optimizer, or create the state with opt.create(params); "
            "until then opt.init splits nothing",
            JfleetWarning,
            stacklevel=3,
        )
        return optimizer
    policy = placement_policy(resolution, mesh, {} if params is None else params)
    return optimizer if policy is None else sharding(optimizer, policy)
