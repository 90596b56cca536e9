"""Calls, loops, branches and manual regions of the walk."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.extend import core as jex

from jfleet._gather._loops import scan_arity
from jfleet._planning import kinds
from jfleet._planning.program import Exchange, Loop, group_size
from jfleet._planning.tiles import Dims, Tile, merge, whole, without
from jfleet._planning.walk import Walker, handler

ROWS = "(rows)"
"""Marks the dim along which a replica has rows of its own."""
MAX_ROUNDS = 5


def _inner(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


# Calls --------------------------------------------------------------------------------


@handler("jit", "pjit", "closed_call", "core_call", "custom_lin", "core_closed_call")
def _call(walker, eqn, ins):
    return walker.run(eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")), ins)


@handler("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
def _custom(walker, eqn, ins):
    jaxpr = eqn.params.get("call_jaxpr", eqn.params.get("fun_jaxpr"))
    return walker.run(jaxpr, ins)


@handler("remat2", "checkpoint", "remat")
def _remat(walker, eqn, ins):
    """In the backward pass the compiler must not take it for the forward pass."""
    if eqn.params.get("prevent_cse") and eqn.params.get("differentiated"):
        ins = _fenced(walker, ins)
    return walker.run(eqn.params["jaxpr"], ins)


@handler("optimization_barrier")
def _barrier(walker, eqn, ins):
    return _fenced(walker, ins)


def _fenced(walker: Walker, ins: Sequence[Tile]) -> list[Tile]:
    outs = [(t.shape, t.dtype, t.dims, t.kind) for t in ins]
    return list(walker.emit("barrier", ins, outs)) if ins else []


@handler("copy", "copy_p", "pvary", "pcast", "stop_gradient", "device_put")
def _same(walker, eqn, ins):
    return list(ins)


# Loops --------------------------------------------------------------------------------


@handler("scan")
def _scan(walker: Walker, eqn: Any, ins: list[Tile]) -> list[Tile]:
    body = _inner(eqn.params["jaxpr"])
    num_consts, num_carry = scan_arity(eqn, body)
    first_x = num_consts + num_carry
    stacks = [walker.move(t, ((), *t.dims[1:])) for t in ins[first_x:]]
    length = eqn.params["length"]

    def start(inner: Walker, carry: list[Tile]) -> list[Tile]:
        consts = [_entered(inner, t) for t in ins[:num_consts]]
        held = [_entered(inner, t) for t in carry]
        return [*consts, *held, *[_taken(inner, t) for t in stacks]]

    carry, inner, outs = _settled(
        walker, eqn.params["jaxpr"], ins[num_consts:first_x], start
    )
    ys = outs[num_carry:]
    puts = [inner.emit("put", [y], [(y.shape, y.dtype, y.dims, y.kind)])[0] for y in ys]
    inner.program.outputs = [t.id for t in (*outs[:num_carry], *puts)]
    results = [(t.shape, t.dtype, t.dims, t.kind) for t in carry]
    results += [((length, *y.shape), y.dtype, ((), *y.dims), y.kind) for y in ys]
    return list(
        walker.emit(
            "scan",
            [*ins[:num_consts], *carry, *stacks],
            results,
            bodies=(inner.program,),
            trips=length,
            loop=Loop(num_consts, num_carry),
        )
    )


def _entered(inner: Walker, tile: Tile) -> Tile:
    """An operand of a loop or branch, seen from inside."""
    new = inner.tile(tile.shape, tile.dtype, tile.dims, tile.kind)
    inner.program.inputs.append(new.id)
    return new


def _taken(inner: Walker, stack: Tile) -> Tile:
    """One slice of a stack that a scan runs over."""
    whole_stack = _entered(inner, stack)
    out = (stack.shape[1:], stack.dtype, stack.dims[1:], stack.kind)
    return inner.emit("take", [whole_stack], [out])[0]


def _settled(walker: Walker, jaxpr: Any, init: Sequence[Tile], start: Any):
    """Walk the body until what it carries enters as it leaves.

    Returns:
        The carried values before the loop, and the walker and results of the body.
    """
    num = len(init)
    dims, classes = [t.dims for t in init], [t.kind for t in init]
    inner, outs = walker.inner(), []
    for _ in range(MAX_ROUNDS):
        inner = walker.inner()
        carry = [
            dataclasses.replace(t, dims=d, kind=k)
            for t, d, k in zip(init, dims, classes, strict=True)
        ]
        outs = inner.run(jaxpr, start(inner, carry))
        new_dims = [merge([d, t.dims]) for d, t in zip(dims, outs, strict=False)]
        new_kinds = [_carried(k, t) for k, t in zip(classes, outs, strict=False)]
        if (new_dims, new_kinds) == (dims, classes):
            break
        dims, classes = new_dims, new_kinds
    carry = [
        dataclasses.replace(walker.move(t, d), kind=k)
        for t, d, k in zip(init, dims, classes, strict=True)
    ]
    outs[:num] = [inner.move(t, d) for t, d in zip(outs, dims, strict=False)]
    return carry, inner, outs


def _carried(kind: str, out: Tile) -> str:
    """The class of a carried value; sums of gradients have one of their own."""
    if out.kind in (kinds.GRADS, kinds.SUMS) and out.shape:
        return kinds.SUMS
    return out.kind if kind == kinds.REST else kind


@handler("while")
def _while(walker: Walker, eqn: Any, ins: list[Tile]) -> list[Tile]:
    num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    consts = ins[num_cond : num_cond + num_body]

    def start(inner: Walker, carry: list[Tile]) -> list[Tile]:
        return [_entered(inner, t) for t in (*consts, *carry)]

    carry, inner, outs = _settled(
        walker, eqn.params["body_jaxpr"], ins[num_cond + num_body :], start
    )
    inner.program.outputs = [t.id for t in outs]
    trips = _trips(eqn, num_cond, num_body)
    if trips is None:
        walker.notes.append("a while loop of unknown length is counted once")
    return list(
        walker.emit(
            "while",
            [*consts, *carry],
            [(t.shape, t.dtype, t.dims, t.kind) for t in carry],
            bodies=(inner.program,),
            trips=1 if trips is None else trips,
            loop=Loop(num_body, len(carry), trips is not None),
        )
    )


def _trips(eqn: Any, num_cond: int, num_body: int) -> int | None:
    """Turns of a loop that counts up by one from a literal to a literal."""
    test = _inner(eqn.params["cond_jaxpr"])
    if len(test.eqns) != 1 or test.eqns[0].primitive.name != "lt":
        return None
    counter, bound = test.eqns[0].invars
    if not isinstance(bound, jex.Literal):
        if bound not in test.invars[:num_cond]:
            return None
        bound = eqn.invars[test.invars.index(bound)]
    if isinstance(counter, jex.Literal) or counter not in test.invars[num_cond:]:
        return None
    place = test.invars.index(counter) - num_cond
    first = eqn.invars[num_cond + num_body + place]
    if not (isinstance(first, jex.Literal) and isinstance(bound, jex.Literal)):
        return None
    return max(int(bound.val) - int(first.val), 0)


@handler("cond")
def _cond(walker: Walker, eqn: Any, ins: list[Tile]) -> list[Tile]:
    walkers, results = [], []
    for number, branch in enumerate(eqn.params["branches"]):
        inner = walker.inner(number)
        results.append(inner.run(branch, [_entered(inner, t) for t in ins[1:]]))
        walkers.append(inner)
    every = list(zip(*results, strict=True))
    outs = [
        (
            options[0].shape,
            options[0].dtype,
            merge([t.dims for t in options]),
            kinds.mixed({t.kind for t in options}),
        )
        for options in every
    ]
    for inner, tiles in zip(walkers, results, strict=True):
        moved = [inner.move(t, out[2]) for t, out in zip(tiles, outs, strict=True)]
        inner.program.outputs = [t.id for t in moved]
    programs = tuple(w.program for w in walkers)
    return list(walker.emit("cond", ins[1:], outs, bodies=programs))


# Manual regions -----------------------------------------------------------------------


@handler("shard_map")
def _shard_map(walker: Walker, eqn: Any, ins: list[Tile]) -> list[Tile]:
    params = eqn.params
    names = params.get("newly_manual_axes", params.get("manual_axes"))
    manual = frozenset(names) if names else frozenset(params["mesh"].axis_names)
    inside = []
    for tile, spec, var in zip(
        ins, params["in_specs"], _inner(params["jaxpr"]).invars, strict=True
    ):
        dims = _with_spec(without(tile.dims, manual), spec, manual)
        tile = walker.move(tile, merge([dims]))
        inside.append(_localised(tile, var.aval.shape, manual))
    inner = dataclasses.replace(
        walker, manual=walker.manual | manual, rows=(ROWS,), known=walker.known
    )
    outs = inner.run(params["jaxpr"], inside)
    return [
        dataclasses.replace(
            tile,
            shape=var.aval.shape,
            dims=_with_spec(without(tile.dims, (ROWS,)), spec, manual),
        )
        for tile, spec, var in zip(outs, params["out_specs"], eqn.outvars, strict=True)
    ]


def _with_spec(dims: Dims, spec: Any, manual: frozenset[str]) -> Dims:
    """Dims with the manual axes that a spec puts in front of the others."""
    out = list(dims)
    for i, entry in enumerate(spec):
        names = () if entry is None else (entry,) if isinstance(entry, str) else entry
        if i < len(out):
            out[i] = (*[a for a in names if a in manual], *out[i])
    return tuple(out)


def _localised(tile: Tile, shape: Sequence[int], manual: frozenset[str]) -> Tile:
    """The same value, as one replica sees it."""
    is_rows = tile.kind in (kinds.BATCH, kinds.ACTIVATIONS)
    dims = tuple(
        (
            *((ROWS,) if is_rows and manual.intersection(e) else ()),
            *[a for a in e if a not in manual],
        )
        for e in tile.dims
    )
    return dataclasses.replace(tile, shape=tuple(shape), dims=dims)


def _named(axes: Any) -> tuple[str, ...]:
    axes = axes if isinstance(axes, tuple | list) else (axes,)
    return tuple(a for a in axes if isinstance(a, str))


@handler("psum", "psum2", "psum_invariant", "pmax", "pmin")
def _psum(walker, eqn, ins):
    axes = _named(eqn.params["axes"])
    ints = [a for a in eqn.params["axes"] if isinstance(a, int)]
    if ints:
        walker.notes.append("a reduction over positional axes is not counted")
    return [walker.reduced(t, axes) for t in ins]


def _manual(name: str):
    def walked(walker: Walker, eqn: Any, ins: list[Tile]) -> list[Tile]:
        axes = _named(eqn.params["axis_name"])
        real = tuple(a for a in axes if walker.sizes.get(a, 1) > 1)
        size = group_size(real, walker.sizes)
        tile, aval = ins[0], eqn.outvars[0].aval
        dims = tile.dims if len(tile.dims) == aval.ndim else whole(aval.ndim)
        out = (aval.shape, aval.dtype, dims, tile.kind)
        if not real:
            return list(walker.emit("barrier", [tile], [out]))
        local = walker.bytes(tile)
        exchange = Exchange(
            kind=name,
            axes=real,
            group_size=2 if name == "collective-permute" else size,
            bytes=local * size if name == "all-gather" else local,
            dtype=str(aval.dtype),
            memory_kind=tile.kind,
        )
        at = eqn.params.get("all_gather_dimension", eqn.params.get("scatter_dimension"))
        info = {} if at is None else {"dims": [at]}
        return list(walker.emit(name, [tile], [out], exchange=exchange, info=info))

    return walked


handler("all_gather", "all_gather_invariant")(_manual("all-gather"))
handler("reduce_scatter")(_manual("reduce-scatter"))
handler("all_to_all", "ragged_all_to_all")(_manual("all-to-all"))
handler("ppermute", "pshuffle")(_manual("collective-permute"))
