"""Compare a checkpoint with a state, and put stored values where the state wants them.

Which leaf gets which stored array is decided first, on names, shapes and types alone;
nothing is read before every difference is known.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh, NamedSharding, Sharding

from jfleet._checkpoint import orbax_io
from jfleet._checkpoint.leaves import Leaf, is_abstract, tied
from jfleet._checkpoint.manifest import Entry, Manifest, decode_scalar, dtype_of
from jfleet._errors import CheckpointError, PlacementError
from jfleet._tree import path_str

_PYTHON = {"bool": np.bool_, "int": np.integer, "float": np.floating}
_PYTHON_OR_COMPLEX = {**_PYTHON, "complex": np.complexfloating}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One leaf on which a checkpoint and a state do not agree."""

    path: str
    """Path for people."""
    text: str
    """What is stored and what is wanted."""
    castable: bool = False
    """True if only the element type differs."""

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


def match(
    manifest: Manifest, leaves: Sequence[Leaf], *, strict: bool
) -> tuple[dict[str, Entry], list[Difference]]:
    """Find the stored leaf for each leaf of a state.

    Args:
        manifest: what is stored.
        leaves: what is wanted.
        strict: if False, a stored array of another element type is a match too.

    Returns:
        Stored entries by name of the wanted leaf, and all differences by path.
    """
    stored = {entry.name: entry for entry in manifest.entries}
    wanted = {leaf.name: leaf for leaf in leaves}
    matches, differences = {}, []
    for name, leaf in wanted.items():
        entry = stored.get(name)
        difference = _compare(entry, leaf)
        if difference is not None:
            differences.append(difference)
        if entry and (not difference or (difference.castable and not strict)):
            matches[name] = entry
    for name, entry in stored.items():
        if name not in wanted:
            path = path_str(tuple(map(str, entry.path)))
            text = f"stored as {_entry_type(entry)}, not in this state (unexpected)"
            differences.append(Difference(path=path, text=text))
    return matches, sorted(differences, key=lambda d: d.path)


def _compare(entry: Entry | None, leaf: Leaf) -> Difference | None:
    path = path_str(leaf.path)
    if entry is None:
        text = f"wanted as {_leaf_type(leaf)}, not in the checkpoint (missing)"
        return Difference(path=path, text=text)
    if _fits(entry, leaf):
        return None
    text = f"stored as {_entry_type(entry)}, wanted as {_leaf_type(leaf)}"
    both_arrays = entry.kind == leaf.kind == "array"
    castable = both_arrays and entry.shape == tuple(leaf.value.shape)
    return Difference(path=path, text=text, castable=castable)


def _fits(entry: Entry, leaf: Leaf) -> bool:
    if entry.kind == leaf.kind:
        if leaf.kind not in ("array", "key"):
            return True
        shape = tuple(leaf.value.shape)
        return entry.shape == shape and entry.dtype == leaf.dtype_name
    if entry.kind == "array" and leaf.kind in _PYTHON_OR_COMPLEX:
        dtype = dtype_of(entry.dtype)
        kind = _PYTHON_OR_COMPLEX[leaf.kind]
        return entry.shape == () and jnp.issubdtype(dtype, kind)
    if entry.kind in _PYTHON_OR_COMPLEX and leaf.kind == "array":
        value = decode_scalar(entry.kind, entry.value)
        return tuple(leaf.value.shape) == () and _holds(leaf.value.dtype, value)
    return False


def _holds(dtype: Any, value: Any) -> bool:
    """True if an element of that type can hold a Python number exactly."""
    kind = _PYTHON_OR_COMPLEX[type(value).__name__]
    if not jnp.issubdtype(dtype, kind):
        return False
    if isinstance(value, int) and not isinstance(value, bool):
        limits = jnp.iinfo(dtype)
        return limits.min <= value <= limits.max
    back = np.asarray(value, dtype).item()
    return back == value or value != value


def _entry_type(entry: Entry) -> str:
    return _type(entry.kind, entry.dtype, entry.shape)


def _leaf_type(leaf: Leaf) -> str:
    if leaf.kind not in ("array", "key"):
        return _type(leaf.kind, "", ())
    return _type(leaf.kind, leaf.dtype_name, tuple(leaf.value.shape))


def _type(kind: str, dtype: str, shape: tuple[int, ...]) -> str:
    if kind == "static":
        return "a function"
    if kind not in ("array", "key"):
        return f"a Python {kind}"
    sizes = "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"
    return f"{dtype} {sizes}" if kind == "array" else f"random key {dtype} {sizes}"


def check_targets(leaves: Sequence[Leaf]) -> None:
    """Raise unless every wanted layout can hold its array.

    Raises:
        PlacementError: a mesh without devices, or a spec that does not divide.
    """
    for leaf in leaves:
        sharding = _target_sharding(leaf)
        if sharding is None:
            continue
        where = f"leaf {path_str(leaf.path)!r}"
        mesh = getattr(sharding, "mesh", None)
        if isinstance(sharding, NamedSharding) and not isinstance(mesh, Mesh):
            raise PlacementError(
                f"{where} must be wanted on devices, got the abstract mesh {mesh};"
                " give shardings on a jax.sharding.Mesh"
            )
        try:
            sharding.shard_shape(tuple(leaf.value.shape))
        except ValueError as error:
            raise PlacementError(
                f"{where} of shape {tuple(leaf.value.shape)} cannot be laid out as"
                f" {sharding}: {error}; lay the state out again for this mesh, for"
                " example with group_sharded_parallel"
            ) from error


def _target_sharding(leaf: Leaf) -> Sharding | None:
    """Return the layout wanted for a leaf, None for "wherever JAX puts it"."""
    if leaf.kind not in ("array", "key"):
        return None
    if isinstance(leaf.value, jax.Array) and not leaf.value.committed:
        return None
    sharding = getattr(leaf.value, "sharding", None)
    return sharding if isinstance(sharding, Sharding) else None


def load_values(
    folder: epath.Path | None,
    manifest: Manifest,
    leaves: Sequence[Leaf],
    matches: Mapping[str, Entry],
) -> dict[str, Any]:
    """Read the matched leaves and lay each out as its leaf is.

    At any time this holds the new arrays and at most ``STAGING_BYTES`` (or one array)
    of host copies.

    Args:
        folder: the arrays.
        manifest: what is stored.
        leaves: what is wanted.
        matches: stored entry by name of the wanted leaf.

    Returns:
        New values by name.
    """
    stored = {entry.name: entry for entry in manifest.entries}
    users: dict[str, list[Leaf]] = {}
    values: dict[str, Any] = {}
    for leaf in leaves:
        entry = matches.get(leaf.name)
        if entry is None:
            continue
        if entry.kind not in ("array", "key"):
            values[leaf.name] = _from_python(entry, leaf)
        else:
            source = stored[entry.same_as or entry.name]
            users.setdefault(source.name, []).append(leaf)
    shared = _Shared(leaves)
    for batch in _batches(folder, stored, users):
        placed = {}
        while batch:
            name, array = batch.popitem()
            placed |= shared.put_all(name, users[name], array)
        # Transfers hold on to the host copies; end them before the next batch is read.
        jax.block_until_ready(placed)
        values |= placed
    return values


def _batches(
    folder: epath.Path | None,
    stored: Mapping[str, Entry],
    users: Mapping[str, Sequence[Leaf]],
) -> Iterator[dict[str, Any]]:
    requests = {name: _request(stored[name], users[name][0]) for name in users}
    present = {n: r for n, r in requests.items() if stored[n].stored}
    yield {n: orbax_io.empty(r) for n, r in requests.items() if n not in present}
    if present and folder is not None:
        yield from orbax_io.read(folder, present)


def _request(entry: Entry, leaf: Leaf) -> orbax_io.Request:
    sharding = _target_sharding(leaf)
    if sharding is not None and (
        sharding.is_fully_addressable or getattr(leaf.value, "weak_type", False)
    ):
        sharding = None
    is_key = entry.kind == "key"
    return orbax_io.Request(
        shape=entry.shape,
        dtype=None if is_key else dtype_of(entry.dtype),
        impl=entry.dtype if is_key else None,
        sharding=sharding,
    )


def _from_python(entry: Entry, leaf: Leaf) -> Any:
    if entry.kind == "static":
        return leaf.value
    value = decode_scalar(entry.kind, entry.value)
    if leaf.kind != "array":
        return value
    return _place(leaf, np.asarray(value, leaf.value.dtype))


class _Shared:
    """Gives leaves that are tied in the state one array, and others their own.

    A concrete state says itself what is tied in it. An abstract one cannot, so there
    the checkpoint decides.
    """

    def __init__(self, leaves: Sequence[Leaf]):
        self._tied = tied(leaves)
        self._made: dict[Any, Any] = {}

    def put_all(
        self, source: str, leaves: Sequence[Leaf], value: Any
    ) -> dict[str, Any]:
        """Place one stored array for each of its leaves."""
        # Numpy memory may become the memory of a CPU array: one array each.
        return {
            leaf.name: self._put(source, leaf, value.copy() if number else value)
            for number, leaf in enumerate(leaves)
        }

    def _put(self, source: str, leaf: Leaf, value: Any) -> Any:
        if leaf.kind not in ("array", "key"):
            return _place(leaf, value)
        if is_abstract(leaf.value):
            look = (source, str(leaf.value.dtype), _target_sharding(leaf))
        else:
            look = (source, self._tied.get(leaf.name, leaf.name))
        if look not in self._made:
            self._made[look] = _place(leaf, value)
        return self._made[look]


def _place(leaf: Leaf, value: Any) -> Any:
    """Turn a numpy array, random key or global array into what a leaf is."""
    like = leaf.value
    if leaf.kind in _PYTHON_OR_COMPLEX:
        return type(like)(value.item())
    if leaf.kind == "array" and value.dtype != like.dtype:
        value = value.astype(like.dtype)
    if isinstance(like, np.ndarray):
        return value
    if isinstance(like, np.generic):
        return value[()]
    if getattr(like, "weak_type", False):
        value = _weak(value)
    sharding = _target_sharding(leaf)
    if sharding is None:
        return jnp.asarray(value)
    if isinstance(value, jax.Array) and value.sharding == sharding:
        return value
    if sharding.is_fully_addressable or isinstance(value, jax.Array):
        return jax.device_put(value, sharding)
    return jax.make_array_from_callback(
        value.shape, sharding, lambda index: value[index]
    )


def _weak(value: np.ndarray) -> Any:
    """Make a weakly typed array of the same bits, if there is one.

    ``step + 1`` of a Python counter is weakly typed after the first jitted step; a
    strong one in its place would compile that step again.
    """
    if value.ndim:
        return value
    weak = jnp.asarray(value.item())
    same = weak.dtype == value.dtype and np.asarray(weak).tobytes() == value.tobytes()
    return weak if same else value


def mismatch(output: Any, differences: Sequence[Difference]) -> CheckpointError:
    """Return the error for a checkpoint of another model."""
    shown = "".join(f"\n  {d}" for d in differences[:10])
    more = len(differences) - 10
    if all(d.castable for d in differences):
        remedy = "pass strict=False to convert the element types"
    else:
        remedy = (
            "build the state as it was when saved, or pass strict=False to load what"
            " matches and keep the rest"
        )
    return CheckpointError(
        f"checkpoint {output} does not fit this state, {len(differences)} leaves"
        f" differ:{shown}"
        + (f"\n  and {more} more" if more > 0 else "")
        + f"\n{remedy}"
    )
