"""What the examples print about a step: bytes on a device, collectives per call.

The numbers of a step are read from its compiled program, so they are those of one call
on this machine, whatever its network.
"""

from typing import Any

import jax

from jfleet._hlo import Collective, collectives

REDUCTIONS = ("all-reduce", "reduce-scatter")


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


def exchanges(step: Any, *arguments: Any, min_bytes: int = 1024) -> list[Collective]:
    """List the collectives of one call, but for those of metrics and counters.

    The program is compiled once: a later call of ``step`` finds it.
    """
    compiled = step.lower(*arguments).compile()
    return [c for c in collectives(compiled) if c.bytes >= min_bytes]


def wire_bytes(found: list[Collective]) -> int:
    """Bytes that one device sends in one call."""
    return round(sum(c.wire_bytes for c in found))
