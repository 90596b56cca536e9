"""Time to save and load the example's state, in seconds.

    python benchmarks/checkpoints.py
    python benchmarks/checkpoints.py --level os --json -

Each level runs in a new process, so that its first save and first load pay for every
import and compilation.
"""

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _bench
import jax
import train_lm
from decoder import Decoder

import jfleet

LEVELS = ("os", "os_g", "p_g_os")


def measure(level: str, repeats: int, width: int) -> dict[str, float]:
    """Measure one level in this process.

    Args:
        level: the level of the state.
        repeats: saves and loads after the first; their median is reported.
        width: of the model.
    """
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = jfleet.init()
    create = functools.partial(train_lm.new_state, Decoder(width=width), 64, 1e-3)
    state = jax.block_until_ready(jfleet.create_sharded(create, level=level, mesh=mesh))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state"
        save = functools.partial(
            jfleet.save_group_sharded_model, state, path, overwrite=True
        )
        load = functools.partial(jfleet.load_group_sharded_model, path, state)
        return {
            "first save": _seconds(save),
            "later saves": statistics.median(_seconds(save) for _ in range(repeats)),
            "first load": _seconds(load),
            "later loads": statistics.median(_seconds(load) for _ in range(repeats)),
            "MiB": sum(x.nbytes for x in jax.tree.leaves(state)) / _bench.MIB,
        }


def _seconds(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(action())
    return time.perf_counter() - start


def measure_in_new_process(level: str, repeats: int, width: int) -> dict[str, float]:
    """Run this script for one level and read its result."""
    options = ["--level", level, "--repeats", str(repeats), "--width", str(width)]
    command = [sys.executable, __file__, *options, "--json", "-"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def table(results: dict[str, dict[str, float]]) -> str:
    header = ["level", "MiB", "first save", "later saves", "first load", "later loads"]
    rows = [
        [level, f"{r['MiB']:.1f}", *[f"{r[name]:.3f} s" for name in header[2:]]]
        for level, r in results.items()
    ]
    return _bench.markdown(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--level", choices=LEVELS, help="default: all of them")
    parser.add_argument("--repeats", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--width", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--json", help="a file, or - for standard output")
    args = parser.parse_args()
    if args.level and args.json == "-":
        print(json.dumps(measure(args.level, args.repeats, args.width)))
        return
    levels = [args.level] if args.level else LEVELS
    results = {
        level: measure_in_new_process(level, args.repeats, args.width)
        for level in levels
    }
    print(table(results))
    _bench.write_json(Path(args.json) if args.json else None, {"checkpoints": results})


if __name__ == "__main__":
    main()
