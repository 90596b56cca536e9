"""What the compiler moves out of loops, because every turn would compute the same."""

from jfleet._planning.program import Loop, Op, Program

STAY = {"barrier", "take", "put"}
CHEAP = {"constant", "iota", "broadcast_in_dim", "reshape", "slice"}
"""Moved only with what needs them."""


def hoisted(program: Program) -> Program:
    """Move what depends on nothing in a loop in front of it, from the inside out."""
    ops: list[Op] = []
    for op in program.ops:
        op.bodies = tuple(map(hoisted, op.bodies))
        if op.loop is not None:
            ops += _moved(program, op)
        ops.append(op)
    program.ops = ops
    return program


def _moved(program: Program, loop_op: Op) -> list[Op]:
    """Take the invariant operations out of the body of a loop."""
    loop, [body] = loop_op.loop, loop_op.bodies
    assert loop is not None
    outside = dict(zip(body.inputs[: loop.num_consts], loop_op.ins, strict=False))
    candidates: dict[int, Op] = {}
    known = set(outside)
    for op in body.ops:
        simple = op.name not in STAY and not op.bodies
        if simple and known.issuperset(op.ins):
            candidates[id(op)] = op
            known.update(op.outs)
    wanted = _worth_it(candidates)
    if not wanted:
        return []
    moved = []
    for op in body.ops:
        if id(op) not in wanted:
            continue
        outs = []
        for out in op.outs:
            value = body.values[out]
            outside[out] = program.new(
                value.shape, value.dtype, value.bytes, value.kind
            )
            outs.append(outside[out])
        ins = tuple(outside[i] for i in op.ins)
        moved.append(_copy(op, ins, tuple(outs)))
    body.ops = [op for op in body.ops if id(op) not in wanted]
    _enter(loop_op, loop, body, outside)
    return moved


def _worth_it(candidates: dict[int, Op]) -> set[int]:
    """What is not cheap, and whatever that needs."""
    made = {out: op for op in candidates.values() for out in op.outs}
    wanted: set[int] = set()
    todo = [op for op in candidates.values() if op.name not in CHEAP]
    while todo:
        op = todo.pop()
        if id(op) not in wanted:
            wanted.add(id(op))
            todo += [made[i] for i in op.ins if i in made]
    return wanted


def _copy(op: Op, ins: tuple[int, ...], outs: tuple[int, ...]) -> Op:
    return Op(
        op.name,
        ins,
        outs,
        flops=op.flops,
        exchange=op.exchange,
        origin=op.origin,
        info=op.info,
    )


def _enter(op: Op, loop: Loop, body: Program, outside: dict[int, int]) -> None:
    """Hand what was moved to the body, where it still needs it."""
    inside = {i for o in body.ops for i in o.ins} | set(body.outputs)
    new = [
        (i, o)
        for i, o in outside.items()
        if i in inside and i not in body.inputs[: loop.num_consts]
    ]
    at = loop.num_consts
    op.ins = (*op.ins[:at], *[o for _, o in new], *op.ins[at:])
    body.inputs[at:at] = [i for i, _ in new]
    op.loop = Loop(at + len(new), loop.num_carry, loop.known_trips)
