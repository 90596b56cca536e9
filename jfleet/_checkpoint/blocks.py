"""Large arrays brought to the host a block of rows at a time.

A block holds as many rows of *each* shard as fit: so a block of an array that is split
by rows is many short stretches of it, and no device ever holds more than the block.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jfleet._tree import num_elements

BLOCK_BYTES = 64 << 20


def rows_of(array: Any, dim: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yield stretches of an array along a dim, the other dims whole.

    Every process of a run calls it for arrays that span processes, and goes on to the
    end. Some rows may come twice.

    Args:
        array: jax or numpy array with that dim.
        dim: the dim that is cut.

    Yields:
        (first row, rows).
    """
    if 0 in array.shape:
        return
    if not isinstance(array, jax.Array):
        array = np.asarray(array)
        yield from _cut(array, dim, 0, _rows_per_block(array.shape, dim, array.dtype))
        return
    shape = array.shape
    per_shard = array.sharding.shard_shape(shape)[dim]
    num_shards = shape[dim] // per_shard
    rows = _rows_per_block(shape, dim, array.dtype) // num_shards
    rows = min(max(rows, 1), per_shard)
    fetch = _from_shards if array.is_fully_addressable else _from_everywhere
    block_at = fetch(array, dim, rows)
    for start in range(0, per_shard, rows):
        start = min(start, per_shard - rows)
        block = block_at(start)
        for shard in range(num_shards):
            cut = [slice(None)] * array.ndim
            cut[dim] = slice(shard * rows, (shard + 1) * rows)
            yield shard * per_shard + start, block[tuple(cut)]


def _rows_per_block(shape: tuple[int, ...], dim: int, dtype: Any) -> int:
    row_bytes = num_elements(shape) // max(shape[dim], 1) * np.dtype(dtype).itemsize
    return max(BLOCK_BYTES // max(row_bytes, 1), 1)


def _cut(
    array: np.ndarray, dim: int, start: int, rows: int
) -> Iterator[tuple[int, np.ndarray]]:
    for first in range(start, array.shape[dim], rows):
        cut = [slice(None)] * array.ndim
        cut[dim] = slice(first, first + rows)
        yield first, array[tuple(cut)]


def _from_shards(array: jax.Array, dim: int, rows: int) -> Callable[[int], np.ndarray]:
    """Blocks of an array whose every shard is in this process."""
    shape = array.shape
    shards = {}
    for shard in array.addressable_shards:
        begins = tuple(s.indices(n)[0] for s, n in zip(shard.index, shape, strict=True))
        shards.setdefault(begins, shard.data)
    per_shard = array.sharding.shard_shape(shape)[dim]

    def block_at(start: int) -> np.ndarray:
        size = list(shape)
        size[dim] = shape[dim] // per_shard * rows
        block = np.empty(size, array.dtype)
        for begins, data in shards.items():
            at = [slice(b, b + n) for b, n in zip(begins, data.shape, strict=True)]
            first = begins[dim] // per_shard * rows
            at[dim] = slice(first, first + rows)
            block[tuple(at)] = _host_slice(data, start, rows, dim)
        return block

    return block_at


def _host_slice(data: jax.Array, start: int, rows: int, dim: int) -> np.ndarray:
    if not _is_on_device(data):  # It is on the host already.
        cut = [slice(None)] * data.ndim
        cut[dim] = slice(start, start + rows)
        return np.asarray(data)[tuple(cut)]
    return np.asarray(_slice(data, start, rows, dim))


def _is_on_device(array: jax.Array) -> bool:
    device = next(iter(array.sharding.device_set))
    return array.sharding.memory_kind in (None, device.default_memory().kind)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _slice(x: jax.Array, start: int, rows: int, dim: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, start, rows, dim)


def _from_everywhere(
    array: jax.Array, dim: int, rows: int
) -> Callable[[int], np.ndarray]:
    """Blocks of an array that spans processes, gathered on every device."""
    sharding = array.sharding
    assert isinstance(sharding, NamedSharding)
    if not _is_on_device(array):
        on_device = NamedSharding(sharding.mesh, sharding.spec)
        array = jax.device_put(array, on_device)
    gather = _gatherer(sharding.mesh, sharding.spec, rows, dim)

    def block_at(start: int) -> np.ndarray:
        return np.asarray(gather(array, start).addressable_data(0))

    return block_at


@functools.lru_cache(maxsize=64)
def _gatherer(mesh: Any, spec: PartitionSpec, rows: int, dim: int) -> Callable:
    """A program that takes rows of every shard and gathers them everywhere."""

    def local(x: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, start, rows, dim)

    sliced = jax.shard_map(
        local, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec
    )
    return jax.jit(sliced, out_shardings=NamedSharding(mesh, PartitionSpec()))
