"""Save a training state and load it on any mesh, level, or number of processes.

A checkpoint holds logically global arrays, each under the name of its path, and a
manifest (``jfleet/_checkpoint/manifest.py`` has the layout on disk). Nothing in it
depends on the devices it was saved from: ``load_group_sharded_model`` puts every leaf
where the corresponding leaf of the given state lives. Loading runs no code from a
checkpoint.
"""

import atexit
import importlib.metadata
import os
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from jfleet._checkpoint import orbax_io
from jfleet._checkpoint.commit import complete, folder_of, next_generation, write_error
from jfleet._checkpoint.leaves import (
    Leaf,
    check_alive,
    describe,
    flatten,
    is_abstract,
    level_of,
    step_of,
)
from jfleet._checkpoint.loading import check_targets, load_values, match, mismatch
from jfleet._checkpoint.manifest import Manifest, check_files, damaged, read_manifest
from jfleet._errors import (
    CheckpointError,
    JfleetError,
    JfleetWarning,
    listing,
)
from jfleet._logical import logical_state, stored_like
from jfleet._tree import path_str

# Python 3.12.0 and 3.12.1 start no threads once the main thread has ended, not even for
# threads that still run (python/cpython#113964); Orbax needs some to end a write.
_CAN_FINISH_AT_EXIT = not (3, 12, 0) <= sys.version_info[:3] < (3, 12, 2)


class SaveHandle:
    """A save that goes on in the background.

    The values are those at the time of the call. An error of the write is raised by
    ``wait``, or else by the next save or load, or else printed when Python ends.
    """

    def __init__(self, output: epath.Path, finish: Callable[[], None]):
        self._output = output
        self._finish = finish
        self._error: CheckpointError | None = None
        self._seen = False
        # Not a daemon: Python must not end before the checkpoint is complete.
        self._thread = threading.Thread(target=self._run, name="jfleet-save")
        self._thread.start()

    def __repr__(self) -> str:
        state = "done" if self.done() else "running"
        return f"SaveHandle({os.fspath(self._output)!r}, {state})"

    def _run(self) -> None:
        try:
            self._finish()
        except BaseException as error:  # Whatever it is, wait() must show it.
            self._error = write_error(self._output, error)

    def done(self) -> bool:
        """True if the write has ended, well or not."""
        return not self._thread.is_alive()

    def join(self) -> None:
        """Wait for the end of the write, whether it went well or not."""
        self._thread.join()

    def wait(self) -> None:
        """Wait until the checkpoint is complete.

        Raises:
            CheckpointError: it could not be written.
        """
        self.join()
        if self._error is not None:
            self._seen = True
            raise self._error

    def _surface(self) -> None:
        """Wait; raise the error unless someone has seen it."""
        self.join()
        if not self._seen:
            self.wait()


class _Pending:
    """The save in the background, of which there is at most one."""

    handle: SaveHandle | None = None

    @classmethod
    def finish(cls) -> None:
        handle, cls.handle = cls.handle, None
        if handle is not None:
            handle._surface()

    @classmethod
    def finish_at_exit(cls) -> None:
        try:
            cls.finish()
        except CheckpointError as error:
            print(f"jfleet: {error}", file=sys.stderr, flush=True)


# Plain atexit functions run after the thread pools that Orbax writes with are shut
# down. This hook, which the pools use themselves, runs before.
getattr(threading, "_register_atexit", atexit.register)(_Pending.finish_at_exit)


def save_group_sharded_model(
    state: Any,
    output: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    wait: bool = True,
) -> SaveHandle | None:
    """Save a training state: parameters, optimizer state, step, keys, everything.

    The checkpoint is complete or absent: it counts from the moment its manifest is
    renamed into place, after every array was written. With ``overwrite=True`` the
    previous checkpoint stays loadable until then. Tied arrays are stored once. Call it
    from all processes of a multi-process run, with a folder that all of them see.

    Args:
        state: flax ``TrainState``, ``(nnx.Module, nnx.Optimizer)``, or any tree of
            arrays, random keys, numbers, strings and functions (which are not stored).
        output: folder to write; made if missing.
        overwrite: replace a checkpoint that is there.
        wait: return when the checkpoint is complete; if False, return as soon as the
            values are copied, so that the next step may donate them. (Python 3.12.0
            and 3.12.1 cannot end such a write while they exit; there it always waits.)

    Returns:
        None, or with ``wait=False`` a handle whose ``wait()`` ends with the write.

    Raises:
        CheckpointError: ``output`` exists, a leaf cannot be stored, or the write
            failed (also that of an earlier save with ``wait=False``).
        DonatedBufferError: the state was donated to an earlier step.

    Example:
        >>> import tempfile, jax.numpy as jnp
        >>> folder = tempfile.mkdtemp() + "/ckpt"
        >>> save_group_sharded_model({"w": jnp.arange(3)}, folder)
        >>> load_group_sharded_model(folder, {"w": jnp.zeros(3, int)})
        {'w': Array([0, 1, 2], dtype=int32)}
    """
    _Pending.finish()
    folder = folder_of(output)
    with _Agreement() as agreement:
        leaves, _ = flatten(state)
        check_alive(leaves)
        state = logical_state(state)
        leaves, _ = flatten(state)
        agreement.number = next_generation(folder, overwrite)
    handle = _start(state, leaves, folder, f"arrays.{agreement.number}")
    if not wait:
        _Pending.handle = handle
        if not _CAN_FINISH_AT_EXIT:
            handle.join()
        return handle
    handle.wait()
    return None


def load_group_sharded_model(
    output: str | os.PathLike[str], state: Any, *, strict: bool = True
) -> Any:
    """Load a checkpoint into a state of any layout.

    The result has the structure and the types of ``state``, and each array lies where
    that of ``state`` lies: build the state for the mesh and level that you want now.
    Values are bit-equal to those saved. ``state`` is not changed; it may be abstract
    (``jax.ShapeDtypeStruct`` with shardings), so that no second copy is in memory.
    A stored scalar array fits a Python number of its kind and the reverse.

    Args:
        output: the folder of a save.
        state: what the result looks like; nnx objects come back as new objects.
        strict: every leaf must be stored with the same shape and dtype, and no other;
            if False, load the leaves that match by path and shape, convert dtypes,
            keep the rest as in ``state``, and warn with the list.

    Returns:
        The loaded state.

    Raises:
        CheckpointError: no checkpoint, an interrupted one, a damaged one, or one of
            another model (the first ten differing leaves are listed).
        PlacementError: an array cannot be laid out as ``state`` wants it.
    """
    _Pending.finish()
    folder = folder_of(output)
    with _Agreement():
        manifest = read_manifest(folder)
        leaves, rebuild = flatten(logical_state(state))
        matches, differences = match(manifest, leaves, strict=strict)
        if differences and strict:
            raise mismatch(folder, differences)
        check_targets(leaves)
        kept = [leaf for leaf in leaves if leaf.name not in matches]
        _check_kept(folder, kept)
    with _Agreement():
        check_files(folder, manifest, jax.process_index(), jax.process_count())
    arrays = None if manifest.arrays is None else folder / manifest.arrays
    with _Agreement():
        try:
            values = load_values(arrays, manifest, leaves, matches)
        except (ValueError, KeyError, OSError, TypeError, RuntimeError) as error:
            raise damaged(folder, f"its arrays cannot be read ({error})") from error
    if differences:
        shown = "".join(f"\n  {d}" for d in differences)
        warnings.warn(
            f"checkpoint {folder} does not fit this state everywhere; what fits was"
            f" loaded, the rest is as it was:{shown}",
            JfleetWarning,
            stacklevel=2,
        )
    loaded = rebuild([values.get(leaf.name, leaf.value) for leaf in leaves])
    return stored_like(loaded, state)


def _check_kept(folder: epath.Path, kept: Sequence[Leaf]) -> None:
    """Without strict some leaves stay as they are: then they must have values."""
    empty = [
        path_str(leaf.path)
        for leaf in kept
        if leaf.kind in ("array", "key") and is_abstract(leaf.value)
    ]
    if empty:
        raise CheckpointError(
            f"checkpoint {folder} has nothing for {len(empty)} leaves that have no"
            f" value in the state either ({listing(empty)}); give concrete arrays for"
            " them"
        )


def _start(
    state: Any, leaves: Sequence[Leaf], folder: epath.Path, name: str
) -> SaveHandle:
    """Copy the values and begin to write them."""
    entries, meshes = describe(leaves)
    values = {leaf.name: leaf.value for leaf in leaves}
    arrays = {e.name: values[e.name] for e in entries if e.stored}
    manifest = Manifest(
        arrays=name if arrays else None,
        entries=tuple(entries),
        files={},
        meshes=meshes,
        info=_info(state, leaves),
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = orbax_io.write(folder / name, arrays) if arrays else lambda: None
    except (OSError, ValueError, RuntimeError) as error:
        raise write_error(folder, error) from error

    def finish() -> None:
        written()
        complete(folder, manifest)

    return SaveHandle(folder, finish)


def _info(state: Any, leaves: Sequence[Leaf]) -> dict[str, Any]:
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


class _Agreement:
    """A block that succeeds in all processes or fails in all of them."""

    number = 0

    def __enter__(self) -> "_Agreement":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if jax.process_count() == 1:
            return
        if error is not None and not isinstance(error, JfleetError):
            return  # A bug or an interrupt: the other processes will time out.
        mine = np.array([error is not None, self.number], np.int32)
        everyone = multihost_utils.process_allgather(mine)
        self.number = int(everyone[0, 1])
        failed = np.flatnonzero(everyone[:, 0])
        if error is None and failed.size:
            raise CheckpointError(
                f"process {failed[0]} of {jax.process_count()} raised an error, see"
                " there; all processes must see the same folder and hold the same"
                " state"
            )
