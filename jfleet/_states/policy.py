"""The policy of a state: what was asked for, and the specs that it came with."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from jfleet._errors import PlacementError
from jfleet._layout import Policy, canonical, check_spec, entries_of
from jfleet._placing.policy import check_level, checked_policy
from jfleet._states.adapters import PARAMS, Leaf, Parts, mesh_of
from jfleet._tree import Path
from jfleet.mesh import current_mesh
from jfleet.optax_meta.sharding import ShardedTransformation


def make_policy(
    parts: Parts, level: str, *, mesh: Any = None, **options: Any
) -> Policy:
    """Resolve what was asked for against a state.

    Args:
        parts: the state, taken apart and without padding.
        level: the level.
        mesh: default the one that the state lives on, else that of ``init``.
        **options: the further arguments of ``checked_policy``.

    Raises:
        ConfigError: a value that cannot work.
        ConfigTypeError: an argument of the wrong type.
    """
    check_level(level)
    mesh = mesh if mesh is not None else mesh_of(parts) or current_mesh()
    policy = checked_policy(level, mesh=mesh, **options)
    policy = dataclasses.replace(policy, kept=_kept(parts, policy.mesh, policy.axes))
    if not policy.pad:
        return policy
    return dataclasses.replace(
        policy,
        pads_params=parts.apply_fn is not None,
        logical=tuple((p.path, p.shape) for p in parts.of_kind(PARAMS)),
    )


def _kept(
    parts: Parts, mesh: Any, axes: Sequence[str]
) -> tuple[tuple[Path, PartitionSpec], ...]:
    """Specs that parameters came with, before jfleet laid any of them out."""
    if isinstance(parts.tx, ShardedTransformation):
        known = parts.tx.policy.kept
        if mesh == parts.tx.policy.mesh:
            return known
        return tuple((p, s) for p, s in known if _axes_known(s, mesh))
    found = []
    for leaf in parts.of_kind(PARAMS):
        sharding = getattr(leaf.value, "sharding", None)
        elsewhere = isinstance(sharding, NamedSharding) and sharding.mesh != mesh
        spec = kept_spec(leaf, mesh, drop=axes if elsewhere else ())
        if any(spec):
            found.append((leaf.path, spec))
    return tuple(found)


def _axes_known(spec: PartitionSpec, mesh: Any) -> bool:
    return all(a in mesh.shape for e in entries_of(spec, len(spec)) for a in e)


def kept_spec(leaf: Leaf, mesh: Any, drop: Sequence[str] = ()) -> PartitionSpec:
    """Return the spec that a leaf came with, as far as ``mesh`` knows its axes.

    The layout that the array already has counts first, then linen or nnx metadata.
    """
    sharding = getattr(leaf.value, "sharding", None)
    spec = None
    if isinstance(sharding, NamedSharding) and any(sharding.spec):
        spec = sharding.spec
    elif leaf.names is not None:
        spec = PartitionSpec(*leaf.names)
    if spec is None or len(spec) > len(leaf.shape):
        return PartitionSpec()
    return canonical(
        [a for a in axes if a in mesh.shape and a not in drop]
        for axes in entries_of(spec, len(leaf.shape))
    )


def fits(kept: Mapping[Path, PartitionSpec], leaf: Leaf, mesh: Any) -> bool:
    """Whether a leaf has a kept spec that works on ``mesh``."""
    if leaf.path not in kept:
        return False
    try:
        check_spec(kept[leaf.path], leaf.shape, mesh, leaf.path, "the array itself")
    except PlacementError:
        return False
    return True
