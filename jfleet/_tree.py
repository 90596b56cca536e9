"""Trees of arrays, seen as (path, shape, dtype).

A path is a tuple of strings. Wrappers that flax puts around a value
(``nnx.Variable``, ``linen.Partitioned``) add a last step ``.value``; it is dropped,
so that one parameter has one name in params, gradients and optimizer state.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Path = tuple[str, ...]


def path_of(keys: Sequence[Any]) -> Path:
    """Turn the key path of ``jax.tree_util`` into a tuple of strings.

    >>> import jax
    >>> [(keys, _)] = jax.tree_util.tree_leaves_with_path({"a": [3.0]})
    >>> path_of(keys)
    ('a', '0')
    """
    names = [_name(key) for key in keys]
    if keys and isinstance(keys[-1], jax.tree_util.GetAttrKey) and names[-1] == "value":
        names.pop()
    return tuple(names)


def _name(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def path_str(path: Path) -> str:
    """Join a path for people: ``block_0/mlp/kernel``."""
    return "/".join(path) if path else "(root)"


def leaves_with_paths(tree: Any) -> list[tuple[Path, Any]]:
    """Return (path, leaf) pairs in the order of ``jax.tree.leaves``."""
    return [(path_of(k), v) for k, v in jax.tree_util.tree_leaves_with_path(tree)]


def map_with_path(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """``jax.tree.map`` whose function gets the path first."""
    return jax.tree_util.tree_map_with_path(
        lambda keys, *leaves: function(path_of(keys), *leaves), tree, *rest
    )


def is_array(leaf: Any) -> bool:
    """True for whatever has a shape and a dtype, abstract or concrete."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def is_prng_key(leaf: Any) -> bool:
    """True for typed random keys (``jax.random.key``)."""
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def abstract(tree: Any) -> Any:
    """Replace every leaf by its shape and dtype; Python scalars become arrays."""
    return jax.tree.map(_abstract_leaf, tree)


def _abstract_leaf(leaf: Any) -> jax.ShapeDtypeStruct:
    if is_array(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    value = np.asarray(leaf)
    return jax.ShapeDtypeStruct(value.shape, jax.dtypes.canonicalize_dtype(value.dtype))


def num_elements(shape: Sequence[int]) -> int:
    """Number of elements of a shape; 1 for a scalar, 0 for an empty array."""
    return math.prod(shape)


def dtype_bytes(dtype: Any) -> int:
    """Bytes of one element, random keys included (threefry: 8, rbg: 16)."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
        return num_elements(data.shape) * data.dtype.itemsize
    return np.dtype(dtype).itemsize


def leaf_bytes(leaf: Any) -> int:
    """Bytes of the whole (logical) array."""
    return num_elements(leaf.shape) * dtype_bytes(leaf.dtype)
