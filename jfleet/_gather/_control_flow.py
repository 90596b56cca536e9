"""How shards enter jit, checkpoint, scan, while, cond and shard_map.

A handler gets the rewriter, the equation and its operands, and returns the results.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from jfleet._gather import _primitive as primitive
from jfleet._gather._layout_rules import Shard, Tag
from jfleet._gather._loops import Plan, has_checkpoint, plan_constant, scan_arity, tie


def _tags(operands: Sequence[Any]) -> list[Tag | None]:
    return [o.tag if isinstance(o, Shard) else None for o in operands]


def _raws(operands: Sequence[Any]) -> list[Any]:
    return [o.value if isinstance(o, Shard) else o for o in operands]


def forwarded(jaxpr: Any, ins: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
    """What a region returns as it got it needs not pass through the region.

    Else a parameter that only comes along, as nnx transformations do with the state of
    a module, would be laid out anew by the compiler.
    """
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    given = dict(zip(inner.invars, ins, strict=True))
    return [
        out if isinstance(var, Literal) else given.get(var, out)
        for var, out in zip(inner.outvars, outs, strict=True)
    ]


def _jit(rw, eqn, ins):
    """Keep the jit: its name, and one trace for all calls of one function."""
    if any(isinstance(s, jax.sharding.Sharding) for s in _asked_shardings(eqn)):
        for operand in ins:
            rw.note(operand, "gathered before a jit with shardings of its own")
        return rw.call_unchanged(eqn, ins)
    jaxpr, tags = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"], _tags(ins)
    key = id(jaxpr), rw.plain, tuple(t and t.key() for t in tags)
    names = [t and t.name for t in tags]
    if key not in rw.jitted:
        traced, start = rw.traced(jaxpr, tags, num_whole=0), len(rw.notes)
        traced.function.__name__ = eqn.params.get("name", "call")
        function = jax.jit(traced.function)
        outs = function(*_raws(ins))
        # The jaxpr is kept so that its id stays its own.
        rw.jitted[key] = traced, function, names, rw.notes[start:], jaxpr
        return forwarded(jaxpr, ins, traced.wrap(outs))
    traced, function, old_names, notes, _ = rw.jitted[key]
    renamed = dict(zip(old_names, names, strict=True))
    rw.replay(notes, renamed)
    outs = [_renamed(o, renamed) for o in traced.wrap(function(*_raws(ins)))]
    return forwarded(jaxpr, ins, outs)


def _renamed(operand, names):
    if isinstance(operand, Shard):
        operand.name = names.get(operand.name, operand.name)
    return operand


def _asked_shardings(eqn):
    return (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))


def _checkpoint(rw, eqn, ins):
    """A full checkpoint drops gathered values by itself; a policy may not."""
    params = eqn.params
    inner = rw.with_plain(rw.plain or params["policy"] is None)
    traced = inner.traced(params["jaxpr"], _tags(ins), num_whole=0)
    again = jax.checkpoint(
        traced.function, prevent_cse=params["prevent_cse"], policy=params["policy"]
    )
    return forwarded(params["jaxpr"], ins, traced.wrap(again(*_raws(ins))))


def _scan(rw, eqn, ins):
    """Layers of a stack stay shards; so do weights, unless gathering once is better."""
    jaxpr = eqn.params["jaxpr"]
    body = getattr(jaxpr, "jaxpr", jaxpr)
    num_consts, num_carry = scan_arity(eqn, body)
    first_x = num_consts + num_carry
    plans = [
        _scan_plan(rw, body, i, operand, num_consts, first_x)
        for i, operand in enumerate(ins)
    ]
    tags = [None if p.early else t for p, t in zip(plans, _tags(ins), strict=True)]
    tags[first_x:] = [t and Tag(t.dims[1:], t.name) for t in tags[first_x:]]
    step = rw.traced(jaxpr, tags, num_whole=num_carry)
    options = {k: eqn.params[k] for k in ("length", "reverse", "unroll")}
    # Layers that come out as they went in need not pass through the loop.
    layers = dict(zip(body.invars[first_x:], ins[first_x:], strict=True))
    same = [
        None if isinstance(v, Literal) else layers.get(v)
        for v in body.outvars[num_carry:]
    ]

    def loop(*values):
        def call(carry, xs):
            consts = values[:num_consts]
            if rw.gathers:
                consts, (carry, xs) = tie(consts, plans[:num_consts], (carry, xs))
            outs = step.function(*consts, *carry, *xs)
            pairs = zip(outs[num_carry:], same, strict=True)
            return outs[:num_carry], [y for y, given in pairs if given is None]

        init, xs = list(values[num_consts:first_x]), list(values[first_x:])
        carry, ys = jax.lax.scan(call, init, xs, **options)
        return [*carry, *ys]

    outs = _run_loop(rw, "scan", loop, plans, ins, keep=has_checkpoint(body))
    ys, result = iter(outs[num_carry:]), outs[:num_carry]
    for given, t in zip(same, step.out_tags[num_carry:], strict=True):
        y = next(ys) if given is None else given
        stacked = given is None and t is not None
        result.append(rw.shard(y, ((), *t.dims), t.name) if stacked else y)
    return result


def _scan_plan(rw, body, i, operand, num_consts, first_x):
    if not isinstance(operand, Shard):
        return Plan()
    if i < num_consts:
        return plan_constant(rw, body, i, operand)
    if i < first_x:
        return Plan(early="carry gathered before the loop")
    if operand.pending or rw.fabric.axes.intersection(operand.dims[0]):
        return Plan(early="stack gathered whole: its layer dim is split")
    return Plan()


def _while(rw, eqn, ins):
    """As scan; a while loop has no reverse derivative, so nothing is kept."""
    params = eqn.params
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    first = num_cond + num_body
    jaxprs = [params["cond_jaxpr"], params["body_jaxpr"]]
    inner = [getattr(j, "jaxpr", j) for j in jaxprs]
    plans = []
    for i, operand in enumerate(ins):
        if not isinstance(operand, Shard):
            plans.append(Plan())
        elif i < first:
            where = (inner[0], i) if i < num_cond else (inner[1], i - num_cond)
            plans.append(plan_constant(rw, *where, operand))
        else:
            plans.append(Plan(early="carry gathered before the loop"))
    tags = [None if p.early else t for p, t in zip(plans, _tags(ins), strict=True)]
    none = [None] * (len(ins) - first)
    test = rw.traced(jaxprs[0], tags[:num_cond] + none)
    step = rw.traced(jaxprs[1], tags[num_cond:first] + none)

    def loop(*values):
        def go_on(carry):
            return test.function(*values[:num_cond], *carry)[0]

        def advance(carry):
            consts = values[num_cond:first]
            if rw.gathers:
                consts, carry = tie(consts, plans[num_cond:first], carry)
            return step.function(*consts, *carry)

        return jax.lax.while_loop(go_on, advance, list(values[first:]))

    return _run_loop(rw, "while", loop, plans, ins, keep=True)


def _run_loop(rw, name, loop, plans, ins, *, keep):
    """Gather what must be whole before the loop, and run it."""
    operands = []
    for plan, operand in zip(plans, ins, strict=True):
        if plan.early:
            rw.note(operand, f"{name}: {plan.early}")
            operand = plan.narrowed(operand)
        else:
            operand = operand.value if isinstance(operand, Shard) else operand
        operands.append(operand)

    def run(*values):
        pairs = zip(values, plans, strict=True)
        return loop(*[plan.restored(v) for v, plan in pairs])

    if not any(plan.early for plan in plans):
        return run(*operands)
    return rw.call(run, operands, safe=not keep)


def _cond(rw, eqn, ins):
    index, *operands = ins
    tags = _tags(operands)
    branches = [rw.traced(branch, tags).function for branch in eqn.params["branches"]]
    return jax.lax.switch(rw.force(index), branches, *_raws(operands))


def _shard_map(rw, eqn, ins):
    """Its own in_specs say how it wants its operands; only cotangents are ours."""
    if rw.fabric.explicit or any(isinstance(i, Shard) and i.pending for i in ins):
        return rw.call_unchanged(eqn, ins)

    def pinned(operand):
        if not isinstance(operand, Shard):
            return operand
        return primitive.pin_cotangent(operand.value, operand.dims, rw.fabric)

    return rw.equation_function(eqn)(*map(pinned, ins))


HANDLERS = {
    "jit": _jit,
    "pjit": _jit,
    "closed_call": _jit,
    "remat2": _checkpoint,
    "checkpoint": _checkpoint,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
}
