"""The leaves of a state as a checkpoint sees them: names, kinds, tied buffers."""

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jfleet._checkpoint.manifest import Entry, encode_scalar, entry_name, supported
from jfleet._errors import CheckpointError, DonatedBufferError, listing
from jfleet._step import replicas
from jfleet._step.state import TrainState
from jfleet._tree import Path, is_array, is_prng_key, path_of, path_str

SCALARS = (bool, int, float, complex, str)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One leaf of a live state."""

    path: Path
    """Path as in ``jfleet._tree``."""
    typed_path: tuple[str | int, ...]
    """The same path with integer keys and indices as integers."""
    kind: str
    """One of ``jfleet._checkpoint.manifest.KINDS``."""
    value: Any
    """Array, abstract array, Python value or function."""
    replicas: int = 0
    """Size of the first dim, where each replica has a value of its own; else 0."""
    owner: str = ""
    """Name of the innermost NamedTuple that the leaf is in."""

    @property
    def one_shape(self) -> tuple[int, ...]:
        """Shape of one replica's array."""
        shape = tuple(self.value.shape)
        return shape[1:] if self.replicas else shape

    @property
    def name(self) -> str:
        """Name in the array store."""
        return entry_name(self.path)

    @property
    def dtype_name(self) -> str:
        """Element type, or random key implementation, by name."""
        if self.kind == "key":
            return key_impl(self.value)
        return np.dtype(self.value.dtype).name


def key_impl(key: Any) -> str:
    """Return the implementation of a concrete or abstract random key array.

    >>> key_impl(jax.random.key(0, impl="rbg"))
    'rbg'
    """
    names = []

    def look(keys: Any) -> Any:
        names.append(str(jax.random.key_impl(keys)))
        return keys

    jax.eval_shape(look, jax.ShapeDtypeStruct(key.shape, key.dtype))
    return names[0]


def flatten(state: Any) -> tuple[list[Leaf], Callable[[Sequence[Any]], Any]]:
    """List the leaves of a state, and a function that puts other leaves in.

    nnx objects are split, so a variable that two modules share is one leaf, and the
    function makes new objects.

    Raises:
        CheckpointError: two leaves have one name, or a leaf cannot be stored.
    """
    tree, finish = _split_nnx(state)
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
    own = jax.tree.leaves(_own_tree(tree))
    leaves = [
        _leaf(keys, value, has_replicas, _owner(tree, keys))
        for (keys, value), has_replicas in zip(flat, own, strict=True)
    ]
    _check_unique(leaves)
    return leaves, lambda values: finish(treedef.unflatten(values))


def _split_nnx(state: Any) -> tuple[Any, Callable[[Any], Any]]:
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not any(
        isinstance(node, nnx.Pytree)
        for node in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Pytree))
    ):
        return state, lambda tree: tree
    graphdef, tree = nnx.split(state)
    return tree, lambda new: nnx.merge(graphdef, new)


def _own_tree(tree: Any) -> Any:
    """A tree of bools: whether each replica has a value of its own in its first dim."""

    def of(node: Any) -> Any:
        if not isinstance(node, TrainState):
            return False
        # Only where parameters are each replica's own are metrics kept between syncs.
        own = node.shown is not None
        residuals = node.replica_state
        if residuals is not None:
            every = replicas.everywhere(residuals.residual, True)
            residuals = replicas.everywhere(residuals, False)._replace(residual=every)
        return node.replace(
            step=False,
            params=replicas.everywhere(node.params, own),
            opt_state=replicas.owned(node.opt_state, own),
            model_state=replicas.everywhere(node.model_state, own),
            replica_state=residuals,
            shown=replicas.everywhere(node.shown, False),
        )

    return jax.tree.map(of, tree, is_leaf=lambda x: isinstance(x, TrainState))


def _owner(tree: Any, keys: Sequence[Any]) -> str:
    """Name of the innermost NamedTuple on a path; "" if there is none."""
    owner, node = "", tree
    for key in keys:
        if isinstance(node, tuple) and hasattr(node, "_fields"):
            owner = type(node).__name__
        if isinstance(key, jax.tree_util.GetAttrKey):
            if not (isinstance(node, tuple) or dataclasses.is_dataclass(node)):
                break  # A variable of nnx: no optax state is inside.
            node = getattr(node, key.name)
        elif isinstance(node, list | tuple | Mapping):
            where: Any = getattr(key, "idx", getattr(key, "key", None))
            node = node[where]
        else:
            break
    return owner


def _leaf(keys: Sequence[Any], value: Any, has_replicas: bool, owner: str) -> Leaf:
    path = path_of(keys)
    raw = [getattr(k, "key", getattr(k, "idx", None)) for k in keys]
    typed = tuple(
        r if isinstance(r, int) and not isinstance(r, bool) else step
        for r, step in zip(raw, path, strict=False)
    )
    return Leaf(
        path=path,
        typed_path=typed,
        kind=_kind(path, value),
        value=value,
        replicas=value.shape[0] if has_replicas else 0,
        owner=owner,
    )


def _kind(path: Path, value: Any) -> str:
    if isinstance(value, jax.core.Tracer):
        raise CheckpointError(
            f"leaf {path_str(path)!r} is being traced by jax.jit or another"
            " transformation; save and load outside of it"
        )
    if is_prng_key(value):
        return "key"
    if type(value) in SCALARS:
        return type(value).__name__
    masked = isinstance(value, np.ma.MaskedArray)
    if is_array(value) and not masked and _has_supported_dtype(value):
        return "array"
    if callable(value) and not is_array(value):
        return "static"
    what = getattr(value, "dtype", None) if is_array(value) else None
    raise CheckpointError(
        f"leaf {path_str(path)!r} must be an array, a random key, a number, a string or"
        f" a function, got {type(value).__name__}"
        + (f" of {what}" if what is not None else "")
        + "; keep it out of the state or in a static field"
    )


def _has_supported_dtype(value: Any) -> bool:
    try:
        return supported(value.dtype)
    except TypeError:
        return False


def _check_unique(leaves: Sequence[Leaf]) -> None:
    seen: dict[str, Leaf] = {}
    for leaf in leaves:
        if leaf.name in seen:
            raise CheckpointError(
                f"two leaves have the path {path_str(leaf.path)!r}; rename one"
            )
        seen[leaf.name] = leaf


def check_alive(leaves: Sequence[Leaf]) -> None:
    """Raise unless every leaf holds values.

    Raises:
        DonatedBufferError: some arrays were donated to an earlier step.
        CheckpointError: some arrays are abstract.
    """
    arrays = [leaf for leaf in leaves if leaf.kind in ("array", "key")]
    dead = [
        path_str(leaf.path)
        for leaf in arrays
        if isinstance(leaf.value, jax.Array) and leaf.value.is_deleted()
    ]
    if dead:
        raise DonatedBufferError(
            f"the state holds {len(dead)} deleted arrays ({listing(dead)}): they were"
            " donated to an earlier step; save the state that the step returned"
        )
    abstract = [path_str(leaf.path) for leaf in arrays if is_abstract(leaf.value)]
    if abstract:
        raise CheckpointError(
            f"the state holds {len(abstract)} arrays without values"
            f" ({listing(abstract)}); save a state of concrete arrays"
        )


def is_abstract(value: Any) -> bool:
    """True for what only has a shape and a dtype."""
    return not isinstance(value, jax.Array | np.ndarray | np.generic)


def describe(leaves: Sequence[Leaf]) -> tuple[list[Entry], tuple[dict[str, int], ...]]:
    """Return one manifest entry per leaf, and the meshes that the entries refer to."""
    meshes: list[dict[str, int]] = []
    first = tied(leaves)
    entries = [_entry(leaf, first.get(leaf.name), meshes) for leaf in leaves]
    return entries, tuple(meshes)


def _entry(leaf: Leaf, first: str | None, meshes: list[dict[str, int]]) -> Entry:
    if leaf.kind == "static":
        return Entry(path=leaf.typed_path, kind="static")
    if leaf.kind not in ("array", "key"):
        value = encode_scalar(leaf.value)
        return Entry(
            path=leaf.typed_path, kind=leaf.kind, value=value, owner=leaf.owner
        )
    spec, mesh = _layout(leaf.value, meshes)
    return Entry(
        path=leaf.typed_path,
        kind=leaf.kind,
        shape=tuple(leaf.value.shape),
        dtype=leaf.dtype_name,
        spec=spec,
        mesh=mesh,
        same_as=first if first != leaf.name else None,
        replicas=leaf.replicas,
        owner=leaf.owner,
    )


def _layout(
    value: Any, meshes: list[dict[str, int]]
) -> tuple[tuple[Any, ...] | None, int | None]:
    sharding = getattr(value, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None, None
    mesh = {str(axis): int(size) for axis, size in sharding.mesh.shape.items()}
    if mesh not in meshes:
        meshes.append(mesh)
    spec = tuple(
        entry if entry is None or isinstance(entry, str) else tuple(map(str, entry))
        for entry in sharding.spec
    )
    return spec, meshes.index(mesh)


def tied(leaves: Sequence[Leaf]) -> dict[str, str]:
    """Map the name of each tied leaf to the first leaf that has its buffer.

    Tied are leaves that are one object, and arrays whose every shard lies at the same
    address (``device_put`` to a layout that an array already has makes such twins).
    """
    firsts: dict[Any, Leaf] = {}
    candidates: dict[Any, list[Leaf]] = {}
    same: dict[str, str] = {}
    for leaf in leaves:
        if leaf.kind not in ("array", "key") or is_abstract(leaf.value):
            continue
        first = firsts.setdefault(id(leaf.value), leaf)
        if first is leaf:
            first = _twin(leaf, candidates) or leaf
            firsts[id(leaf.value)] = first
        if first is not leaf:
            same[first.name] = same[leaf.name] = first.name
    return same


def _twin(leaf: Leaf, candidates: dict[Any, list[Leaf]]) -> Leaf | None:
    """Return an earlier leaf with the same buffers; remember this one."""
    value = leaf.value
    if not isinstance(value, jax.Array) or leaf.kind == "key" or value.size == 0:
        return None
    if value.is_deleted() or not value.addressable_shards:
        return None
    look = (value.shape, value.dtype, value.sharding, _address(value, 0))
    known = candidates.setdefault(look, [])
    num = len(value.sharding.addressable_devices)
    for other in known:
        pairs = ((_address(value, i), _address(other.value, i)) for i in range(num))
        if all(a == b for a, b in pairs):
            return other
    known.append(leaf)
    return None


def _address(array: jax.Array, index: int) -> int:
    return array.addressable_data(index).unsafe_buffer_pointer()


def step_of(leaves: Sequence[Leaf]) -> int | None:
    """Return the training step that the state carries, if it carries one."""
    for leaf in leaves:
        if leaf.path[-1:] != ("step",) or leaf.kind not in ("array", "int"):
            continue
        value = leaf.value
        if isinstance(value, jax.Array):
            value = value.addressable_data(0)
        if np.ndim(value) == 0 and np.issubdtype(np.asarray(value).dtype, np.integer):
            return int(value)
    return None


def level_of(state: Any) -> str | None:
    """Return the group sharding level that a state was placed with, if any."""
    parts: Sequence[Any] = [state]
    if isinstance(state, tuple | list):
        parts = state
    elif isinstance(state, Mapping):
        parts = list(state.values())
    for part in parts:
        policy = getattr(getattr(part, "tx", None), "policy", None)
        level = getattr(policy, "level", None)
        if isinstance(level, str):
            return level
    return None
