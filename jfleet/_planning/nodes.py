"""Fusion: which values of a program get memory, and which are made where they are used.

A value is kept where something reads it that no element-by-element kernel can take in
(a product, a collective, a loop), or where it is dear to compute and has several users.
"""

import dataclasses
import math
from collections import defaultdict

from jfleet._planning.compilers import ALIASES, CHEAP, DEAR, REDUCTIONS, Compiler
from jfleet._planning.products import folded, with_copies
from jfleet._planning.program import Op, Program, Value
from jfleet._planning.scatters import with_own_starts
from jfleet._tree import dtype_bytes


@dataclasses.dataclass(slots=True)
class Node:
    """A kernel, a collective, a loop: what the compiled program runs as one."""

    ops: list[Op]
    reads: set[int]
    writes: list[int]
    waits: set[int] = dataclasses.field(default_factory=set)
    """Values that must be there first, though it does not read them."""
    aligned: set[int] = dataclasses.field(default_factory=set)
    """Those it reads at each place only for that place of its result."""

    @property
    def op(self) -> Op:
        """The operation that gives its result."""
        return self.ops[-1]


class Fusion:
    """Nodes of a program; values are those of the program."""

    def __init__(self, program: Program, compiler: Compiler):
        self.source = program
        program = with_own_starts(folded(program))
        if compiler.copies_operands:
            program = with_copies(program)
        self.program, self.compiler = program, compiler
        self._index()
        self.absorbed = self._absorbed()
        if compiler.copies_operands:
            self._spread()
        self.kept: dict[int, bool] = {}
        self._decide()
        self.nodes = self._nodes()

    def _index(self) -> None:
        """Who makes and who uses each value."""
        program = self.program
        self.root = list(range(len(program.values)))
        self.maker: dict[int, Op] = {o: op for op in program.ops for o in op.outs}
        for op in program.ops:
            if self._is_alias(op):
                for i, o in zip(op.ins, op.outs, strict=False):
                    self.root[o] = self.root[i]
        self.users: dict[int, list[Op]] = defaultdict(list)
        for op in program.ops:
            if not self._is_alias(op):
                for i in {self.root[i] for i in op.ins}:
                    self.users[i].append(op)
        self.outputs = {self.root[i] for i in program.outputs}
        self.inputs = {self.root[i] for i in program.inputs}

    def _spread(self) -> None:
        """Give reductions operands of full size: they repeat none by themselves."""
        values, ops = self.program.values, []
        wide: dict[tuple[int, tuple[int, ...]], int] = {}
        for op in self.program.ops:
            ins = list(op.ins)
            for place, i in enumerate(ins if id(op) in self.absorbed else ()):
                full, small = values[op.outs[0]], values[i]
                if not small.shape or small.bytes >= full.bytes:
                    continue
                key = (self.root[i], full.shape)
                if key not in wide:
                    size = math.prod(full.shape) * dtype_bytes(small.dtype)
                    values.append(Value(size, small.kind, full.shape, small.dtype))
                    wide[key] = len(values) - 1
                    ops.append(Op("spread", (i,), (wide[key],)))
                ins[place] = wide[key]
            op.ins = tuple(ins)
            ops.append(op)
        self.program = dataclasses.replace(self.program, ops=ops)
        self._index()

    def _is_alias(self, op: Op) -> bool:
        if op.name == "broadcast_in_dim":
            [out], values = op.outs, self.program.values
            return bool(op.ins) and values[op.ins[0]].bytes == values[out].bytes
        return op.name in ALIASES

    def is_kept(self, value: int) -> bool:
        """Whether a value has memory of its own."""
        return self.kept.get(self.root[value], True)

    def _decide(self) -> None:
        """From the last operation to the first."""
        for op in reversed(self.program.ops):
            if self._is_alias(op):
                continue
            for out in op.outs:
                self.kept[out] = self._keeps(op, out)

    def _keeps(self, op: Op, out: int) -> bool:
        if not self._is_light(op):
            return True
        if out in self.outputs:
            return True
        users = self.users[out]
        if id(op) in self.absorbed:
            return False
        if not all(self._hosts(user) for user in users):
            return True
        narrow = self.compiler.widens_bfloat16 and (
            str(self.program.values[out].dtype) == "bfloat16"
        )
        dear = op.name in DEAR or (narrow and bool(op.info.get("elementwise")))
        return dear and len(users) > 1

    def _hosts(self, op: Op) -> bool:
        """Can an operation take in what others use as well?"""
        return self._is_light(op) and id(op) not in self.absorbed

    def _absorbed(self) -> set[int]:
        """What a reduction takes in: whatever works element by element for it alone."""
        found: set[int] = set()
        for op in reversed(self.program.ops):
            if op.name not in REDUCTIONS and id(op) not in found:
                continue
            for i in map(self.root.__getitem__, op.ins):
                maker = self.maker.get(i)
                alone = len(self.users[i]) == 1 and i not in self.outputs
                if maker is not None and alone and self._is_plain(maker):
                    found.add(id(maker))
        return found

    def _is_light(self, op: Op) -> bool:
        """Can an operation be part of the kernel of its users?"""
        return op.name in CHEAP or bool(op.info.get("elementwise"))

    def _is_plain(self, op: Op) -> bool:
        """Sums and products and the like, element by element."""
        return bool(op.info.get("elementwise")) and op.name not in DEAR

    def _nodes(self) -> list[Node]:
        reads_of: dict[int, set[int]] = {}
        waits_of: dict[int, set[int]] = {}
        aligned_of: dict[int, set[int]] = {}
        nodes = []
        for op in self.program.ops:
            waits = set().union(*(waits_of.get(i, set()) for i in op.ins))
            if op.name == "barrier" and self.compiler.keeps_barriers:
                waits |= {r for i in op.ins for r in self._reads(i, reads_of)}
            if self._is_alias(op):
                waits_of.update(dict.fromkeys(op.outs, waits))
                continue
            reads = {r for i in op.ins for r in self._reads(i, reads_of)}
            kept = [o for o in op.outs if self.kept[o]]
            aligned: set[int] = set()
            if op.info.get("elementwise"):
                for i in map(self.root.__getitem__, op.ins):
                    own = self.kept.get(i, True)
                    aligned |= {i} if own else aligned_of.get(i, set())
            for out in op.outs:
                if not self.kept[out]:
                    reads_of[out], waits_of[out] = reads, waits
                    aligned_of[out] = aligned
            if kept or not op.outs:
                nodes.append(Node([op], reads, kept, waits, aligned))
        return nodes

    def _reads(self, value: int, reads_of: dict[int, set[int]]) -> set[int]:
        """The values in memory that one is made of."""
        root = self.root[value]
        return {root} if self.kept.get(root, True) else reads_of[root]
