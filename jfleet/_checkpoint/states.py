"""States inside of a tree, seen in the shapes that they have without padding."""

from collections.abc import Mapping
from typing import Any

import jax

from jfleet._logical import logical_state, stored_like


def logical_states(tree: Any) -> Any:
    """Return a tree without the padding of the state that it is, or that it holds."""
    if not _holds_states(tree):
        return logical_state(tree)
    return jax.tree.map(
        lambda node: logical_state(node) if _is_state(node) else node,
        tree,
        is_leaf=_is_inner,
    )


def stored_like_states(loaded: Any, tree: Any) -> Any:
    """Pad and place loaded states in the way that those of ``tree`` rest."""
    if not _holds_states(tree):
        return stored_like(loaded, tree)
    return jax.tree.map(
        lambda new, old: stored_like(new, old) if _is_state(old) else new,
        loaded,
        tree,
        is_leaf=_is_inner,
    )


def _is_state(node: Any) -> bool:
    names = ("params", "opt_state", "tx")
    return hasattr(type(node), "replace") and all(hasattr(node, n) for n in names)


def _is_inner(node: Any) -> bool:
    """True for what is looked at as one: anything but dicts, lists and tuples."""
    return not isinstance(node, Mapping | list | tuple)


def _holds_states(tree: Any) -> bool:
    """True for a container of states; False for a state of any kind and all else."""
    if _is_inner(tree):
        return False
    return any(map(_is_state, jax.tree.leaves(tree, is_leaf=_is_inner)))
