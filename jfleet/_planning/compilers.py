"""What is known of the compilers that matters for memory.

Measured by reading what they did with real steps; see ``benchmarks/planner.py``.
"""

import dataclasses

import jax

ALIASES = frozenset(("reshape", "squeeze", "expand_dims", "barrier", "bitcast"))
"""The same bytes under another shape."""

CHEAP = frozenset(
    (
        *("constant", "iota", "broadcast_in_dim", "slice", "dynamic_slice", "take"),
        *("put", "pad", "concatenate", "transpose", "rev", "split", "stack"),
        *("dynamic_update_slice", "gather", "relayout", "spread"),
    )
)
"""Beside what works element by element: made in the kernel of its users."""

DEAR = frozenset(
    (
        *("acos", "asin", "atan", "atan2", "cbrt", "cos", "cosh", "div", "erf", "erfc"),
        *("erf_inv", "exp", "exp2", "expm1", "lgamma", "log", "log1p", "logistic"),
        *("pow", "rem", "rsqrt", "sin", "sinh", "sqrt", "tan", "tanh", "digamma"),
    )
)
"""Kept if there is more than one user; all else is computed again in each."""

REDUCTIONS = frozenset(
    f"reduce_{n}" for n in ("sum", "max", "min", "prod", "and", "or", "xor")
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Compiler:
    """How a compiler lays out memory."""

    name: str
    breadth_first: bool
    """Run what is ready first (for concurrency), not what frees memory."""
    keeps_barriers: bool
    """Does what is behind a barrier wait for all that is in front of it?"""
    copies_operands: bool
    """Does it copy operands of products into the layout that its kernels want?"""
    packs: bool
    """Do gaps between buffers count?"""
    widens_bfloat16: bool
    """Does it compute and send bfloat16 as float32?"""
    combines_reductions: bool
    """Do all reductions that wait for nothing but each other at once."""


def _version() -> tuple[int, ...]:
    return tuple(int(x) for x in jax.__version__.split(".")[:2])


CPU = Compiler(
    name="cpu",
    breadth_first=True,
    keeps_barriers=_version() >= (0, 12),
    packs=True,
    widens_bfloat16=True,
    combines_reductions=True,
    copies_operands=True,
)
TPU = Compiler(
    name="tpu",
    breadth_first=False,
    keeps_barriers=True,
    packs=False,
    widens_bfloat16=False,
    combines_reductions=False,
    copies_operands=False,
)
COMPILERS = {"cpu": CPU, "tpu": TPU, "gpu": TPU}
