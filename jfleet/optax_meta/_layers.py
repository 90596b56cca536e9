"""Parameters seen as layers with norms; the common part of LARS and LAMB."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jfleet._errors import ConfigError
from jfleet._tree import leaves_with_paths, path_str
from jfleet._types import AxisName, PyTree
from jfleet.optax_meta import _common as common
from jfleet.optax_meta._norms import leaf_norms


@dataclasses.dataclass(frozen=True, slots=True)
class Layers:
    """The settings of LARS and LAMB that concern layers."""

    exclude: common.Rule
    trust_on_excluded: bool
    stacked: common.Rule
    axis_name: AxisName | None
    replicated: common.Rule

    def __post_init__(self):
        common.check_flag("trust_on_excluded", self.trust_on_excluded)
        common.check_axis_name(self.axis_name)
        for name in ("exclude", "stacked", "replicated"):
            common.check_rule(name, getattr(self, name))


@dataclasses.dataclass(frozen=True, slots=True)
class LayerView:
    """One tree of parameters under given settings."""

    treedef: Any
    dtypes: list[Any]
    excluded: list[bool]
    stacked: list[bool]
    split: list[bool]
    axis_name: AxisName | None
    leaves: list[Any]

    def wide_leaves(self, tree: PyTree) -> list[jax.Array]:
        """Leaves of a tree like the parameters, in float32 or wider."""
        return [common.wide(x) for x in self.treedef.flatten_up_to(tree)]

    def norms(self, leaves: list[jax.Array]) -> list[jax.Array]:
        """Norms of several trees' leaves, one tree after the other."""
        times = len(leaves) // len(self.split) if self.split else 0
        flags = (self.stacked * times, self.split * times)
        return leaf_norms(leaves, *flags, self.axis_name)

    def unflatten(self, leaves: list[Any]) -> PyTree:
        """Back to a tree like the parameters."""
        return self.treedef.unflatten(leaves)

    def updates(self, leaves: list[jax.Array]) -> PyTree:
        """Back to a tree, in the dtypes of the parameters."""
        rows = zip(leaves, self.dtypes, strict=True)
        return self.unflatten([x.astype(dtype) for x, dtype in rows])

    def ratio_like(self) -> PyTree:
        """Ones in the shape of the norms."""
        rows = zip(self.leaves, self.stacked, strict=True)
        return self.unflatten([_ratio(x, stacked) for x, stacked in rows])


def _ratio(x: Any, stacked: bool) -> jax.Array:
    shape = (x.shape[0], *(1 for _ in x.shape[1:])) if stacked else ()
    return jnp.ones(shape, common.wide_dtype(x.dtype))


def layers_of(params: PyTree, layers: Layers) -> LayerView:
    """Look up the rules for each parameter; refuse scalars named as stacked."""
    leaves, treedef = jax.tree.flatten(params)
    stacked = jax.tree.leaves(common.mask_of(layers.stacked, params, "stacked"))
    for (path, x), is_stacked in zip(leaves_with_paths(params), stacked, strict=True):
        if is_stacked and x.ndim < 1:
            raise ConfigError(
                f"stacked must name leaves with a dim of layers, got the scalar "
                f"parameter {path_str(path)!r}; narrow the rule"
            )
    whole = jax.tree.leaves(common.mask_of(layers.replicated, params, "replicated"))
    return LayerView(
        treedef=treedef,
        dtypes=[x.dtype for x in leaves],
        excluded=jax.tree.leaves(common.mask_of(layers.exclude, params, "exclude")),
        stacked=stacked,
        split=[bool(layers.axis_name) and not w for w in whole],
        axis_name=layers.axis_name,
        leaves=leaves,
    )
