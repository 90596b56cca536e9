"""The page: pictures, tables, style and script in one file.

Nothing on it may load anything: the content security policy allows this style sheet
and this script, by their hashes, and nothing else.
"""

import base64
import dataclasses
import hashlib
import importlib.resources
from collections.abc import Sequence

from jfleet._html import arrays as arrays_
from jfleet._html import bars as bars_
from jfleet._html import sheet as sheets_
from jfleet._html.arrays import Array
from jfleet._html.bars import Bars
from jfleet._html.cells import hatching
from jfleet._html.markup import Markup, tag
from jfleet._html.sheet import Sheet


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where arrays lie at one level."""

    name: str
    """Short, for links: letters, digits, dashes."""
    title: str
    """Such as ``level os_g``."""
    params: tuple[Array, ...]
    opt_state: tuple[Array, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """What to show."""

    title: str
    lines: tuple[str, ...]
    """What matters most, in words."""
    memory: Bars
    traffic: Bars
    layouts: tuple[Layout, ...]
    """The first one is shown, the others are folded."""
    sheets: tuple[Sheet, ...] = ()
    """Further tables."""
    notes: tuple[str, ...] = ()


def page_html(page: Page) -> str:
    """The page as text."""
    style, script = _file("page.css"), _file("page.js")
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src "
        f"'{_hash(script)}'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", f"Plan of {page.title}"),
        tag("style", Markup(style)),
    )
    body = tag("body", hatching("hatching"), _main(page), tag("script", Markup(script)))
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def _main(page: Page) -> Markup:
    return tag(
        "main",
        tag("h1", f"Plan of {page.title}"),
        [tag("p", line, class_="lead") for line in page.lines],
        _section(
            "Memory", bars_.draw(page.memory), _folded(bars_.as_sheet(page.memory))
        ),
        _section("Layout", _layouts(page.layouts)),
        _section(
            "Traffic", bars_.draw(page.traffic), _folded(bars_.as_sheet(page.traffic))
        ),
        _section("In numbers", [sheets_.draw(s) for s in page.sheets])
        if page.sheets
        else None,
        _section("Notes", tag("ul", [tag("li", n) for n in page.notes]))
        if page.notes
        else None,
    )


def _section(title: str, *children: object) -> Markup:
    return tag("section", tag("h2", title), children)


def _layouts(layouts: Sequence[Layout]) -> list[Markup]:
    first, *others = layouts
    return [
        *_layout(first),
        *(
            tag("details", tag("summary", f"Layout at {other.title}"), _layout(other))
            for other in others
        ),
    ]


def _layout(layout: Layout) -> list[Markup]:
    caption = f"At {layout.title}; areas are bytes of the whole arrays."
    found = []
    for name, title, rows in (
        ("params", "Parameters", layout.params),
        ("state", "Optimizer state", layout.opt_state),
    ):
        if any(a.total_bytes for a in rows):
            found.append(arrays_.draw(f"{layout.name}-{name}", title, caption, rows))
            sheet = arrays_.as_sheet(f"{title} at {layout.title}, array by array", rows)
            found.append(_folded(sheet))
    return found


def _folded(sheet: Sheet) -> Markup:
    return tag("details", tag("summary", sheet.title), sheets_.draw(sheet))


def _file(name: str) -> str:
    return (importlib.resources.files("jfleet._html") / name).read_text("utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
