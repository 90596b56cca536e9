"""The arguments of the public verbs, checked and resolved to a ``Policy``."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from jfleet._errors import ConfigError, ConfigTypeError, nearest
from jfleet._layout import Policy, is_explicit
from jfleet._types import LEVELS, AxisName
from jfleet.mesh import shard_axes


def checked_policy(
    level: Any,
    *,
    mesh: Any,
    axis: AxisName | None = None,
    optimizer_axis: AxisName | None = None,
    rules: Any = (),
    exclude: Any = (),
    min_shard_size: int = 0,
    offload: bool = False,
    pad: bool = False,
) -> Policy:
    """Check what was asked for and resolve its defaults against a mesh.

    Raises:
        ConfigError: a value that cannot work.
        ConfigTypeError: an argument of the wrong type.
    """
    check_level(level)
    mesh = _check_mesh(mesh)
    axes = shard_axes(mesh, axis)
    wide = axes if optimizer_axis is None else shard_axes(mesh, optimizer_axis)
    if not set(axes) <= set(wide):
        raise ConfigError(
            f"optimizer_axis must contain axis {axes}, got {optimizer_axis!r}"
        )
    if isinstance(min_shard_size, bool) or not isinstance(
        min_shard_size, int | np.integer
    ):
        raise ConfigTypeError(
            f"min_shard_size must be an integer, got {min_shard_size!r}"
        )
    if min_shard_size < 0:
        raise ConfigError(
            f"min_shard_size must be at least 0, got {min_shard_size}; 0 splits every"
            " array that can be split"
        )
    return Policy(
        mesh=mesh,
        level=level,
        axes=axes,
        optimizer_axes=axes + tuple(a for a in wide if a not in axes),
        rules=_check_rules(rules),
        exclude=_check_exclude(exclude),
        min_shard_size=min_shard_size,
        offload=offload,
        pad=_check_pad(pad, mesh),
    )


def check_level(level: Any) -> None:
    """Raise ConfigError unless ``level`` is one of the three."""
    if level not in LEVELS:
        hint = nearest(str(level), LEVELS)
        raise ConfigError(f"level must be one of {LEVELS}, got {level!r}{hint}")


def _check_pad(pad: Any, mesh: Any) -> bool:
    if not isinstance(pad, bool):
        raise ConfigTypeError(f"pad must be True or False, got {pad!r}")
    if pad and is_explicit(mesh):
        raise ConfigError(
            "pad=True needs a mesh with Auto axes: on Explicit axes the shape without"
            " padding cannot be split; build the mesh with AxisType.Auto"
        )
    return pad


def _check_mesh(mesh: Any) -> Any:
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ConfigTypeError(
            "mesh must be a jax.sharding.Mesh or AbstractMesh, got"
            f" {type(mesh).__qualname__}; jfleet.init() makes one"
        )
    if AxisType.Manual in mesh.axis_types or len(set(mesh.axis_types)) > 1:
        raise ConfigError(
            "all axes of the mesh must be Auto or all Explicit, got"
            f" {dict(zip(mesh.axis_names, mesh.axis_types, strict=True))}"
        )
    return mesh


def _check_pattern(pattern: Any, what: str) -> str:
    if not isinstance(pattern, str):
        raise ConfigTypeError(f"{what} must be a regular expression, got {pattern!r}")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"{what} {pattern!r} is not a regular expression: {error}"
        ) from error
    return pattern


def _check_rules(rules: Any) -> tuple[tuple[str, PartitionSpec], ...]:
    pairs = rules.items() if isinstance(rules, Mapping) else rules
    checked = []
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ConfigTypeError(
                f"rules must be pairs (regular expression, PartitionSpec), got {pair!r}"
            )
        pattern, spec = pair
        if isinstance(spec, str):
            spec = PartitionSpec(spec)
        elif spec is None:
            spec = PartitionSpec()
        elif isinstance(spec, tuple | list):
            spec = PartitionSpec(*spec)
        if not isinstance(spec, PartitionSpec):
            raise ConfigTypeError(
                f"the spec of rule {pattern!r} must be a PartitionSpec, got {spec!r}"
            )
        checked.append((_check_pattern(pattern, "rule"), spec))
    return tuple(checked)


def _check_exclude(exclude: Any) -> tuple[str, ...]:
    patterns: Sequence[Any] = (exclude,) if isinstance(exclude, str) else exclude
    return tuple(_check_pattern(p, "exclude") for p in patterns)
