"""Which mesh axes every feature works over, and which features get in each other's way.

Note [axes]: the axes that split a batch are the data axes. A feature that gives every
replica parameters or residuals of its own (localsgd, dgc) works over ``replica`` where
the mesh has such an axis, else over the data axes that state is not split over.
fp16_allreduce averages over the data axes that are left. Two features that need the
same axis, and more than one device along it, cannot run together.
"""

import math
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from jfleet._errors import ConfigError
from jfleet._resolving.rules import Axes, Rule
from jfleet.mesh import batch_axes, shard_axes


def size(mesh_shape: Mapping[str, int] | None, axes: Iterable[str]) -> int:
    """Number of devices along the axes; 1 where the mesh is unknown."""
    return math.prod(mesh_shape[a] for a in axes) if mesh_shape else 1


def data_axes(mesh_shape: Mapping[str, int], options: Mapping[str, Any]) -> Axes:
    """The axes that split a batch: all but those of tensor parallelism."""
    tensor = options.get("tensor_parallel")
    names = batch_axes(SimpleNamespace(shape=mesh_shape))
    return tuple(a for a in names if tensor is None or a != tensor.axis)


def find_axes(
    rules: Iterable[Rule],
    options: Mapping[str, Any],
    mesh_shape: Mapping[str, int] | None,
) -> dict[str, Axes]:
    """Return the axes of every feature that works over some.

    Raises:
        ConfigError: an axis that the mesh lacks.
    """
    if mesh_shape is None:
        return {}
    data = data_axes(mesh_shape, options)
    found: dict[str, Axes] = {}
    if "sharding" in options:
        axis = _given("sharding", options, mesh_shape)
        found["sharding"] = shard_axes(SimpleNamespace(shape=mesh_shape), axis)
    rest = tuple(a for a in data if a not in found.get("sharding", ())) or data
    own = ("replica",) if "replica" in data else rest
    for rule in rules:
        if rule.own_parameters:
            given = _given(rule.name, options, mesh_shape)
            found[rule.name] = given or own
    taken = {a for r in rules if r.own_parameters for a in found[r.name]}
    left = tuple(a for a in data if a not in taken)
    for rule in rules:
        if rule.name not in found and rule.replica_gradients:
            found[rule.name] = _given(rule.name, options, mesh_shape) or left
    for name, default in (("tensor_parallel", ()), ("sync_batch_norm", data)):
        if name in options:
            found[name] = _given(name, options, mesh_shape) or default
    return found


def _given(name: str, options: Mapping[str, Any], mesh_shape) -> Axes | None:
    """The axes that the options name, checked against the mesh."""
    axis = getattr(options[name], "axis", None)
    if axis is None:
        return None
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    for a in axes:
        if a not in mesh_shape:
            raise ConfigError(
                f"{name}_configs['axis'] names {a!r}, which is no axis of the mesh "
                f"{dict(mesh_shape)}; use one of {list(mesh_shape)}"
            )
    return axes


def clash(
    one: Rule,
    two: Rule,
    axes: Mapping[str, Axes],
    options: Mapping[str, Any],
    mesh_shape: Mapping[str, int] | None,
) -> str | None:
    """Why two features cannot share their axes, or None."""
    if mesh_shape is None:
        return None
    for first, second in ((one, two), (two, one)):
        if not first.own_parameters:
            continue
        mine = axes[first.name]
        if second.name == "sharding":
            extra = options["sharding"].optimizer_axis or ()
            common = _wide(mine, {*axes["sharding"], *extra}, mesh_shape)
            if common:
                return _same_axis(first.name, common)
        if second.replica_gradients and not second.own_parameters:
            theirs = axes[second.name]
            many = size(mesh_shape, mine) > 1
            if many and (not theirs or _wide(mine, theirs, mesh_shape)):
                return (
                    f"{first.name} replaces the reduction over {'+'.join(mine)}, so "
                    f"that {second.name} has nothing to reduce; use a mesh such as "
                    "{'replica': 2, 'shard': 4}: " + f"{first.name} over replica, "
                    f"{second.name} over shard"
                )
    if "tensor_parallel" in (one.name, two.name):
        other = two if one.name == "tensor_parallel" else one
        common = set(axes.get(other.name, ())) & set(axes["tensor_parallel"])
        if common:
            return (
                f"tensor_parallel splits layers over {'+'.join(sorted(common))}; give "
                f"{other.name}_configs['axis'] another axis"
            )
    return None


def _wide(mine: Axes, theirs: Iterable[str], mesh_shape: Mapping[str, int]) -> Axes:
    return tuple(a for a in mine if a in set(theirs) and mesh_shape[a] > 1)


def _same_axis(name: str, common: Axes) -> str:
    return (
        f"each replica of {name} must own whole parameters, but sharding splits them "
        f"over {'+'.join(common)} as well; use a mesh such as "
        "{'replica': 2, 'shard': 4}: " + f"{name} over replica, sharding over shard"
    )
