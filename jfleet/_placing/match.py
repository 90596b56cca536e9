"""Which parameter an optimizer-state leaf belongs to, and the spec that follows.

``optax.tree_map_params`` answers this for the common optimizers but raises for
``masked``, ``partition``, ``muon`` and others, and hands the factored statistics of
``adafactor`` a spec of the wrong rank. Here a leaf belongs to the parameter whose path
is the longest suffix of its own, and takes that parameter's spec only if the shape
agrees; everything else is decided from the leaf's own shape.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from jfleet._layout import Decision, ParamLayout, Policy, canonical, entries_of, split
from jfleet._tree import Path, is_prng_key, path_str


class ParamIndex:
    """Find parameters by path suffix."""

    def __init__(self, layouts: Iterable[ParamLayout]):
        self._by_path: dict[Path, ParamLayout] = {p.path: p for p in layouts}
        self._lengths = sorted({len(p) for p in self._by_path}, reverse=True)

    def __len__(self) -> int:
        return len(self._by_path)

    def find(self, path: Path) -> ParamLayout | None:
        """Return the parameter whose path is the longest suffix of ``path``."""
        for length in self._lengths:
            if length <= len(path):
                found = self._by_path.get(path[len(path) - length :])
                if found is not None:
                    return found
        return None


def optimizer_decisions(
    leaves: Sequence[tuple[Path, Any]], index: ParamIndex, policy: Policy
) -> list[Decision]:
    """Decide the spec of every optimizer-state leaf."""
    return [_optimizer_leaf(path, leaf, index, policy) for path, leaf in leaves]


def _optimizer_leaf(path, leaf, index: ParamIndex, policy: Policy) -> Decision:
    shape = tuple(leaf.shape)
    if not shape:
        return Decision(PartitionSpec(), "scalar: whole")
    if is_prng_key(leaf):
        return Decision(PartitionSpec(), "random key: whole")
    param = index.find(path)
    if param is not None:
        name = path_str(param.path)
        if shape in (param.shape, param.stored_optimizer):
            return Decision(
                param.optimizer.spec, f"as {name!r}: {param.optimizer.reason}"
            )
        if shape[1:] == param.shape:
            spec = canonical([(), *entries_of(param.optimizer.spec, len(param.shape))])
            return Decision(spec, f"history of {name!r}, each entry split alike")
        if param.optimizer.reason.startswith("excluded"):
            return Decision(PartitionSpec(), f"belongs to {name!r}, which is excluded")
    own = split(
        shape,
        policy.optimizer_axes,
        policy.mesh,
        min_shard_size=policy.min_shard_size,
    )
    whose = "no parameter of this name"
    if param is not None:
        whose = f"another shape than {path_str(param.path)!r}"
    return Decision(own.spec, f"{whose}, by its own: {own.reason}")


def extra_decisions(
    leaves: Sequence[tuple[Path, Any]],
    index: ParamIndex,
    kept: dict[Path, PartitionSpec],
) -> list[Decision]:
    """Decide the spec of leaves that are neither parameters nor optimizer state.

    A copy of a parameter (an average, a target network) lies like the parameter: were
    it split where the parameter is whole, XLA would split the parameter too, as soon as
    a step mixes them. Anything else (step counters, batch statistics, random keys)
    stays as it came, else whole.
    """
    decisions = []
    for path, leaf in leaves:
        param = index.find(path)
        shapes = () if param is None else (param.shape, param.stored_param)
        if param is not None and param.path and tuple(leaf.shape) in shapes:
            text = f"copy of {path_str(param.path)!r}, lies like it"
            decisions.append(Decision(param.param.spec, text))
        elif path in kept:
            decisions.append(Decision(kept[path], "as it came"))
        else:
            text = "neither parameter nor optimizer state: whole"
            decisions.append(Decision(PartitionSpec(), text))
    return decisions
