"""Bytes on a device: what the examples print about a state."""

from typing import Any

import jax


def device_bytes(tree: Any) -> int:
    """Bytes that the arrays of a tree take on the first device."""
    first = jax.devices()[0]
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf, jax.Array)
        for shard in leaf.addressable_shards
        if shard.device == first
    )
