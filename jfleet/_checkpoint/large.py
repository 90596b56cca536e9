"""Arrays too large to be on the host whole: read shard by shard, block by block.

Orbax reads an array whole, or all of its shards at once; either is a second copy of it
beside the array on the devices. The format on disk is public (zarr 2 in OCDBT), so
here TensorStore reads the parts, and the host holds one shard at a time.
"""

import math
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from etils import epath
from jax.sharding import Sharding

from jfleet._checkpoint.contents import open_store

BLOCK_BYTES = 64 << 20
_ALIGNMENT = 64
"""What XLA wants of host memory that becomes an array on a CPU without a copy."""


def read(
    folder: epath.Path,
    name: str,
    shape: tuple[int, ...],
    stored: Any,
    wanted: Any,
    sharding: Sharding,
) -> jax.Array:
    """Read one array onto devices of this process.

    Args:
        folder: of the arrays.
        name: of the array.
        shape: logical shape.
        stored: element type on disk.
        wanted: element type of the result, of the same size: bits are kept.
        sharding: where the array goes.

    Returns:
        The array.

    Raises:
        ValueError: something else is stored under that name.
    """
    source = _open(folder, name)
    if source.shape != shape or source.dtype.numpy_dtype != stored:
        raise ValueError(
            f"stored as {source.dtype.name}{list(source.shape)}, the manifest says"
            f" {np.dtype(stored)}{list(shape)}"
        )
    users: dict[Any, tuple[Any, list[Any]]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        spans = tuple(
            part.indices(size)[:2] for part, size in zip(index, shape, strict=True)
        )
        users.setdefault(spans, (index, []))[1].append(device)
    pieces = {}
    for index, devices in users.values():
        shard = _read_shard(source[index], wanted)
        for number, device in enumerate(devices):
            # The memory of the first may become that of the array.
            value = shard if number == 0 else shard.copy()
            where = jax.sharding.SingleDeviceSharding(
                device, memory_kind=sharding.memory_kind
            )
            pieces[device] = jax.block_until_ready(jax.device_put(value, where))
            del value
        del shard
    return jax.make_array_from_single_device_arrays(
        shape, sharding, list(pieces.values())
    )


def _open(folder: epath.Path, name: str) -> Any:
    spec = {
        "driver": "zarr",
        "kvstore": {**open_store(folder), "path": f"{name}/"},
        "fill_missing_data_reads": False,
    }
    return ts.open(spec, open=True, read=True).result()


def _read_shard(source: Any, dtype: Any) -> np.ndarray:
    source = source[ts.d[:].translate_to[0]] if source.rank else source
    shard = _aligned(source.shape, dtype)
    if not source.rank:
        shard[...] = source.read().result().view(dtype)
        return shard
    row_bytes = max(shard[:1].nbytes, 1)
    num_rows = max(BLOCK_BYTES // row_bytes, 1)
    for start in range(0, source.shape[0], num_rows):
        rows = slice(start, min(start + num_rows, source.shape[0]))
        shard[rows] = source[rows].read().result().view(dtype)
    return shard


def _aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)
