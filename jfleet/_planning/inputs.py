"""What a compiled program says of its arguments: path, class, sizes, layout."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding

from jfleet._planning import kinds
from jfleet._tree import Path, dtype_bytes, num_elements, path_of, path_str

STATE_FIELDS = {
    "params": kinds.PARAMS,
    "opt_state": kinds.STATE,
    "model_state": kinds.EXTRA,
    "batch_stats": kinds.EXTRA,
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """One array that a compiled program gets."""

    path: str
    kind: str | None
    """Class of memory, as far as the path tells; None: unknown."""
    shape: tuple[int, ...]
    dtype: str
    total_bytes: int
    device_bytes: int
    donated: bool
    is_split: bool


def inputs_of(compiled: Any) -> list[Input]:
    """Every argument of a compiled program, in order."""
    infos = jax.tree_util.tree_leaves_with_path(compiled.args_info)
    where = jax.tree.leaves(compiled.input_shardings)
    if len(infos) != len(where):  # jit dropped arguments that the step does not use
        where = [None] * len(infos)
    return [_input(path_of(k), i, s) for (k, i), s in zip(infos, where, strict=True)]


def _input(path: Path, info: Any, sharding: Any) -> Input:
    shape, dtype = tuple(info.shape), info.dtype
    total = num_elements(shape) * dtype_bytes(dtype)
    local = shape if sharding is None else sharding.shard_shape(shape)
    return Input(
        path=path_str(path[2:]) if len(path) > 2 else path_str(path),
        kind=_kind(path),
        shape=shape,
        dtype=str(dtype),
        total_bytes=total,
        device_bytes=num_elements(local) * dtype_bytes(dtype),
        donated=info.donated,
        is_split=tuple(local) != shape,
    )


def _kind(path: Path) -> str | None:
    """``args_info`` is (args, kwargs); then comes the number of the argument."""
    names = [STATE_FIELDS[name] for name in path[2:4] if name in STATE_FIELDS]
    if names:
        return (
            kinds.MASTERS if names[0] == kinds.STATE and "master" in path else names[0]
        )
    return kinds.BATCH if path[:1] == ("0",) and path[1:2] > ("0",) else None


def mesh_of(compiled: Any) -> tuple[Mapping[str, int], Any] | None:
    """Sizes of the mesh axes and the devices in order, from the arguments."""
    for where in jax.tree.leaves(compiled.input_shardings):
        if isinstance(where, NamedSharding):
            return dict(where.mesh.shape), where.mesh
    return None
