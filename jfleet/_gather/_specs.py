"""Specs as tuples of mesh axes, and the way from a whole array to a shard.

``Dims`` holds, for every dim of an array, the mesh axes it is split over:
``P("x", ("y", "z"))`` on a rank-3 array is ``(("x",), ("y", "z"), ())``.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jfleet._errors import ConfigError, PlacementError, listing, nearest

Dims: TypeAlias = tuple[tuple[str, ...], ...]
Mode: TypeAlias = Literal["gather", "cotangent"]


def dims_of(spec: P, rank: int) -> Dims:
    """Write a spec as one tuple of axes per dim.

    >>> dims_of(P("x", ("y", "z")), 3)
    (('x',), ('y', 'z'), ())
    """
    entries = [() if e is None else (e,) if isinstance(e, str) else e for e in spec]
    if len(entries) > rank:
        raise PlacementError(f"{spec} has more entries than the array has dims: {rank}")
    return tuple(tuple(e) for e in entries) + ((),) * (rank - len(entries))


def spec_of(dims: Dims) -> P:
    """The inverse of `dims_of`; never ends in ``None``.

    >>> spec_of((("x",), ("y", "z"), ())) == P("x", ("y", "z"))
    True
    """
    entries = [e[0] if len(e) == 1 else e or None for e in dims]
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How one function is rewritten. Equal options give equal programs."""

    axes: tuple[str, ...]
    """Mesh axes to gather over; all others (tensor parallel) stay."""

    mode: Mode = "gather"
    """``"gather"`` (p_g_os), or ``"cotangent"``: whole parameters, split gradients."""

    embedding: tuple[str, ...] | None = None
    """Axes over which the leading dim of the tokens is split; then a table whose
    feature dims alone are split is looked up in its shard. ``None`` gathers it."""

    stepwise: bool = True
    """One mesh axis at a time, so that each torus axis has its own collective."""

    regather: bool = True
    """Gather again in the backward pass, instead of keeping whole weights for it."""

    hoist_bytes: int = 2**28
    """Weights that every iteration of a loop uses are gathered once, before the loop,
    up to this size each; larger ones are gathered in every iteration."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fabric:
    """The mesh as seen from where the function is traced."""

    mesh: Mesh | AbstractMesh
    axes: frozenset[str]
    explicit: bool

    def split(self, dims: Dims) -> bool:
        """Is anything split over the gathered axes?"""
        return any(self.axes.intersection(entry) for entry in dims)

    def whole(self, dims: Dims) -> Dims:
        """The layout after a gather."""
        return tuple(tuple(a for a in e if a not in self.axes) for e in dims)

    def num_shards(self, entry: Iterable[str]) -> int:
        """Into how many pieces an entry splits its dim."""
        return math.prod(self.mesh.shape[axis] for axis in entry)

    def sharding(self, dims: Dims) -> NamedSharding:
        """The sharding that ``dims`` stands for."""
        return NamedSharding(self.mesh, spec_of(dims))

    def way(self, dims: Dims, *, stepwise: bool) -> list[NamedSharding]:
        """From whole to ``dims``, both included; one mesh axis a step."""
        todo = [(i, a) for i, e in enumerate(dims) for a in e if a in self.axes]
        at = [list(entry) for entry in self.whole(dims)]
        way = [self.sharding(self.whole(dims))]
        for i, axis in todo:
            at[i].append(axis)
            way.append(self.sharding(tuple(map(tuple, at))))
        if way[-1] != self.sharding(dims):  # a kept axis stands behind a gathered one
            way.append(self.sharding(dims))
        return way if stepwise else [way[0], way[-1]]


def fabric_of(mesh: Mesh | AbstractMesh, options: Options) -> Fabric:
    """The mesh to use here: inside ``shard_map`` some axes are out of reach.

    Raises:
        ConfigError: an axis is unknown or manual here, or axis types are mixed.
    """
    for axis in options.axes + (options.embedding or ()):
        if axis not in mesh.shape:
            raise ConfigError(
                f"axes must name axes of the mesh {dict(mesh.shape)}, got {axis!r}"
                f"{nearest(axis, mesh.shape)}"
            )
    here = jax.sharding.get_abstract_mesh()
    if not here.empty and here.axis_names == mesh.axis_names:
        mesh = here if AxisType.Manual in here.axis_types else mesh
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    manual = {axis for axis, kind in types.items() if kind == AxisType.Manual}
    if reached := manual.intersection(options.axes):
        raise ConfigError(
            f"axes must not be manual where the function is called, got "
            f"{listing(sorted(reached))}; call it outside this shard_map, or list only "
            "other axes in axis_names="
        )
    kinds = {kind for axis, kind in types.items() if axis not in manual}
    if len(kinds) > 1:
        raise ConfigError(
            f"the axes of the mesh must all be Auto or all be Explicit, got {types}; "
            "build it with one axis type"
        )
    explicit = kinds == {AxisType.Explicit}
    if explicit and options.mode == "cotangent":
        raise ConfigError(
            "mode='cotangent' needs a mesh with Auto axes: on Explicit axes a gradient "
            "has the sharding of its parameter by type; shard the parameter and use "
            "mode='gather', or build the mesh with AxisType.Auto"
        )
    if explicit and options.embedding is not None:
        raise ConfigError(
            "embedding= needs a mesh with Auto axes, got Explicit ones; leave it None"
        )
    return Fabric(mesh=mesh, axes=frozenset(options.axes), explicit=explicit)


def checked_dims(fabric: Fabric, spec: P, leaf: Any, name: str) -> Dims:
    """Dims of one leaf; axes that are manual here are left out.

    Raises:
        PlacementError: the spec does not fit the leaf.
    """
    shape = jax.numpy.shape(leaf)
    if len(spec) > len(shape):
        raise PlacementError(
            f"the spec of {name!r} must have at most {len(shape)} entries for shape "
            f"{shape}, got {spec}"
        )
    dims = dims_of(spec, len(shape))
    types = dict(zip(fabric.mesh.axis_names, fabric.mesh.axis_types, strict=True))
    if unknown := sorted({a for e in dims for a in e} - types.keys()):
        raise PlacementError(
            f"the spec of {name!r} must use axes of the mesh {listing(types)}, got "
            f"{spec}{nearest(unknown[0], types)}"
        )
    dims = tuple(tuple(a for a in e if types[a] != AxisType.Manual) for e in dims)
    for size, entry in zip(shape, dims, strict=True):
        if size % fabric.num_shards(entry):
            raise PlacementError(
                f"the spec of {name!r} must divide its shape {shape}, got {spec} on "
                f"mesh {dict(fabric.mesh.shape)}; split another dim or leave it whole"
            )
    return dims
