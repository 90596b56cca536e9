"""The interpreter: run a jaxpr on shards, gathering each one where it is needed.

Note [each use its own checkpoint]. A gathered weight that reverse-mode autodiff keeps
for the backward pass undoes the sharding. So the equation that needs a shard becomes
``checkpoint(gather; equation)`` under a policy that saves everything but gathers: the
backward pass gathers again and computes nothing else twice. Inside a region that the
user rematerialises in full the gathered value is dropped anyway, and one plain gather
serves all its uses; there ``Rewriter.plain`` is true.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.source_info_util
from jax.extend import core as jex

from jfleet._gather import _layout_rules as layout
from jfleet._gather import _primitive as primitive
from jfleet._gather._control_flow import HANDLERS
from jfleet._gather._custom_rules import CUSTOM_HANDLERS
from jfleet._gather._layout_rules import Shard, Tag
from jfleet._gather._loops import has_checkpoint
from jfleet._gather._specs import Dims, Fabric, Options


@dataclasses.dataclass(frozen=True, slots=True)
class Note:
    """A parameter that is gathered before it is needed, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


@dataclasses.dataclass(slots=True)
class Traced:
    """A function of raw values, and the tags of what it returned when traced."""

    function: Callable[..., Any]
    out_tags: list[Tag | None] = dataclasses.field(default_factory=list)

    def wrap(self, values: Sequence[Any]) -> list[Any]:
        """Put the tags back on the results."""
        return tagged(values, self.out_tags)


def raw(operand: Any) -> Any:
    """The value of a shard, or an ordinary value."""
    return operand.value if isinstance(operand, Shard) else operand


def tag(operand: Any) -> Tag | None:
    """The tag of a shard, ``None`` for an ordinary value."""
    return operand.tag if isinstance(operand, Shard) else None


def tagged(values: Sequence[Any], tags: Sequence[Tag | None]) -> list[Any]:
    """Make shards of the values that have a tag."""
    return [
        v if t is None else Shard(v, t.dims, t.name, t.pending)
        for v, t in zip(values, tags, strict=True)
    ]


def closed(jaxpr: Any) -> tuple[jex.Jaxpr, Sequence[Any]]:
    """The jaxpr and its constants; jax 0.12 merges the two classes."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


@contextlib.contextmanager
def place_of(eqn: jex.JaxprEqn) -> Iterator[None]:
    """Trace as if at the user's line: same names in profiles, same context."""
    source = jax.extend.source_info_util
    stack = source.current_name_stack() + eqn.source_info.name_stack
    where = source.user_context(eqn.source_info.traceback, name_stack=stack)
    with where, eqn.ctx.manager:
        yield


def equation_function(eqn: jex.JaxprEqn) -> Callable[..., list[Any]]:
    """The equation as a function of its operands."""

    def run(*operands):
        params = eqn.primitive.get_bind_params(eqn.params)
        outs = eqn.primitive.bind(*operands, **params)
        return list(outs) if eqn.primitive.multiple_results else [outs]

    return run


@dataclasses.dataclass(kw_only=True, slots=True)
class Rewriter:
    """Runs jaxprs on shards."""

    fabric: Fabric
    options: Options
    plain: bool = False
    notes: list[Note] = dataclasses.field(default_factory=list)
    jitted: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def with_plain(self, plain: bool) -> "Rewriter":
        """The same, for a region whose gathered values are dropped anyway."""
        return dataclasses.replace(self, plain=plain)

    @property
    def gathers(self) -> bool:
        """True at p_g_os, false where only cotangents are split."""
        return self.options.mode == "gather"

    def note(self, operand: Any, reason: str) -> None:
        """Record that a shard is gathered early."""
        if self.gathers and isinstance(operand, Shard):
            self.notes.append(Note(operand.name, reason))

    def replay(self, notes: Sequence[Note], names: dict[str, str]) -> None:
        """Repeat notes about a function for another call of it."""
        for note in notes:
            self.notes.append(Note(names.get(note.name, note.name), note.reason))

    # Shards to whole values ----------------------------------------------------------

    def whole_of(self, tag: Tag, value: Any) -> Any:
        """Gather a value, then do what waited for that. Linear in ``value``."""
        act = primitive.gather if self.gathers else primitive.split_cotangent
        value = act(value, tag.dims, self.fabric, stepwise=self.options.stepwise)
        for eqn in tag.pending:
            [value] = equation_function(eqn)(value)
        return value

    def force(self, operand: Any) -> Any:
        """The whole value, here and now."""
        if not isinstance(operand, Shard):
            return operand
        if operand.whole is None:
            operand.whole = self.whole_of(operand.tag, operand.value)
        return operand.whole

    def shard(self, value: Any, dims: Dims, name: str) -> Any:
        """A value that is laid out as a shard, and whose cotangent shall be too."""
        if not self.fabric.split(dims):
            return value
        value = primitive.pin_cotangent(value, dims, self.fabric)
        return Shard(value, dims, name)

    def output(self, operand: Any) -> Any:
        """A result of the whole function: a shard is as good as a whole array."""
        if not isinstance(operand, Shard):
            return operand
        if operand.pending or not self.gathers:
            return self.force(operand)
        return primitive.pin_cotangent(operand.value, operand.dims, self.fabric)

    def call(
        self, function: Callable[..., Any], operands: Sequence[Any], safe: bool = True
    ) -> Any:
        """Call a function that needs whole operands; see the note at the top.

        ``safe`` says that no part of it must be lost or repeated by a checkpoint.
        """
        keeps = self.plain or not (self.options.regather and self.gathers and safe)
        if keeps:
            return function(*map(self.force, operands))
        tags = [tag(o) for o in operands]

        def gather_and_run(*values):
            pairs = zip(values, tags, strict=True)
            return function(
                *[v if t is None else self.whole_of(t, v) for v, t in pairs]
            )

        policy = primitive.saves_all_but_gathers
        return jax.checkpoint(gather_and_run, policy=policy)(*map(raw, operands))

    # Jaxprs --------------------------------------------------------------------------

    def traced(
        self, jaxpr: Any, tags: Sequence[Tag | None], *, num_whole: int | None = None
    ) -> Traced:
        """A jaxpr as a function of raw values, for a JAX transformation to trace.

        Its first ``num_whole`` results, all by default, are made whole; the others may
        be shards, whose tags are known once it is traced.
        """

        def function(*values):
            outs = self.run(jaxpr, tagged(values, tags))
            for i, out in enumerate(outs[:num_whole]):
                outs[i] = self.force(out)
            traced.out_tags = [tag(o) for o in outs]
            return [raw(o) for o in outs]

        traced = Traced(function)
        return traced

    def run(self, jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
        """Evaluate a jaxpr; operands and results are values or shards."""
        inner, consts = closed(jaxpr)
        env: dict[Any, Any] = dict(zip(inner.constvars, consts, strict=True))
        env.update(zip(inner.invars, operands, strict=True))
        same: set[Any] = set()  # variables that hold one number everywhere

        def read(atom):
            return atom.val if isinstance(atom, jex.Literal) else env[atom]

        def uniform(atom):
            scalar = getattr(atom.aval, "ndim", None) == 0
            return scalar or (not isinstance(atom, jex.Literal) and atom in same)

        for eqn in inner.eqns:
            ins = [read(atom) for atom in eqn.invars]
            sharded = any(isinstance(i, Shard) for i in ins)
            with place_of(eqn):
                if sharded:
                    outs = self.equation(eqn, ins, uniform)
                else:
                    outs = equation_function(eqn)(*ins)
            spreads = eqn.primitive.name == "broadcast_in_dim" and not sharded
            if spreads and uniform(eqn.invars[0]):
                same.update(eqn.outvars)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in inner.outvars]

    def equation(
        self, eqn: jex.JaxprEqn, ins: list[Any], uniform: Callable[[Any], bool]
    ) -> Sequence[Any]:
        """One equation with at least one shard among its operands."""
        name = eqn.primitive.name
        if name in HANDLERS or name in CUSTOM_HANDLERS:
            return (HANDLERS.get(name) or CUSTOM_HANDLERS[name])(self, eqn, ins)
        ins = [self._widened(i) if _computes(name) else i for i in ins]
        names = ", ".join(dict.fromkeys(i.name for i in ins if isinstance(i, Shard)))
        out = layout.passes(eqn, ins, uniform, self.fabric, self.gathers)
        if out is not None:
            values = layout.run_on_shards(eqn, [raw(i) for i in ins], out, self.fabric)
            pairs = zip(values, out, strict=True)
            return [self.shard(v, d, names) for v, d in pairs]
        if len(ins) == 1 and layout.may_wait(eqn):
            return [self._postponed(eqn, ins[0])]
        if name == "gather" and self._is_lookup(eqn, ins):
            return [self._look_up(eqn, ins)]
        if any(True for _ in jex.jaxprs_in_params(eqn.params)):
            for shard in ins:
                self.note(shard, f"gathered before {name}, which cannot be followed")
        return self.call_unchanged(eqn, ins)

    def call_unchanged(self, eqn: jex.JaxprEqn, ins: Sequence[Any]) -> Sequence[Any]:
        """Gather, then run the equation as it stands."""
        inside = map(has_checkpoint, jex.jaxprs_in_params(eqn.params))
        safe = not eqn.effects and not any(inside)
        return self.call(self.equation_function(eqn), ins, safe=safe)

    equation_function = staticmethod(equation_function)
    tagged = staticmethod(tagged)

    def _widened(self, operand: Any) -> Any:
        """Cast the shard up after all, where it is then computed with."""
        if not isinstance(operand, Shard) or not operand.pending:
            return operand
        if any(e.primitive.name != "convert_element_type" for e in operand.pending):
            return operand
        value = operand.value
        for eqn in operand.pending:
            [value] = equation_function(eqn)(value)
        return Shard(value, operand.dims, operand.name)

    def _postponed(self, eqn: jex.JaxprEqn, shard: Shard) -> Shard:
        if layout.narrows(eqn, shard):
            dtype = eqn.params["new_dtype"]
            value = jax.lax.convert_element_type(shard.value, dtype)
            return Shard(value, shard.dims, shard.name, shard.pending)
        pending = (*shard.pending, eqn)
        return Shard(shard.value, shard.dims, shard.name, pending)

    def _is_lookup(self, eqn: jex.JaxprEqn, ins: list[Any]) -> bool:
        batch, table = self.options.embedding, ins[0]
        if batch is None or not self.gathers or not isinstance(table, Shard):
            return False
        rows = eqn.outvars[0].aval
        return (
            not table.pending
            and not any(isinstance(i, Shard) for i in ins[1:])
            and layout.picks_features(eqn, table.dims)
            and 0 not in eqn.params["dimension_numbers"].offset_dims
            and rows.shape[0] % self.fabric.num_shards(batch) == 0
        )

    def _look_up(self, eqn: jex.JaxprEqn, ins: list[Any]) -> Any:
        """Rows of a table whose feature dims alone are split, without gathering it.

        Every shard looks up all tokens in its features; one all-to-all then turns
        "all tokens, some features" into "some tokens, all features".
        """
        batch = self.options.embedding or ()
        rest = tuple(a for a in batch if a not in self.fabric.axes) or None
        tokens = primitive.constrain(ins[1], [rest], self.fabric)
        [rows] = equation_function(eqn)(ins[0].value, tokens, *ins[2:])
        dims = [entry or None for entry in layout.picked_dims(eqn, ins[0].dims)]
        rows = primitive.constrain(rows, [rest, *dims[1:]], self.fabric)
        whole = self.fabric.whole(layout.picked_dims(eqn, ins[0].dims))
        dims = [entry or None for entry in whole]
        return primitive.constrain(rows, [batch, *dims[1:]], self.fabric)


def _computes(name: str) -> bool:
    return name in layout.ELEMENTWISE or name in layout.REDUCTIONS
