"""Begin a save: copy the values, start to write, and say how it ends."""

import dataclasses
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from etils import epath

from jfleet._checkpoint import orbax_io
from jfleet._checkpoint.commit import complete, next_generation, write_error
from jfleet._checkpoint.handle import Pending, SaveHandle
from jfleet._checkpoint.leaves import (
    Leaf,
    check_alive,
    describe,
    flatten,
    level_of,
    step_of,
)
from jfleet._checkpoint.manifest import Manifest
from jfleet._checkpoint.states import logical_states
from jfleet._checkpoint.together import Agreement, from_first
from jfleet._errors import CheckpointError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a checkpoint in a run's directory holds beside the state."""

    step: int
    """Step of the run, which also names the folder."""
    extra: Any
    """JSON values of the user, such as the position in the data."""
    check: Callable[[], None]
    """Raises if the directory cannot take this step; called in the first process."""
    clean: Callable[[], None]
    """Removes what is no longer kept; called in the first process at the end."""


def begin(
    state: Any, folder: epath.Path, *, overwrite: bool, run: Run | None = None
) -> SaveHandle:
    """Copy the values of a state and write them in the background.

    Args:
        state: any tree of leaves that can be stored.
        folder: where to; what is there stays loadable until the end.
        overwrite: whether there may be something.
        run: of a checkpoint in a run's directory.

    Returns:
        The handle of the save. All processes get one, or all get an error.

    Raises:
        CheckpointError: the folder, a leaf, or an earlier save in the background.
        DonatedBufferError: the state was donated to an earlier step.
    """
    with Agreement():
        Pending.finish()
        leaves, _ = flatten(state)
        check_alive(leaves)
        leaves, _ = flatten(logical_states(state))
        manifest = _describe(state, leaves, run)

    def prepare() -> int:
        if run is not None:
            run.check()
        number = next_generation(folder, overwrite)
        _make(folder, f"arrays.{number}" if manifest.arrays else None)
        return number

    number = from_first(prepare)
    if manifest.arrays is not None:
        manifest = dataclasses.replace(manifest, arrays=f"arrays.{number}")
    with Agreement():
        writing = _write(folder, manifest, leaves)
    clean = run.clean if run is not None else None
    return SaveHandle(
        folder,
        lambda: complete(folder, manifest, writing, clean),
        step=run.step if run is not None else None,
    )


def _make(folder: epath.Path, arrays: str | None) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if arrays is not None:
            (folder / arrays).mkdir()
    except OSError as error:
        raise write_error(folder, error) from error


def _write(
    folder: epath.Path, manifest: Manifest, leaves: Sequence[Leaf]
) -> orbax_io.Writing | None:
    if manifest.arrays is None:
        return None
    values = {leaf.name: leaf.value for leaf in leaves}
    arrays = {e.name: values[e.name] for e in manifest.entries if e.stored}
    try:
        return orbax_io.Writing(folder / manifest.arrays, arrays)
    except CheckpointError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        raise write_error(folder, error) from error


def _describe(state: Any, leaves: Sequence[Leaf], run: Run | None) -> Manifest:
    entries, meshes = describe(leaves)
    stored = any(entry.stored for entry in entries)
    return Manifest(
        arrays="arrays.0" if stored else None,
        entries=tuple(entries),
        files={},
        meshes=meshes,
        info=_info(state, leaves),
        run=None if run is None else {"step": run.step, "extra": run.extra},
    )


def _info(state: Any, leaves: Sequence[Leaf]) -> Mapping[str, Any]:
    kind = type(state)
    return {
        "jfleet": _version("jfleet"),
        "jax": jax.__version__,
        "orbax": _version("orbax-checkpoint"),
        "state": f"{kind.__module__}.{kind.__qualname__}",
        "step": step_of(leaves),
        "level": level_of(state),
        "num_devices": jax.device_count(),
        "num_processes": jax.process_count(),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
