"""From what ``plan`` has found out to the page that shows it."""

from collections.abc import Iterator, Sequence

from jfleet import _html
from jfleet._commands import _answer
from jfleet._commands._answer import Answer
from jfleet._commands._levels import Levels, Planning, rows_of, sent_of, stack_of
from jfleet._layout import entries_of
from jfleet._plan_text import human
from jfleet._planning.report import seconds
from jfleet._states.adapters import Parts
from jfleet.plan import Row


def page_of(answer: Answer, step: Planning, levels: Levels, parts: Parts) -> _html.Page:
    """The page of an answer.

    Args:
        answer: what was asked and found.
        step: the one to show in full.
        levels: the same at every level.
        parts: the arrays of its state.
    """
    name = step.name
    stacks = {n: stack_of(p.plan) for n, p in levels.found.items()}
    sent = {n: sent_of(p.plan) for n, p in levels.found.items()}
    return _html.Page(
        title=answer.problem.name,
        lines=tuple(_lines(answer)),
        memory=_html.Bars(
            name="memory",
            title="Bytes per device, by level",
            caption="At the worst moment of a step.",
            rows={n: stacks.get(n) for n in levels.names},
            shown=name,
            limit_bytes=answer.limit_bytes,
        ),
        traffic=_html.Bars(
            name="traffic",
            title="Bytes that a device sends per step, by level",
            caption="By kind of collective and mesh axis, with ring algorithms.",
            rows={n: sent.get(n) for n in levels.names},
            shown=name,
        ),
        layouts=tuple(_layouts(step, levels, parts)),
        sheets=tuple(_sheets(answer, step, levels)),
        notes=tuple(_notes(step, levels)),
    )


def _lines(answer: Answer) -> Iterator[str]:
    yield answer.heading
    if answer.auto is not None:
        yield answer.auto.explain().split("\n", 1)[0]
    yield from _answer.verdict(answer)


def _layouts(step: Planning, levels: Levels, parts: Parts) -> Iterator[_html.Layout]:
    """That of the step that was asked for, then those of all levels."""
    others = [
        p for p in levels.found.values() if p.plan.level not in (None, step.plan.level)
    ]
    for planned in (step, *others):
        rows = rows_of(planned, parts)
        level = planned.plan.level
        yield _html.Layout(
            name=(level or "whole").replace("_", "-"),
            title=f"level {level}" if level else planned.name,
            params=tuple(_array(r) for r in rows if r.kind == "params"),
            opt_state=tuple(_array(r) for r in rows if r.kind == "opt_state"),
        )


def _array(row: Row) -> _html.Array:
    entries = entries_of(row.spec, len(row.shape))
    dims = [" + ".join(entry) or "whole" for entry in entries]
    return _html.Array(
        path=row.path,
        shape=row.shape,
        dtype=row.dtype,
        axes=tuple(dict.fromkeys(axis for entry in entries for axis in entry)),
        spec=f"({', '.join(dims)})",
        total_bytes=row.total_bytes,
        device_bytes=row.device_bytes,
        reason=row.reason,
    )


def _sheets(answer: Answer, step: Planning, levels: Levels) -> Iterator[_html.Sheet]:
    yield _html.Sheet(
        title="Levels side by side",
        columns=("", *levels.names),
        rows=tuple(
            (name, *cells) for name, cells in _answer.table_rows(answer, levels)
        ),
    )
    yield _transfers(step)
    if step.plan.time is not None:
        yield _phases(step)
    if answer.compiled is not None:
        yield from _compiled(answer)
    if answer.auto is not None:
        yield _candidates(answer)


def _transfers(step: Planning) -> _html.Sheet:
    columns = ("collective", "axes", "of", "runs", "arrays", "sent", "where")
    rows = []
    for t in step.plan.traffic.transfers:
        where = "in a loop" if t.in_loop else ""
        if t.in_conditional:
            where = f"{where} in a branch, one step in {1 / t.share:.0f}".strip()
        cells = (t.kind, "+".join(t.axes), t.what, f"{t.count:g}")
        rows.append((*cells, human(t.bytes), human(t.wire_bytes), where))
    title = f"Traffic per step, {step.name}"
    return _html.Sheet(title=title, columns=columns, rows=tuple(rows))


def _phases(step: Planning) -> _html.Sheet:
    time = step.plan.time
    assert time is not None
    rows: list[Sequence[str]] = [
        (p.name, *(seconds(s) for s in p.terms.values()), p.binds) for p in time.phases
    ]
    both = f"{seconds(time.low_seconds)} - {seconds(time.high_seconds)}"
    rows.append(("step, all or nothing overlapped", "", "", "", both))
    return _html.Sheet(
        title=f"Estimate of time on {time.hardware.name}, {step.name}",
        columns=("phase", "compute", "memory", "traffic", "binds"),
        rows=tuple(map(tuple, rows)),
    )


def _compiled(answer: Answer) -> Iterator[_html.Sheet]:
    compiled = answer.compiled
    assert compiled is not None
    found = compiled.comparison
    yield _html.Sheet(
        title=f"Plan and compiler, {compiled.name} for {compiled.where}",
        columns=("", "planned", "compiled", "differs"),
        rows=tuple(
            (r.name, human(r.planned), human(r.compiled), f"{r.difference:+.1%}")
            for r in (*found.memory, *found.traffic)
        ),
    )
    if compiled.report.flags:
        yield _html.Sheet(
            title="What should not be in the compiled step",
            columns=("flag", "text"),
            rows=tuple((f.name, f.text) for f in compiled.report.flags),
            right=False,
        )


def _candidates(answer: Answer) -> _html.Sheet:
    auto = answer.auto
    assert auto is not None
    lines = auto.explain().split("\n")
    return _html.Sheet(
        title="What auto chose, and from what",
        columns=("explanation",),
        rows=tuple((line,) for line in lines if line),
    )


def _notes(step: Planning, levels: Levels) -> Iterator[str]:
    yield from (n.removeprefix("Note: ") for n in _answer.notes(levels))
    plan = step.plan
    yield f"Memory as the {plan.compiler} compiler lays it out"
    if plan.time is not None:
        yield from plan.time.notes
