"""XLA for the CPU multiplies and sends bfloat16 as float32.

What goes into a product or a collective is cast up first; what a product gives is cast
down after it.
"""

import dataclasses

import numpy as np

from jfleet._planning.program import Op, Program, Value

NARROW, WIDE = "bfloat16", np.dtype("float32")
PRODUCTS = ("dot_general", "conv_general_dilated")


def widened(program: Program) -> Program:
    """The program as the CPU runs it."""
    values, ops = list(program.values), []
    wide: dict[int, int] = {}

    def cast(value: int) -> int:
        if str(values[value].dtype) != NARROW:
            return value
        if value not in wide:
            wide[value] = _wider(values, value)
            ops.append(_cast((value,), (wide[value],)))
        return wide[value]

    for op in program.ops:
        if op.bodies:
            op = dataclasses.replace(op, bodies=tuple(map(widened, op.bodies)))
        elif op.name in PRODUCTS:
            ins = tuple(map(cast, op.ins))
            [out] = op.outs
            if str(values[out].dtype) == NARROW:
                full = _wider(values, out)
                ops.append(dataclasses.replace(op, ins=ins, outs=(full,)))
                op = Op("narrow", (full,), (out,))
            else:
                op = dataclasses.replace(op, ins=ins)
        elif op.exchange is not None and op.exchange.dtype == NARROW:
            values[op.outs[0]] = values[_wider(values, op.outs[0])]
            sent = dataclasses.replace(
                op.exchange, bytes=2 * op.exchange.bytes, dtype=str(WIDE)
            )
            op = dataclasses.replace(op, exchange=sent)
        ops.append(op)
    return dataclasses.replace(program, values=values, ops=ops)


def _wider(values: list[Value], like: int) -> int:
    old = values[like]
    values.append(dataclasses.replace(old, bytes=2 * old.bytes, dtype=WIDE))
    return len(values) - 1


def _cast(ins: tuple[int, ...], outs: tuple[int, ...]) -> Op:
    return Op("convert_element_type", ins, outs, info={"elementwise": True})
