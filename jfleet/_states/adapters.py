"""Take a training state apart, whatever its type, and put it together again.

``take_apart`` is the only place that knows what states look like. Everything after it
works on ``Parts``: parameters, optimizer state, the rest, each a list of (path, leaf).
"""

import dataclasses
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jfleet._errors import (
    ConfigTypeError,
    DonatedBufferError,
    JfleetWarning,
    listing,
)
from jfleet._states.buffers import is_deleted
from jfleet._tree import Path, is_array, path_of, path_str

PARAMS, OPT_STATE, EXTRA = "params", "opt_state", "extra"

Rebuild = Callable[[Sequence[Any], Any, Any], Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One array of a state."""

    kind: str
    """``params``, ``opt_state`` or ``extra``."""
    path: Path
    """Path below the parameters or the optimizer state; for extras, the whole path."""
    value: Any
    """The array, ShapeDtypeStruct or Python scalar."""
    names: tuple[str | tuple[str, ...] | None, ...] | None = None
    """Mesh axis names from linen or nnx metadata, if any."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array; () for a Python scalar."""
        return (
            tuple(np.shape(self.value))
            if not is_array(self.value)
            else tuple(self.value.shape)
        )

    @property
    def dtype(self) -> Any:
        """Type of the elements, as JAX would store them."""
        if is_array(self.value):
            return self.value.dtype
        return jax.dtypes.canonicalize_dtype(np.asarray(self.value).dtype)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A state taken apart."""

    leaves: tuple[Leaf, ...]
    """Every leaf, in the order in which ``rebuild`` wants them."""
    tx: Any
    """The optax transformation, or None."""
    apply_fn: Any
    """The model's forward function, or None."""
    rebuild: Rebuild
    """``rebuild(values, tx, apply_fn)`` makes a state of the caller's type."""
    cls: type | None = None
    """The class of a state that carries its own transformation, such as TrainState."""

    def of_kind(self, kind: str) -> list[Leaf]:
        """Leaves of one kind, in order."""
        return [leaf for leaf in self.leaves if leaf.kind == kind]


def take_apart(state: Any, tx: Any = None) -> Parts:
    """Take a state apart.

    Args:
        state: a flax ``TrainState`` (or any dataclass with ``params``, ``opt_state``,
            ``tx`` and ``replace``), ``(nnx.Module, nnx.Optimizer)``, a mapping with
            ``params`` and perhaps ``opt_state``, or a pair of both.
        tx: the transformation, where the state does not carry it.

    Returns:
        The parts.

    Raises:
        ConfigTypeError: any other object.
    """
    if _is_nnx_pair(state):
        return _nnx_parts(*state)
    if all(hasattr(state, name) for name in ("params", "opt_state", "replace")):
        return _train_state_parts(state, tx)
    if isinstance(state, Mapping) and "params" in state:
        return _tree_parts(state, tx, lambda path: (path[0], path[1:]))
    if isinstance(state, tuple) and len(state) == 2 and not hasattr(state, "_fields"):
        kinds = (PARAMS, OPT_STATE)
        return _tree_parts(state, tx, lambda path: (kinds[int(path[0])], path[1:]))
    raise ConfigTypeError(
        "state must be a flax TrainState, a pair (nnx.Module, nnx.Optimizer), a pair"
        " (params, opt_state), or a mapping with 'params' and 'opt_state',"
        f" got {type(state).__module__}.{type(state).__qualname__}"
    )


def _train_state_parts(state: Any, tx: Any) -> Parts:
    parts = _tree_parts(state, tx, lambda path: (path[0], path[1:]))
    has = {name: hasattr(state, name) for name in ("tx", "apply_fn")}

    def rebuild(values: Sequence[Any], tx: Any, apply_fn: Any) -> Any:
        new = parts.rebuild(values, tx, apply_fn)
        fields = {"tx": tx, "apply_fn": apply_fn}
        return new.replace(**{k: v for k, v in fields.items() if has[k]})

    return dataclasses.replace(
        parts,
        tx=getattr(state, "tx", tx),
        apply_fn=getattr(state, "apply_fn", None),
        rebuild=rebuild,
        cls=type(state) if has["tx"] else None,
    )


def _tree_parts(state: Any, tx: Any, sort: Callable[[Path], tuple[str, Path]]) -> Parts:
    names = _boxed_names(state)
    flat, treedef = jax.tree_util.tree_flatten_with_path(state)
    leaves = []
    for keys, value in flat:
        whole = path_of(keys)
        kind, path = sort(whole)
        if kind not in (PARAMS, OPT_STATE):
            kind, path = EXTRA, whole
        leaves.append(_leaf(kind, path, value, names.get(whole)))
    return Parts(
        leaves=tuple(leaves),
        tx=tx,
        apply_fn=None,
        rebuild=lambda values, tx, apply_fn: treedef.unflatten(values),
    )


def _leaf(kind: str, path: Path, value: Any, names: Any = None) -> Leaf:
    if not is_array(value) and not isinstance(value, bool | int | float | complex):
        raise ConfigTypeError(
            f"{kind} leaf {path_str(path)!r} must be an array or a number, got"
            f" {type(value).__qualname__}; keep other values out of the tree"
        )
    return Leaf(kind=kind, path=path, value=value, names=names)


def _boxed_names(tree: Any) -> dict[Path, tuple]:
    """Axis names that ``linen.with_partitioning`` boxes carry, by path."""
    if "flax.core.meta" not in sys.modules:
        return {}
    boxes = sys.modules["flax.core.meta"].AxisMetadata
    flat = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda x: isinstance(x, boxes)
    )
    return {
        path_of(keys): tuple(value.names)
        for keys, value in flat
        if isinstance(value, boxes) and hasattr(value, "names")
    }


def _is_nnx_pair(state: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return (
        nnx is not None
        and isinstance(state, tuple | list)
        and len(state) == 2
        and isinstance(state[0], nnx.Module)
        and isinstance(state[1], nnx.Optimizer)
    )


def _nnx_parts(model: Any, optimizer: Any) -> Parts:
    nnx = sys.modules["flax.nnx"]
    graphdef, state = nnx.split((model, optimizer))
    trained = {path_of(k) for k, _ in _flat(nnx.state(model, optimizer.wrt))}
    variables = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    flat, treedef = jax.tree_util.tree_flatten_with_path(state)
    leaves = []
    for (keys, value), variable in zip(flat, variables, strict=True):
        path = path_of(keys)
        if path[0] == "0" and path[1:] in trained:
            kind, path = PARAMS, path[1:]
        elif path[:2] == ("1", "opt_state"):
            kind, path = OPT_STATE, path[2:]
        else:
            kind = EXTRA
        leaves.append(_leaf(kind, path, value, _variable_names(variable)))

    def rebuild(values: Sequence[Any], tx: Any, apply_fn: Any) -> Any:
        new_model, new_optimizer = nnx.merge(graphdef, treedef.unflatten(values))
        new_optimizer.tx = tx
        return new_model, new_optimizer

    return Parts(leaves=tuple(leaves), tx=optimizer.tx, apply_fn=None, rebuild=rebuild)


def _flat(tree: Any) -> list[Any]:
    return jax.tree_util.tree_leaves_with_path(tree)


def _variable_names(variable: Any) -> tuple | None:
    """Axis names in the metadata of an nnx variable."""
    metadata = getattr(variable, "get_metadata", dict)()
    for key in ("sharding_names", "out_sharding", "sharding"):
        names = metadata.get(key)
        if isinstance(names, tuple | PartitionSpec):
            return tuple(names)
    return None


def mesh_of(parts: Parts) -> Mesh | None:
    """Return the mesh that the state already lives on, if it lives on one."""
    for leaf in parts.leaves:
        sharding = getattr(leaf.value, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    return None


def check_alive(parts: Parts) -> None:
    """Raise DonatedBufferError if some arrays were donated to an earlier step."""
    dead = [path_str(leaf.path) for leaf in parts.leaves if is_deleted(leaf.value)]
    if dead:
        raise DonatedBufferError(
            f"the state holds {len(dead)} deleted arrays ({listing(dead, 5)}): they"
            " were donated to an earlier step; use the state that the step returned"
        )


def warn_tied(parts: Parts, *, stacklevel: int) -> None:
    """Warn of one array under several parameter paths.

    ``stacklevel`` is that of the caller's own ``warnings.warn``.
    """
    for group in tied_params(parts):
        warnings.warn(
            f"parameters {listing(group)} hold one and the same array. Each gets a copy"
            " of its own and its own gradient, so they drift apart in training; if they"
            " are one weight, keep it under one path and use it twice in the model",
            JfleetWarning,
            stacklevel=stacklevel + 1,
        )


def tied_params(parts: Parts) -> list[tuple[str, ...]]:
    """Return groups of parameter paths that hold one and the same array.

    The fast and slow copies that ``optax.lookahead`` starts with are meant to part.
    """
    groups: dict[int, list[Path]] = {}
    for leaf in parts.of_kind(PARAMS):
        if isinstance(leaf.value, jax.Array | np.ndarray):
            groups.setdefault(id(leaf.value), []).append(leaf.path)
    return [
        tuple(map(path_str, group))
        for group in groups.values()
        if len(group) > 1 and {p[:1] for p in group} != {("fast",), ("slow",)}
    ]
