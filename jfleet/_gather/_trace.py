"""Trace a function of leaves, and run the jaxpr on shards."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jfleet._gather._control_flow import forwarded
from jfleet._gather._rewrite import Rewriter
from jfleet._gather._specs import Dims, Fabric


def run_leaves(
    rewriter: Rewriter,
    function: Callable[[list[Any]], Any],
    leaves: Sequence[Any],
    dims: Sequence[Dims | None],
    names: Sequence[str],
) -> Any:
    """Call ``function(leaves)``, rewritten.

    Only sharded leaves are traced. All others, be they strings, flags, arrays or
    tracers of an outer transformation, reach the function as they are.
    """
    sharded = [i for i, entry in enumerate(dims) if entry is not None]
    if not sharded:
        return function(list(leaves))
    static: list[Any] = []

    def flat(*values):
        full = list(leaves)
        for i, value in zip(sharded, values, strict=True):
            full[i] = value
        outs, treedef = jax.tree.flatten(function(full))
        arrays = [isinstance(o, jax.Array) for o in outs]
        kept = [None if a else o for a, o in zip(arrays, outs, strict=True)]
        static[:] = [treedef, arrays, kept]
        return [o for a, o in zip(arrays, outs, strict=True) if a]

    values = [jax.numpy.asarray(leaves[i]) for i in sharded]
    fabric = rewriter.fabric
    split = [entry for entry in dims if entry is not None]
    pairs = list(zip(values, split, strict=True))
    jaxpr = jax.make_jaxpr(flat)(*[_traced_as(fabric, v, d) for v, d in pairs])
    shards = [
        rewriter.shard(v, d, names[i]) for (v, d), i in zip(pairs, sharded, strict=True)
    ]
    outs = [rewriter.output(o) for o in rewriter.run(jaxpr, shards)]
    outs = iter(forwarded(jaxpr, values, outs))
    treedef, arrays, kept = static
    pairs = zip(arrays, kept, strict=True)
    return jax.tree.unflatten(treedef, [next(outs) if a else k for a, k in pairs])


def _traced_as(fabric: Fabric, value: jax.Array, dims: Dims) -> Any:
    """On Explicit axes the function must see the type of the whole array."""
    if not fabric.explicit:
        return value
    aval = jax.typeof(value)
    return jax.ShapeDtypeStruct(
        aval.shape,
        aval.dtype,
        weak_type=aval.weak_type,
        sharding=fabric.sharding(fabric.whole(dims)),
    )
