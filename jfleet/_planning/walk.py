"""From the jaxpr of a step to the program of one device.

The walk does in a few lines what the compiler's partitioner does in many: it carries
from equation to equation over which mesh axes each value is split, and notes a
collective where a value must be laid out anew or where devices hold parts of a sum.
Calls are inlined; loops and branches become operations with bodies.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from jfleet._planning import kinds
from jfleet._planning.flops import flops_of
from jfleet._planning.program import Exchange, Op, Origin, Program, group_size
from jfleet._planning.rules import Outcome, is_elementwise, outcome
from jfleet._planning.tiles import (
    Dims,
    Tile,
    axes_of,
    local_bytes,
    local_shape,
    merge,
    whole,
    without,
)

Handler = Callable[["Walker", Any, list[Tile]], Sequence[Tile]]
HANDLERS: dict[str, Handler] = {}


def handler(*names: str) -> Callable[[Handler], Handler]:
    """Register how some primitives are walked."""

    def register(function: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, function))
        return function

    return register


@dataclasses.dataclass(slots=True)
class Walker:
    """Builds a program; bodies of loops get walkers of their own."""

    sizes: Mapping[str, int]
    """Mesh axes and their sizes."""
    program: Program = dataclasses.field(default_factory=Program)
    manual: frozenset[str] = frozenset()
    """Axes that are manual here (``shard_map``)."""
    rows: tuple[str, ...] = ()
    """Axes of size one that mark the rows of a replica."""
    notes: list[str] = dataclasses.field(default_factory=list)
    known: dict[Any, tuple[Tile, ...]] = dataclasses.field(default_factory=dict)
    at: Origin = ()
    """The equation that is walked."""
    origins: dict[int, Origin] = dataclasses.field(default_factory=dict)
    """Where each value was made first."""
    hints: Mapping[Origin, Dims] = dataclasses.field(default_factory=dict)
    """Axes by which a sum is cut further on; see ``demand``."""

    def inner(self, branch: int = 0) -> "Walker":
        """A walker for the body of a loop or branch."""
        at = (*self.at, branch)
        return dataclasses.replace(self, program=Program(), known={}, origins={}, at=at)

    # Values --------------------------------------------------------------------------

    def tile(self, shape: Sequence[int], dtype: Any, dims: Dims, kind: str) -> Tile:
        """A new value."""
        shape = tuple(shape)
        num = self.program.new(
            local_shape(shape, dims, self.sizes),
            dtype,
            local_bytes(shape, dtype, dims, self.sizes),
            kind,
        )
        return Tile(num, shape, dtype, dims, kind)

    def bytes(self, tile: Tile) -> int:
        """Bytes of a value on one device."""
        return self.program.values[tile.id].bytes

    def emit(
        self,
        name: str,
        ins: Sequence[Tile],
        outs: Sequence[tuple[Sequence[int], Any, Dims, str]],
        *,
        key: Any = None,
        **fields: Any,
    ) -> tuple[Tile, ...]:
        """Add an operation, unless the same one was added before.

        Args:
            name: of the operation.
            ins: its operands.
            outs: shape, dtype, dims and class of each result.
            key: what else makes two operations equal; None: no two are.
            **fields: of ``Op``.
        """
        seen = None if key is None else (name, key, tuple(t.id for t in ins))
        if seen is not None and seen in self.known:
            return self.known[seen]
        tiles = tuple(self.tile(*out) for out in outs)
        ids = tuple(t.id for t in tiles)
        self.origins.update(dict.fromkeys(ids, self.at))
        op = Op(name, tuple(t.id for t in ins), ids, origin=self.at, **fields)
        self.program.ops.append(op)
        if seen is not None:
            self.known[seen] = tiles
        return tiles

    # Layouts -------------------------------------------------------------------------

    def move(self, tile: Tile, dims: Dims, kind: str | None = None) -> Tile:
        """Lay a value out anew: cut it where it is whole, exchange where it is not."""
        kind = kind or tile.kind
        at, goal = self.real(tile.dims), self.real(dims)
        now, then = set(axes_of(at)), set(axes_of(goal))
        turned = {a for a in now & then if _place(a, at) != _place(a, goal)}
        if turned:
            kept = [tuple(a for a in e if a not in turned) for e in at]
            at = tuple(
                (*e, *[a for a in f if a in turned])
                for e, f in zip(kept, goal, strict=True)
            )
            axes = tuple(a for a in self.sizes if a in turned)
            tile = self._exchange("all-to-all", tile, at, axes, kind)
        gone = tuple(a for a in self.sizes if a in now - then)
        if gone:
            at = without(at, gone)
            tile = self._exchange("all-gather", tile, at, gone, kind)
        if at != goal:
            out = (tile.shape, tile.dtype, goal, tile.kind)
            pairs = zip(at, goal, strict=True)
            cut = tuple(tuple(a for a in g if a not in e) for e, g in pairs)
            [tile] = self.emit("slice", [tile], [out], key=goal, info={"cut": cut})
        return dataclasses.replace(tile, dims=dims)

    def real(self, dims: Dims) -> Dims:
        """Dims without axes of one device."""
        return tuple(tuple(a for a in e if self.sizes.get(a, 1) > 1) for e in dims)

    def _exchange(self, name, tile, dims, axes, kind) -> Tile:
        size = group_size(axes, self.sizes)
        out = (tile.shape, tile.dtype, dims, kind)
        split = [i for i, e in enumerate(tile.dims) if set(e) & set(axes)]
        local = self.bytes(tile)
        exchange = Exchange(
            kind=name,
            axes=axes,
            group_size=size,
            bytes=local * size if name == "all-gather" else local,
            dtype=str(tile.dtype),
            memory_kind=kind,
        )
        info = {"dims": split}
        return self.emit(name, [tile], [out], key=dims, exchange=exchange, info=info)[0]

    def reduced(self, tile: Tile, axes: Sequence[str], name="all-reduce") -> Tile:
        """Add up the parts of a sum that the devices along ``axes`` hold."""
        real = tuple(a for a in self.sizes if a in axes and self.sizes[a] > 1)
        if not real:
            return tile
        exchange = Exchange(
            kind=name,
            axes=real,
            group_size=group_size(real, self.sizes),
            bytes=self.bytes(tile),
            dtype=str(tile.dtype),
            memory_kind=tile.kind,
        )
        out = (tile.shape, tile.dtype, tile.dims, tile.kind)
        return self.emit(name, [tile], [out], key=real, exchange=exchange)[0]

    # Jaxprs --------------------------------------------------------------------------

    def constant(self, value: Any) -> Tile:
        """A literal, or a constant that the jaxpr closes over."""
        shape, dtype = np.shape(value), getattr(value, "dtype", np.asarray(0).dtype)
        key = ("constant", str(value)) if not shape else ("constant", id(value))
        out = (shape, dtype, whole(len(shape)), kinds.REST)
        return self.emit("constant", [], [out], key=key)[0]

    def run(self, jaxpr: Any, operands: Sequence[Tile]) -> list[Tile]:
        """Walk a jaxpr on operands that exist; return its results."""
        inner, consts = getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())
        env: dict[Any, Tile] = {
            v: self.constant(c) for v, c in zip(inner.constvars, consts, strict=True)
        }
        env.update(zip(inner.invars, operands, strict=True))

        def read(atom: Any) -> Tile:
            if isinstance(atom, jex.Literal):
                return self.constant(atom.val)
            return env[atom]

        outer = self.at
        for number, eqn in enumerate(inner.eqns):
            self.at = (*outer, number)
            ins = [read(a) for a in eqn.invars]
            found = HANDLERS.get(eqn.primitive.name, _plain)
            outs = found(self, eqn, ins)
            env.update(zip(eqn.outvars, outs, strict=True))
        self.at = outer
        return [read(a) for a in inner.outvars]


def _place(axis: str, dims: Dims) -> int:
    """The dim that an axis splits."""
    return [axis in entry for entry in dims].index(True)


def _plain(walker: Walker, eqn: Any, ins: list[Tile]) -> Sequence[Tile]:
    """An equation without a jaxpr of its own."""
    if any(True for _ in jex.jaxprs_in_params(eqn.params)):
        name = eqn.primitive.name
        if name not in ("reduce", "scatter", "select_and_scatter") and not (
            name.startswith(("scatter", "reduce", "select_and", "sort", "arg"))
        ):
            walker.notes.append(f"{name} is opaque: counted as one operation")
    said: Outcome = outcome(eqn, [t.dims for t in ins], walker.sizes)
    ins = [walker.move(t, d) for t, d in zip(ins, said.ins, strict=True)]
    ins, said = _scattered_in_shards(walker, eqn, ins, said)
    classes = [t.kind for t in ins if t.shape or len(ins) == 1]
    name = eqn.primitive.name
    # Rows that devices look up in their parts of a table are no sum over rows.
    sums = said.summed and name != "gather"
    kind = (kinds.of_sum if sums else kinds.mixed)(classes)
    outs = [
        (v.aval.shape, v.aval.dtype, dims, kind)
        for v, dims in zip(eqn.outvars, said.outs, strict=True)
    ]
    local = [walker.program.values[t.id].shape for t in ins]
    tiles = walker.emit(
        name, ins, outs, key=_key(eqn), flops=flops_of(eqn, local), info=_info(eqn)
    )
    return [_summed(walker, t, said.summed, name) for t in tiles]


def _scattered_in_shards(
    walker: Walker, eqn: Any, ins: list[Tile], said: Outcome
) -> tuple[list[Tile], Outcome]:
    """Rows of updates for all devices, where that is less than a sum of the results.

    A scatter whose result is cut later may as well get all updates on every device,
    which then writes those that fall into its part.
    """
    cut = walker.hints.get(walker.at)
    real = [a for a in said.summed if walker.sizes.get(a, 1) > 1]
    scatters = eqn.primitive.name.startswith("scatter")
    if cut is None or not scatters or not set(real) <= set(axes_of(cut)) or not real:
        return ins, said
    sent = group_size(real, walker.sizes) * sum(walker.bytes(t) for t in ins[1:])
    if 2 * walker.bytes(ins[0]) <= sent and not walker.manual:
        return ins, said
    [dims] = said.outs
    goal = tuple((*d, *c) for d, c in zip(dims, cut, strict=True))
    rows = [walker.move(t, without(t.dims, real)) for t in ins[1:]]
    return [walker.move(ins[0], goal), *rows], Outcome([], [goal])


def _summed(walker: Walker, tile: Tile, axes: Sequence[str], name: str) -> Tile:
    """Add up parts of a sum; of a product that is cut later, only what is kept.

    The compiler reduces a product first along the axes that cut it, cuts it, and then
    along the others.
    """
    cut = walker.hints.get(walker.origins[tile.id])
    if (
        cut is None
        or len(cut) != len(tile.dims)
        or set(axes_of(cut)) & set(axes_of(tile.dims))
    ):
        return walker.reduced(tile, axes)
    first = [a for a in axes if a in axes_of(cut)]
    if name not in ("dot_general", "conv_general_dilated") or not first:
        first = list(axes)
    goal = tuple((*d, *c) for d, c in zip(tile.dims, cut, strict=True))
    tile = walker.move(walker.reduced(tile, first), goal)
    return walker.reduced(tile, [a for a in axes if a not in first])


def _key(eqn: Any) -> Any:
    if eqn.effects:
        return None
    return str(sorted((k, str(v)) for k, v in eqn.params.items() if k != "sharding"))


def _info(eqn: Any) -> dict[str, Any]:
    name, params = eqn.primitive.name, eqn.params
    if is_elementwise(eqn):
        return {"elementwise": True}
    if name == "broadcast_in_dim":
        return {"places": params["broadcast_dimensions"]}
    if name == "transpose":
        return {"permutation": params["permutation"]}
    if name == "dot_general":
        ranks = [v.aval.ndim for v in eqn.invars]
        return {"dimension_numbers": params["dimension_numbers"], "ranks": ranks}
    if name == "conv_general_dilated":
        return _conv_layout(params["dimension_numbers"])
    if name.startswith("reduce_") and "axes" in params:
        return {"dims": list(params["axes"])}
    return {}


def _conv_layout(numbers: Any) -> dict[str, Any]:
    """Whether images are rows, ..., features and kernels ..., in, out."""

    def image(spec: Sequence[int]) -> bool:
        return spec[0] == 0 and spec[1] == len(spec) - 1

    kernel = numbers.rhs_spec
    good = (
        image(numbers.lhs_spec),
        kernel[0] == len(kernel) - 1 and kernel[1] == len(kernel) - 2,
    )
    return {"good": good, "rows_first": image(numbers.out_spec)}


# Layouts that the step asks for -------------------------------------------------------


def _dims_of(spec: Any, num_dims: int) -> list[Any]:
    entries = [() if e is None else (e,) if isinstance(e, str) else e for e in spec]
    return entries + [()] * (num_dims - len(entries))


def wanted_dims(walker: Walker, tile: Tile, sharding: Any) -> Dims:
    """The dims that a sharding asks for; unconstrained ones stay."""
    spec = getattr(sharding, "spec", None)
    if spec is None:
        return tile.dims
    free = jax.sharding.PartitionSpec.UNCONSTRAINED
    marks = set(walker.rows)
    out = []
    entries = _dims_of(spec, len(tile.shape))
    for now, entry in zip(tile.dims, entries, strict=True):
        if entry is free:
            out.append(now)
            continue
        kept = tuple(a for a in now if a in marks)
        real = tuple(
            a for a in entry if a not in walker.manual and walker.sizes.get(a, 1) > 1
        )
        out.append((*kept, *real))
    return merge([tuple(out)])


@handler("sharding_constraint", "reshard")
def _constraint(walker, eqn, ins):
    sharding = eqn.params.get("sharding", eqn.params.get("dst_sharding"))
    return [walker.move(ins[0], wanted_dims(walker, ins[0], sharding))]


@handler("jfleet_gather", "jfleet_scatter")
def _gather_at_use(walker, eqn, ins):
    """Parameters gather one axis at a time; their gradients scatter."""
    tile = ins[0]
    gathers = eqn.primitive.name == "jfleet_gather"
    for sharding in eqn.params["path"]:
        kind = kinds.GATHERED if gathers else tile.kind
        tile = walker.move(tile, wanted_dims(walker, tile, sharding), kind)
    return [tile]
