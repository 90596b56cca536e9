"""When each buffer of a step is alive, and what is alive at the worst moment."""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence

from jfleet._planning.compilers import Compiler
from jfleet._planning.donation import Hole, into_holes, with_old_values
from jfleet._planning.nodes import Fusion, Node
from jfleet._planning.program import Program
from jfleet._planning.schedule import breadth_first, combined


@dataclasses.dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that a value of the step takes for a while."""

    start: int
    end: int
    bytes: int
    kind: str
    name: str
    """The operation that makes it."""
    shape: tuple[int, ...]
    dtype: str


class Run:
    """One run of a program, kernel by kernel.

    Attributes:
        buffers: every temporary that needs memory of its own.
        kernels: what ran, and how often in one step.
    """

    def __init__(
        self,
        program: Program,
        compiler: Compiler,
        aliases: Mapping[int, int] | None = None,
    ):
        self.compiler, self.aliases = compiler, aliases or {}
        self.clock = 0
        self.buffers: list[Buffer] = []
        self.kernels: list[tuple[Node, Program, float]] = []
        self.holes: list[Hole] = []
        self.whole = program
        self._program(program, 1)
        self.buffers = into_holes(self.buffers, self.holes)

    def _order(self, fusion: Fusion) -> list[Node]:
        nodes = fusion.nodes
        if self.compiler.combines_reductions:
            nodes = combined(nodes)
        if fusion.source is self.whole and self.aliases:
            nodes = with_old_values(nodes, fusion, self.aliases)
        return breadth_first(nodes) if self.compiler.breadth_first else nodes

    def _program(self, program: Program, count: float) -> None:
        """Run a program; its inputs and outputs have memory already."""
        fusion = Fusion(program, self.compiler)
        order = self._order(fusion)
        uses: dict[int, int] = defaultdict(int)
        last: dict[int, Node] = {}
        for node in order:
            for r in node.reads:
                uses[r] += 1
                last[r] = node
        spans: dict[int, list[int]] = {}
        makers: dict[int, str] = {}
        home: dict[int, int] = {}
        for node in order:
            self.clock += 1
            start = self.clock
            makers.update(dict.fromkeys(node.writes, node.op.name))
            home.update(_in_place(node, fusion, makers, uses, last))
            times = count * (node.op.trips if node.op.loop else 1)
            for body in node.op.bodies:
                self._program(body, times)
            if not node.op.bodies:
                self.kernels.append((node, fusion.program, count))
            for v in (*node.reads, *node.writes):
                while v in home:
                    v = home[v]
                span = spans.setdefault(v, [start, start])
                span[1] = self.clock
        if program is self.whole:
            self._find_holes(fusion, spans)
        outside = fusion.inputs | fusion.outputs
        for v, (start, end) in spans.items():
            value = fusion.program.values[v]
            if v in makers and v not in outside and value.bytes:
                self.buffers.append(
                    Buffer(
                        start,
                        end,
                        value.bytes,
                        value.kind,
                        makers[v],
                        value.shape,
                        str(value.dtype),
                    )
                )

    def _find_holes(self, fusion: Fusion, spans: Mapping[int, list[int]]) -> None:
        """Where donated arguments lie unused."""
        for result, argument in self.aliases.items():
            result, argument = fusion.root[result], fusion.root[argument]
            if result in spans and result != argument:
                last_read = spans.get(argument, [0, 0])[1]
                size = fusion.program.values[argument].bytes
                self.holes.append(Hole(size, last_read, spans[result][0]))


def _in_place(node: Node, fusion: Fusion, made, uses, last) -> dict[int, int]:
    """Results that take the memory of an operand that nothing else needs.

    What a loop carries stays where it entered; a scatter writes into its operand; an
    elementwise kernel writes over an operand that it is the last to read.
    """
    op = node.op
    found: dict[int, int] = {}
    if op.info.get("elementwise"):
        values = fusion.program.values
        for r in sorted(node.aligned):
            dies = r in made and last.get(r) is node and r not in fusion.outputs
            if dies and values[r].bytes == values[op.outs[0]].bytes:
                return {op.outs[0]: r}
        return {}
    if op.loop is not None:
        pairs = zip(op.outs, op.ins[op.loop.num_consts :], strict=False)
        pairs = list(pairs)[: op.loop.num_carry]
    elif op.name.startswith("scatter"):
        pairs = [(op.outs[0], op.ins[0])]
    else:
        return {}
    for out, operand in pairs:
        enters = fusion.root[operand]
        own = enters in made and fusion.is_kept(enters)
        if own and uses[enters] == 1 and enters not in found.values():
            found[out] = enters
    return found


def peak(buffers: Sequence[Buffer]) -> tuple[int, int]:
    """The largest sum of what is alive at once, and when."""
    change: dict[int, int] = defaultdict(int)
    for b in buffers:
        change[b.start] += b.bytes
        change[b.end + 1] -= b.bytes
    best, at, now = 0, 0, 0
    for time in sorted(change):
        now += change[time]
        if now > best:
            best, at = now, time
    return best, at
