"""Bytes per device of an 8B decoder at each level, from the plans.

python docs/figures/memory.py
"""

import jax
import optax
from _svg import (
    FAINT,
    GRADS,
    LINE,
    PARAMS,
    STATE,
    legend,
    line,
    page,
    rect,
    text,
    write,
)

import jfleet

LAYERS, WIDTH, HIDDEN, KEYS, VOCABULARY = 32, 4096, 14336, 1024, 128256
SHAPES = {
    "embed": (VOCABULARY, WIDTH),
    "blocks": {
        "query": (LAYERS, WIDTH, WIDTH),
        "key": (LAYERS, WIDTH, KEYS),
        "value": (LAYERS, WIDTH, KEYS),
        "out": (LAYERS, WIDTH, WIDTH),
        "gate": (LAYERS, WIDTH, HIDDEN),
        "up": (LAYERS, WIDTH, HIDDEN),
        "down": (LAYERS, HIDDEN, WIDTH),
        "norms": (LAYERS, 2, WIDTH),
    },
    "norm": (WIDTH,),
    "head": (WIDTH, VOCABULARY),
}
COLORS = {"params": PARAMS, "grads": GRADS, "opt_state": STATE}
GIB = 2**30
LEFT, RIGHT, TOP, BAR, STEP = 110, 90, 84, 18, 26


def gibs(level, devices):
    """GiB of each kind on one device."""
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, "float32"),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    mesh = jax.sharding.AbstractMesh((devices,), ("data",))
    tx = optax.adam(1e-3)
    plan = jfleet.plan({"params": params}, level or "os", mesh=mesh, tx=tx)
    count = plan.total_bytes if level is None else plan.device_bytes
    return {kind: count(kind) / GIB for kind in COLORS}


def draw():
    """The picture as text."""
    width, largest = 760, sum(gibs(None, 8).values())
    scale = (width - LEFT - RIGHT) / largest
    names = ["parameters", "gradients (during a step)", "optimizer state (Adam)"]
    parts = [
        text(20, 28, "8.0 billion parameters in float32, GiB per device", bold=True),
        legend(20, 52, zip(COLORS.values(), names, strict=True)),
    ]
    bottom = TOP + 2 * 22 + 8 * STEP
    for tick in range(0, int(largest) + 1, 20):
        x = LEFT + tick * scale
        parts.append(line(x, TOP - 10, x, bottom, color=LINE))
        parts.append(
            text(x, bottom + 16, f"{tick}", size=12, fill=FAINT, anchor="middle")
        )
    y = TOP
    for devices in (8, 256):
        parts.append(text(20, y + 6, f"{devices} devices", size=12, fill=FAINT))
        y += 14
        for level in (None, "os", "os_g", "p_g_os"):
            parts += bar(y, level, gibs(level, devices), scale)
            y += STEP
        y += 8
    return page(width, bottom + 28, "Bytes per device of an 8B decoder", parts)


def bar(y, level, sizes, scale):
    """One level: its name, its parts, their sum."""
    yield text(LEFT - 10, y + 14, level or "none", anchor="end")
    x = LEFT
    for kind, size in sizes.items():
        yield rect(x, y, max(size * scale - 1, 0.5), BAR, COLORS[kind], radius=1)
        x += size * scale
    total = sum(sizes.values())
    decimals = 2 if total < 10 else 1 if total < 100 else 0
    yield text(x + 6, y + 14, f"{total:.{decimals}f}", size=12)


if __name__ == "__main__":
    write(draw)
