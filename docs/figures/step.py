"""The three regions of a training step, and which feature acts where.

python docs/figures/step.py
"""

from _svg import FAINT, GRADS, INK, LINE, PARAMS, STATE, arrow, page, rect, text, write

import jfleet

REGIONS = {
    "local": ("per replica, in shard_map", ("loss", "merge"), PARAMS),
    "boundary": ("one reduction", ("reduce",), GRADS),
    "global": (
        "plain jit, whole arrays",
        ("scale", "clip", "base", "placement"),
        STATE,
    ),
}
WORDS = {
    "loss": "the loss and its gradient",
    "merge": "micro batches",
    "reduce": "mean over replicas",
    "scale": "unscale, find infinities",
    "clip": "limit",
    "base": "your optimizer, or what replaces it",
    "placement": "where things live",
}
LEFT, TOP, WIDTH, GAP, HEIGHT = 20, 20, 240, 36, 258


def features(phase):
    """The switches of a phase; amp acts in its own and where its scale nests."""
    return [r.name for r in jfleet.default_registry if phase in (r.phase, r.nests)]


def draw():
    """The picture as text."""
    parts = []
    for number, (name, (how, phases, color)) in enumerate(REGIONS.items()):
        x = LEFT + number * (WIDTH + GAP)
        parts.append(rect(x, TOP, WIDTH, HEIGHT, "none", stroke=LINE, radius=8))
        parts.append(rect(x, TOP, WIDTH, 6, color, radius=3))
        parts.append(text(x + 16, TOP + 32, name, size=16, bold=True))
        parts.append(text(x + 16, TOP + 50, how, size=12, fill=FAINT))
        y = TOP + 78
        for phase in phases:
            parts.append(text(x + 16, y, WORDS[phase], size=12, fill=INK))
            for names in rows(features(phase)):
                y += 16
                parts.append(text(x + 26, y, names, size=12, fill=color, bold=True))
            y += 24
        if number:
            parts.append(arrow(x - GAP + 4, x - 4, TOP + HEIGHT / 2))
    y = TOP + HEIGHT + 26
    names = " and ".join(features("parameter"))
    words = (
        f"{names}: all three run per replica, and parameters are averaged now and then"
    )
    parts.append(text(LEFT, y, words, size=12, fill=FAINT))
    width = 2 * LEFT + 3 * WIDTH + 2 * GAP
    return page(width, y + 18, "The three regions of a step", parts)


def rows(names):
    """Names in lines that fit."""
    per_line = 3 if sum(map(len, names)) < 24 else 2
    return [", ".join(names[i : i + per_line]) for i in range(0, len(names), per_line)]


if __name__ == "__main__":
    write(draw)
