"""Should a weight that every iteration uses be gathered once, before the loop?

Once is less traffic; but the whole weight is then alive as long as the loop. Large
weights, and loops whose body the user rematerialises, gather in every iteration.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from jfleet._gather._layout_rules import RULES, Shard
from jfleet._gather._specs import Dims, Fabric


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What to do with one operand of a loop."""

    early: str = ""
    """Why it is gathered before the loop; empty if it is not."""
    narrow: Any = None
    """The dtype to gather in, where the loop casts down first."""
    dtype: Any = None
    inside: bool = False
    """Every iteration gathers it; the compiler must not move that out of the loop."""

    def narrowed(self, shard: Shard) -> Shard:
        """The shard in the dtype to gather."""
        if self.narrow is None:
            return shard
        value = jax.lax.convert_element_type(shard.value, self.narrow)
        return Shard(value, shard.dims, shard.name, shard.pending)

    def restored(self, value: Any) -> Any:
        """The gathered value in the dtype that the loop expects."""
        if self.narrow is None:
            return value
        return jax.lax.convert_element_type(value, self.dtype)


def plan_constant(rw: Any, jaxpr: Any, place: int, shard: Shard) -> Plan:
    """Decide for one constant, which enters the loop's jaxpr at ``place``."""
    var = jaxpr.invars[place]
    own = var.aval.dtype
    uses = [own] if shard.pending else direct_uses(jaxpr, var, shard.dims, rw.fabric)
    large = var.aval.size * own.itemsize > rw.options.hoist_bytes
    if not uses:
        return Plan()
    if large or has_checkpoint(jaxpr):
        return Plan(inside=True)
    alike = all(dtype == uses[0] for dtype in uses)
    narrow = uses[0] if alike and uses[0] != own else None
    reason = "gathered before the loop, every iteration uses it"
    return Plan(early=reason, narrow=narrow, dtype=own)


def tie(values: Sequence[Any], plans: Sequence[Plan], state: Any) -> tuple[Any, Any]:
    """Make what is gathered in every iteration depend on the state of the loop."""
    places = [i for i, plan in enumerate(plans) if plan.inside]
    values = list(values)
    if places:
        tied, state = jax.lax.optimization_barrier(([values[i] for i in places], state))
        for i, value in zip(places, tied, strict=True):
            values[i] = value
    return values, state


def has_checkpoint(jaxpr: Any) -> bool:
    """Does a jaxpr rematerialise anything?"""
    return any(
        eqn.primitive.name in ("remat2", "checkpoint")
        or any(map(has_checkpoint, jex.jaxprs_in_params(eqn.params)))
        for eqn in jaxpr.eqns
    )


def scan_arity(eqn: jex.JaxprEqn, body: Any) -> tuple[int, int]:
    """Numbers of constants and carries of a scan.

    Only stacked values have one dim more outside than inside; the parameters that say
    so directly differ between versions of jax.
    """

    def same_rank(pair):
        outer, inner = pair
        return np.ndim(outer.aval) == np.ndim(inner.aval)

    ins = zip(eqn.invars, body.invars, strict=True)
    outs = zip(eqn.outvars, body.outvars, strict=True)
    num_carry = sum(map(same_rank, outs))
    return sum(map(same_rank, ins)) - num_carry, num_carry


def direct_uses(jaxpr: Any, var: Any, dims: Dims, fabric: Fabric) -> list[Any]:
    """Dtypes in which a variable is needed whole; none if only layers are picked."""
    found = [var.aval.dtype] if any(var is out for out in jaxpr.outvars) else []
    for eqn in jaxpr.eqns:
        for place, atom in enumerate(eqn.invars):
            if atom is var:
                found += _uses_by(jaxpr, eqn, place, dims, fabric)
    return found


def _uses_by(jaxpr, eqn, place, dims, fabric) -> list[Any]:
    name, aval = eqn.primitive.name, eqn.invars[place].aval
    direct = [aval.dtype]
    if name in RULES and place == 0:
        outs = RULES[name](eqn, dims, fabric)
        if outs is None:
            return direct
        if name in ("dynamic_slice", "gather") and eqn.outvars[0].aval.size < aval.size:
            return []
        pairs = zip(eqn.outvars, outs, strict=True)
        return [use for v, d in pairs for use in direct_uses(jaxpr, v, d, fabric)]
    if name == "scan":
        body = eqn.params["jaxpr"]
        body = getattr(body, "jaxpr", body)
        num_consts, num_carry = scan_arity(eqn, body)
        if place >= num_consts + num_carry:  # layers of a stack
            return direct if fabric.axes.intersection(dims[0]) else []
        if place >= num_consts:
            return direct
    entered = _entered(eqn, place)
    if not entered:
        return direct
    return [use for j, v in entered for use in direct_uses(j, v, dims, fabric)]


def _entered(eqn, place) -> list[tuple[Any, Any]]:
    """Where an operand enters the jaxprs of an equation, if it keeps its shape."""
    name, params = eqn.primitive.name, eqn.params
    if name in ("jit", "pjit", "closed_call", "remat2", "checkpoint", "scan"):
        jaxprs = [params["jaxpr"]]
    elif name in ("custom_jvp_call", "custom_vjp_call"):
        jaxprs = [params["call_jaxpr"]]
    elif name == "cond" and place > 0:
        jaxprs, place = params["branches"], place - 1
    elif name == "while" and place < params["cond_nconsts"]:
        jaxprs = [params["cond_jaxpr"]]
    elif name == "while":
        place -= params["cond_nconsts"]
        jaxprs = [params["body_jaxpr"]] if place < params["body_nconsts"] else []
    else:
        return []
    inner = [getattr(j, "jaxpr", j) for j in jaxprs]
    return [(j, j.invars[place]) for j in inner]
