"""Train for a long time with saves in the background; see what grows or leaks.

    python benchmarks/soak.py --minutes 30
    python benchmarks/soak.py --minutes 3 --seconds 2 --json soak.json

Every few seconds a save begins, and the steps go on, which donate their state. Some of
the checkpoints are read back and compared with the values that were saved. Then the
same steps run once more in another process, without any save: every loss must be the
same, bit for bit. What is printed last says what the run with saves holds beyond the
other: memory, threads, processes and open files. (JAX itself grows a little at first.)
"""

import argparse
import dataclasses
import gc
import hashlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import _bench
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jfleet
from jfleet.checkpointer import Checkpointer

GROWTH_MIB, GROWTH_THREADS = 32, 4
"""More than that beyond the run without saves is a leak; pools of threads in XLA and
TensorStore grow a little until each of them has been busy once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """What the process holds at one moment."""

    minutes: float
    step: int
    rss_mib: float
    python_threads: int
    threads: int
    files: int
    children: int


def sample(start: float, step: int) -> Sample:
    """Look at this process; Linux only."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    tasks = list(Path("/proc/self/task").iterdir())
    return Sample(
        minutes=(time.monotonic() - start) / 60,
        step=step,
        rss_mib=int(status.split("VmRSS:")[1].split()[0]) / 1024,
        python_threads=threading.active_count(),
        threads=len(tasks),
        files=len(os.listdir("/proc/self/fd")),
        children=sum(len(_children(task)) for task in tasks),
    )


def _children(task: Path) -> list[str]:
    try:
        return (task / "children").read_text().split()
    except OSError:
        return []  # The thread has just ended.


def build(width: int) -> tuple[Any, Any]:
    """A step and a state with a loss scale, masters, clipping and split moments."""
    strategy = jfleet.DistributedStrategy(amp=True, sharding=True, clip=True)
    strategy.amp_configs = {"dtype": "bfloat16"}
    strategy.sharding_configs = {"level": "os_g"}
    base = optax.adamw(optax.cosine_decay_schedule(1e-3, 10_000))
    opt = jfleet.distributed_optimizer(base, strategy)

    def init(key: jax.Array) -> Any:
        keys = jax.random.split(key, 4)
        shapes = [(64, width), (width, width), (width, width), (width, 64)]
        return {
            f"w{i}": jax.random.normal(k, s, jnp.bfloat16) / s[0] ** 0.5
            for i, (k, s) in enumerate(zip(keys, shapes, strict=True))
        }

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        y = x
        for name in sorted(params):
            y = jnp.tanh(y @ params[name])
        return jnp.mean((y - x).astype(jnp.float32) ** 2)

    return opt.minimize(loss_fn), opt.create(init, jax.random.key(0))


def batches() -> Iterator[np.ndarray]:
    """The same rows in every run."""
    rng = np.random.default_rng(0)
    pool = rng.normal(size=(64, 32, 64)).astype(np.float32)
    return itertools.cycle(pool)


def host(tree: Any) -> list[np.ndarray]:
    return [np.array(x) for x in jax.tree.leaves(tree)]


def with_saves(minutes: float, seconds: float, width: int) -> dict[str, Any]:
    """Train for so long, saving every few seconds; return what was seen."""
    step, state = build(width)
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    start = next_save = time.monotonic()
    losses, samples, num_checks = [], [], 0
    with (
        tempfile.TemporaryDirectory() as folder,
        Checkpointer(folder, keep=2) as checkpointer,
    ):
        for number, rows in enumerate(batches(), 1):
            state, metrics = step(state, rows)
            losses.append(float(metrics.loss))
            now = time.monotonic()
            if now < next_save:
                continue
            next_save = now + seconds
            samples.append(sample(start, number))  # The save before has long ended.
            values = host(state) if len(samples) % 10 == 6 else None
            checkpointer.save(number, state, extra={"row": number})
            if values is not None:  # Steps go on in the meantime, and donate.
                later = step(state, rows)
                loaded, extra = checkpointer.restore(abstract, number)
                same = zip(host(loaded), values, strict=True)
                assert all(a.tobytes() == b.tobytes() for a, b in same)
                assert extra == {"row": number}
                state = loaded  # What `later` consumed goes on from the checkpoint.
                del later, values
                num_checks += 1
            if now - start > minutes * 60:
                break
        last = checkpointer.latest()
    return {
        "losses": losses,
        "state": digest(state),
        "samples": [dataclasses.asdict(s) for s in samples],
        "checked": num_checks,
        "last step loads": last == number,
    }


def without_saves(like: dict[str, Any], width: int) -> dict[str, Any]:
    """Make the steps of a run with saves, and look at the process at the same steps."""
    step, state = build(width)
    start, losses, samples = time.monotonic(), [], []
    looked_at = {s["step"] for s in like["samples"]}
    for number, rows in enumerate(batches(), 1):
        state, metrics = step(state, rows)
        losses.append(float(metrics.loss))
        if number in looked_at:
            samples.append(sample(start, number))
        if number == len(like["losses"]):
            break
    return {
        "losses": losses,
        "state": digest(state),
        "samples": [dataclasses.asdict(s) for s in samples],
    }


def digest(state: Any) -> str:
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()


def growth(found: dict[str, Any]) -> dict[str, float]:
    """What the last fifth of a run holds beyond the second, the first to be warm."""
    samples = found["samples"]
    fifth = max(len(samples) // 5, 1)
    warm, late = samples[fifth : 2 * fifth] or samples[:1], samples[-fifth:]

    def of(some: list[dict[str, Any]], name: str) -> float:
        values = [s[name] for s in some]
        return statistics.median(values) if name == "rss_mib" else max(values)

    names = ("rss_mib", "python_threads", "threads", "files", "children")
    return {name: of(late, name) - of(warm, name) for name in names}


def verdicts(saves: dict[str, Any], control: dict[str, Any]) -> dict[str, Any]:
    """Compare two runs of the same steps."""
    grown, usual = growth(saves), growth(control)
    more = {name: grown[name] - max(usual[name], 0) for name in grown}
    limits = {"rss_mib": GROWTH_MIB, "threads": GROWTH_THREADS}
    equal = {
        "losses equal": saves["losses"] == control["losses"],
        "state equal": saves["state"] == control["state"],
        "last step loads": saves["last step loads"],
    }
    kept = all(value <= limits.get(name, 0) for name, value in more.items())
    return {
        "steps": len(saves["losses"]),
        "saves": len(saves["samples"]),
        "read back": saves["checked"],
        **equal,
        "growth MiB with saves": round(grown["rss_mib"], 1),
        "growth MiB without": round(usual["rss_mib"], 1),
        **{f"more {n}": v for n, v in more.items() if n != "rss_mib"},
        "holds": kept and all(equal.values()),
    }


def table(samples: list[dict[str, Any]], most_rows: int = 16) -> str:
    names = list(samples[0])
    chosen = samples[:: max(len(samples) // most_rows, 1)]
    rows = [[f"{s[n]:.1f}" if "m" in n[:7] else s[n] for n in names] for s in chosen]
    return _bench.markdown(names, rows)


def run(options: Sequence[str], folder: Path, name: str) -> dict[str, Any]:
    """Run one part in a process of its own, whose memory is nobody else's."""
    output = folder / name
    command = [sys.executable, __file__, *options, "--part", str(output)]
    subprocess.run(command, check=True)
    return json.loads(output.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--minutes", type=float, default=30, help="default: %(default)s"
    )
    parser.add_argument("--seconds", type=float, default=3, help="between two saves")
    parser.add_argument("--width", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--json", help="a file for all samples and the verdicts")
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--like", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 8)
        jfleet.init()
        if args.like:
            found = without_saves(json.loads(args.like.read_text()), args.width)
        else:
            found = with_saves(args.minutes, args.seconds, args.width)
        args.part.write_text(json.dumps(found))
        return 0
    options = [f"--{n}={getattr(args, n)}" for n in ("minutes", "seconds", "width")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        saves = run(options, folder, "saves.json")
        like = [*options, "--like", str(folder / "saves.json")]
        control = run(like, folder, "control.json")
    said = verdicts(saves, control)
    print(table(saves["samples"]))
    for title, value in said.items():
        print(f"{title}: {value}")
    samples = {"saves": saves["samples"], "control": control["samples"]}
    path = Path(args.json) if args.json else None
    _bench.write_json(path, {"verdicts": said, "samples": samples})
    return 0 if said["holds"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
