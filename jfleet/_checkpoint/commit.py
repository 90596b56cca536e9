"""The folder of a checkpoint: may it be written, and when is it complete.

Every process writes its arrays, every process reads back its share of the files for
their checksums, and the first one puts the manifest in place.
"""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
from etils import epath

from jfleet._checkpoint.files import digest, is_link, sync_folders
from jfleet._checkpoint.manifest import (
    FILE_NAME,
    Manifest,
    is_interrupted,
    is_own,
    write_manifest,
)
from jfleet._checkpoint.together import BACKGROUND
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


def complete(
    folder: epath.Path,
    manifest: Manifest,
    writing: Any,
    clean: Callable[[], None] | None = None,
) -> None:
    """Wait for the arrays, record the checksums, put the manifest in place.

    All processes call it; an error in one of them is an error in all.

    Args:
        folder: of the checkpoint.
        manifest: what is in it, without the files.
        writing: the ``orbax_io.Writing`` that began, None if no leaf has any bytes.
        clean: what the first process does when the checkpoint is complete.
    """
    stage = BACKGROUND.stage
    first = jax.process_index() == 0
    files: dict[str, tuple[int, int]] = {}
    if writing is not None:
        assert manifest.arrays is not None
        arrays = folder / manifest.arrays
        try:
            stage(writing.join)
            stage(lambda: writing.merge() if first else None)
        finally:
            writing.close()
        part, parts = jax.process_index(), jax.process_count()
        mine = stage(lambda: digest(arrays, part, parts))
        for found in BACKGROUND.gather(mine):
            files |= found
        sync_folders(arrays)

    def put_in_place() -> None:
        if first:
            write_manifest(folder, dataclasses.replace(manifest, files=files))
            remove_own(folder, keep=manifest.arrays)
            if clean is not None:
                clean()

    stage(put_in_place)


def remove_own(folder: epath.Path, keep: str | None = None) -> None:
    """Remove previous arrays and rests of interrupted saves, nothing that is another's.

    What cannot be removed stays.
    """
    for entry in list(folder.iterdir()):
        if entry.name == keep or not is_own(entry.name):
            continue
        try:
            is_folder = entry.is_dir() and not is_link(entry)
            entry.rmtree() if is_folder else entry.unlink()
        except OSError:
            # The new checkpoint is complete; the next save tries again.
            continue


def write_error(
    folder: epath.Path, error: BaseException, step: int | None = None
) -> CheckpointError:
    """Return the error for a save that failed on its way."""
    what = f"checkpoint {folder}" + ("" if step is None else f" of step {step}")
    new = CheckpointError(
        f"{what} could not be written ({type(error).__name__}: {error});"
        " what was there before is still there; check space and permissions, then save"
        " again"
    )
    new.__cause__ = error
    return new
