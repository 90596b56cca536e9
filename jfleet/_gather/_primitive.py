"""Gather as a JAX primitive: linear, the identity on values, with its own transpose.

``gather`` walks an array through ``path`` (shard to whole); its transpose is
``scatter``, which walks the cotangent through ``back`` (whole to shard), and the other
way round. A plain ``with_sharding_constraint`` cannot do this: its transpose puts the
*same* constraint on the cotangent, so the gradient would be made whole.

On Explicit axes layouts are part of the type, and ``jax.sharding.reshard`` has the
right transpose already.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jfleet._gather._specs import Dims, Fabric

Path = tuple[NamedSharding, ...]


def _walk(x: jax.Array, *, path: Path, back: Path) -> jax.Array:
    del back
    for sharding in path:
        x = jax.lax.with_sharding_constraint(x, sharding)
    return x


_walk_eagerly = functools.partial(jax.jit, static_argnames=("path", "back"))(_walk)


def _primitive(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.def_impl(_walk_eagerly)
    primitive.def_abstract_eval(lambda x, **_: x)
    lowering = mlir.lower_fun(_walk, multiple_results=False)
    mlir.register_lowering(primitive, lowering)
    return primitive


gather_p = _primitive("jfleet_gather")
scatter_p = _primitive("jfleet_scatter")


def _define_transpose(primitive: Primitive, opposite: Primitive) -> None:
    def transpose(cotangent, _, *, path, back):
        if type(cotangent) is ad.Zero:
            return [cotangent]
        return [opposite.bind(cotangent, path=back, back=path)]

    ad.deflinear2(primitive, transpose)


def _define_batching(primitive: Primitive) -> None:
    def rule(axis_data, operands, batch_dims, *, path, back):
        (x,), (dim,) = operands, batch_dims
        if dim is None:
            return primitive.bind(x, path=path, back=back), None
        # Whoever maps says over which mesh axes; otherwise leave that dim alone.
        entry = axis_data.spmd_name or P.UNCONSTRAINED

        def insert(sharding: NamedSharding) -> NamedSharding:
            spec = list(sharding.spec) + [None] * (x.ndim - 1 - len(sharding.spec))
            return NamedSharding(sharding.mesh, P(*spec[:dim], entry, *spec[dim:]))

        path, back = tuple(map(insert, path)), tuple(map(insert, back))
        return primitive.bind(x, path=path, back=back), dim

    batching.fancy_primitive_batchers[primitive] = rule


for _primitive_, _opposite in ((gather_p, scatter_p), (scatter_p, gather_p)):
    _define_transpose(_primitive_, _opposite)
    _define_batching(_primitive_)


def gather(x: jax.Array, dims: Dims, fabric: Fabric, *, stepwise: bool) -> jax.Array:
    """Make a shard whole over the gathered axes; its cotangent becomes a shard.

    The path starts with the layout of the shard: else the compiler may move a cast,
    or whatever else is done to the shard, behind the gather.
    """
    way = fabric.way(dims, stepwise=stepwise)
    forward, backward = tuple(way[::-1]), tuple(way[1:])
    if fabric.explicit:
        return functools.reduce(jax.sharding.reshard, forward, x)
    return gather_p.bind(x, path=forward, back=backward)


def split_cotangent(
    x: jax.Array, dims: Dims, fabric: Fabric, *, stepwise: bool
) -> jax.Array:
    """Leave the value alone; its cotangent becomes a shard."""
    if fabric.explicit:  # the type of the value already says so
        return x
    backward = tuple(fabric.way(dims, stepwise=stepwise)[1:])
    return gather_p.bind(x, path=(), back=backward)


def pin_cotangent(x: jax.Array, dims: Dims, fabric: Fabric) -> jax.Array:
    """Leave the value alone; its cotangent, a shard more or less, stays one."""
    if fabric.explicit:
        return x
    return gather_p.bind(x, path=(), back=(fabric.sharding(dims),))


def constrain(x: jax.Array, dims: Sequence[Any], fabric: Fabric) -> jax.Array:
    """Lay an array out, forward and backward; ``P.UNCONSTRAINED`` is allowed."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(fabric.mesh, P(*dims)))


MOVEMENT = frozenset(
    ("convert_element_type", "copy", "squeeze", "transpose", "slice", "reshape", "rev")
)
"""One operand in, the same numbers out."""

_DONE_AGAIN = MOVEMENT | {"jfleet_gather", "jfleet_scatter", "reshard"}


def saves_all_but_gathers(prim: Any, *_: Any, **__: Any) -> bool:
    """A checkpoint policy: gather again; compute nothing twice but casts and moves."""
    return prim.name not in _DONE_AGAIN
