"""The folder of a checkpoint: may it be written, and when is it complete.

Every process writes its arrays, every process reads back its share of the files for
their checksums, and the first one puts the manifest in place.
"""

import dataclasses
import json
import os

import jax
from etils import epath

from jfleet._checkpoint import orbax_io
from jfleet._checkpoint.manifest import (
    FILE_NAME,
    Manifest,
    digest,
    is_interrupted,
    is_own,
    write_manifest,
)
from jfleet._errors import CheckpointError, ConfigTypeError


def _shown(output: object) -> str:
    """A path as it is; of anything else, such as a state, only the type."""
    if isinstance(output, str | bytes | int | None):
        return repr(output)
    return f"{type(output).__qualname__} (is the state the other argument?)"


def folder_of(output: str | os.PathLike[str]) -> epath.Path:
    """Return the absolute path of a checkpoint."""
    if not isinstance(output, str | os.PathLike) or not os.fspath(output):
        raise ConfigTypeError(
            f"output must be the path of a folder, got {_shown(output)}"
        )
    name = os.fspath(output)
    return epath.Path(name if "://" in name else os.path.abspath(name))


def next_generation(folder: epath.Path, overwrite: bool) -> int:
    """Return the number of the next arrays folder, if ``folder`` may be written.

    Raises:
        CheckpointError: it holds something that must not be replaced.
    """
    try:
        if not folder.exists():
            return 0
        if not folder.is_dir():
            raise CheckpointError(f"output {folder} is a file; give another path")
        names = [entry.name for entry in folder.iterdir()]
    except OSError as error:
        raise CheckpointError(f"output {folder} cannot be read: {error}") from error
    complete = FILE_NAME in names
    if names and not complete and not is_interrupted(folder):
        raise CheckpointError(
            f"output {folder} exists and is no checkpoint; give a new or empty folder"
        )
    if names and not overwrite:
        what = "a checkpoint" if complete else "an interrupted save"
        raise CheckpointError(
            f"output {folder} exists and holds {what}; pass overwrite=True to replace"
            " it, or give another folder"
        )
    numbers = [
        int(name.split(".")[1])
        for name in names
        if name.startswith("arrays.") and is_own(name)
    ]
    return max(numbers, default=-1) + 1


def complete(folder: epath.Path, manifest: Manifest) -> None:
    """Record the checksums, put the manifest in place, remove what it replaces."""
    files = {}
    if manifest.arrays is not None:
        files = _digest_together(folder, manifest.arrays)
    if jax.process_index() == 0:
        write_manifest(folder, dataclasses.replace(manifest, files=files))
        _remove_leftovers(folder, keep=manifest.arrays)
    if jax.process_count() > 1:
        orbax_io.barrier(f"jfleet.complete.{folder.name}.{manifest.arrays}")


def _digest_together(folder: epath.Path, name: str) -> dict[str, tuple[int, int]]:
    """Let every process read its share of the files; the first one gets the result."""
    part, parts = jax.process_index(), jax.process_count()
    found = digest(folder / name, part, parts)
    if parts == 1:
        return found
    own = folder / f"digest.{part}.json"
    own.write_text(json.dumps(found))
    orbax_io.barrier(f"jfleet.digest.{folder.name}.{name}")
    if part == 0:
        for other in range(1, parts):
            found |= json.loads((folder / f"digest.{other}.json").read_text())
    return found


def _remove_leftovers(folder: epath.Path, keep: str | None) -> None:
    """Remove the previous arrays and the rests of interrupted saves."""
    for entry in list(folder.iterdir()):
        if entry.name == keep or not is_own(entry.name):
            continue
        try:
            entry.rmtree() if entry.is_dir() else entry.unlink()
        except OSError:
            # The new checkpoint is complete; the next save tries again.
            continue


def write_error(folder: epath.Path, error: BaseException) -> CheckpointError:
    """Return the error for a save that failed on its way."""
    new = CheckpointError(
        f"checkpoint {folder} could not be written ({type(error).__name__}: {error});"
        " what was there before is still there; check space and permissions, then save"
        " again"
    )
    new.__cause__ = error
    return new
