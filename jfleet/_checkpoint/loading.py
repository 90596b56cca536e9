"""Read stored values and put them where the state wants them.

``matching`` has decided which leaf gets which; nothing is read before every difference
is known.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh, NamedSharding, Sharding

from jfleet._checkpoint import orbax_io
from jfleet._checkpoint.leaves import Leaf, is_abstract, tied
from jfleet._checkpoint.manifest import Entry, Manifest, decode_scalar, dtype_of
from jfleet._checkpoint.matching import PYTHON_OR_COMPLEX
from jfleet._checkpoint.memory import trim
from jfleet._errors import PlacementError
from jfleet._tree import path_str


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
    *,
    donate: bool = False,
) -> dict[str, Any]:
    """Read the matched leaves and lay each out as its leaf is.

    At any time this holds the new arrays and at most ``STAGING_BYTES`` (or one shard)
    of host copies.

    Args:
        folder: the arrays.
        manifest: what is stored.
        leaves: what is wanted.
        matches: stored entry by name of the wanted leaf.
        donate: delete the arrays of the leaves that are matched before reading.

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
    if donate:
        _delete(leaf.value for group in users.values() for leaf in group)
    for batch in _batches(folder, stored, users):
        placed = {}
        while batch:
            name, array = batch.popitem()
            placed |= shared.put_all(stored[name], users[name], array)
        # Transfers hold on to the host copies; end them before the next batch is read.
        jax.block_until_ready(placed)
        values |= placed
        trim()
    return values


def _delete(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, jax.Array) and not value.is_deleted():
            value.delete()


def _batches(
    folder: epath.Path | None,
    stored: Mapping[str, Entry],
    users: Mapping[str, Sequence[Leaf]],
) -> Iterator[dict[str, Any]]:
    requests = {name: _request(stored[name], users[name]) for name in users}
    present = {n: r for n, r in requests.items() if stored[n].stored}
    yield {n: orbax_io.empty(r) for n, r in requests.items() if n not in present}
    if present and folder is not None:
        yield from orbax_io.read(folder, present)


def _request(entry: Entry, leaves: Sequence[Leaf]) -> orbax_io.Request:
    is_key = entry.kind == "key"
    request = orbax_io.Request(
        shape=entry.shape,
        dtype=None if is_key else dtype_of(entry.dtype),
        impl=entry.dtype if is_key else None,
    )
    sharding = _target_sharding(leaves[0])
    if sharding is None or getattr(leaves[0].value, "weak_type", False):
        return request
    if any(leaf.replicas != entry.replicas for leaf in leaves):
        return request  # Their mean is taken on the host.
    if sharding.is_fully_addressable and (is_key or not request.is_large):
        return request
    return dataclasses.replace(request, sharding=sharding)


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
        self, entry: Entry, leaves: Sequence[Leaf], value: Any
    ) -> dict[str, Any]:
        """Place one stored array for each of its leaves."""
        # Numpy memory may become the memory of a CPU array: one array each.
        return {
            leaf.name: self._put(entry, leaf, value.copy() if number else value)
            for number, leaf in enumerate(leaves)
        }

    def _put(self, entry: Entry, leaf: Leaf, value: Any) -> Any:
        if leaf.kind == "array" and entry.replicas != leaf.replicas:
            value = _for_replicas(value, entry.replicas, leaf)
        if leaf.kind not in ("array", "key"):
            return _place(leaf, value)
        if is_abstract(leaf.value):
            look = (entry.name, str(leaf.value.dtype), _target_sharding(leaf))
        else:
            look = (entry.name, self._tied.get(leaf.name, leaf.name))
        if look not in self._made:
            self._made[look] = _place(leaf, value)
        return self._made[look]


def _for_replicas(value: np.ndarray, stored: int, leaf: Leaf) -> np.ndarray:
    """Take the mean of the stored replicas, and give it to each wanted one.

    A mean keeps what the next synchronisation would have found: parameters, moments,
    and the mean of what waits to be sent. Of integers there is no mean: the first.
    """
    if stored and jnp.issubdtype(value.dtype, jnp.inexact):
        wide = np.complex128 if value.dtype.kind == "c" else np.float64
        value = value.mean(axis=0, dtype=wide)
    elif stored:
        value = value[0]
    value = value.astype(leaf.value.dtype)
    return (
        np.broadcast_to(value, (leaf.replicas, *value.shape))
        if leaf.replicas
        else value
    )


def _place(leaf: Leaf, value: Any) -> Any:
    """Turn a numpy array, random key or global array into what a leaf is."""
    like = leaf.value
    if leaf.kind in PYTHON_OR_COMPLEX:
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
