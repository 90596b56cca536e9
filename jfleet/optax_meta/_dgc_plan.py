"""What DGC decides from shapes and steps: which leaves, when, how many entries."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jfleet._errors import ConfigError
from jfleet._tree import leaves_with_paths, num_elements, path_str
from jfleet._types import PyTree
from jfleet.optax_meta import _common as common

SLACK = 1e-6  # so that 10 * (1 - 0.9) is 1


def num_kept(numel: int, sparsity: float, rounding: str = "ceil") -> int:
    """Number of entries to send.

    >>> num_kept(10, 0.9), num_kept(10, 0.75), num_kept(10, 0.75, "floor")
    (1, 3, 2)
    """
    exact = numel * (1 - sparsity)
    if rounding == "ceil":
        return min(numel, max(1, math.ceil(exact - SLACK)))
    return min(numel, max(1, math.floor(exact + SLACK)))


def compressible(params: PyTree, min_size: int, exclude: common.Rule) -> PyTree:
    """Tree of bools: large leaves of float32 or wider that no rule excludes."""
    excluded = common.mask_of(exclude, params, "exclude")
    return jax.tree.map(
        lambda p, skip: not skip and _is_large(p, min_size), params, excluded
    )


def _is_large(p: Any, min_size: int) -> bool:
    wide = jnp.issubdtype(p.dtype, jnp.floating) and jnp.finfo(p.dtype).bits >= 32
    return wide and num_elements(p.shape) >= min_size


def dgc_compressed_paths(
    params: PyTree, *, min_size: int = 16384, exclude: common.Rule = ()
) -> list[str]:
    """List the parameters that ``dgc`` compresses; shapes are enough.

    >>> import jax, jax.numpy as jnp
    >>> shapes = jax.eval_shape(lambda: {"w": jnp.ones((128, 128)), "b": jnp.ones(128)})
    >>> dgc_compressed_paths(shapes)
    ['w']
    """
    chosen = jax.tree.leaves(compressible(params, min_size, exclude))
    rows = zip(leaves_with_paths(params), chosen, strict=True)
    return [path_str(path) for (path, _), is_chosen in rows if is_chosen]


@dataclasses.dataclass(frozen=True, slots=True)
class Ramp:
    """Sparsity over time. A stage is a level that occurs; 0.0 is the dense phase."""

    begin: int
    steps: int
    levels: tuple[float, ...]
    stages: tuple[float, ...]
    returns: bool  # whether a dense level follows a sparse one

    @classmethod
    def of(cls, begin: Any, steps: Any, sparsity: Sequence[float]) -> "Ramp":
        """Check the arguments of ``dgc``."""
        begin = common.static_count("rampup_begin_step", begin, low=0)
        steps = common.static_count("rampup_step", steps, low=1)
        if isinstance(sparsity, int | float):
            sparsity = (sparsity,)
        levels = tuple(float(x) for x in sparsity)
        if not levels or not all(0 <= x < 1 for x in levels):
            raise ConfigError(
                f"sparsity must be numbers in [0, 1), at least one, got {sparsity!r}; "
                "0.999 lets one entry in a thousand through"
            )
        stages = tuple(sorted({*levels, *([0.0] if begin else [])}))
        returns = any(a > 0 and b == 0 for a, b in itertools.pairwise(levels))
        return cls(begin, steps, levels, stages, returns)

    def stage_at(self, step: jax.Array) -> int | jax.Array:
        """Index into ``stages``; an int if it is the same for all steps."""
        if len(self.stages) == 1:
            return 0
        stage_of = jnp.array([self.stages.index(x) for x in self.levels], jnp.int32)
        # Beyond the ramp nothing changes; the limit also keeps the product small.
        into = jnp.clip(step - self.begin, 0, self.steps)
        num = len(self.levels)
        level = jnp.minimum(into * num // self.steps, num - 1)
        return jnp.where(step < self.begin, 0, stage_of[level])

    def sparsity_of(self, stage: int | jax.Array) -> jax.Array:
        """The sparsity of a stage."""
        return jnp.asarray(self.stages)[stage]
