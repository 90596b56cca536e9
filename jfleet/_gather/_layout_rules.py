"""How a shard passes through an equation without being gathered.

A rule gets the equation and its operands and returns the dims of each output, or
``None`` where the whole array is needed. It may answer only if running the equation
on the shard gives, element for element, what it gives on the whole array.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding

from jfleet._gather._primitive import MOVEMENT
from jfleet._gather._specs import Dims, Fabric, dims_of


@dataclasses.dataclass(slots=True)
class Shard:
    """A parameter, or something made of it, that is not gathered yet."""

    value: Any
    dims: Dims
    name: str
    pending: tuple[JaxprEqn, ...] = ()
    """Data movement that must wait until after the gather."""
    whole: Any = None
    """The gathered value, where it may be used more than once."""

    @property
    def tag(self) -> "Tag":
        """All but the value."""
        return Tag(self.dims, self.name, self.pending)


@dataclasses.dataclass(frozen=True, slots=True)
class Tag:
    """What is known about a shard at trace time."""

    dims: Dims
    name: str
    pending: tuple[JaxprEqn, ...] = ()

    def key(self) -> tuple[Any, ...]:
        """Equal keys give equal programs; names do not matter."""
        return self.dims, tuple(map(id, self.pending))


Rule = Callable[[JaxprEqn, Dims, Fabric], Sequence[Dims] | None]
RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


# fmt: off
ELEMENTWISE = frozenset((
    "abs", "add", "add_any", "and", "atan2", "cbrt", "ceil", "clamp", "cos", "cosh",
    "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt",
    "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min",
    "mul", "ne", "neg", "not", "or", "pow", "rem", "round", "rsqrt", "select_n", "sign",
    "sin", "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
))
# fmt: on

REDUCTIONS = frozenset(
    f"reduce_{name}" for name in ("sum", "max", "min", "prod", "and", "or")
)


@_rule("convert_element_type")
def _convert(eqn, dims, fabric):
    """Casting down comes before the gather (half the traffic), casting up after."""
    return [dims] if _casts_down(eqn) else None


def _casts_down(eqn: JaxprEqn) -> bool:
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    return jnp.issubdtype(new, jnp.floating) and new.itemsize <= old.itemsize


@_rule("copy", "copy_p", "pvary", "reduce_precision", "stop_gradient")
def _same(eqn, dims, fabric):
    return [dims]


@_rule("optimization_barrier")
def _barrier(eqn, dims, fabric):
    return [dims] if len(eqn.outvars) == 1 else None


@_rule("transpose")
def _transpose(eqn, dims, fabric):
    return [tuple(dims[i] for i in eqn.params["permutation"])]


@_rule("squeeze")
def _squeeze(eqn, dims, fabric):
    dropped = {d % len(dims) for d in eqn.params["dimensions"]}
    return [tuple(e for i, e in enumerate(dims) if i not in dropped)]


@_rule("slice", "dynamic_slice")
def _slice(eqn, dims, fabric):
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    cut = any(e and a != b for e, a, b in zip(dims, old, new, strict=True))
    return None if cut else [dims]


@_rule("split")
def _split(eqn, dims, fabric):
    return None if dims[eqn.params["axis"]] else [dims] * len(eqn.outvars)


@_rule("rev")
def _rev(eqn, dims, fabric):
    return None if any(dims[d] for d in eqn.params["dimensions"]) else [dims]


@_rule("reshape")
def _reshape(eqn, dims, fabric):
    """A split dim must stay the outer part of the dim that it lands in.

    Row-major order makes the n shards of a dim whose outer dims have p positions the
    same memory as the n shards of any new dim with p outer positions.
    """
    if eqn.params.get("dimensions") is not None:
        return None
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    out: list[tuple[str, ...]] = [()] * len(new)
    for i, entry in enumerate(dims):
        if not entry:
            continue
        outer, pieces = math.prod(old[:i]), fabric.num_shards(entry)
        places = [
            j
            for j in range(len(new))
            if math.prod(new[:j]) == outer and new[j] % pieces == 0 and not out[j]
        ]
        if not places:
            return None
        out[places[-1]] = entry
    return [tuple(out)]


@_rule("broadcast_in_dim")
def _broadcast(eqn, dims, fabric):
    """New dims of size one pass; a larger array is made after the gather."""
    old, new = eqn.invars[0].aval, eqn.outvars[0].aval
    if old.size != new.size:
        return None
    out: list[tuple[str, ...]] = [()] * new.ndim
    for i, d in enumerate(eqn.params["broadcast_dimensions"]):
        out[d] = dims[i]
    return [tuple(out)]


def picks_features(eqn: JaxprEqn, dims: Dims) -> bool:
    """Does this ``gather`` index only dims that are not split?"""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    if numbers.operand_batching_dims:
        return False
    shape = eqn.invars[0].aval.shape
    return not any(
        entry and (i in numbers.start_index_map or sizes[i] != shape[i])
        for i, entry in enumerate(dims)
    )


def picked_dims(eqn: JaxprEqn, dims: Dims) -> Dims:
    """Dims of the output of a ``gather`` for which `picks_features` holds."""
    numbers = eqn.params["dimension_numbers"]
    kept = [i for i in range(len(dims)) if i not in numbers.collapsed_slice_dims]
    out: list[tuple[str, ...]] = [()] * eqn.outvars[0].aval.ndim
    for place, i in zip(numbers.offset_dims, kept, strict=True):
        out[place] = dims[i]
    return tuple(out)


@_rule("gather")
def _pick(eqn, dims, fabric):
    """One layer picked out of a stack; a look-up of many rows is no layout matter."""
    numbers, indices = eqn.params["dimension_numbers"], eqn.invars[1].aval
    one = indices.size == len(numbers.start_index_map)
    return [picked_dims(eqn, dims)] if one and picks_features(eqn, dims) else None


@_rule("sharding_constraint")
def _constraint(eqn, dims, fabric):
    """A constraint that says nothing new about the axes that stay."""
    sharding = eqn.params["sharding"]
    if not isinstance(sharding, NamedSharding) or eqn.params["unconstrained_dims"]:
        return None
    wanted = fabric.whole(dims_of(sharding.spec, len(dims)))
    return [dims] if wanted == fabric.whole(dims) else None


def passes(
    eqn: JaxprEqn,
    operands: Sequence[Any],
    uniform: Callable[[Any], bool],
    fabric: Fabric,
    gathers: bool,
) -> Sequence[Dims] | None:
    """Dims of the outputs if the equation may run on shards, else ``None``.

    ``uniform(atom)`` tells whether an ordinary operand is one number everywhere.
    """
    shards = [o for o in operands if isinstance(o, Shard)]
    if any(s.pending for s in shards):
        return None
    name, dims = eqn.primitive.name, shards[0].dims
    if len(shards) == 1 and name in RULES and isinstance(operands[0], Shard):
        return RULES[name](eqn, dims, fabric)
    alike = all(s.dims == dims for s in shards)
    pairs = list(zip(eqn.invars, operands, strict=True))
    if name == "concatenate":
        every = alike and len(shards) == len(operands)
        return [dims] if every and not dims[eqn.params["dimension"]] else None
    if name in REDUCTIONS and gathers:
        # To one number: a norm is cheaper summed over shards. A partial reduction is
        # not worth it, what it is combined with needs the whole weight.
        return [()] if eqn.outvars[0].aval.ndim == 0 else None
    if name in ELEMENTWISE and alike:
        shape = eqn.outvars[0].aval.shape
        fits = all(
            atom.aval.shape == shape if isinstance(o, Shard) else uniform(atom)
            for atom, o in pairs
        )
        return [dims] if fits else None
    return None


def may_wait(eqn: JaxprEqn) -> bool:
    """Can this equation be done after the gather, inside whatever needs it?"""
    return eqn.primitive.name in MOVEMENT and len(eqn.invars) == 1


def narrows(eqn: JaxprEqn, shard: Shard) -> bool:
    """Is this a cast down that can overtake the movement that waits?"""
    if eqn.primitive.name != "convert_element_type" or not shard.pending:
        return False
    moved = all(e.primitive.name != "convert_element_type" for e in shard.pending)
    return moved and _casts_down(eqn)


def run_on_shards(
    eqn: JaxprEqn, values: Sequence[Any], out: Sequence[Dims], fabric: Fabric
) -> list[Any]:
    """Run an equation that passes. Explicit axes need to be told the result."""
    if eqn.primitive.name == "sharding_constraint":
        return [values[0]]  # already so, but for the axes that a gather removes

    def bind(*values):
        params = dict(eqn.primitive.get_bind_params(eqn.params))
        if fabric.explicit:
            params |= dict.fromkeys({"sharding", "out_sharding"} & params.keys())
        result = eqn.primitive.bind(*values, **params)
        return list(result) if eqn.primitive.multiple_results else [result]

    if not fabric.explicit:
        return bind(*values)
    shardings = [fabric.sharding(dims) for dims in out]
    run: Any = jax.sharding.auto_axes(bind, out_sharding=shardings)
    return run(*values)
