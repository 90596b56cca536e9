"""What each of four devices holds at each level, from the plans.

python docs/figures/levels.py
"""

import jax
import optax
from _svg import FAINT, GRADS, LINE, PARAMS, STATE, legend, page, rect, text, write

import jfleet

DEVICES = 4
LEVELS = {
    None: "data parallel: 12P at rest, 4P of gradients",
    "os": "os: 4P + 8P/D at rest, 4P of gradients",
    "os_g": "os_g: 4P + 8P/D at rest, 4P/D of gradients",
    "p_g_os": "p_g_os: 12P/D at rest, 4P/D of gradients",
}
KINDS = {"params": PARAMS, "grads": GRADS, "opt_state": STATE}
HEIGHTS = {"params": 16, "grads": 16, "opt_state": 32}  # Adam holds twice as much
LEFT, TOP, ROW, CELL, GAP = 20, 62, 108, 170, 15


def shares(level):
    """The share of each kind that one device holds."""
    if level is None:
        return dict.fromkeys(KINDS, 1.0)
    mesh = jax.sharding.AbstractMesh((DEVICES,), ("data",))
    params = {"w": jax.ShapeDtypeStruct((1024, 1024), "float32")}
    # Momentum has no counter, which would be whole: the shares are exact.
    tx = optax.sgd(1.0, momentum=0.9)
    plan = jfleet.plan({"params": params}, level, mesh=mesh, tx=tx)
    return {kind: plan.device_bytes(kind) / plan.total_bytes(kind) for kind in KINDS}


def draw():
    """The picture as text."""
    names = {PARAMS: "parameters", GRADS: "gradients", STATE: "optimizer state (Adam)"}
    parts = [legend(LEFT, 28, names.items())]
    for row, (level, title) in enumerate(LEVELS.items()):
        y = TOP + row * ROW
        parts.append(text(LEFT, y, title, bold=True))
        for device in range(DEVICES):
            x = LEFT + device * (CELL + GAP)
            parts += cell(x, y + 10, device, shares(level))
    for device in range(DEVICES):
        x = LEFT + device * (CELL + GAP) + CELL / 2
        words = f"device {device}"
        y = TOP + len(LEVELS) * ROW - 4
        parts.append(text(x, y, words, size=12, fill=FAINT, anchor="middle"))
    width = 2 * LEFT + DEVICES * CELL + (DEVICES - 1) * GAP
    return page(width, TOP + len(LEVELS) * ROW + 12, "The three levels", parts)


def cell(x, y, device, held):
    """Three bars: all of the array in outline, what this device holds filled."""
    for kind, color in KINDS.items():
        share = held[kind]
        start = x if share == 1 else x + device * share * CELL
        yield rect(start, y, share * CELL, HEIGHTS[kind], color)
        yield rect(x, y, CELL, HEIGHTS[kind], "none", stroke=LINE)
        y += HEIGHTS[kind] + 4


if __name__ == "__main__":
    write(draw)
