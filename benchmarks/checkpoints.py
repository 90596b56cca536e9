"""Time to save and load the example's state, and the host memory that it takes.

    python benchmarks/checkpoints.py
    python benchmarks/checkpoints.py --level os --json -
    python benchmarks/checkpoints.py --memory 1024   # MiB of parameters and moments

Each level runs in a new process, so that its first save and first load pay for every
import and compilation. For the memory every save and load runs in a process of its
own; on CPU devices the state itself is host memory too, so with 8 devices at level
``os`` there are 8 copies of the parameters. One array has half of all elements, which
is hard on whoever reads arrays whole.
"""

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _bench
import jax
import optax
import train_lm
from decoder import Decoder
from flax.training import train_state

import jfleet
from jfleet.checkpointer import Checkpointer

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
    return _run(options)


def _run(options: Sequence[str]) -> dict[str, float]:
    command = [sys.executable, __file__, *options, "--json", "-"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


BOUND, CONSTANT_MIB = 1.3, 256
"""What is promised: peak host memory is at most this x local bytes + a constant."""
ACTIONS = ("save", "load", "load, donated")


def measure_memory(level: str, action: str, folder: Path, mib: int) -> dict[str, float]:
    """Peak host memory of one action in this process, beyond what imports take."""
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = jfleet.init()

    def create(elements: int) -> Any:
        def init() -> Any:
            large = jax.numpy.full((elements // 2 // 1024, 1024), 0.5)
            rows = (elements // 2 // 16 // 256, 256)
            params = {"large": large}
            params |= {f"w{i}": jax.numpy.full(rows, float(i)) for i in range(16)}
            return train_state.TrainState.create(
                apply_fn=None, params=params, tx=optax.adam(1e-3)
            )

        return jfleet.create_sharded(init, level=level, mesh=mesh)

    small = create(1 << 17)
    jfleet.save_group_sharded_model(small, folder / "small", overwrite=True)
    jax.block_until_ready(jfleet.load_group_sharded_model(folder / "small", small))
    base = _resident("VmRSS")
    state = jax.block_until_ready(create(mib * _bench.MIB // 4 // 3))
    local = sum(
        s.data.nbytes for x in jax.tree.leaves(state) for s in x.addressable_shards
    )
    checkpointer = Checkpointer(folder / "run", async_=False)
    if action == "load":
        state = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        )
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from here.
    if action == "save":
        checkpointer.save(1, state)
    else:
        donate = action != "load"
        jax.block_until_ready(checkpointer.restore(state, donate=donate))
    peak = _resident("VmHWM") - base
    return {
        "local MiB": local / _bench.MIB,
        "peak MiB": peak / _bench.MIB,
        "ratio": peak / local,
        "bound MiB": BOUND * local / _bench.MIB + CONSTANT_MIB,
    }


def _resident(name: str) -> int:
    """A line of /proc/self/status, in bytes; Linux only."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{name}:")[1].split()[0]) * 1024


def measure_all_memory(levels: Sequence[str], mib: int) -> dict[str, Any]:
    """Each level and action in a process of its own."""
    results: dict[str, Any] = {}
    for level in levels:
        with tempfile.TemporaryDirectory() as folder:
            for action in ACTIONS:
                options = ["--level", level, "--memory", str(mib)]
                found = _run([*options, "--action", action, "--folder", folder])
                results.setdefault(level, {})[action] = found
    return results


def memory_table(results: dict[str, Any]) -> str:
    header = ["level", "action", "local MiB", "peak MiB", "ratio", "bound MiB", ""]
    rows = [
        [
            level,
            action,
            f"{r['local MiB']:.0f}",
            f"{r['peak MiB']:.0f}",
            f"{r['ratio']:.2f}",
            f"{r['bound MiB']:.0f}",
            "holds" if r["peak MiB"] <= r["bound MiB"] else "BROKEN",
        ]
        for level, actions in results.items()
        for action, r in actions.items()
    ]
    return _bench.markdown(header, rows)


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
    parser.add_argument("--memory", type=int, default=0, metavar="MIB", help="measure")
    parser.add_argument("--action", choices=ACTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", help="a file, or - for standard output")
    args = parser.parse_args()
    if args.action:
        found = measure_memory(args.level, args.action, args.folder, args.memory)
        print(json.dumps(found))
        return
    if args.level and args.json == "-" and not args.memory:
        print(json.dumps(measure(args.level, args.repeats, args.width)))
        return
    levels = [args.level] if args.level else LEVELS
    if args.memory:
        memory = measure_all_memory(levels, args.memory)
        print(memory_table(memory))
        results = {"memory": memory}
    else:
        times = {
            level: measure_in_new_process(level, args.repeats, args.width)
            for level in levels
        }
        print(table(times))
        results = {"checkpoints": times}
    _bench.write_json(Path(args.json) if args.json else None, results)


if __name__ == "__main__":
    main()
