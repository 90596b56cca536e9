"""What the benchmark scripts share: paths, devices, tables, environment."""

import datetime
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import optax
import orbax.checkpoint

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
if str(EXAMPLES) not in sys.path:  # the benchmarks train the example's model
    sys.path.insert(0, str(EXAMPLES))

MIB = 2**20
GIB = 2**30


def environment() -> dict[str, Any]:
    """Describe the machine and the versions; numbers mean nothing without them."""
    return {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "optax": optax.__version__,
        "orbax": orbax.checkpoint.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    }


def markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table that is readable as text and as Markdown."""
    cells = [list(header), *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def write_json(path: Path | None, results: dict[str, Any]) -> None:
    """Write results with the environment they were measured in."""
    if path is not None:
        text = json.dumps({"environment": environment(), **results}, indent=1)
        path.write_text(text + "\n")
