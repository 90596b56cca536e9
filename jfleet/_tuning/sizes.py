"""Bytes and traffic of a candidate in closed form, for states of any size.

Without a loss there is nothing to trace. Leaves are grouped by shape, so a tree of
100,000 leaves costs what its few hundred shapes cost. A leaf is split if its largest
dim that the devices divide exists; else it is whole, as the plan would have it.
"""

import collections
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax

from jfleet._tree import leaf_bytes
from jfleet._tuning.candidates import SHARD, Candidate

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Leaves of one shape and type."""

    shape: Shape
    leaf_bytes: int
    count: int

    def per_device(self, num_shards: int) -> int:
        """Bytes on each device, split as far as some dim lets it."""
        fits = any(n and n % num_shards == 0 for n in self.shape)
        share = num_shards if fits else 1
        return self.count * self.leaf_bytes // share

    @property
    def total(self) -> int:
        """Bytes of all of them, whole."""
        return self.count * self.leaf_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """A state by shapes."""

    params: tuple[Group, ...]
    opt_state: tuple[Group, ...]

    @classmethod
    def of(cls, params: Any, init: Callable[[Any], Any]) -> "Sizes":
        """Group the leaves of parameters and of the state that ``init`` makes."""
        return cls(_groups(params), _groups(jax.eval_shape(init, params)))

    def peak_bytes(self, candidate: Candidate) -> int:
        """Parameters, gradients and optimizer state on one device, in a step.

        At ``p_g_os`` the largest leaf is gathered beside its shard.
        """
        shape = dict(candidate.mesh_shape)
        num = shape.get(SHARD, math.prod(shape.values()))
        level = candidate.level

        def held(groups: tuple[Group, ...], split: bool) -> int:
            return sum(g.per_device(num) if split else g.total for g in groups)

        largest = max((g.leaf_bytes for g in self.params), default=0)
        return (
            held(self.params, level == "p_g_os")
            + held(self.params, level in ("os_g", "p_g_os"))
            + held(self.opt_state, level is not None)
            + (largest if level == "p_g_os" else 0)
        )

    def wire_bytes(self, candidate: Candidate) -> float:
        """What one device sends per step, with ring algorithms.

        Data parallel all-reduces gradients: 2 units of (n - 1) / n times the
        parameters. os and os_g spend the same on reduce-scatter and all-gather (on
        backends without a reduce-scatter os spends 3); p_g_os gathers twice: 3. Over
        the replicas of a split mesh, shards are all-reduced.
        """
        shape = dict(candidate.mesh_shape)
        num = shape.get(SHARD, math.prod(shape.values()))
        replicas = shape.get("replica", 1) if SHARD in shape else 1
        total = sum(g.total for g in self.params)
        ring = (num - 1) / num * total
        inside = ring * {None: 2, "os": 3, "os_g": 2, "p_g_os": 3}[candidate.level]
        shard = sum(g.per_device(num) for g in self.params)
        return inside + 2 * (replicas - 1) / replicas * shard


def _groups(tree: Any) -> tuple[Group, ...]:
    leaves = jax.tree.leaves(tree)
    kinds: dict[Any, Any] = {(x.shape, x.dtype): x for x in leaves}
    sizes = {kind: leaf_bytes(x) for kind, x in kinds.items()}
    found = collections.Counter((x.shape, x.dtype) for x in leaves)
    return tuple(
        Group(tuple(kind[0]), sizes[kind], count) for kind, count in found.items()
    )
