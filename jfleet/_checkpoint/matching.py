"""Which stored array goes to which leaf of a state, decided before anything is read.

Names, shapes and types decide. Under ``strict`` they must all agree; else
``elastic`` looks further. Whatever does not agree is a ``Difference`` with its fate.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jfleet._checkpoint.leaves import Leaf
from jfleet._checkpoint.manifest import Entry, Manifest, decode_scalar, dtype_of
from jfleet._errors import CheckpointError
from jfleet._tree import path_str

PYTHON = {"bool": np.bool_, "int": np.integer, "float": np.floating}
PYTHON_OR_COMPLEX = {**PYTHON, "complex": np.complexfloating}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One leaf on which a checkpoint and a state do not agree."""

    path: str
    """Path for people."""
    text: str
    """What is stored and what is wanted."""
    fates: tuple[str, ...]
    """``converted``; or ``fresh`` (as in the state), ``gone`` (not loaded), or both."""

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


def match(
    manifest: Manifest, leaves: Sequence[Leaf]
) -> tuple[dict[str, Entry], list[Difference]]:
    """Find the stored leaf of the same name and type for each leaf of a state.

    Returns:
        Stored entries by name of the wanted leaf, and all differences by path.
    """
    stored = {entry.name: entry for entry in manifest.entries}
    matches, differences = {}, []
    for leaf in leaves:
        entry = stored.pop(leaf.name, None)
        if entry is None:
            differences.append(missing(leaf))
        elif fits(entry, leaf):
            matches[leaf.name] = entry
        else:
            differences.append(other_type(entry, leaf))
    differences += [unexpected(entry) for entry in stored.values()]
    return matches, sorted(differences, key=lambda d: d.path)


def missing(leaf: Leaf) -> Difference:
    """The difference of a leaf that is not stored."""
    text = f"wanted as {leaf_type(leaf)}, not in the checkpoint (missing)"
    return Difference(path=path_str(leaf.path), text=text, fates=("fresh",))


def unexpected(entry: Entry) -> Difference:
    """The difference of a stored leaf that is not wanted."""
    text = f"stored as {entry_type(entry)}, not in this state (unexpected)"
    return Difference(path=entry_path(entry), text=text, fates=("gone",))


def other_type(entry: Entry, leaf: Leaf) -> Difference:
    """The difference of a leaf that is stored with another type."""
    old, new = entry_type(entry), leaf_type(leaf)
    if owners_differ(entry, leaf):
        old, new = f"{old} in {entry.owner}", f"{new} in {leaf.owner}"
    text = f"stored as {old}, wanted as {new}"
    fates = ("converted",) if convertible(entry, leaf) else ("fresh", "gone")
    return Difference(path=path_str(leaf.path), text=text, fates=fates)


def owners_differ(entry: Entry, leaf: Leaf) -> bool:
    """True if both are in NamedTuples, of different types."""
    return bool(entry.owner and leaf.owner and entry.owner != leaf.owner)


def convertible(entry: Entry, leaf: Leaf) -> bool:
    """True if only the element type or the number of replicas differ."""
    return same_shape(entry, leaf) and not owners_differ(entry, leaf)


def same_shape(entry: Entry, leaf: Leaf) -> bool:
    """True for arrays of which each replica has the same shape."""
    both_arrays = entry.kind == leaf.kind == "array"
    return both_arrays and entry.one_shape == leaf.one_shape


def entry_path(entry: Entry) -> str:
    """Path for people."""
    return path_str(tuple(map(str, entry.path)))


def fits(entry: Entry, leaf: Leaf) -> bool:
    """True if a stored leaf can become a wanted leaf without a change."""
    if entry.kind == leaf.kind:
        if leaf.kind not in ("array", "key"):
            return True
        same_shape = entry.shape == tuple(leaf.value.shape)
        same_type = entry.dtype == leaf.dtype_name
        return same_shape and same_type and entry.replicas == leaf.replicas
    if entry.kind == "array" and leaf.kind in PYTHON_OR_COMPLEX:
        dtype = dtype_of(entry.dtype)
        kind = PYTHON_OR_COMPLEX[leaf.kind]
        return entry.shape == () and jnp.issubdtype(dtype, kind)
    if entry.kind in PYTHON_OR_COMPLEX and leaf.kind == "array":
        value = decode_scalar(entry.kind, entry.value)
        return tuple(leaf.value.shape) == () and _holds(leaf.value.dtype, value)
    return False


def _holds(dtype: Any, value: Any) -> bool:
    """True if an element of that type can hold a Python number exactly."""
    kind = PYTHON_OR_COMPLEX[type(value).__name__]
    if not jnp.issubdtype(dtype, kind):
        return False
    if isinstance(value, int) and not isinstance(value, bool):
        limits = jnp.iinfo(dtype)
        return limits.min <= value <= limits.max
    back = np.asarray(value, dtype).item()
    return back == value or value != value


def entry_type(entry: Entry) -> str:
    """Type of a stored leaf, for people."""
    return _type(entry.kind, entry.dtype, entry.shape, entry.replicas)


def leaf_type(leaf: Leaf) -> str:
    """Type of a wanted leaf, for people."""
    if leaf.kind not in ("array", "key"):
        return _type(leaf.kind, "", (), 0)
    return _type(leaf.kind, leaf.dtype_name, tuple(leaf.value.shape), leaf.replicas)


def _type(kind: str, dtype: str, shape: tuple[int, ...], replicas: int) -> str:
    if kind == "static":
        return "a function"
    if kind not in ("array", "key"):
        return f"a Python {kind}"
    sizes = "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"
    text = f"{dtype} {sizes}" + (f" of {replicas} replicas" if replicas else "")
    return text if kind == "array" else f"random key {text}"


def mismatch(output: Any, differences: Sequence[Difference]) -> CheckpointError:
    """Return the error for a checkpoint of another model."""
    shown = "".join(f"\n  {d}" for d in differences[:10])
    more = len(differences) - 10
    if all(d.fates == ("converted",) for d in differences):
        remedy = "pass strict=False to convert them"
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
