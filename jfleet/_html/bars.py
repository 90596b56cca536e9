"""Stacked bars: a bar for each row, a segment for each class."""

import dataclasses
from collections.abc import Mapping, Sequence

from jfleet._html.cells import NUM_COLOURS, cell, figure
from jfleet._html.markup import Markup, tag
from jfleet._html.sheet import Sheet
from jfleet._plan_text import human

_LIMIT_IN_VIEW = 2.0
"""A limit beyond so many times the longest bar is told, not drawn."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """Bytes by row and class."""

    name: str
    """Short, for links: a word."""
    title: str
    caption: str
    rows: Mapping[str, Mapping[str, float] | None]
    """Bytes of each class by name of the row, in order; None: it cannot run."""
    shown: str | None = None
    """The row that the rest of the page is about."""
    limit_bytes: int | None = None
    """What a row should stay below."""

    @property
    def classes(self) -> tuple[str, ...]:
        """All classes that some row has, in the order of their first row."""
        rows = [row for row in self.rows.values() if row]
        return tuple(
            dict.fromkeys(c for row in rows for c, size in row.items() if size)
        )

    def folded(self) -> "Bars":
        """The same with as many classes as there are colours: the smallest as one."""
        if len(self.classes) <= NUM_COLOURS:
            return self
        rows = [row for row in self.rows.values() if row]
        most = {c: max(row.get(c, 0) for row in rows) for c in self.classes}
        kept = sorted(most, key=lambda c: -most[c])[: NUM_COLOURS - 1]
        return dataclasses.replace(
            self,
            rows={
                name: row and _folded(row, [c for c in self.classes if c in kept])
                for name, row in self.rows.items()
            },
        )


def _folded(row: Mapping[str, float], kept: Sequence[str]) -> dict[str, float]:
    rest = sum(size for c, size in row.items() if c not in kept)
    return {**{c: row.get(c, 0) for c in kept}, "the rest": rest}


def draw(bars: Bars) -> Markup:
    """The bars, drawn to one scale."""
    bars = bars.folded()
    colours = {c: number for number, c in enumerate(bars.classes)}
    most = max([1.0, *(sum(row.values()) for row in bars.rows.values() if row)])
    limit = bars.limit_bytes
    drawn = limit is not None and limit <= _LIMIT_IN_VIEW * most
    scale = max(most, limit or 0.0) if drawn else most
    parts = [
        _row(bars, name, row, colours, scale, limit / scale if drawn else None)
        for name, row in bars.rows.items()
    ]
    caption = bars.caption
    if limit is not None:
        where = "the dashed line" if drawn else "far to the right, beyond the picture"
        caption += f" The limit is {human(limit)}: {where}."
    entries = [(c, colours[c]) for c in bars.classes]
    return figure(bars.title, caption, bars.name, parts, entries)


def _row(bars, name, row, colours, scale, limit) -> Markup:
    total = sum(row.values()) if row else 0
    at, segments = 0.0, []
    for kind, size in (row or {}).items():
        if size:
            share = f"{size / total:.1%} of {human(total)}"
            segments.append(
                cell(
                    f"{name}, {kind}: {human(size)}, {share}",
                    colours[kind],
                    x=_percent(at / scale),
                    width=_percent(size / scale),
                    height="100%",
                )
            )
        at += size
    line = None
    if limit is not None:
        at = _percent(limit)
        line = tag("line", x1=at, x2=at, y1="0", y2="100%", class_="limit")
    return tag(
        "div",
        tag("span", name, class_="name"),
        tag("svg", segments, line, class_="bar", role="presentation"),
        tag("span", "cannot run" if row is None else human(total), class_="sum"),
        class_="row shown" if name == bars.shown else "row",
    )


def _percent(share: float) -> str:
    return f"{100 * share:.4f}%"


def as_sheet(bars: Bars) -> Sheet:
    """The same numbers as a table: the text alternative of the picture."""
    rows = list(bars.rows.values())
    body = [
        (kind, *("" if row is None else human(row.get(kind, 0)) for row in rows))
        for kind in bars.classes
    ]
    totals = ["" if row is None else human(sum(row.values())) for row in rows]
    return Sheet(
        title=f"{bars.title}, in numbers",
        columns=("", *bars.rows),
        rows=(*body, ("all", *totals)),
    )
