"""Arrays to and from disk with Orbax; the only file that knows Orbax.

Everything is one flat dict from name to array. Choices, and why:

- *OCDBT, zarr, no compression*: few files however many leaves there are, and trained
  float32 values shrink by less than a tenth for five times the CPU time.
- *First replica writes*: splitting a replicated array over its replicas compiles one
  program per shape, which made the first save of a small model take seconds.
- *Plain bytes for exotic types*: TensorStore knows some of the 4 and 8 bit types, not
  all; stored as uint8 they need no knowledge. Random keys are stored as key data.
- *Reading*: an array whose devices all belong to this process is read once, whole, and
  cut up by ``device_put``; reading shard by shard costs one read of a chunk for every
  shard that touches it. An array that spans processes is read shard by shard.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jfleet._tree import is_prng_key, num_elements

TIMEOUT_SECS = 3600
STAGING_BYTES = 256 << 20
"""Most that loading holds on the host beyond the arrays it makes."""


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
    """Global layout, only for arrays that span processes; None gives numpy."""

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


def write(folder: epath.Path, arrays: Mapping[str, Any]) -> Callable[[], None]:
    """Start writing arrays; they may be changed or donated once this returns.

    Args:
        folder: new folder; it appears under this name when everything is written.
        arrays: jax or numpy arrays by name, at least one.

    Returns:
        A function that waits for the end of the write and raises its error.
    """
    item = {name: _physical(array) for name, array in arrays.items()}
    checkpointer = ocp.AsyncCheckpointer(_handler(), timeout_secs=TIMEOUT_SECS)
    try:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(item))
    except BaseException:
        checkpointer.close()
        raise
    return checkpointer.close


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
        Numpy arrays, random keys, or global arrays by name, in the order asked for.
    """
    for batch in _batches(requests):
        args = {name: _restore_args(requests[name]) for name in batch}
        found = _handler().restore(
            folder,
            args=ocp.args.PyTreeRestore(
                item=dict.fromkeys(batch, 0), restore_args=args, partial_restore=True
            ),
        )
        yield {name: _logical(found.pop(name), requests[name]) for name in batch}


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


def barrier(key: str) -> None:
    """Wait for all processes without using devices; safe in a background thread."""
    wait = ocp.multihost.get_barrier_sync_fn()
    wait(key=key, timeout_ms=TIMEOUT_SECS * 1000)
