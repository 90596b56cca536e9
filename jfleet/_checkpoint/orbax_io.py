"""Arrays to and from disk with Orbax; the only file that knows Orbax.

Everything is one flat dict from name to array. Choices, and why:

- *OCDBT, zarr, no compression*: few files however many leaves there are, and trained
  float32 values shrink by less than a tenth for five times the CPU time.
- *First replica writes*: splitting a replicated array over its replicas compiles one
  program per shape, which made the first save of a small model take seconds.
- *Plain bytes for exotic types*: TensorStore knows some of the 4 and 8 bit types, not
  all; stored as uint8 they need no knowledge. Random keys are stored as key data.
- *Reading*: a small array whose devices all belong to this process is read once, whole,
  and cut up by ``device_put``; reading shard by shard costs one read of a chunk for
  every shard that touches it. ``large`` reads the others, and Orbax, shard by shard,
  those that span processes.
"""

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jfleet._checkpoint import large
from jfleet._checkpoint.contents import check_contents
from jfleet._tree import is_prng_key, num_elements

TIMEOUT_SECS = 3600
STAGING_BYTES = 128 << 20
"""Most that is read at once; loading holds about twice that, or one shard, beside the
arrays that it makes."""
LARGE_BYTES = 32 << 20
"""From here on an array is read shard by shard."""
CHUNK_BYTES = 64 << 20
"""Most that one stored chunk holds."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One stored array that is wanted, and where."""

    shape: tuple[int, ...]
    """Logical shape."""
    dtype: Any
    """Stored element type; key types have the implementation in ``impl``."""
    impl: str | None = None
    """Random key implementation, None for numbers."""
    sharding: Sharding | None = None
    """Layout of arrays that span processes or are large; None gives numpy."""

    @property
    def is_large(self) -> bool:
        """True if the host should not hold the whole array."""
        shape, dtype = _physical_type(self)
        return num_elements(shape) * np.dtype(dtype).itemsize > LARGE_BYTES

    @property
    def num_bytes(self) -> int:
        """Bytes that this process reads."""
        shape, dtype = _physical_type(self)
        num_shards = 1
        if self.sharding is not None:
            sharding = _physical_sharding(self, self.sharding, len(shape))
            shape = sharding.shard_shape(shape)
            num_shards = len(sharding.addressable_devices)
        return num_shards * num_elements(shape) * np.dtype(dtype).itemsize


def _is_exotic(dtype: Any) -> bool:
    name = np.dtype(dtype).name
    return hasattr(ml_dtypes, name) and name != "bfloat16"


class Writing:
    """A write that has begun: the values are copied, the files are on their way."""

    def __init__(self, folder: epath.Path, arrays: Mapping[str, Any]):
        """Begin; the arrays may be changed or donated once this returns.

        Args:
            folder: new, empty folder that all processes see.
            arrays: jax or numpy arrays by name, at least one.
        """
        self._folder, self._names = folder, tuple(arrays)
        self._handler = _handler()
        item = {name: _physical(array) for name, array in arrays.items()}
        args = ocp.args.PyTreeSave(item, save_args=_save_args(item))
        try:
            begun = _run(self._handler.async_save(folder, args=args))
        except BaseException:
            self._handler.close()
            raise
        self._futures = begun or []

    def join(self) -> None:
        """Wait until this process has written its files.

        Raises:
            Exception: whatever the write raised.
        """
        for future in self._futures:
            future.result(timeout=TIMEOUT_SECS)

    def merge(self) -> None:
        """Join the files of all processes, in one of them, after all have joined.

        Raises:
            Exception: whatever that raised, or something is missing.
        """
        self._handler.finalize(self._folder)
        check_contents(self._folder, self._names)

    def close(self) -> None:
        """Release what the write held, however it went."""
        self._futures = []
        self._handler.close()


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end, inside of a notebook's event loop too."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


def _save_args(item: Mapping[str, Any]) -> dict[str, ocp.SaveArgs]:
    """Store large shards in chunks, so that a part can be read by itself."""

    def chunks(array: Any) -> int | None:
        sharding = getattr(array, "sharding", None)
        shape = sharding.shard_shape(array.shape) if sharding else array.shape
        num_bytes = num_elements(shape) * array.dtype.itemsize
        return CHUNK_BYTES if num_bytes > CHUNK_BYTES else None

    return {n: ocp.SaveArgs(chunk_byte_size=chunks(x)) for n, x in item.items()}


def _handler() -> ocp.PyTreeCheckpointHandler:
    arrays = ocp.type_handlers.ArrayHandler(
        use_replica_parallel=False,
        enable_write_sharding_file=False,
        array_metadata_store=None,
    )
    return ocp.PyTreeCheckpointHandler(
        use_ocdbt=True,
        use_zarr3=False,
        use_compression=False,
        type_handler_registry=ocp.type_handlers.create_type_handler_registry(
            (jax.Array, arrays), (np.ndarray, ocp.type_handlers.NumpyHandler())
        ),
    )


def _physical(array: Any) -> Any:
    """Return what is written for an array."""
    if is_prng_key(array):
        array = jax.random.key_data(array)
    exotic = _is_exotic(array.dtype)
    if isinstance(array, jax.Array):
        spans_processes = not array.is_fully_addressable
        if not exotic and (spans_processes or jax.process_count() == 1):
            return array
        if spans_processes:
            return _by_shard(array, array.sharding, lambda x: x.view(np.uint8))
    # Here every process has the whole array; Orbax lets the first one write it.
    array = np.asarray(array)
    if exotic:
        return np.ascontiguousarray(array).reshape(array.shape).view(np.uint8)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _by_shard(
    array: jax.Array, sharding: Sharding, function: Callable[[np.ndarray], np.ndarray]
) -> jax.Array:
    """Apply a function to each local shard on the host; shapes stay."""
    shards = [
        jax.device_put(function(np.asarray(shard.data)), shard.data.sharding)
        for shard in array.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)


def read(
    folder: epath.Path, requests: Mapping[str, Request]
) -> Iterator[dict[str, Any]]:
    """Read arrays, a limited number of bytes at a time.

    Args:
        folder: what ``write`` wrote.
        requests: the arrays wanted, by name.

    Yields:
        Numpy arrays, random keys, or arrays on devices, by name.
    """
    by_shard = {n: r for n, r in requests.items() if _is_local(r.sharding)}
    for name, request in by_shard.items():
        assert request.sharding is not None
        shape, stored = _physical_type(request)
        wanted = request.dtype
        yield {name: large.read(folder, name, shape, stored, wanted, request.sharding)}
    requests = {n: r for n, r in requests.items() if n not in by_shard}
    for batch in _batches(requests):
        args = {name: _restore_args(requests[name]) for name in batch}
        found = _handler().restore(
            folder,
            args=ocp.args.PyTreeRestore(
                item=dict.fromkeys(batch, 0), restore_args=args, partial_restore=True
            ),
        )
        yield {name: _logical(found.pop(name), requests[name]) for name in batch}


def _is_local(sharding: Sharding | None) -> bool:
    return sharding is not None and sharding.is_fully_addressable


def _batches(requests: Mapping[str, Request]) -> Iterator[Sequence[str]]:
    batch: list[str] = []
    num_bytes = 0
    for name, request in requests.items():
        if batch and num_bytes + request.num_bytes > STAGING_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(name)
        num_bytes += request.num_bytes
    if batch:
        yield batch


def _physical_type(request: Request) -> tuple[tuple[int, ...], Any]:
    if request.impl is not None:
        data = jax.eval_shape(
            lambda: jax.random.key_data(jax.random.key(0, impl=request.impl))
        )
        return (*request.shape, *data.shape), data.dtype
    exotic = _is_exotic(request.dtype)
    return request.shape, np.dtype(np.uint8) if exotic else request.dtype


def _restore_args(request: Request) -> ocp.RestoreArgs:
    if request.sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    shape, dtype = _physical_type(request)
    return ocp.ArrayRestoreArgs(
        restore_type=jax.Array,
        sharding=_physical_sharding(request, request.sharding, len(shape)),
        global_shape=shape,
        dtype=dtype,
    )


def _physical_sharding(request: Request, sharding: Sharding, num_dims: int) -> Sharding:
    if request.impl is None or not isinstance(sharding, NamedSharding):
        return sharding
    free = num_dims - len(sharding.spec)
    spec = PartitionSpec(*sharding.spec, *[None] * free)
    return sharding.update(spec=spec)


def _logical(array: Any, request: Request) -> Any:
    """Undo ``_physical``; what comes back must have the type that was asked for."""
    shape, dtype = _physical_type(request)
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(
            f"stored as {array.dtype}{list(array.shape)}, the manifest says"
            f" {np.dtype(dtype)}{list(shape)}"
        )
    if request.impl is not None:
        return jax.random.wrap_key_data(jnp.asarray(array), impl=request.impl)
    if not _is_exotic(request.dtype):
        return array
    if isinstance(array, np.ndarray):
        return array.view(request.dtype)
    return _by_shard(array, array.sharding, lambda shard: shard.view(request.dtype))


def empty(request: Request) -> Any:
    """Return the array of a request that has no elements, and so was not stored."""
    shape, dtype = _physical_type(request)
    return _logical(np.zeros(shape, dtype), request)
