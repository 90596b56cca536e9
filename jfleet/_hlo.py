"""Which collectives a compiled program runs, read from its HLO text.

Loops are counted with their trips, so the numbers are those of one step. Bytes on the
wire are what one device sends with ring algorithms, for a group of n devices:

    all-gather, reduce-scatter, all-to-all   (n - 1) / n * bytes
    all-reduce                             2 (n - 1) / n * bytes
    collective-permute, send                             bytes

where bytes is the size of the whole array that is gathered, reduced or exchanged.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
    "send",
)

_ARRAY = re.compile(r"\b(pred|[a-z]+\d+[a-z0-9]*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"([\w\-]+)\(([^)]*)\)")
_CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")
_BRANCH = re.compile(r"(?:true|false)_computation=%?([\w.\-]+)")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One collective instruction of a program."""

    kind: str
    """One of ``KINDS``."""
    name: str
    """The instruction's own name."""
    dtype: str
    """Element type as XLA writes it, such as ``bf16``."""
    shape: tuple[int, ...]
    """Shape of the result on one device; of the first one if there are several."""
    bytes: int
    """Size of the whole array(s) in one group, once."""
    group_size: int
    """How many devices take part together."""
    groups: tuple[tuple[int, ...], ...]
    """The devices of each group, numbered as in the program's device assignment; of a
    permutation, pairs of source and target; empty where all take part."""
    count: int
    """How often it runs in one execution of the program."""
    in_loop: bool
    """Is it inside a while loop?"""
    in_conditional: bool
    """Is it inside a branch, which may not run?"""
    known_trips: bool
    """False if a loop around it has unknown trips, and was counted once."""
    op_name: str
    """Where it comes from: XLA's metadata, with the user's scopes."""

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends for it per execution of the program."""
        return self.count * wire_bytes(self.kind, self.bytes, self.group_size)


def wire_bytes(kind: str, num_bytes: float, group_size: int) -> float:
    """Bytes that one device sends in one collective; see the top of this file.

    >>> wire_bytes("all-reduce", 800, 8), wire_bytes("all-gather", 800, 8)
    (1400.0, 700.0)
    """
    others = (group_size - 1) / group_size
    if kind in ("collective-permute", "collective-broadcast", "send"):
        return float(num_bytes)
    return (2 * others if kind == "all-reduce" else others) * num_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class _Instruction:
    name: str
    type: str
    opcode: str
    operands: str
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    count: int = 1
    in_loop: bool = False
    in_conditional: bool = False
    known_trips: bool = True


def collectives(compiled: Any) -> list[Collective]:
    """List the collectives of a compiled program.

    Args:
        compiled: what ``jax.jit(f).lower(...).compile()`` returns, or its HLO text.

    Returns:
        One record per instruction and place in the program.

    Example:
        >>> text = '''HloModule step, num_partitions=4
        ... ENTRY %main (w: f32[2,8]) -> f32[8,8] {
        ...   %w = f32[2,8]{1,0} parameter(0)
        ...   ROOT %g = f32[8,8]{1,0} all-gather(%w), replica_groups=[1,4]<=[4]
        ... }'''
        >>> [(c.kind, c.shape, c.bytes, c.wire_bytes) for c in collectives(text)]
        [('all-gather', (8, 8), 256, 192.0)]
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    return list(_Program(text).walk())


class _Program:
    def __init__(self, text: str):
        header = text[: text.find("\n")]
        counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", header)
        self.num_devices = math.prod(map(int, counts))
        self.computations, self.entry = _parse(text)
        self.types = {
            name: {i.name: i.type for i in instructions}
            for name, instructions in self.computations.items()
        }

    def walk(self) -> Iterator[Collective]:
        yield from self._walk(self.entry, _Place())

    def _walk(self, name: str, place: _Place) -> Iterator[Collective]:
        for one in self.computations.get(name, ()):
            kind = one.opcode.removesuffix("-start")
            if kind in KINDS and "is_host_transfer=true" not in one.text:
                yield self._collective(kind, one, name, place)
            else:
                for called, inside in self._called(one, place):
                    yield from self._walk(called, inside)

    def _called(self, one: _Instruction, place: _Place) -> Iterator[tuple[str, _Place]]:
        if one.opcode == "while":
            trips = self._trips(one)
            [body] = re.findall(r"body=%?([\w.\-]+)", one.text)
            yield (
                body,
                dataclasses.replace(
                    place,
                    count=place.count * (1 if trips is None else trips),
                    in_loop=True,
                    known_trips=place.known_trips and trips is not None,
                ),
            )
        elif one.opcode == "conditional":
            listed = re.search(r"branch_computations=\{([^}]*)\}", one.text)
            names = re.findall(r"[\w.\-]+", listed.group(1)) if listed else []
            for name in names or _BRANCH.findall(one.text):
                yield name, dataclasses.replace(place, in_conditional=True)
        # The TPU compiler splits an asynchronous collective over several fusions; the
        # one that starts it holds it, the others only repeat it.
        elif not one.name.startswith("async-collective-done"):
            for name in _CALLED.findall(one.text):
                if not name.startswith("async_collective_fusion"):
                    yield name, place

    def _collective(
        self, kind: str, one: _Instruction, computation: str, place: _Place
    ) -> Collective:
        size = self._operand_bytes(one, computation)
        groups = _groups(one.text)
        group = len(groups[0]) if groups else max(self.num_devices, 1)
        group = 2 if kind in ("collective-permute", "send") else group
        arrays = _ARRAY.findall(one.type)
        # An asynchronous start returns its operands first, then its results.
        pair = one.opcode.endswith("-start") and len(arrays) > 1
        dtype, dims = arrays[len(arrays) // 2 if pair else 0] if arrays else ("", "")
        shape = tuple(int(d) for d in dims.split(",") if d)
        if kind == "all-gather":
            size *= group
        # The TPU compiler writes a reduce-scatter as a fusion with this name.
        if kind == "all-reduce" and "all-reduce-scatter" in computation + one.name:
            kind = "reduce-scatter"
        op_name = re.search(r'op_name="([^"]*)"', one.text)
        return Collective(
            kind=kind,
            name=one.name,
            dtype=dtype,
            shape=shape,
            bytes=size,
            group_size=group,
            groups=groups,
            op_name=op_name.group(1) if op_name else "",
            **{f.name: getattr(place, f.name) for f in dataclasses.fields(place)},
        )

    def _operand_bytes(self, one: _Instruction, computation: str) -> int:
        types = self.types[computation]
        names = re.findall(r"[\w.\-]+", re.sub(r"\{[^}]*\}", "", one.operands))
        return sum(type_bytes(types[name]) for name in names if name in types)

    def _trips(self, loop: _Instruction) -> int | None:
        known = r'known_trip_count["\\]*:\s*\{["\\]*n["\\]*:\s*["\\]*(\d+)'
        if m := re.search(known, loop.text):
            return int(m.group(1))
        m = re.search(r"condition=%?([\w.\-]+)", loop.text)
        bounds = list(self._constants(m.group(1))) if m else []
        return max((b for b in bounds if b > 0), default=None)

    def _constants(self, name: str) -> Iterator[int]:
        for one in self.computations.get(name, ()):
            scalar = re.match(r"[su]32\[\]", one.type)
            if one.opcode == "constant" and scalar:
                yield int(one.operands)
            for called in _CALLED.findall(one.text):
                yield from self._constants(called)


def _groups(text: str) -> tuple[tuple[int, ...], ...]:
    """The devices of each group, from any of the ways in which XLA writes them.

    >>> _groups("replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}")
    ((0, 2), (1, 3))
    >>> _groups("replica_groups=mesh['x'=2,'y'=2] {'x'}")
    ((0, 2), (1, 3))
    """
    if m := re.search(r"replica_groups=mesh\[([^\]]*)\]([^{]*)\{([^}]*)\}", text):
        return _mesh_groups(*m.groups())
    if m := re.search(r"replica_groups=\[([\d,]+)\]<=(\S+?)[,\s]*(?:\s|$)", text):
        return _rows(_iota(m.group(2)).reshape(_numbers(m.group(1))))
    if m := re.search(
        r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]+\})\}", text
    ):
        return tuple(
            tuple(_numbers(g)) for g in re.findall(r"\{([\d,]+)\}", m.group(1))
        )
    return ()


def _mesh_groups(sizes: str, order: str, used: str) -> tuple[tuple[int, ...], ...]:
    """Groups along some axes, or parts of axes, of a mesh."""
    shape = {name: int(n) for name, n in re.findall(r"'?([\w\-.]+)'?=(\d+)", sizes)}
    if m := re.search(r"device_ids=\((\S+)\)", order):
        devices = _iota(m.group(1))
    else:
        devices = np.arange(math.prod(shape.values()))
    split: list[int] = []
    chosen: list[int] = []
    wanted = re.findall(r"'([\w\-.]+)'(?::\((\d+)\)(\d+))?", used)
    for name, size in shape.items():
        parts = [(int(p or 1), int(n or size)) for a, p, n in wanted if a == name]
        at = 1
        for before, part in sorted(parts):
            split += [before // at, part]
            chosen.append(len(split) - 1)
            at = before * part
        split.append(size // at)
    rest = [d for d in range(len(split)) if d not in chosen]
    grid = devices.reshape(split).transpose(*rest, *chosen)
    return _rows(grid.reshape(-1, math.prod(split[d] for d in chosen)))


def _iota(text: str) -> Any:
    """Devices in the order that ``[2,4]T(1,0)`` stands for."""
    m = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    assert m, f"not a device list: {text}"
    shape = _numbers(m.group(1))
    grid = np.arange(math.prod(shape)).reshape(shape)
    return grid.transpose(_numbers(m.group(2))) if m.group(2) else grid


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def _rows(grid: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, row)) for row in grid)


def _parse(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    computations: dict[str, list[_Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if current is None:
            if m := _COMPUTATION.match(line):
                current = computations.setdefault(m.group(2), [])
                entry = m.group(2) if m.group(1) else entry
        elif line.startswith("}"):
            current = None
        elif (m := _INSTRUCTION.match(line)) and (one := _instruction(*m.groups())):
            current.append(one)
    return computations, entry


def _instruction(name: str, text: str) -> _Instruction | None:
    end = _end_of_type(text)
    m = _OPCODE.match(text, end + 1)
    return m and _Instruction(name, text[:end], m.group(1), m.group(2), text)


def _end_of_type(text: str) -> int:
    """Where the result type ends: after its closing parenthesis, or at a blank."""
    if not text.startswith("("):
        return text.find(" ")
    depth = 0
    for i, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return i + 1
    return len(text)


def type_bytes(type_text: str) -> int:
    """Bytes of all arrays in a type.

    >>> type_bytes("(f32[2,3]{1,0}, pred[8]{0}, s4[8]{0})")
    36
    """
    return sum(
        math.prod(int(d) for d in dims.split(",") if d) * _bits(dtype) // 8
        for dtype, dims in _ARRAY.findall(type_text)
    )


def _bits(dtype: str) -> int:
    return 8 if dtype == "pred" else int(re.findall(r"\d+", dtype)[0])
