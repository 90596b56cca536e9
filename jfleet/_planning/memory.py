"""Bytes on one device: at rest exactly, during a step as the compiler lays them out."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from jfleet._plan_text import human
from jfleet._planning import kinds
from jfleet._planning.compilers import Compiler
from jfleet._planning.donation import matched
from jfleet._planning.heap import heap_bytes
from jfleet._planning.liveness import Buffer, Run, peak
from jfleet._planning.program import Program
from jfleet._planning.tiles import axes_of, local_bytes, local_shape, num_parts
from jfleet._planning.tracing import Argument, TracedStep, argument_dims
from jfleet._tree import dtype_bytes, num_elements


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ClassBytes:
    """One class of memory."""

    kind: str
    """Its name; one of ``kinds.KINDS``."""
    bytes: int
    """Bytes on each device at the worst moment of a step."""
    most_bytes: int
    """The most that it ever takes during a step."""
    whole_bytes: int | None
    """Bytes of the whole arrays, for what a step gets as arguments; else None."""
    formula: str
    """Where the number comes from, in words."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepMemory:
    """Memory of one step on one device.

    ``peak_bytes = arguments + temporaries + outputs - donated``.
    """

    classes: tuple[ClassBytes, ...]
    """By class; those of the arguments are exact."""
    arguments_bytes: int
    """Everything that a step gets."""
    output_bytes: int
    """Everything that it returns."""
    donated_bytes: int
    """What of that lies where arguments lay."""
    live_bytes: int
    """The most that temporaries take at once."""
    temporary_bytes: int
    """The same with the gaps between them."""
    complete: bool
    """False where no loss was given: then activations are missing."""

    @property
    def peak_bytes(self) -> int:
        """What a device must have."""
        own = self.output_bytes - self.donated_bytes
        return self.arguments_bytes + self.temporary_bytes + own

    def of(self, kind: str) -> ClassBytes:
        """One class by name; zero bytes where a step has none of it."""
        for row in self.classes:
            if row.kind == kind:
                return row
        return ClassBytes(
            kind=kind, bytes=0, most_bytes=0, whole_bytes=None, formula=""
        )

    @property
    def state_bytes(self) -> int:
        """What lies on a device between steps."""
        return sum(self.of(k).bytes for k in kinds.AT_REST if k != kinds.BATCH)


def bytes_of(argument: Argument, sizes: Mapping[str, int]) -> int:
    """Bytes of an argument on one device."""
    dims = argument_dims(argument)
    return local_bytes(argument.shape, argument.dtype, dims, sizes)


def step_memory(
    traced: TracedStep,
    program: Program,
    run: Run,
    aliases: Mapping[int, int],
    compiler: Compiler,
) -> StepMemory:
    """Memory of a step whose loss was given."""
    output = sum(program.values[i].bytes for i in program.outputs)
    donated = sum(program.values[i].bytes for i in aliases)
    live, at = peak(run.buffers)
    return StepMemory(
        classes=(*at_rest(traced), *_temporary(run.buffers, at)),
        arguments_bytes=sum(
            bytes_of(a, traced.sizes) for a in traced.arguments if a.used
        ),
        output_bytes=output,
        donated_bytes=donated,
        live_bytes=live,
        temporary_bytes=heap_bytes(run.buffers) if compiler.packs else live,
        complete=True,
    )


def at_rest(traced: TracedStep) -> list[ClassBytes]:
    """What a step gets, by class."""
    groups: dict[str, list[Argument]] = defaultdict(list)
    for argument in traced.arguments:
        groups[argument.kind].append(argument)
    return [
        _class_at_rest(kind, groups[kind], traced.sizes)
        for kind in kinds.AT_REST
        if kind in groups
    ]


def _class_at_rest(kind, arguments, sizes) -> ClassBytes:
    whole = sum(num_elements(a.shape) * dtype_bytes(a.dtype) for a in arguments)
    local = sum(bytes_of(a, sizes) for a in arguments)
    return ClassBytes(
        kind=kind,
        bytes=local,
        most_bytes=local,
        whole_bytes=whole,
        formula=_formula(arguments, sizes),
    )


def _formula(arguments: Sequence[Argument], sizes: Mapping[str, int]) -> str:
    """``12.0 MiB / 8 over data + 1.50 KiB whole``."""
    parts: Counter[tuple[str, ...]] = Counter()
    for a in arguments:
        used = set(axes_of(argument_dims(a)))
        axes = tuple(axis for axis in sizes if axis in used and sizes[axis] > 1)
        parts[axes] += num_elements(a.shape) * dtype_bytes(a.dtype)
    terms = [
        f"{human(size)} / {num_parts(axes, sizes)} over {'+'.join(axes)}"
        if axes
        else f"{human(size)} whole"
        for axes, size in sorted(parts.items(), key=lambda item: -item[1])
    ]
    return " + ".join(terms)


def _temporary(buffers: Sequence[Buffer], at: int) -> list[ClassBytes]:
    found = []
    for kind in kinds.KINDS:
        own = [b for b in buffers if b.kind == kind]
        if not own:
            continue
        now = sum(b.bytes for b in own if b.start <= at <= b.end)
        name = f"copies of {kind}" if kind in kinds.AT_REST else kind
        largest = max(own, key=lambda b: b.bytes)
        shape = "x".join(map(str, largest.shape)) or "scalar"
        found.append(
            ClassBytes(
                kind=name,
                bytes=now,
                most_bytes=peak(own)[0],
                whole_bytes=None,
                formula=f"{len(own)} buffers, the largest {human(largest.bytes)}: "
                f"{largest.dtype} {shape} of {largest.name}",
            )
        )
    return found


def aliases_of(traced: TracedStep, program: Program) -> dict[int, int]:
    """For each result that takes the memory of a donated argument, that argument."""
    given = [a for a in traced.arguments if a.used]
    inputs = [
        (i, _key(local_shape(a.shape, argument_dims(a), traced.sizes), a.dtype))
        for i, a in zip(program.inputs, given, strict=True)
        if a.donated
    ]
    values = program.values
    outputs = [(i, _key(values[i].shape, values[i].dtype)) for i in program.outputs]
    return matched(inputs, outputs)


def _key(shape: Sequence[int], dtype: Any) -> tuple[tuple[int, ...], str]:
    return tuple(shape), str(dtype)
