"""The mesh: naming axes, laying out batches.

This is the only module that chooses axis types. Meshes made here have Auto axes unless
``explicit=True``: with ``jax.make_mesh``'s Explicit default, sharding becomes part of
every array's type and a model written for one device needs annotations.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jfleet import processes
from jfleet._errors import ConfigError, ConfigTypeError, listing
from jfleet._layout import axes_size, canonical, named_sharding
from jfleet._tree import is_array, map_with_path, path_str
from jfleet._types import AxisName

MODEL_AXES = frozenset(
    {"model", "tensor", "tensor_parallel", "tp", "mp"}
    | {"sequence", "seq", "sp", "sep", "context", "cp"}
    | {"expert", "ep", "pipeline", "pipe", "pp", "stage"}
)
"""Axis names over which a batch is not split."""

SHARD_AXES = ("shard", "fsdp", "zero", "data")
"""Axis names over which state is split when the caller names none, best first."""

_current: Mesh | None = None


def init(
    mesh_shape: Mapping[str, int] | None = None,
    *,
    devices: Sequence[jax.Device] | None = None,
    distributed: Literal["auto"] | bool | Mapping[str, Any] = "auto",
    explicit: bool = False,
) -> Mesh:
    """Start the processes where there are several, and return the mesh.

    Args:
        mesh_shape: axis names and sizes in order, such as ``{"replica": 2, "shard":
            4}``; one size may be -1 and is then computed. Default: one axis ``data``
            over all devices.
        devices: the devices to use; default all devices of all processes.
        distributed: ``"auto"`` starts ``jax.distributed`` where the environment names
            several processes (TPU pod, SLURM, Open MPI, Kubernetes, or
            ``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES``, ``JAX_PROCESS_ID``);
            True always, False never; a mapping is passed to
            ``jax.distributed.initialize``, over what the environment says. A process
            that dies is missed after 30 seconds (``heartbeat_timeout_seconds``).
        explicit: make Explicit axes instead of Auto ones.

    Returns:
        The mesh, which later calls of jfleet use when they are given none.

    Raises:
        ConfigError: a size below 1, sizes that the devices do not match, or a second
            call with another shape.
        DistributedError: the processes could not be connected.

    Example:
        >>> import jfleet
        >>> dict(jfleet.init({"data": -1}).shape)
        {'data': 8}
        >>> jfleet.init() is jfleet.init()
        True
    """
    global _current
    processes.start(distributed)
    if _current is not None and mesh_shape is None and devices is None:
        return _current
    devices = list(jax.devices() if devices is None else devices)
    shape = _resolve_shape({"data": -1} if mesh_shape is None else mesh_shape, devices)
    kind = AxisType.Explicit if explicit else AxisType.Auto
    mesh = jax.make_mesh(
        tuple(shape.values()),
        tuple(shape),
        axis_types=(kind,) * len(shape),
        devices=devices,
    )
    if _current is not None and _current != mesh:
        raise ConfigError(
            f"init was called before with the mesh {dict(_current.shape)} and now with"
            f" {shape} over {len(devices)} devices; call it once, or build further"
            " meshes with jfleet.new_group or jax.sharding.Mesh"
        )
    _current = mesh
    return mesh


def _resolve_shape(
    mesh_shape: Mapping[str, int], devices: Sequence[jax.Device]
) -> dict[str, int]:
    if not isinstance(mesh_shape, Mapping) or not mesh_shape:
        raise ConfigTypeError(
            "mesh_shape must be a mapping of axis names to sizes such as"
            f" {{'replica': 2, 'shard': 4}}, got {mesh_shape!r}"
        )
    shape = dict(mesh_shape)
    for axis, size in shape.items():
        if not isinstance(axis, str) or isinstance(size, bool):
            raise ConfigTypeError(f"mesh_shape needs names and integers, got {shape!r}")
        if not isinstance(size, int | np.integer):
            raise ConfigTypeError(
                f"mesh_shape[{axis!r}] must be an integer, got {size!r}"
            )
        if size < 1 and size != -1:
            raise ConfigError(
                f"mesh_shape[{axis!r}] must be at least 1, or -1 for the rest,"
                f" got {size}"
            )
    open_axes = [a for a, s in shape.items() if s == -1]
    if len(open_axes) > 1:
        raise ConfigError(f"only one size of mesh_shape may be -1, got {shape}")
    known = math.prod(s for s in shape.values() if s != -1)
    count = len(devices)
    if count % known or (not open_axes and known != count):
        raise ConfigError(
            f"mesh_shape {shape} covers {known} devices but there are {count};"
            " change the sizes, use -1 for one of them, or pass devices="
        )
    if open_axes:
        shape[open_axes[0]] = count // known
    return {axis: int(size) for axis, size in shape.items()}


def new_group(ranks: Sequence[int]) -> Mesh:
    """Return a mesh with one axis ``data`` over the devices of these ranks.

    Args:
        ranks: positions in ``jax.devices()``, each once.

    Returns:
        A mesh with Auto axes.

    Raises:
        ConfigError: no rank, a rank twice, or a rank that does not exist.

    Example:
        >>> import jfleet
        >>> dict(jfleet.new_group([0, 1, 2]).shape)
        {'data': 3}
    """
    devices = jax.devices()
    ranks = list(ranks)
    if not ranks or len(set(ranks)) != len(ranks):
        raise ConfigError(f"ranks must be distinct and at least one, got {ranks}")
    bad = [r for r in ranks if not 0 <= r < len(devices)]
    if bad:
        raise ConfigError(
            f"ranks must lie in 0..{len(devices) - 1}, got {listing(map(str, bad))}"
        )
    return Mesh(
        np.array([devices[r] for r in ranks]), ("data",), axis_types=(AxisType.Auto,)
    )


def current_mesh() -> Mesh:
    """Return the mesh of ``init``, calling it with its defaults if need be."""
    return init() if _current is None else _current


def shard_axes(mesh: Any, axis: AxisName | None = None) -> tuple[str, ...]:
    """Return the mesh axes that state is split over.

    Args:
        mesh: a Mesh or AbstractMesh.
        axis: a name, several names, or None: the only axis of a 1-D mesh, else the
            first of ``shard``, ``fsdp``, ``zero``, ``data`` that the mesh has.

    Raises:
        ConfigError: an axis that the mesh lacks, or none that could be meant.
    """
    names = tuple(mesh.shape)
    if axis is None:
        if len(names) == 1:
            return names
        for name in SHARD_AXES:
            if name in names:
                return (name,)
        raise ConfigError(
            f"axis must be given for the mesh {dict(mesh.shape)}: none of its axes is"
            f" called {listing(SHARD_AXES)}; pass axis='{names[0]}' or several"
        )
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    bad = [a for a in axes if a not in names]
    if bad or not axes or len(set(axes)) != len(axes):
        raise ConfigError(
            f"axis must name distinct axes of the mesh {dict(mesh.shape)}, got {axis!r}"
        )
    return axes


def batch_axes(mesh: Any) -> tuple[str, ...]:
    """Return the axes that split a batch: all but the model-parallel ones."""
    return tuple(a for a in mesh.shape if a.lower() not in MODEL_AXES)


def shard_batch(
    tree: Any, *, mesh: Mesh | None = None, axis: AxisName | None = None
) -> Any:
    """Lay a batch out over the data axes, rows first.

    Args:
        tree: arrays (NumPy, JAX, or what ``np.asarray`` takes) whose dim 0 is the
            batch; scalars are replicated. With several processes each passes its own
            rows and gets the global array.
        mesh: default the mesh of ``init``.
        axis: the axes that split the rows; default every axis of the mesh that is not
            a model-parallel one (``model``, ``tensor``, ``tp``, ...).

    Returns:
        The same tree of global arrays.

    Raises:
        ConfigError: rows that the axes do not divide; the text names the leaf.
        ConfigTypeError: a leaf that is not numeric.

    Example:
        >>> import jfleet, numpy as np
        >>> x = jfleet.shard_batch(np.ones((16, 3)), mesh=jfleet.new_group([0, 1]))
        >>> x.sharding.shard_shape(x.shape)
        (8, 3)
    """
    mesh = current_mesh() if mesh is None else mesh
    axes = batch_axes(mesh) if axis is None else shard_axes(mesh, axis)
    width = axes_size(mesh, axes)

    def place(path, leaf):
        value = leaf if is_array(leaf) else np.asarray(leaf)
        if value.dtype == object or getattr(value.dtype, "kind", "") in "USO":
            raise ConfigTypeError(
                f"batch leaf {path_str(path)!r} must be numeric, got {type(leaf)}"
            )
        if value.ndim == 0:
            return jax.device_put(value, named_sharding(mesh, canonical([]), 0))
        sharding = named_sharding(mesh, canonical([axes]), value.ndim)
        count = jax.process_count()
        here = count > 1 and not isinstance(value, jax.Array)
        rows = value.shape[0] * (count if here else 1)
        if rows % width:
            raise ConfigError(
                f"batch leaf {path_str(path)!r} of shape {tuple(value.shape)} has"
                f" {rows} rows, which {width} devices (mesh {dict(mesh.shape)}, spec"
                f" {sharding.spec}) do not divide; drop or pad rows to a multiple of"
                f" {width}"
            )
        if here:
            return jax.make_array_from_process_local_data(sharding, value)
        return jax.device_put(value, sharding)

    return map_with_path(place, tree)
