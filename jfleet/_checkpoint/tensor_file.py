"""The safetensors format: named arrays as raw bytes behind a JSON header.

    8 bytes     length of the header, little endian
    header      JSON: name -> dtype, shape, [begin, end) in the data; "__metadata__"
    data        row major, little endian, without gaps

The library of that name writes only what is in memory whole, and does not read every
8-bit type into NumPy. Here rows are written where they belong as they come, and parts
are read without the rest. Reading runs no code and trusts no number of the header.

References:
    https://github.com/huggingface/safetensors
"""

import dataclasses
import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from jfleet._errors import CheckpointError

BLOCK_BYTES = 64 << 20
_MAX_HEADER_BYTES = 100_000_000
METADATA = "__metadata__"
_CODES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16",
    "uint32": "U32", "int32": "I32", "uint64": "U64", "int64": "I64",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
_DTYPES = {
    code: np.dtype(getattr(ml_dtypes, name, name)) for name, code in _CODES.items()
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One array of a file."""

    name: str
    """Name in the file."""
    dtype: np.dtype
    """Element type."""
    shape: tuple[int, ...]
    """Shape."""
    start: int = 0
    """First byte, from the start of the file."""
    file: str = ""
    """Path of the file."""

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def is_known(dtype: Any) -> bool:
    """True for element types that the format knows."""
    return np.dtype(dtype).name in _CODES


def header(tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the first bytes of a file; the data of the tensors follow in order.

    >>> x = Tensor(name="x", dtype=np.dtype("f4"), shape=(2,))
    >>> header([x], {})[8:]
    b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}  '
    """
    entries: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.num_bytes
        entries[tensor.name] = {
            "dtype": _CODES[tensor.dtype.name],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def read_header(path: str) -> tuple[list[Tensor], dict[str, str]]:
    """Return the arrays of a file, by name, and its metadata.

    Raises:
        CheckpointError: it is no such file, or damaged.
    """
    try:
        return _read_header(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is no safetensors file, or damaged: {error}"
        ) from error


def _read_header(path: str) -> tuple[list[Tensor], dict[str, str]]:
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        length = int.from_bytes(_exactly(file.read(8), 8), "little")
        if length > min(_MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        text = _exactly(file.read(length), length)
    entries = json.loads(text, object_pairs_hook=_without_repeats)
    metadata = entries.pop(METADATA, {})
    if not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"{METADATA} must map names to text")
    found = [_tensor(path, name, raw, 8 + length) for name, raw in entries.items()]
    end = 8 + length
    for tensor in sorted(found, key=lambda t: (t.start, t.num_bytes)):
        if tensor.start != end:
            raise ValueError(f"{tensor.name!r} does not begin where another ends")
        end += tensor.num_bytes
    if end != size:
        raise ValueError(f"{size} bytes, where the header says {end}")
    return sorted(found, key=lambda t: t.name), dict(metadata)


def _exactly(data: bytes, length: int) -> bytes:
    if len(data) != length:
        raise ValueError("the file ends in the header")
    return data


def _without_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("a name occurs twice")
    return entries


def _tensor(path: str, name: str, raw: Mapping[str, Any], data: int) -> Tensor:
    begin, end = raw["data_offsets"]
    sizes = (*raw["shape"], begin, end)
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"{name!r} has sizes that are none")
    if raw["dtype"] not in _DTYPES:
        raise ValueError(f"{name!r} has the unknown type {raw['dtype']!r}")
    tensor = Tensor(
        name=name,
        dtype=_DTYPES[raw["dtype"]],
        shape=tuple(raw["shape"]),
        start=data + begin,
        file=path,
    )
    if end - begin != tensor.num_bytes:
        raise ValueError(f"{name!r} has {end - begin} bytes, not {tensor.num_bytes}")
    return tensor


def read_part(tensor: Tensor, index: Sequence[slice], dtype: Any) -> np.ndarray:
    """Read a part of an array; the file is read in blocks of whole rows.

    Args:
        tensor: which array.
        index: one slice for each dim, without steps.
        dtype: element type of the result.

    Raises:
        CheckpointError: the file ends too early.
    """
    if not tensor.shape:
        return _read(tensor, 0, 1)[0].astype(dtype)
    spans = [s.indices(n)[:2] for s, n in zip(index, tensor.shape, strict=True)]
    part = np.empty([max(b - a, 0) for a, b in spans], dtype)
    if not part.size:
        return part
    first, last = spans[0]
    row_bytes = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
    num_rows = max(BLOCK_BYTES // row_bytes, 1)
    for row in range(first, last, num_rows):
        stop = min(row + num_rows, last)
        rows = _read(tensor, row, stop).reshape(stop - row, *tensor.shape[1:])
        part[row - first : stop - first] = rows[(slice(None), *index[1:])]
    return part


def _read(tensor: Tensor, first: int, last: int) -> np.ndarray:
    """Read whole rows as flat elements; of a scalar the one."""
    per_row = math.prod(tensor.shape[1:])
    item = tensor.dtype.itemsize
    data = bytearray((last - first) * per_row * item)
    try:
        with open(tensor.file, "rb", buffering=0) as file:
            file.seek(tensor.start + first * per_row * item)
            view, done = memoryview(data), 0
            while done < len(data):
                count = file.readinto(view[done:])
                if not count:
                    raise OSError("it ends too early")
                done += count
    except OSError as error:
        raise CheckpointError(f"{tensor.file} cannot be read: {error}") from error
    values = np.frombuffer(data, np.uint8).view(tensor.dtype.newbyteorder("<"))
    return values.astype(tensor.dtype, copy=False)
