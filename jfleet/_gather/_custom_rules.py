"""Functions with derivative rules of their own: the rule sees shards too.

Both handlers ask JAX for the derivative of the equation as it stands, trace that to a
jaxpr, and run the jaxpr on shards. What a ``custom_vjp`` keeps for its backward pass
is then a shard wherever it kept the weight, and its backward rule gathers again.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jfleet._gather._layout_rules import Shard, Tag


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """What the backward rule gets: raw values, and how to read them."""

    values: list[Any]
    tags: tuple[Tag | None, ...] = dataclasses.field(metadata={"static": True})
    treedef: Any = dataclasses.field(metadata={"static": True})


def _is_float(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def _abstract(atom: Any) -> jax.ShapeDtypeStruct:
    """The whole operand that an equation was traced with."""
    aval = atom.aval
    sharding = aval.sharding if getattr(aval.sharding, "mesh", None) else None
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding
    )


def _of_floats(function: Any, operands: Sequence[Any], floats: Sequence[int]) -> Any:
    """The function with only its differentiable operands left to give."""

    def run(*values):
        full = list(operands)
        for i, value in zip(floats, values, strict=True):
            full[i] = value
        return function(*full)

    return run


def _tags(operands: Sequence[Any]) -> tuple[Tag | None, ...]:
    return tuple(o.tag if isinstance(o, Shard) else None for o in operands)


def _custom_vjp(rw, eqn, ins):
    function, tags = rw.equation_function(eqn), _tags(ins)
    floats = [i for i, atom in enumerate(eqn.invars) if _is_float(atom.aval)]
    whole = [_abstract(atom) for atom in eqn.invars]
    raws = [i.value if isinstance(i, Shard) else i for i in ins]
    shapes = [jax.typeof(value) for value in raws]
    primal = rw.traced(eqn.params["call_jaxpr"], tags)

    def differentiate(*operands):
        some = _of_floats(function, operands, floats)
        return jax.vjp(some, *[operands[i] for i in floats])

    def forward(*values):
        jaxpr, shape = jax.make_jaxpr(differentiate, return_shape=True)(*whole)
        outs = rw.run(jaxpr, rw.tagged(values, tags))
        num_outs = len(eqn.outvars)
        kept = outs[num_outs:]
        treedef = jax.tree.structure(shape[1])
        raw_kept = [k.value if isinstance(k, Shard) else k for k in kept]
        return [rw.force(o) for o in outs[:num_outs]], Kept(
            raw_kept, _tags(kept), treedef
        )

    def backward(kept, cotangents):
        usable = [c for c in cotangents if _is_float(c)]

        def pull_back(values, given):
            given = iter(given)
            all_cotangents = [next(given) if _is_float(c) else c for c in cotangents]
            return jax.tree.unflatten(kept.treedef, values)(all_cotangents)

        kept_whole = [
            v if t is None else jax.eval_shape(lambda v, t=t: rw.whole_of(t, v), v)
            for v, t in zip(kept.values, kept.tags, strict=True)
        ]
        jaxpr = jax.make_jaxpr(pull_back)(kept_whole, usable)
        outs = rw.run(jaxpr, [*rw.tagged(kept.values, kept.tags), *usable])
        result: list[Any] = [None] * len(ins)
        for i, out in zip(floats, outs, strict=True):
            result[i] = _to_shard(rw, tags[i], shapes[i], rw.force(out))
        return tuple(result)

    call = jax.custom_vjp(primal.function)
    call.defvjp(forward, backward)
    return call(*raws)


def _to_shard(rw, tag, shape, cotangent):
    """The cotangent of a whole operand, as that of the shard."""
    if tag is None:
        return cotangent
    transpose = jax.linear_transpose(lambda value: rw.whole_of(tag, value), shape)
    return transpose(cotangent)[0]


def _custom_jvp(rw, eqn, ins):
    function, tags = rw.equation_function(eqn), _tags(ins)
    floats = [i for i, atom in enumerate(eqn.invars) if _is_float(atom.aval)]
    whole = [_abstract(atom) for atom in eqn.invars]
    raws = [i.value if isinstance(i, Shard) else i for i in ins]
    primal = rw.traced(eqn.params["call_jaxpr"], tags)

    def push_forward(operands, tangents):
        some = _of_floats(function, operands, floats)
        return jax.jvp(some, [operands[i] for i in floats], tangents)

    def rule(primals, tangents):
        moved = [tangents[i] for i in floats]
        jaxpr = jax.make_jaxpr(push_forward)(whole, [whole[i] for i in floats])
        shards = rw.tagged([*primals, *moved], [*tags, *[tags[i] for i in floats]])
        outs = [rw.force(o) for o in rw.run(jaxpr, shards)]
        half = len(outs) // 2
        return outs[:half], outs[half:]

    call = jax.custom_jvp(primal.function)
    call.defjvp(rule)
    return call(*raws)


CUSTOM_HANDLERS = {"custom_vjp_call": _custom_vjp, "custom_jvp_call": _custom_jvp}
