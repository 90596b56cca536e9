"""HTML that cannot be forgotten to escape.

``tag`` escapes every text and every attribute; only what it has made itself, a
``Markup``, goes into a page as it is.
"""

import html
from collections.abc import Iterable
from typing import Any

VOID = frozenset(("br", "link", "meta"))
"""Elements that have no end."""


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """Make one element.

    Args:
        name: its name.
        *children: Markup, text (which is escaped), numbers, None, or lists of these.
        **attributes: ``class_`` stands for ``class``, and ``aria_label`` for
            ``aria-label``. True writes the name alone, None and False nothing.

    Example:
        >>> print(tag("p", "1 < 2", tag("br"), class_="a", hidden=True))
        <p class="a" hidden="">1 &lt; 2<br></p>
    """
    words = [name, *(_attribute(*item) for item in attributes.items())]
    start = " ".join(word for word in words if word)
    if name in VOID:
        return Markup(f"<{start}>")
    return Markup(f"<{start}>{join(children)}</{name}>")


def join(children: Iterable[Any]) -> Markup:
    """Put elements and texts behind one another.

    >>> print(join([tag("b", "x"), " & ", None, 3]))
    <b>x</b> &amp; 3
    """
    return Markup("".join(map(_text, children)))


def _text(child: Any) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, list | tuple):
        return join(child)
    return html.escape(str(child))


def _attribute(name: str, value: Any) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    return f'{name}="{html.escape("" if value is True else str(value))}"'
