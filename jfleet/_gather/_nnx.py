"""flax.nnx modules as arguments: a module is a graph that the function may change.

The call becomes a pure function of the module's state; what the function changed
(batch statistics, random counts, new variables) is put back into the caller's modules.
"""

from typing import Any

import jax
from flax import nnx

from jfleet._gather._rewrite import Rewriter
from jfleet._gather._trace import run_leaves
from jfleet._tree import leaves_with_paths

_CONTEXT = "jfleet_gather"


def _is_module(node: Any) -> bool:
    return isinstance(node, nnx.Pytree)


def has_modules(tree: Any) -> bool:
    """Is there a module among the arguments?"""
    return any(map(_is_module, jax.tree.leaves(tree, is_leaf=_is_module)))


def states(tree: Any) -> Any:
    """The tree with the state of each module in its place."""
    return jax.tree.map(
        lambda node: nnx.state(node) if _is_module(node) else node,
        tree,
        is_leaf=_is_module,
    )


def run(fn: Any, rewriter: Rewriter, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call ``fn.fn`` on modules, rewritten, and update the modules."""
    plain = states((args, kwargs))
    pairs = leaves_with_paths(plain)
    dims, names = fn.layout(rewriter.fabric, *plain)
    known = {p: (d, n) for (p, _), d, n in zip(pairs, dims, names, strict=True)}
    with nnx.update_context(_CONTEXT):
        with nnx.split_context(_CONTEXT) as context:
            graph, state = context.split((args, kwargs))
        flat = leaves_with_paths(state)
        treedef = jax.tree.structure(state)
        found = [known.get(path, (None, "")) for path, _ in flat]
        after: list[Any] = []

        def function(leaves):
            with nnx.merge_context(_CONTEXT, inner=True) as context:
                args, kwargs = context.merge(graph, jax.tree.unflatten(treedef, leaves))
            out = fn.fn(*args, **kwargs)
            with nnx.split_context(_CONTEXT) as context:
                new_graph, new_state = context.split((args, kwargs, out))
            after[:] = [new_graph]
            return new_state

        new_state = run_leaves(
            rewriter,
            function,
            [leaf for _, leaf in flat],
            [dims for dims, _ in found],
            [name for _, name in found],
        )
        with nnx.merge_context(_CONTEXT, inner=False) as context:
            _, _, out = context.merge(after[0], new_state)
    return out
