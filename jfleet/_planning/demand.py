"""Which sums are only used in part, so that the compiler makes only that part.

The compiler's partitioner carries layouts backwards as well as forwards: a gradient
that the optimizer needs in shards becomes a shard where it is summed, inside loops too.
The walk goes forwards only; so it is done twice, and the first program tells, for each
sum, by which axes it is cut later on.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from jfleet._planning.kinds import REST
from jfleet._planning.program import Op, Origin, Program
from jfleet._planning.tiles import Dims

BLOCKED = "blocked"
Demand = Dims | str | None
"""By which axes each dim is cut; ``BLOCKED``: it is needed whole; None: no matter."""


def demands(program: Program) -> dict[Origin, Dims]:
    """By which axes the sums of a program are cut, for those that are."""
    found: dict[Origin, Dims] = {}
    _Scope(program, None, None).collect(found)
    return found


@dataclasses.dataclass
class _Scope:
    """A program and, where it is a body, the operation that runs it."""

    program: Program
    outer: "_Scope | None"
    op: Op | None

    def __post_init__(self):
        self.users: dict[int, list[Op]] = defaultdict(list)
        for op in self.program.ops:
            for i in set(op.ins):
                self.users[i].append(op)
        self.results: dict[int, list[int]] = defaultdict(list)
        for place, i in enumerate(self.program.outputs):
            self.results[i].append(place)
        self.seen: dict[int, Demand] = {}
        self.inner: dict[tuple[int, int], _Scope] = {}

    def body(self, op: Op, number: int) -> "_Scope":
        """The scope of one body of an operation."""
        key = (id(op), number)
        if key not in self.inner:
            self.inner[key] = _Scope(op.bodies[number], self, op)
        return self.inner[key]

    def collect(self, found: dict[Origin, Dims]) -> None:
        """Note the demand of every sum, here and in bodies."""
        for op in self.program.ops:
            if op.name == "all-reduce" or self._is_constant(op):
                demand = self.demand(op.outs[0])
                if isinstance(demand, tuple) and any(demand):
                    found[op.origin] = demand
            for number in range(len(op.bodies)):
                self.body(op, number).collect(found)

    def _is_constant(self, op: Op) -> bool:
        """Whether it makes a mask, a table, zeros: the same on every device."""
        if len(op.outs) != 1 or op.name == "constant":
            return False
        value = self.program.values[op.outs[0]]
        return value.kind == REST and bool(value.shape)

    def demand(self, value: int) -> Demand:
        """What all users of a value say."""
        if value not in self.seen:
            self.seen[value] = None  # a loop that hands it on says nothing new
            said = [self._by(op, value) for op in self.users[value]]
            said += [self._outside(place) for place in self.results[value]]
            self.seen[value] = _agreed(said)
        return self.seen[value]

    def _by(self, op: Op, value: int) -> Demand:
        if op.name == "slice":
            more = {user.name for user in self.users[op.outs[0]]} == {"slice"}
            after = self.demand(op.outs[0]) if more else None
            return _added(op.info["cut"], after)
        if op.name in ("put", "barrier"):
            pairs = zip(op.ins, op.outs, strict=True)
            return _agreed([self.demand(o) for i, o in pairs if i == value])
        if op.name == "transpose":
            after = self.demand(op.outs[0])
            if not isinstance(after, tuple):
                return after
            back: list[Any] = [()] * len(after)
            for new, old in enumerate(op.info["permutation"]):
                back[old] = after[new]
            return tuple(back)
        shape = self.program.values[value].shape
        if op.name == "broadcast_in_dim":
            return _spread(self.demand(op.outs[0]), op.info["places"])
        if op.info.get("elementwise"):
            outs = [o for o in op.outs if self.program.values[o].shape == shape]
            return _agreed([self.demand(o) for o in outs]) if outs else BLOCKED
        if op.name.startswith("reduce_"):
            return BLOCKED if self.program.values[op.outs[0]].shape else None
        if op.bodies:
            return self._within(op, value)
        return BLOCKED

    def _within(self, op: Op, value: int) -> Demand:
        """What the bodies of a loop or branch do with it."""
        said: list[Demand] = []
        for number, body in enumerate(op.bodies):
            scope = self.body(op, number)
            for place, i in enumerate(op.ins):
                if i == value and place < len(body.inputs):
                    said.append(scope.demand(body.inputs[place]))
        return _agreed(said)

    def _outside(self, place: int) -> Demand:
        """What is done with a result, after the loop or branch."""
        if self.outer is None or self.op is None:
            return BLOCKED
        demand = self.outer.demand(self.op.outs[place])
        loop = self.op.loop
        if loop is not None and place >= loop.num_carry and isinstance(demand, tuple):
            return BLOCKED if demand[0] else demand[1:]
        return demand


def _agreed(said: list[Demand]) -> Demand:
    told = [d for d in said if d is not None]
    if not told:
        return None
    return told[0] if all(d == told[0] for d in told) else BLOCKED


def _spread(after: Demand, places: Sequence[int]) -> Demand:
    """What is cut of a value that gets more dims; none of the dims that it had not."""
    if not isinstance(after, tuple):
        return after
    if any(entry for i, entry in enumerate(after) if i not in places):
        return BLOCKED
    return tuple(after[i] for i in places)


def _added(cut: Dims, after: Demand) -> Dims:
    if not isinstance(after, tuple) or len(after) != len(cut):
        return cut
    return tuple((*a, *b) for a, b in zip(cut, after, strict=True))
