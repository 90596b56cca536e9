"""The directory of a run: one checkpoint folder per step, and which of them count.

    directory/step_00000100/    a checkpoint, see ``manifest``

A folder counts from the moment its manifest is in place, so nothing is renamed when a
save ends. A folder is removed manifest first: what is half removed is incomplete, and
never picked.
"""

import re

from etils import epath

from jfleet._checkpoint.commit import remove_own
from jfleet._checkpoint.files import check_sizes, damaged, is_link
from jfleet._checkpoint.manifest import FILE_NAME, Manifest, read_manifest
from jfleet._errors import CheckpointError

_NAME = re.compile(r"step_([0-9]{8,18})")


def folder_of_step(directory: epath.Path, step: int) -> epath.Path:
    """Return the folder of a step.

    >>> folder_of_step(epath.Path("run"), 7).name
    'step_00000007'
    """
    return directory / f"step_{step:08d}"


def list_steps(directory: epath.Path) -> list[int]:
    """Return the steps that have a folder, complete or not, in order."""
    if not directory.exists():
        return []
    steps = []
    for entry in directory.iterdir():
        found = _NAME.fullmatch(entry.name)
        if found and entry.name == folder_of_step(directory, int(found[1])).name:
            steps.append(int(found[1]))
    return sorted(steps)


def read_step(directory: epath.Path, step: int) -> Manifest:
    """Read the manifest of a step.

    Raises:
        CheckpointError: the step is missing, incomplete, damaged, or another's.
    """
    folder = folder_of_step(directory, step)
    if is_link(folder):
        raise damaged(folder, "it is a link")
    if folder.is_dir() and not any(folder.iterdir()):
        raise CheckpointError(
            f"checkpoint {folder} is incomplete (interrupted save): it is empty"
        )
    manifest = read_manifest(folder)
    if manifest.run is None or manifest.run["step"] != step:
        inside = None if manifest.run is None else manifest.run["step"]
        raise damaged(folder, f"it holds step {inside}, not step {step}")
    return manifest


def complete_steps(directory: epath.Path) -> list[int]:
    """Return the steps whose save has ended and whose files have their sizes."""
    return [s for s in list_steps(directory) if _is_complete(directory, s)]


def _is_complete(directory: epath.Path, step: int) -> bool:
    try:
        manifest = read_step(directory, step)
        check_sizes(folder_of_step(directory, step), manifest.arrays, manifest.files)
    except CheckpointError:
        return False
    return True


def check_free(directory: epath.Path, step: int, *, first: bool) -> None:
    """Raise if a step may not be saved now.

    Args:
        directory: of the run.
        step: the step.
        first: whether this run has saved nothing yet, so that newer checkpoints would
            be those of another run.

    Raises:
        CheckpointError: a link is in the way, or a newer checkpoint.
    """
    folder = folder_of_step(directory, step)
    if is_link(folder):
        raise CheckpointError(f"{folder} is a link; remove it to save step {step}")
    newer = [s for s in complete_steps(directory) if s > step] if first else []
    if newer:
        raise CheckpointError(
            f"step {step} cannot be saved in {directory}, which has a checkpoint of"
            f" step {newer[-1]}: the newest one is what a run resumes from; resume"
            " from it, remove the folders of the steps that are no longer wanted,"
            " or give another directory"
        )


def clean(directory: epath.Path, step: int, keep: int | None) -> None:
    """Remove what is no longer kept, once a step is saved.

    The newest ``keep`` complete steps are kept, and of what is newer than the oldest of
    these everything but rests of interrupted saves. The step just saved was read back,
    so there is always one that loads.
    """
    steps = complete_steps(directory)
    oldest = steps[-keep:][0] if steps and keep is not None else 0
    for other in list_steps(directory):
        folder = folder_of_step(directory, other)
        complete = (folder / FILE_NAME).exists()
        if other != step and (other < oldest or not complete):
            _remove(folder)


def _remove(folder: epath.Path) -> None:
    """Remove a folder, but nothing in it that no save made, and no link."""
    if is_link(folder):
        return
    try:
        (folder / FILE_NAME).unlink(missing_ok=True)
        remove_own(folder)
        if not any(folder.iterdir()):
            folder.rmdir()
    except OSError:
        return  # The new checkpoint is complete; the next save tries again.
