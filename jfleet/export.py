"""Parameters to and from safetensors files, as other tools read and write them.

An export has one model: the mean of the replicas where a strategy keeps several, the
float32 masters where parameters are trained in 16 bits, arrays without padding, a tied
array once. Values pass through the host in blocks of rows, whatever their size.

    folder/model.safetensors                     if it fits one file, else
    folder/model-00001-of-00003.safetensors      ...
    folder/model.safetensors.index.json          which name is in which file

Names are paths joined by dots, ``block_0.mlp.kernel``. A name that is left out because
its array is stored under another one is in the metadata of the files, which map it to
that other name.
"""

import os
from typing import Any

import jax.numpy as jnp
import numpy as np

from jfleet._checkpoint import exporting, importing
from jfleet._checkpoint.commit import folder_of
from jfleet._checkpoint.params import params_of, with_params
from jfleet._checkpoint.tensor_file import is_known
from jfleet._checkpoint.together import MAIN, Agreement, from_first
from jfleet._errors import ConfigError, ConfigTypeError


def export_safetensors(
    state: Any,
    path: str | os.PathLike[str],
    *,
    dtype: Any = None,
    max_shard_bytes: int = 5 << 30,
) -> None:
    """Write the parameters of a state as safetensors files.

    The folder appears when all of it is written. All processes of a run call it; the
    first one writes.

    Args:
        state: any state that ``group_sharded_parallel`` takes, or of ``opt.create``.
        path: new folder; it may exist if it is empty.
        dtype: element type of floating-point parameters; None takes that of the master
            where there is one, else that of the parameter.
        max_shard_bytes: most that one file holds, unless one array is larger.

    Raises:
        CheckpointError: the folder is not empty or cannot be written, a parameter has a
            type that the format does not know, or two have one name.
        DonatedBufferError: the state was donated to an earlier step.

    Example:
        >>> import tempfile, jax.numpy as jnp, jfleet
        >>> folder = tempfile.mkdtemp() + "/model"
        >>> state = {"params": {"dense": {"kernel": jnp.arange(4.0)}}}
        >>> export_safetensors(state, folder, dtype="bfloat16")
        >>> new = {"params": {"dense": {"kernel": jnp.zeros(4)}}}
        >>> import_safetensors(folder, new)["params"]["dense"]["kernel"]
        Array([0., 1., 2., 3.], dtype=float32)
    """
    if isinstance(max_shard_bytes, bool) or not isinstance(max_shard_bytes, int):
        raise ConfigTypeError(
            f"max_shard_bytes must be an integer, got {max_shard_bytes!r}"
        )
    if max_shard_bytes < 1:
        raise ConfigError(f"max_shard_bytes must be at least 1, got {max_shard_bytes}")
    target = _local(path)
    with Agreement():
        params = params_of(state)
        files = exporting.plan(params, _float_type(dtype), max_shard_bytes)
    temporary = f"{target}.incomplete"
    from_first(lambda: exporting.prepare(target, temporary, files))
    by_name = {param.name: param for param in params}
    for file in files:
        for tensor in file.tensors:
            writer = exporting.Writer(os.path.join(temporary, file.name), tensor)
            exporting.write_param(by_name[tensor.name], writer)
            MAIN.stage(writer.finish)
    from_first(lambda: exporting.commit(temporary, target))


def import_safetensors(path: str | os.PathLike[str], state: Any) -> Any:
    """Read parameters from safetensors files into a placed state.

    Parameters, and their copies in the optimizer state (masters, anchors of localsgd),
    get the stored values, converted between floating-point types, on the devices where
    those of ``state`` are; every replica gets the same. All else stays as it is:
    moments and counters are those of ``state``.

    Args:
        path: a folder of such files, with or without an index, or one file.
        state: which parameters, and where they lie. It is not changed.

    Returns:
        A state of the same type; nnx objects come back as new objects.

    Raises:
        CheckpointError: no such files, damaged ones, or ones of another model: missing
            and unexpected names, and other shapes, are listed by path.
    """
    with Agreement():
        tensors, aliases = importing.read_all(_local(path))
        params = params_of(state, alive=False)
        found = importing.match(os.fspath(path), params, tensors, aliases)
        return with_params(state, params, found)


def _local(path: Any) -> str:
    folder = os.fspath(folder_of(path))
    if "://" in folder:
        raise ConfigError(
            f"path must be on a file system, got {folder}; export to a local folder"
            " and copy it"
        )
    return folder


def _float_type(dtype: Any) -> np.dtype | None:
    if dtype is None:
        return None
    try:
        found = jnp.dtype(dtype)
    except TypeError as error:
        raise ConfigTypeError(f"dtype must name an element type: {error}") from None
    if not jnp.issubdtype(found, np.floating) or not is_known(found):
        raise ConfigError(
            f"dtype must be a floating-point type that safetensors files can hold, got"
            f" {found.name}; for example float32 or bfloat16"
        )
    return found
