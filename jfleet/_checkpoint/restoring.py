"""Load a checkpoint that was found whole into a state."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from etils import epath

from jfleet._checkpoint.elastic import match_elastic
from jfleet._checkpoint.files import check_files, damaged
from jfleet._checkpoint.leaves import Leaf, flatten, is_abstract
from jfleet._checkpoint.loading import check_targets, load_values
from jfleet._checkpoint.manifest import Manifest
from jfleet._checkpoint.matching import Difference, match, mismatch
from jfleet._checkpoint.states import logical_states, stored_like_states
from jfleet._checkpoint.together import Agreement
from jfleet._errors import CheckpointError, listing
from jfleet._tree import path_str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a load with ``strict=False`` did to the leaves that did not just fit."""

    differences: tuple[Difference, ...] = ()
    """Every such leaf, by path, with what became of it."""

    def _paths(self, fate: str) -> tuple[str, ...]:
        return tuple(d.path for d in self.differences if fate in d.fates)

    @property
    def converted(self) -> tuple[str, ...]:
        """Paths in the state of what was loaded from another type or place."""
        return self._paths("converted")

    @property
    def fresh(self) -> tuple[str, ...]:
        """Paths in the state of what was not stored, and is as it was in the state."""
        return self._paths("fresh")

    @property
    def gone(self) -> tuple[str, ...]:
        """Paths in the checkpoint of what the state has no place for."""
        return self._paths("gone")

    def __str__(self) -> str:
        return "".join(f"\n  {d}" for d in self.differences)


def restore(
    folder: epath.Path,
    manifest: Manifest,
    state: Any,
    *,
    strict: bool,
    donate: bool = False,
    checked: bool = False,
) -> tuple[Any, LoadReport]:
    """Load into a state of any layout; all processes call it.

    Args:
        folder: of the checkpoint.
        manifest: what is in it.
        state: what the result looks like.
        strict: every leaf must be stored with the same type, and no other.
        donate: delete arrays of ``state`` that are replaced, once all is known to fit.
        checked: the files have been compared with the manifest.

    Returns:
        The state, and what did not just fit.

    Raises:
        CheckpointError: a damaged checkpoint, or one of another model.
        PlacementError: an array cannot be laid out as ``state`` wants it.
    """
    with Agreement():
        leaves, rebuild = flatten(logical_states(state))
        find = match if strict else match_elastic
        matches, differences = find(manifest, leaves)
        if differences and strict:
            raise mismatch(folder, differences)
        check_targets(leaves)
        _check_kept(folder, [x for x in leaves if x.name not in matches])
    if not checked:
        verify(folder, manifest)
    arrays = None if manifest.arrays is None else folder / manifest.arrays
    with Agreement():
        try:
            values = load_values(arrays, manifest, leaves, matches, donate=donate)
        except (ValueError, KeyError, OSError, TypeError, RuntimeError) as error:
            lost = "; the given state was donated and is lost" if donate else ""
            reason = f"its arrays cannot be read ({error}){lost}"
            raise damaged(folder, reason) from error
    loaded = rebuild([values.get(leaf.name, leaf.value) for leaf in leaves])
    report = LoadReport(differences=tuple(differences))
    return stored_like_states(loaded, state), report


def verify(folder: epath.Path, manifest: Manifest) -> None:
    """Compare every file with the manifest, each process its share.

    Raises:
        CheckpointError: files are missing or have changed.
    """
    part, parts = jax.process_index(), jax.process_count()
    with Agreement():
        check_files(folder, manifest.arrays, manifest.files, part, parts)


def _check_kept(folder: epath.Path, kept: Sequence[Leaf]) -> None:
    """Without strict some leaves stay as they are: then they must have values."""
    empty = [
        path_str(leaf.path)
        for leaf in kept
        if leaf.kind in ("array", "key")
        and (
            is_abstract(leaf.value)
            or (isinstance(leaf.value, jax.Array) and leaf.value.is_deleted())
        )
    ]
    if empty:
        raise CheckpointError(
            f"checkpoint {folder} has nothing for {len(empty)} leaves that have no"
            f" value in the state either ({listing(empty)}); give concrete arrays for"
            " them"
        )
