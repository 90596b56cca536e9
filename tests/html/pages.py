"""Pages to test with, some with names that want to break out."""

from jfleet import _html
from jfleet._html import Array, Bars, Layout, Page, Sheet

HOSTILE = (
    "<script>window.pwned = 1</script>",
    '"><img src=x onerror="window.pwned = 1">',
    "</style><b id=pwned>'&amp;",
    "</title></svg>${1}",
)


def array(path="w", total=800, axes=("data",), shape=(8, 25), **more):
    known = {
        "dtype": "float32",
        "spec": "(data, whole)" if axes else "(whole, whole)",
        "device_bytes": total // 8 if axes else total,
        "reason": "dim 0 is the largest that 8 divides",
    }
    return Array(path=path, total_bytes=total, axes=axes, shape=shape, **known | more)


def bars(rows, **more):
    known = {"name": "memory", "title": "Bytes", "caption": "At the peak."}
    return Bars(rows=rows, **known | more)


def page(arrays=None, **more):
    arrays = (array(),) if arrays is None else tuple(arrays)
    memory = bars({"os": {"parameters": 600, "other": 200}, "p_g_os": None}, shown="os")
    known = {
        "title": "a step",
        "lines": ("8 devices",),
        "memory": memory,
        "traffic": bars({"os": {"all-reduce over data": 50.0}}, name="traffic"),
        "layouts": (
            Layout(name="os", title="level os", params=arrays, opt_state=()),
            Layout(name="whole", title="no sharding", params=arrays, opt_state=arrays),
        ),
        "sheets": (Sheet(title="Levels", columns=("", "os"), rows=(("peak", "1 B"),)),),
        "notes": ("an estimate",),
    }
    return Page(**known | more)


def hostile_page():
    """Every place that takes text gets text that wants to break out."""
    names = [f"{h}{i}" for i, h in enumerate(HOSTILE)]
    arrays = [
        array(name, 100 + i, axes=(name,) if i % 2 else (), reason=name, spec=name)
        for i, name in enumerate(names)
    ]
    first = names[0]
    rows = {first: dict.fromkeys(names, 10.0)}
    return page(
        arrays,
        title=first,
        lines=names,
        memory=bars(rows, shown=first, title=first, caption=first),
        traffic=bars(rows, name="traffic", title=first, caption=first),
        sheets=(Sheet(title=first, columns=("", first), rows=((first, first),)),),
        notes=tuple(names),
    )


def text_of(shown):
    return _html.page_html(shown)
