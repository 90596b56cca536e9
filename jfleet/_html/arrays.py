"""Which mesh axis splits which array: areas to scale, and a table of the same."""

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence

from jfleet._html.cells import GREY, cell, figure
from jfleet._html.markup import Markup, tag
from jfleet._html.sheet import Sheet
from jfleet._html.treemap import squarified
from jfleet._plan_text import human

MAX_CELLS = 400
_LABEL_WIDTH, _LABEL_HEIGHT = 0.05, 0.06  # of the picture; smaller ones have no label
_SHAPE = (1000.0, 420.0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Array:
    """One array, or ``count`` that are alike."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]
    """Mesh axes that split it; none: every device has all of it."""
    spec: str
    """Which axis splits which dim."""
    total_bytes: int
    """Bytes of the whole array, or arrays."""
    device_bytes: int
    """Bytes on each device."""
    reason: str
    """Why it lies so."""
    count: int = 1

    @property
    def info(self) -> str:
        """Everything, in a line."""
        many = f", {self.count} of them" if self.count > 1 else ""
        return (
            f"{self.path}: {self.dtype} {list(self.shape)}{many}, {self.spec}, "
            f"{human(self.device_bytes)} of {human(self.total_bytes)} on each device; "
            f"{self.reason}"
        )


def gathered(arrays: Sequence[Array], limit: int = MAX_CELLS) -> list[Array]:
    """At most ``limit`` arrays: those of layers alike become one, the rest is named so.

    Largest first.
    """
    found = list(arrays)
    if len(found) > limit:
        found = _alike(found)
    found.sort(key=lambda a: -a.total_bytes)
    if len(found) > limit:
        found, rest = found[: limit - 1], found[limit - 1 :]
        count = sum(a.count for a in rest)
        found.append(_sum(f"{count} smaller arrays", rest, "each has its own reason"))
    return found


def _alike(arrays: Sequence[Array]) -> list[Array]:
    groups: dict[tuple, list[Array]] = {}
    for a in arrays:
        key = (_pattern(a.path), a.shape, a.dtype, a.spec, _pattern(a.reason))
        groups.setdefault(key, []).append(a)
    return [
        dataclasses.replace(
            _sum(path, members, reason), shape=shape, dtype=dtype, spec=spec
        )
        for (path, shape, dtype, spec, reason), members in groups.items()
    ]


def _pattern(text: str) -> str:
    """Numbers of layers in a path, or in a reason that quotes one, as stars.

    >>> _pattern("layers/3/mlp_1/w2"), _pattern("as 'block_3/w/0': dim 1 is")
    ('layers/*/mlp_*/w2', "as 'block_*/w/*': dim 1 is")
    """
    return re.sub(r"(?:(?<=[/_'])|^)\d+(?=[/']|$)", "*", text)


def _sum(path: str, members: Sequence[Array], reason: str) -> Array:
    axes = {a.axes for a in members}
    return Array(
        path=path,
        shape=(),
        dtype="several types",
        axes=axes.pop() if len(axes) == 1 else ("several",),
        spec="several specs",
        total_bytes=sum(a.total_bytes for a in members),
        device_bytes=sum(a.device_bytes for a in members),
        reason=reason,
        count=sum(a.count for a in members),
    )


def draw(name: str, title: str, caption: str, arrays: Sequence[Array]) -> Markup:
    """The picture: an area for each array, coloured by the axes that split it."""
    arrays = [a for a in gathered(arrays) if a.total_bytes]
    colours = axis_colours(arrays)
    boxes = squarified([a.total_bytes for a in arrays], (0.0, 0.0, *_SHAPE))
    cells = []
    for a, (left, top, width, height) in zip(arrays, boxes, strict=True):
        x, y = left / _SHAPE[0], top / _SHAPE[1]
        wide, high = width / _SHAPE[0], height / _SHAPE[1]
        label = None
        if wide >= _LABEL_WIDTH and high >= _LABEL_HEIGHT:
            label = tag("text", _label(a.path), x="6", y="17", aria_hidden="true")
        cells.append(
            cell(
                a.info,
                colours[a.axes],
                label,
                x=f"{100 * x:.4f}%",
                y=f"{100 * y:.4f}%",
                width=f"{100 * wide:.4f}%",
                height=f"{100 * high:.4f}%",
            )
        )
    sums = Counter[tuple[str, ...]]()
    for a in arrays:
        sums[a.axes] += a.total_bytes
    entries = [
        (f"{axes_text(axes)}: {human(sums[axes])}", colour)
        for axes, colour in colours.items()
    ]
    picture = tag("svg", cells, class_="treemap", role="presentation")
    return figure(title, caption, name, [picture], entries)


def _label(path: str) -> str:
    """The last names of a path; a cell has no room for more."""
    return "/".join(path.split("/")[-3:])


def axis_colours(arrays: Sequence[Array]) -> dict[tuple[str, ...], int]:
    """A colour for each set of axes; what is whole is grey."""
    found = sorted({a.axes for a in arrays if a.axes})
    colours = {axes: i % GREY for i, axes in enumerate(found)}
    return colours if all(a.axes for a in arrays) else {**colours, (): GREY}


def axes_text(axes: tuple[str, ...]) -> str:
    """In words.

    >>> axes_text(()), axes_text(("data", "model"))
    ('whole on every device', 'split over data + model')
    """
    return f"split over {' + '.join(axes)}" if axes else "whole on every device"


def as_sheet(title: str, arrays: Sequence[Array]) -> Sheet:
    """The same as a table."""
    rows = [
        (
            a.path if a.count == 1 else f"{a.path} ({a.count})",
            f"{a.dtype} {list(a.shape)}" if a.shape or a.count == 1 else a.dtype,
            a.spec,
            human(a.total_bytes),
            human(a.device_bytes),
            a.reason,
        )
        for a in gathered(arrays)
    ]
    columns = ("path", "shape", "split over", "whole", "per device", "why")
    return Sheet(title=title, columns=columns, rows=tuple(rows), right=False)
