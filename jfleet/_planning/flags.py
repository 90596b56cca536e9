"""What a compiled step should not do, found by counting."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from jfleet._errors import listing
from jfleet._hlo import Collective, type_bytes
from jfleet._plan_text import human
from jfleet._planning import kinds
from jfleet._planning.inputs import Input

SMALL = 2**10
"""Collectives below this are bookkeeping: losses, norms, flags."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """One thing that should not be there."""

    name: str
    """``activation-gather``, ``reduction-in-loop``, ``replicated``,
    ``level-saves-nothing`` or ``missed-donation``."""
    text: str
    """What, how much, and what to do."""
    bytes: int
    """How much of memory or traffic it concerns."""


def flags_of(
    found: Sequence[Collective],
    inputs: Sequence[Input],
    memory: Any,
    *,
    level: str | None,
    num_devices: int,
    num_micro: int,
    large_bytes: int,
) -> tuple[Flag, ...]:
    """All flags of a program, the largest first."""
    flags = [
        *_activation_gathers(found, inputs, level),
        *_reductions_in_loops(found, inputs, num_micro),
        *_replicated(inputs, level, num_devices, large_bytes),
        *_useless_level(inputs, level, num_devices),
        *_missed_donation(memory, inputs),
    ]
    return tuple(sorted(flags, key=lambda f: -f.bytes))


def _activation_gathers(found, inputs, level) -> Iterator[Flag]:
    """At p_g_os only parameters gather: whole ones, or layers of a stack."""
    if level not in (None, "p_g_os"):
        return
    params = [i for i in inputs if i.kind == kinds.PARAMS]
    if not any(i.is_split for i in params):
        return
    sizes = {math.prod(i.shape[d:]) for i in inputs for d in (0, 1)}
    odd = [
        c
        for c in found
        if c.kind == "all-gather" and c.bytes >= SMALL and _elements(c) not in sizes
    ]
    if odd:
        total = int(sum(c.count * c.bytes for c in odd))
        names = listing(dict.fromkeys(c.op_name.split("/")[-1] for c in odd), 3)
        yield Flag(
            name="activation-gather",
            text=f"{len(odd)} all-gathers ({human(total)} per step, from {names}) are "
            "of arrays that are no parameter, so activations travel; use "
            "state.apply_fn or jfleet.gather_at_use, or constrain activations to the "
            "data axes",
            bytes=total,
        )


def _elements(one: Collective) -> int:
    """Elements of the whole array."""
    return one.bytes * 8 // type_bytes(f"{one.dtype}[8]") if one.dtype else 0


def _reductions_in_loops(found, inputs, num_micro) -> Iterator[Flag]:
    """Each gradient should be reduced once; loops over layers do just that."""
    whole = sum(i.total_bytes for i in inputs if i.kind == kinds.PARAMS)
    reductions = [
        c
        for c in found
        if c.kind in ("all-reduce", "reduce-scatter") and c.bytes >= SMALL
    ]
    inside = sum(c.count * c.bytes for c in reductions if c.in_loop)
    total = sum(c.count * c.bytes for c in reductions)
    if whole and inside and total >= 1.5 * whole:
        yield Flag(
            name="reduction-in-loop",
            text=f"loops reduce {human(inside)} per step for {human(whole)} of "
            "parameters: gradients are reduced in every turn"
            + (f" of {num_micro}" if num_micro > 1 else "")
            + "; gradient_merge_configs={'sync': 'last'} reduces once, and holds a "
            "whole gradient on every device",
            bytes=int(total - whole),
        )


def _replicated(inputs, level, num_devices, large_bytes) -> Iterator[Flag]:
    """Large arrays that the level should split."""
    if num_devices < 2:
        return
    wanted = {kinds.STATE, kinds.MASTERS}
    params = [i for i in inputs if i.kind == kinds.PARAMS]
    if level == "p_g_os" or any(i.is_split for i in params):
        wanted.add(kinds.PARAMS)
    large = [
        i
        for i in inputs
        if i.kind in wanted and not i.is_split and i.total_bytes >= large_bytes
    ]
    if large:
        size = sum(i.total_bytes for i in large)
        yield Flag(
            name="replicated",
            text=f"{len(large)} large arrays ({human(size)}) lie whole on every "
            f"device: {listing([i.path for i in large], 5)}; jfleet.plan says why",
            bytes=size,
        )


def _useless_level(inputs, level, num_devices) -> Iterator[Flag]:
    """The level's arrays take as much memory as without it."""
    if level is None or num_devices < 2:
        return
    wanted = [kinds.STATE] + [kinds.PARAMS] * (level == "p_g_os")
    for kind in wanted:
        own = [i for i in inputs if i.kind == kind and i.total_bytes >= SMALL]
        size = sum(i.total_bytes for i in own)
        if own and sum(i.device_bytes for i in own) == size:
            yield Flag(
                name="level-saves-nothing",
                text=f"level {level} should split the {kind}, but all {human(size)} "
                "of it lie on every device; lay the state out with "
                "jfleet.group_sharded_parallel or opt.create",
                bytes=size,
            )


def _missed_donation(memory, inputs) -> Iterator[Flag]:
    """A new state beside the old one."""
    state = sum(
        i.device_bytes
        for i in inputs
        if i.kind in (kinds.PARAMS, kinds.STATE, kinds.MASTERS)
    )
    missed = min(memory.output_size_in_bytes, state) - memory.alias_size_in_bytes
    if state and missed > 0.01 * state:
        yield Flag(
            name="missed-donation",
            text=f"{human(missed)} of new state need memory beside the old one; use "
            "jax.jit(step, donate_argnums=0), or minimize(..., donate=True)",
            bytes=int(missed),
        )
