"""Save a training state and load it on any mesh, level, or number of processes.

A checkpoint holds logically global arrays, each under the name of its path, and a
manifest (``jfleet/_checkpoint/manifest.py`` has the layout on disk). Nothing in it
depends on the devices it was saved from: ``load_group_sharded_model`` puts every leaf
where the corresponding leaf of the given state lives. Loading runs no code from a
checkpoint.
"""

import os
import warnings
from typing import Any

from jfleet._checkpoint import restoring, saving
from jfleet._checkpoint.commit import folder_of
from jfleet._checkpoint.handle import Pending
from jfleet._checkpoint.handle import SaveHandle as SaveHandle
from jfleet._checkpoint.manifest import read_manifest
from jfleet._checkpoint.together import Agreement
from jfleet._errors import JfleetWarning


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
    handle = saving.begin(state, folder_of(output), overwrite=overwrite)
    if not wait:
        Pending.add(handle)
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
    folder = folder_of(output)
    with Agreement():
        Pending.finish()
        manifest = read_manifest(folder)
    loaded, report = restoring.restore(folder, manifest, state, strict=strict)
    if report.differences:
        warnings.warn(
            f"checkpoint {folder} does not fit this state everywhere; what fits was"
            f" loaded, the rest is as it was:{report}",
            JfleetWarning,
            stacklevel=2,
        )
    return loaded
