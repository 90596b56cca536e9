"""The parameters of a state, as an export and an import see them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jfleet._checkpoint.leaves import Leaf, check_alive, flatten, tied
from jfleet._checkpoint.tensor_file import Tensor, read_part
from jfleet._errors import CheckpointError
from jfleet._states.adapters import OPT_STATE, PARAMS, Parts, take_apart
from jfleet._tree import Path, path_str
from jfleet.plan import without_padding

_COPIES = ("master", "anchor")
"""Fields of optimizer states that hold parameters."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Param:
    """One parameter of a state."""

    path: Path
    """Path below the parameters."""
    shape: tuple[int, ...]
    """Shape of one replica's value, without padding."""
    value: Any
    """The array as it is in the state."""
    source: Any
    """The array with the exact values: the master if there is one."""
    replicas: int = 0
    """Size of the first dim of ``source``, if every replica has its own; else 0."""
    same_as: str | None = None
    """Name of the parameter that holds the same array, for tied parameters."""

    @property
    def name(self) -> str:
        """Name in a file."""
        return ".".join(self.path)


def params_of(state: Any, *, alive: bool = True) -> list[Param]:
    """List the parameters of a state.

    Args:
        state: any state that ``group_sharded_parallel`` takes, or of ``opt.create``.
        alive: whether every parameter must have values.

    Raises:
        CheckpointError: a parameter that is no array, or without values.
        DonatedBufferError: parameters were donated.
    """
    parts, leaves = _leaves(state)
    shapes = _logical_shapes(parts, leaves)
    masters = {
        part.path[part.path.index("master") + 1 :]: leaf
        for part, leaf in zip(parts.leaves, leaves, strict=True)
        if part.kind == OPT_STATE and "master" in part.path
    }
    same = tied(leaves)
    found: dict[str, Param] = {}
    for part, leaf, shape in zip(parts.leaves, leaves, shapes, strict=True):
        if part.kind != PARAMS:
            continue
        if leaf.kind != "array":
            raise CheckpointError(
                f"parameter {path_str(part.path)!r} is no array but a {leaf.kind};"
                " only arrays go into safetensors files"
            )
        master = masters.get(part.path, leaf)
        first = found.get(same.get(leaf.name, ""))
        if alive:
            check_alive([leaf, master])
        found[leaf.name] = Param(
            path=part.path,
            shape=shape,
            value=leaf.value,
            source=master.value,
            replicas=master.replicas,
            same_as=None if first is None else first.name,
        )
    return list(found.values())


def _leaves(state: Any) -> tuple[Parts, list[Leaf]]:
    parts = take_apart(state)
    leaves, _ = flatten(state)
    return parts, leaves


def _logical_shapes(parts: Parts, leaves: Sequence[Leaf]) -> list[tuple[int, ...]]:
    """Shapes without padding and without replicas, from shapes alone."""
    shapes = tuple(
        dataclasses.replace(p, value=jax.ShapeDtypeStruct(p.shape, p.dtype))
        for p in parts.leaves
    )
    cut = without_padding(dataclasses.replace(parts, leaves=shapes)).leaves
    return [
        p.shape[1:] if leaf.replicas else p.shape
        for p, leaf in zip(cut, leaves, strict=True)
    ]


def with_params(
    state: Any, params: Sequence[Param], tensors: Mapping[str, Tensor]
) -> Any:
    """Return a state with parameters, and their copies, read from files.

    Args:
        state: what is changed; it stays as it is.
        params: its parameters.
        tensors: one for each parameter, by name.
    """
    parts, leaves = _leaves(state)
    shapes = {param.path: param.shape for param in params}
    names = {param.path: param.name for param in params}
    same, made, values = tied(leaves), {}, []
    for part, leaf in zip(parts.leaves, leaves, strict=True):
        path = _param_path(part.kind, part.path, names)
        if path is None:
            values.append(leaf.value)
            continue
        look = same.get(leaf.name, leaf.name)
        if look not in made:
            made[look] = _read(leaf, shapes[path], tensors[names[path]])
        values.append(made[look])
    return parts.rebuild(values, parts.tx, parts.apply_fn)


def _param_path(kind: str, path: Path, names: Mapping[Path, str]) -> Path | None:
    """The parameter that a leaf is, or is a copy of; None for all else."""
    if kind == PARAMS:
        return path
    if kind == OPT_STATE:
        for index, step in enumerate(path):
            if step in _COPIES and path[index + 1 :] in names:
                return path[index + 1 :]
    return None


def _read(leaf: Leaf, logical: tuple[int, ...], tensor: Tensor) -> Any:
    """Read a tensor as a leaf is: its type, its padding, its place."""
    like = leaf.value
    shape = tuple(like.shape)

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        spans = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
        sizes = [stop - start for start, stop in spans]
        inner = spans[1:] if leaf.replicas else spans
        cut = [slice(a, min(b, n)) for (a, b), n in zip(inner, logical, strict=True)]
        values = read_part(tensor, cut, like.dtype)
        if leaf.replicas:
            values = values[None]
            values = np.broadcast_to(values, (sizes[0], *values.shape[1:]))
        if list(values.shape) == sizes:
            return values
        padded = np.zeros(sizes, like.dtype)
        padded[tuple(map(slice, values.shape))] = values
        return padded

    sharding = getattr(like, "sharding", None)
    free = isinstance(like, jax.Array) and not like.committed
    if isinstance(like, np.ndarray | np.generic):
        return part((slice(None),) * len(shape))
    if free or not isinstance(sharding, Sharding):
        return jnp.asarray(part((slice(None),) * len(shape)))
    return jax.make_array_from_callback(shape, sharding, part)
