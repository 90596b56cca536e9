"""Just enough SVG for the pictures of the documents: text, boxes, arrows.

The pictures are a few rectangles with words, which a plotting library would draw no
better and would have to be installed for. Every picture has a light ground of its own,
so that it reads on dark pages too.
"""

import inspect
import pathlib
from html import escape

PARAMS, GRADS, STATE = "#2f6db3", "#d97a1f", "#3f8f63"
INK, FAINT, LINE, GROUND = "#1d2430", "#5c6675", "#b9c0ca", "#ffffff"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"


def rect(x, y, width, height, fill, *, stroke="none", radius=2):
    """A box."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        f' rx="{radius:g}" fill="{fill}" stroke="{stroke}"/>'
    )


def text(x, y, words, *, size=13, fill=INK, anchor="start", bold=False):
    """One line of text; y is its base line."""
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{fill}"'
        f' text-anchor="{anchor}"{weight}>{escape(words)}</text>'
    )


def line(x1, y1, x2, y2, *, color=LINE):
    """A thin line."""
    ends = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
    return f'<line {ends} stroke="{color}"/>'


def arrow(x1, x2, y):
    """A horizontal arrow."""
    head = f"{x2:g},{y:g} {x2 - 8:g},{y - 4:g} {x2 - 8:g},{y + 4:g}"
    return (
        line(x1, y, x2 - 8, y, color=FAINT)
        + f'<polygon points="{head}" fill="{FAINT}"/>'
    )


def legend(x, y, entries):
    """Colours and what they stand for, in a row."""
    parts = []
    for color, words in entries:
        parts += [rect(x, y - 10, 12, 12, color), text(x + 18, y, words, size=12)]
        x += 34 + 6.6 * len(words)
    return "\n".join(parts)


def page(width, height, title, parts):
    """A whole picture; the title is for those who cannot see it."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            f' width="{width}" height="{height}" font-family="{FONT}" role="img">',
            f"<title>{escape(title)}</title>",
            rect(0, 0, width, height, GROUND, radius=8),
            *parts,
            "</svg>\n",
        ]
    )


def write(draw):
    """Write what ``draw`` returns next to its script."""
    script = pathlib.Path(inspect.getfile(draw))
    script.with_suffix(".svg").write_text(draw())
