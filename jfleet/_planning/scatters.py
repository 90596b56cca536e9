"""Where the results of scatters and loops lie.

Both write into an operand. Zeros that several of them start from are made for each;
a scatter into zeros that are then added to something is a scatter into that.
"""

import dataclasses
from collections import Counter

from jfleet._planning.program import Op, Program


def with_own_starts(program: Program) -> Program:
    """The program with a start of its own for whatever writes in place."""
    program = _merged_sums(program)
    values, ops = list(program.values), []
    made: dict[int, Op] = {}
    for op in program.ops:
        if _is_start(op):
            made[op.outs[0]] = op
        elif op.name == "slice" and op.ins[0] in made:
            made[op.outs[0]] = dataclasses.replace(made[op.ins[0]], outs=op.outs)
    count = Counter(i for op in program.ops for i in op.ins)
    for op in program.ops:
        ins = list(op.ins)
        for place in _written(op):
            start = made.get(ins[place])
            if start is not None and count[ins[place]] > 1:
                values.append(dataclasses.replace(values[ins[place]]))
                ins[place] = len(values) - 1
                ops.append(dataclasses.replace(start, outs=(ins[place],)))
        ops.append(dataclasses.replace(op, ins=tuple(ins)))
    return dataclasses.replace(program, values=values, ops=ops)


def _is_start(op: Op) -> bool:
    """One number everywhere."""
    return op.name == "broadcast_in_dim" and not op.info.get("places")


def _written(op: Op) -> range:
    """Operands that are written to."""
    if op.loop is not None:
        first = op.loop.num_consts
        return range(first, first + op.loop.num_carry)
    return range(1 if op.name.startswith("scatter") else 0)


def _merged_sums(program: Program) -> Program:
    """Scatter into the other term of a sum instead of into zeros."""
    made = {o: op for op in program.ops for o in op.outs}
    count = Counter([*program.outputs, *(i for op in program.ops for i in op.ins)])
    gone: dict[int, Op] = {}
    for op in program.ops:
        if op.name not in ("add", "add_any"):
            continue
        for place in (0, 1):
            term = made.get(op.ins[place])
            if term is None or term.name not in ("scatter-add", "scatter_add"):
                continue
            start = made.get(term.ins[0])
            if start is not None and _is_start(start) and count[term.outs[0]] == 1:
                ins = (op.ins[1 - place], *term.ins[1:])
                gone[id(op)] = dataclasses.replace(term, ins=ins, outs=op.outs)
                gone[id(term)] = op
                break
    ops = [
        gone[id(op)] if op.name in ("add", "add_any") and id(op) in gone else op
        for op in program.ops
        if not (op.name.startswith("scatter") and id(op) in gone)
    ]
    return dataclasses.replace(program, ops=ops)
