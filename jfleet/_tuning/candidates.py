"""What ``auto`` may choose from: mesh splits times settings, in a fixed order.

Only what leaves the result the same up to rounding order is free, unless accuracy
"mixed" adds bfloat16 compute. What the user set stays as it is.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jfleet._errors import ConfigError
from jfleet._resolving.request import FEATURES
from jfleet._types import LEVELS
from jfleet.strategy import DistributedStrategy

DATA, REPLICA, SHARD = "data", "replica", "shard"
POLICIES = ("dots_saveable", "nothing_saveable")
"""Recompute policies, from the one that keeps more."""
_HARMLESS = {"auto", "auto_configs", "hybrid_configs"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One way to run the step."""

    mesh_shape: tuple[tuple[str, int], ...]
    """Axis names and sizes."""
    level: str | None
    """Level of sharding, None without."""
    recompute: str | None
    """Recompute policy, None without."""
    sync: str | None
    """``last`` or ``each`` where gradients are merged and that is free."""
    half: bool
    """Whether it computes in bfloat16 because auto chose to."""
    strategy: DistributedStrategy = dataclasses.field(compare=False, repr=False)
    """The strategy with everything spelled out: auto is off in it."""

    @property
    def name(self) -> str:
        """In words."""
        mesh = " x ".join(f"{a}={n}" for a, n in self.mesh_shape)
        parts = [self.level or "no sharding", mesh]
        if self.recompute is not None:
            parts.append(f"recompute {self.recompute}")
        if self.sync is not None:
            parts.append(f"sync {self.sync}")
        if self.half:
            parts.append("bfloat16")
        return ", ".join(parts)

    @property
    def complexity(self) -> tuple[int, ...]:
        """Smaller is simpler; of equally fast candidates the simplest is taken."""
        return (
            0 if self.recompute is None else 1 + POLICIES.index(self.recompute),
            int(self.half),
            len(self.mesh_shape),
            0 if self.level is None else 1 + LEVELS.index(self.level),
            int(self.sync == "each"),
        )


def free_switches(strategy: DistributedStrategy) -> set[str]:
    """The switches that are left to auto.

    ``auto`` alone leaves all of them; with other switches set it leaves nothing, unless
    ``auto_configs`` say ``{"mode": "fill"}``; a switch set to "auto" is always free.
    """
    given = strategy.to_dict()
    free = {name for name in FEATURES if given.get(name) == "auto"}
    if strategy.auto:
        fixed = [n for n, v in given.items() if n not in _HARMLESS and v != "auto"]
        if not fixed or strategy.options("auto_configs").mode == "fill":
            free |= {name for name in FEATURES if name not in given}
    return free


def mesh_splits(num_devices: int, *, wide: bool) -> list[dict[str, int]]:
    """Meshes over that many devices: all in one axis, or replicas of smaller groups.

    Example:
        >>> mesh_splits(4, wide=True)
        [{'data': 4}, {'replica': 2, 'shard': 2}]
    """
    splits = [{DATA: num_devices}]
    if wide:
        sizes = [n for n in range(num_devices // 2, 1, -1) if num_devices % n == 0]
        splits += [{REPLICA: num_devices // n, SHARD: n} for n in sizes]
    return splits


def candidates(
    strategy: DistributedStrategy,
    meshes: Sequence[Mapping[str, int]],
    *,
    traced: bool = True,
) -> list[Candidate]:
    """Every way to run that the strategy leaves open, in a fixed order.

    Args:
        strategy: with ``auto`` on, or single switches set to "auto".
        meshes: the mesh splits to consider.
        traced: whether there is a loss to trace; without one, nothing is known of what
            recomputing, precision or the reduction schedule would change.

    Raises:
        ConfigError: nothing is left to choose.
    """
    free = free_switches(strategy)
    several = len(meshes) > 1
    found = [
        one
        for shape in meshes
        for one in _of_mesh(strategy, free, dict(shape), traced)
        # Replicas of groups only make sense where a group splits something.
        if one.level is not None or not several or SHARD not in shape
    ]
    if not found:
        raise ConfigError(
            "auto has nothing to choose from: no level goes with this mesh and what "
            "the strategy sets"
        )
    return found


def _of_mesh(
    strategy: DistributedStrategy, free: set[str], shape: dict[str, int], traced: bool
) -> Iterator[Candidate]:
    given = strategy.to_dict()
    levels: Sequence[str | None] = (None, *LEVELS)
    if "sharding" not in free:
        on = given.get("sharding") is True
        levels = (strategy.options("sharding_configs").level,) if on else (None,)
    policies: Sequence[str | None] = (None, *POLICIES)
    if "recompute" not in free or not traced:
        policies = (None,)
    merges = traced and given.get("gradient_merge") is True
    chosen = given.get("gradient_merge_configs", {}).get("sync", "auto")
    syncs = ("last", "each") if merges and chosen == "auto" else (None,)
    accuracy = strategy.options("auto_configs").accuracy
    mixed = traced and "amp" in free and accuracy != "exact"
    halves = (False, True) if mixed else (False,)
    for level in levels:
        if level is not None and _num(shape) == 1:
            continue
        for policy in policies:
            for sync in syncs:
                for half in halves:
                    yield Candidate(
                        mesh_shape=tuple(shape.items()),
                        level=level,
                        recompute=policy,
                        sync=sync,
                        half=half,
                        strategy=_spelled(strategy, free, level, policy, sync, half),
                    )


def _num(shape: Mapping[str, int]) -> int:
    num = 1
    for size in shape.values():
        num *= size
    return num


def _spelled(
    strategy: DistributedStrategy,
    free: set[str],
    level: str | None,
    policy: str | None,
    sync: str | None,
    half: bool,
) -> DistributedStrategy:
    """The strategy with auto off and every choice written down."""
    given: dict[str, Any] = strategy.to_dict()
    for name in ("auto", "auto_configs", *free):
        given.pop(name, None)
    if "sharding" in free and level is not None:
        given["sharding"] = True
        given["sharding_configs"] = {
            **given.get("sharding_configs", {}),
            "level": level,
        }
    if policy is not None:
        given["recompute"] = True
        given["recompute_configs"] = {
            **given.get("recompute_configs", {}),
            "policy": policy,
        }
    if sync is not None:
        merge = given.get("gradient_merge_configs", {})
        given["gradient_merge_configs"] = {**merge, "sync": sync}
    if half:
        given["amp"] = True
        given["amp_configs"] = {**given.get("amp_configs", {}), "dtype": "bfloat16"}
    return DistributedStrategy(**given)
