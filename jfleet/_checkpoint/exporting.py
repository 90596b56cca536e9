"""Write safetensors files in place: sizes first, then rows where they belong."""

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfleet._checkpoint.blocks import rows_of
from jfleet._checkpoint.params import Param
from jfleet._checkpoint.tensor_file import METADATA, Tensor, header, is_known
from jfleet._errors import CheckpointError
from jfleet._tree import path_str

FILE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
FORMAT = "format"
"""Name in the metadata that says how the arrays are laid out."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """One file of an export, before any of its data."""

    name: str
    """Name in the folder."""
    tensors: tuple[Tensor, ...]
    """What is in it, and where."""
    start: bytes
    """The header."""

    @property
    def num_bytes(self) -> int:
        """Size of the whole file."""
        return len(self.start) + sum(t.num_bytes for t in self.tensors)


def plan(params: Sequence[Param], dtype: np.dtype | None, max_bytes: int) -> list[File]:
    """Decide what is in which file, from shapes alone.

    Args:
        params: what to export.
        dtype: of floating-point parameters; None leaves each as it is.
        max_bytes: most data in one file, unless one array is larger.

    Raises:
        CheckpointError: names that are equal, or a type that no file can hold.
    """
    _check_names(params)
    groups: list[list[Tensor]] = [[]]
    size = 0
    for param in params:
        if param.same_as is not None:
            continue
        tensor = _tensor(param, dtype)
        if groups[-1] and size + tensor.num_bytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.num_bytes
    metadata = {FORMAT: "flax"}
    metadata |= {p.name: p.same_as for p in params if p.same_as is not None}
    total = len(groups)
    files = []
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{total:05d}.safetensors"
        start = header(group, metadata)
        offset = len(start)
        placed = []
        for tensor in group:
            placed.append(dataclasses.replace(tensor, start=offset))
            offset += tensor.num_bytes
        files.append(
            File(
                name=name if total > 1 else FILE_NAME,
                tensors=tuple(placed),
                start=start,
            )
        )
    return files


def _check_names(params: Sequence[Param]) -> None:
    if not params:
        raise CheckpointError("the state has no parameters to export")
    names: dict[str, Param] = {}
    for param in params:
        other = names.setdefault(param.name, param)
        if other is not param or param.name in (METADATA, FORMAT):
            raise CheckpointError(
                f"parameters {path_str(other.path)!r} and {path_str(param.path)!r}"
                f" would both be {param.name!r} in the file; rename one"
                if other is not param
                else f"a parameter cannot be called {param.name!r} in the file; rename"
                " it"
            )


def _tensor(param: Param, dtype: np.dtype | None) -> Tensor:
    kind = np.dtype(param.source.dtype)
    if dtype is not None and jnp.issubdtype(kind, np.floating):
        kind = dtype
    if not is_known(kind):
        raise CheckpointError(
            f"parameter {path_str(param.path)!r} is {kind.name}, which safetensors"
            " files cannot hold; convert it first"
        )
    return Tensor(name=param.name, dtype=kind, shape=param.shape)


def prepare(target: str, temporary: str, files: Sequence[File]) -> None:
    """Make the temporary folder with files of the right size."""
    try:
        if os.path.lexists(target) and not _is_empty(target):
            raise CheckpointError(
                f"path {target} exists; give a new or empty folder, or remove it"
            )
        if os.path.lexists(temporary):
            _remove_rest(temporary)
        os.makedirs(temporary)
        for file in files:
            with open(os.path.join(temporary, file.name), "wb") as out:
                out.write(file.start)
                out.truncate(file.num_bytes)
        if len(files) > 1:
            with open(os.path.join(temporary, INDEX_NAME), "w") as out:
                json.dump(_index(files), out, indent=1)
    except OSError as error:
        raise write_error(target, error) from error


def _is_empty(folder: str) -> bool:
    return not os.path.islink(folder) and not os.listdir(folder)


def _remove_rest(folder: str) -> None:
    """Remove what an interrupted export left; nothing else."""
    names = [] if os.path.islink(folder) else os.listdir(folder)
    if os.path.islink(folder) or not all(n.startswith("model") for n in names):
        raise CheckpointError(f"{folder} is in the way; remove it")
    for name in names:
        os.unlink(os.path.join(folder, name))
    os.rmdir(folder)


def _index(files: Sequence[File]) -> dict[str, Any]:
    places = {t.name: file.name for file in files for t in file.tensors}
    total = sum(t.num_bytes for file in files for t in file.tensors)
    return {"metadata": {"total_size": total}, "weight_map": places}


def commit(temporary: str, target: str) -> None:
    """Write everything through to the disk, then give the folder its name."""
    try:
        names = [os.path.join(temporary, n) for n in os.listdir(temporary)]
        for name in (*names, temporary):
            descriptor = os.open(name, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        os.rename(temporary, target)
    except OSError as error:
        raise write_error(target, error) from error


def write_error(path: str, error: OSError) -> CheckpointError:
    """Return the error for an export that failed on its way."""
    return CheckpointError(
        f"{path} could not be written ({error}); check space and permissions"
    )


class Writer:
    """Writes rows of one tensor where they belong; only in the first process."""

    def __init__(self, path: str, tensor: Tensor):
        self._path, self._tensor = path, tensor
        self._file: Any = None
        self._error: OSError | None = None

    def write(self, first: int, rows: np.ndarray) -> None:
        """Write rows; an error waits for ``finish``, since others are not done yet."""
        if jax.process_index() or self._error is not None:
            return
        tensor = self._tensor
        row_bytes = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
        values = rows.astype(tensor.dtype, order="C", copy=False)
        data = values.astype(values.dtype.newbyteorder("<"), copy=False)
        try:
            if self._file is None:
                self._file = open(self._path, "r+b", buffering=0)  # noqa: SIM115
            self._file.seek(tensor.start + first * row_bytes)
            view = memoryview(data.reshape(-1).view(np.uint8).data)
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            self._error = error

    def finish(self) -> None:
        """Close the file; raise what went wrong."""
        if self._file is not None:
            self._file.close()
        if self._error is not None:
            raise write_error(self._path, self._error) from self._error


def write_param(param: Param, writer: Writer) -> None:
    """Write the value that is exported for a parameter; all processes take part."""
    value = param.source
    if not param.shape:
        writer.write(0, _mean(_whole(value), param.replicas))
        return
    dim = 1 if param.replicas else 0
    for first, rows in rows_of(value, dim):
        rows = _mean(rows, param.replicas)[tuple(map(slice, (None, *param.shape[1:])))]
        rows = rows[: max(param.shape[0] - first, 0)]
        if rows.size:
            writer.write(first, rows)


def _whole(value: Any) -> np.ndarray:
    """The values of a small array on the host of this process."""
    if not value.ndim:
        is_jax = isinstance(value, jax.Array)
        return np.asarray(value.addressable_data(0) if is_jax else value)
    whole = np.empty(value.shape, value.dtype)
    for first, rows in rows_of(value, 0):
        whole[first : first + len(rows)] = rows
    return whole


def _mean(rows: np.ndarray, replicas: int) -> np.ndarray:
    if not replicas:
        return rows
    if not jnp.issubdtype(rows.dtype, np.inexact):
        return rows[0]
    wide = np.complex128 if rows.dtype.kind == "c" else np.float64
    return rows.mean(axis=0, dtype=wide)
