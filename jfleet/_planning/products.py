"""How compilers arrange the operands of products: transposes folded in, or copies.

A matrix that is transposed on its way into a product, or out of it, costs nothing: the
product is computed the other way round. XLA for the CPU further wants the contracted
dims of the left operand last, batch dims first, images as rows, height, width,
features, and kernels as height, width, in, out; what lies otherwise is copied first,
as early as it can be.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from jfleet._planning.program import Op, Program, Value


def folded(program: Program) -> Program:
    """The program without transposes of matrices next to products."""
    transposes = {
        op.outs[0]: op
        for op in program.ops
        if op.name == "transpose" and len(program.values[op.outs[0]].shape) == 2
    }
    ops = [_without_transposes(op, transposes) for op in program.ops]
    count = _num_users(ops, program.outputs)
    ops = [op for op in ops if op.name != "transpose" or count[op.outs[0]]]
    products = {op.outs[0] for op in ops if op.name == "dot_general"}
    turned = {
        op.ins[0]
        for op in ops
        if op.name == "transpose" and op.ins[0] in products and count[op.ins[0]] == 1
    }
    return dataclasses.replace(program, ops=[_turned(op, turned) for op in ops])


def _num_users(ops: Sequence[Op], outputs: Sequence[int]) -> Counter[int]:
    return Counter([*outputs, *(i for op in ops for i in op.ins)])


def _without_transposes(op: Op, transposes: dict[int, Op]) -> Op:
    if op.name != "dot_general" or op.info["dimension_numbers"][1] != ((), ()):
        return op
    ins, contract = list(op.ins), list(op.info["dimension_numbers"][0])
    for side in (0, 1):
        if ins[side] in transposes:
            ins[side] = transposes[ins[side]].ins[0]
            contract[side] = tuple(1 - d for d in contract[side])
    numbers = (tuple(contract), ((), ()))
    info = op.info | {"dimension_numbers": numbers}
    return dataclasses.replace(op, ins=tuple(ins), info=info)


def _turned(op: Op, turned: set[int]) -> Op:
    if op.name == "dot_general" and op.outs[0] in turned:
        return dataclasses.replace(op, info=op.info | {"turned": True})
    if op.name == "transpose" and op.ins[0] in turned:
        return dataclasses.replace(op, name="bitcast")
    return op


def with_copies(program: Program) -> Program:
    """The program with the copies of operands that the CPU makes."""
    values, ops = list(program.values), []

    def new(like: int) -> int:
        old = values[like]
        values.append(Value(old.bytes, old.kind, old.shape, old.dtype))
        return len(values) - 1

    for op in program.ops:
        ins, outs = list(op.ins), op.outs
        for side in _wrong(op):
            ins[side] = new(op.ins[side])
            ops.append(Op("relayout", (op.ins[side],), (ins[side],)))
        if op.name == "conv_general_dilated" and not op.info["rows_first"]:
            outs = (new(op.outs[0]),)
        ops.append(dataclasses.replace(op, ins=tuple(ins), outs=outs))
        if outs is not op.outs:
            ops.append(Op("relayout", outs, op.outs))
    return dataclasses.replace(program, values=values, ops=ops)


def _wrong(op: Op) -> set[int]:
    """Operands that must be copied."""
    if op.name == "dot_general":
        contract, batch = op.info["dimension_numbers"]
        late = {n for n in (0, 1) if list(batch[n]) != list(range(len(batch[n])))}
        left = 1 if op.info.get("turned") else 0
        rank = op.info["ranks"][left]
        last = list(range(rank - len(contract[left]), rank))
        return late | ({left} if sorted(contract[left]) != last else set())
    if op.name == "conv_general_dilated":
        return {n for n in (0, 1) if not op.info["good"][n]}
    return set()
