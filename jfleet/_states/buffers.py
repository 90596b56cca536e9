"""Buffers of one's own: nothing that jfleet returns shares memory with its input.

``jax.device_put`` returns the very buffer it was given when the device already holds
the right bytes, even with ``may_alias=False`` when only one of several shards matches.
A donated step would then delete the caller's array, or donate one buffer twice, which
ends the process. So every placed array is checked by address, and copied if need be.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfleet._tree import is_prng_key


def addresses(value: Any) -> set[tuple[Any, int]]:
    """Return (device, address) of every buffer of an array that this process holds."""
    if isinstance(value, np.ndarray):
        return {(None, value.ctypes.data)}
    if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
        return set()
    if is_prng_key(value):
        value = jax.random.key_data(value)
    return {
        (shard.device, shard.data.unsafe_buffer_pointer())
        for shard in value.addressable_shards
        if shard.data.size
    }


def is_deleted(value: Any) -> bool:
    """Whether an array was donated or deleted; False for anything else."""
    concrete = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    return concrete and value.is_deleted()


def place(
    values: Sequence[Any], shardings: Sequence[jax.sharding.Sharding]
) -> list[jax.Array]:
    """Put arrays on shardings, into buffers that nothing else holds.

    Args:
        values: concrete arrays.
        shardings: where each goes.

    Returns:
        The placed arrays, pairwise distinct and distinct from ``values``.
    """
    placed = jax.device_put(list(values), list(shardings))
    return own(placed, values)


def own(arrays: Sequence[jax.Array], others: Iterable[Any] = ()) -> list[jax.Array]:
    """Copy those arrays that share a buffer with an earlier one or with ``others``."""
    taken: set[int] = set()
    for value in others:
        taken |= {address for _, address in addresses(value)}
    shared = []
    for i, array in enumerate(arrays):
        mine = {address for _, address in addresses(array)}
        # Random keys and empty arrays hide their buffers: copying them costs nothing.
        if mine & taken or is_prng_key(array) or array.size == 0:
            shared.append(i)
        taken |= mine
    out = list(arrays)
    if shared:
        sources = [arrays[i] for i in shared]
        for i, array in zip(shared, _copies(sources), strict=True):
            out[i] = array
    return out


def _copies(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Copy all arrays in one program."""
    shardings = [a.sharding for a in arrays]
    return jax.jit(lambda xs: [jnp.copy(x) for x in xs], out_shardings=shardings)(
        list(arrays)
    )
