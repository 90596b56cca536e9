"""Floating-point operations of an equation on one device: products only.

Matrix products and convolutions are what the peak rate of a chip is about; everything
else is limited by memory and counted there.
"""

import math
from collections.abc import Sequence
from typing import Any


def flops_of(eqn: Any, local: Sequence[tuple[int, ...]]) -> float:
    """Two per multiplication and addition, for operands of these local shapes.

    Args:
        eqn: the equation.
        local: shapes of the operands on one device.
    """
    name = eqn.primitive.name
    if name == "dot_general":
        left, right = local
        (_, contracted), (_, batched) = eqn.params["dimension_numbers"]
        free = [
            n for d, n in enumerate(right) if d not in contracted and d not in batched
        ]
        return 2.0 * math.prod(left) * math.prod(free)
    if name == "conv_general_dilated":
        return _conv(eqn, local)
    return 0.0


def _conv(eqn: Any, local: Sequence[tuple[int, ...]]) -> float:
    """Each element of the result sums over the kernel's window and input features."""
    numbers = eqn.params["dimension_numbers"]
    kernel = local[1]
    share = (
        local[0][numbers.lhs_spec[0]] / eqn.invars[0].aval.shape[numbers.lhs_spec[0]]
    )
    out = math.prod(eqn.outvars[0].aval.shape) * share
    window = math.prod(kernel[d] for d in numbers.rhs_spec[1:])
    return 2.0 * out * window / _dilution(eqn)


def _dilution(eqn: Any) -> float:
    """A dilated operand is mostly zeros, which good kernels skip."""
    return float(math.prod(eqn.params["lhs_dilation"]))
