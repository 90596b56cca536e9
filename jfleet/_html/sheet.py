"""Tables."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jfleet._html.markup import Markup, tag


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sheet:
    """A table whose first column names its rows."""

    title: str
    columns: tuple[str, ...]
    """Heads of the columns."""
    rows: tuple[tuple[Any, ...], ...]
    """Cells; numbers and sizes of the whole table stand on the right."""
    right: bool = True
    """Do all columns but the first stand on the right?"""


def draw(sheet: Sheet) -> Markup:
    """The table, in a frame that scrolls sideways where the screen is narrow."""
    heads = [tag("th", name, scope="col") for name in sheet.columns]
    table = tag(
        "table",
        tag("caption", sheet.title),
        tag("thead", tag("tr", heads)),
        tag("tbody", [_row(row) for row in sheet.rows]),
        class_="right" if sheet.right else "left",
    )
    # A frame that scrolls must be reachable by keyboard.
    return tag(
        "div",
        table,
        class_="frame",
        role="region",
        tabindex="0",
        aria_label=sheet.title,
    )


def _row(cells: Sequence[Any]) -> Markup:
    first, *rest = cells
    return tag("tr", tag("th", first, scope="row"), [tag("td", cell) for cell in rest])
