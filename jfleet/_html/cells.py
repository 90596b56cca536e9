"""What all pictures share: coloured parts that can be pointed at and walked through."""

from collections.abc import Iterable, Sequence
from typing import Any

from jfleet._html.markup import Markup, tag

NUM_COLOURS = 9
"""Classes ``c0`` to ``c8`` of the style sheet; the last one is hatched grey."""
GREY = NUM_COLOURS - 1


def cell(info: str, colour: int, *children: Any, **attributes: Any) -> Markup:
    """One part of a picture, as an ``svg`` of its own so that its text is cut off.

    Args:
        info: what it is, for pointers, keyboards and screen readers.
        colour: number of its colour.
        *children: what lies on it.
        **attributes: where it lies.
    """
    return tag(
        "svg",
        tag("title", info),
        tag("rect", width="100%", height="100%"),
        children,
        class_=f"cell c{colour}",
        role="img",
        tabindex="-1",
        aria_label=info,
        data_info=info,
        **attributes,
    )


def hatching(name: str) -> Markup:
    """The pattern of the last colour."""
    lines = tag("path", d="M-2 2l4-4M0 8l8-8M6 10l4-4", class_="hatch")
    pattern = tag(
        "pattern",
        tag("rect", width="8", height="8", class_="ground"),
        lines,
        id=name,
        width="8",
        height="8",
        patternUnits="userSpaceOnUse",
    )
    return tag(
        "svg",
        tag("defs", pattern),
        width="0",
        height="0",
        class_="defs",
        aria_hidden="true",
    )


def legend(entries: Iterable[tuple[str, int]]) -> Markup:
    """Names of colours."""
    items = [
        tag(
            "li",
            tag(
                "svg",
                tag("rect", width="100%", height="100%"),
                class_=f"swatch c{colour}",
                aria_hidden="true",
            ),
            name,
        )
        for name, colour in entries
    ]
    return tag("ul", items, class_="legend")


def figure(
    title: str, caption: str, name: str, parts: Sequence[Any], entries: Any
) -> Markup:
    """A picture with its legend, and a line that tells of the part in focus."""
    hint = "Point at a part, or walk through them with the arrow keys."
    return tag(
        "figure",
        tag("figcaption", tag("strong", title), " ", caption),
        legend(entries),
        tag(
            "div",
            parts,
            role="group",
            aria_label=f"{title}. {hint}",
            data_cells=f"{name}-info",
            class_="picture",
        ),
        tag("p", hint, id=f"{name}-info", class_="info", aria_live="polite"),
        id=name,
    )
