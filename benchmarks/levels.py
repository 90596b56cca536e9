"""jfleet against hand-written JAX at the same level: time, memory, traffic, losses.

    python benchmarks/levels.py
    python benchmarks/levels.py --level p_g_os --rounds 15 --json levels.json

The programs take turns (A B C, C B A, ...) in one process; each round gives one ratio
of CPU seconds, over all threads, and the median of the rounds is reported with its
quartiles. On simulated devices CPU seconds are the measure that other load disturbs
least. The first round is not counted.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _bench
import corpus
import jax
import jax.numpy as jnp
import numpy as np
import optax
import reference
from decoder import Decoder
from flax.training.train_state import TrainState
from jax.sharding import Mesh
from train_lm import train_step

import jfleet
from jfleet._hlo import collectives

LEVELS = ("os", "os_g", "p_g_os")
TIME_LIMIT = {"os": 1.0, "os_g": 1.03, "p_g_os": 1.03}
LOSS_TOLERANCE = 1e-4  # relative, after all steps: sums run in another order


@dataclasses.dataclass(slots=True)
class Program:
    """One way to train, and what was measured of it."""

    name: str
    state: Any
    step: Callable[[Any, jax.Array], tuple[Any, jax.Array]]
    compiled: Any
    cpu_seconds: list[float] = dataclasses.field(default_factory=list)
    wall_seconds: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)

    def run(self, batches: list[jax.Array]) -> None:
        """Take one step per batch and note what a step took."""
        cpu, wall = time.process_time(), time.perf_counter()
        for batch in batches:
            self.state, loss = self.step(self.state, batch)
            self.losses.append(float(loss))
        self.cpu_seconds.append((time.process_time() - cpu) / len(batches))
        self.wall_seconds.append((time.perf_counter() - wall) / len(batches))


def programs(
    level: str, model: Decoder, tokens: jax.Array, mesh: Mesh
) -> list[Program]:
    """Return jfleet's program and the hand-written ones, not yet run."""
    tx = optax.adamw(1e-3)

    def init_params():
        return model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]

    def create():
        return TrainState.create(apply_fn=model.apply, params=init_params(), tx=tx)

    shapes = jax.eval_shape(init_params)
    starts = [
        ("jfleet", jfleet.create_sharded(create, level=level, mesh=mesh), train_step)
    ]
    for name, make_step in reference.STEPS.items():
        state = reference.create(init_params, tx, level, mesh)
        step = make_step(shapes, tx, level, mesh, model.num_heads)
        starts.append((name, state, step))
    return [
        Program(name, state, step, step.lower(state, tokens).compile())
        for name, state, step in starts
    ]


def compare(
    level: str, *, model: Decoder, length: int, num_rows: int, rounds: int, steps: int
) -> dict[str, Any]:
    """Measure all programs of one level.

    Returns:
        A record per program, under its name; times as ratios to the first,
        ``jfleet`` divided by the program.
    """
    mesh = jfleet.init()
    text = corpus.load(None, length=length)
    batches = [
        jfleet.shard_batch(text.batch(i, num_rows), mesh=mesh) for i in range(steps)
    ]
    contenders = programs(level, model, batches[0], mesh)
    for turn in range(rounds + 1):
        for program in contenders[:: 1 if turn % 2 else -1]:
            program.run(batches)
    ours = contenders[0]
    return {program.name: _record(program, ours) for program in contenders}


def _record(program: Program, ours: Program) -> dict[str, Any]:
    memory = program.compiled.memory_analysis()
    ratios = [a / b for a, b in zip(ours.cpu_seconds, program.cpu_seconds, strict=True)]
    quartiles = statistics.quantiles(ratios[1:], n=4)
    gap = max(abs(a - b) / b for a, b in zip(program.losses, ours.losses, strict=True))
    return {
        "cpu_seconds": statistics.median(program.cpu_seconds[1:]),
        "wall_seconds": statistics.median(program.wall_seconds[1:]),
        "ratio": statistics.median(ratios[1:]),
        "ratio_quartiles": [quartiles[0], quartiles[2]],
        "state_bytes": _bytes_per_device(program.state),
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "collectives": _by_kind(program.compiled),
        "last_loss": program.losses[-1],
        "loss_gap": gap,
    }


def _bytes_per_device(state: Any) -> int:
    return sum(
        x.dtype.itemsize * int(np.prod(x.sharding.shard_shape(x.shape)))
        for x in jax.tree.leaves(state)
    )


def _by_kind(compiled: Any) -> dict[str, dict[str, float]]:
    """Return how often each kind of collective runs in a step, and its bytes."""
    kinds: dict[str, dict[str, float]] = {}
    for item in collectives(compiled):
        total = kinds.setdefault(item.kind, {"count": 0, "wire_bytes": 0})
        total["count"] += item.count
        total["wire_bytes"] += item.wire_bytes
    return kinds


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return a row per level and program."""
    header = [
        "level", "program", "CPU s/step", "jfleet takes", "wall s", "state MiB",
        "arguments", "temporaries", "collectives per step", "loss gap",
    ]  # fmt: skip
    rows = []
    for level, records in results.items():
        for name, r in records.items():
            low, high = r["ratio_quartiles"]
            ratio = f"{r['ratio']:.3f} ({low:.3f}-{high:.3f})"
            rows.append(
                [
                    level,
                    name,
                    f"{r['cpu_seconds']:.3f}",
                    "" if name == "jfleet" else ratio,
                    f"{r['wall_seconds']:.3f}",
                    *[
                        f"{r[f'{what}_bytes'] / _bench.MIB:.2f}"
                        for what in ("state", "argument", "temporary")
                    ],
                    ", ".join(
                        f"{c['count']} {kind} {c['wire_bytes'] / _bench.MIB:.1f}"
                        for kind, c in r["collectives"].items()
                    ),
                    f"{r['loss_gap']:.0e}",
                ]
            )
    return _bench.markdown(header, rows)


def verdicts(results: dict[str, dict[str, Any]]) -> list[tuple[bool, str]]:
    """Compare with what the project promises; True where the promise is kept."""
    lines = []
    for level, records in results.items():
        ours, by_jit = records["jfleet"], records["constraints"]
        by_hand = [record for name, record in records.items() if name != "jfleet"]
        ratio, limit = by_jit["ratio"], TIME_LIMIT[level]
        lines.append(
            (ratio <= limit, f"{level}: CPU time {ratio:.3f} of {limit} times by hand")
        )
        peak, allowed = _peak_bytes(ours), min(map(_peak_bytes, by_hand))
        lines.append(
            (
                peak <= allowed,
                f"{level}: arguments and temporaries {peak / _bench.MIB:.2f} MiB, the"
                f" better hand-written form {allowed / _bench.MIB:.2f}",
            )
        )
        gap = max(record["loss_gap"] for record in by_hand)
        lines.append((gap <= LOSS_TOLERANCE, f"{level}: losses agree to {gap:.0e}"))
    return lines


def _peak_bytes(record: dict[str, Any]) -> int:
    return record["argument_bytes"] + record["temporary_bytes"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--level", choices=LEVELS, help="default: all of them")
    add("--devices", type=int, default=8, help="simulated devices; default: 8")
    add("--rounds", type=int, default=11, help="counted ones; default: %(default)s")
    add("--steps", type=int, default=4, help="per round; default: %(default)s")
    add("--rows", type=int, default=16, help="per step; default: %(default)s")
    add("--length", type=int, default=64, help="bytes per row; default: %(default)s")
    add("--width", type=int, default=256, help="of the model; default: %(default)s")
    add("--layers", type=int, default=4, help="default: %(default)s")
    add("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()
    if args.rounds < 2:  # quartiles need two
        parser.error(f"--rounds must be at least 2, got {args.rounds}")
    jax.config.update("jax_num_cpu_devices", args.devices)
    model = Decoder(width=args.width, num_layers=args.layers)
    results = {
        level: compare(
            level,
            model=model,
            length=args.length,
            num_rows=args.rows,
            rounds=args.rounds,
            steps=args.steps,
        )
        for level in ([args.level] if args.level else LEVELS)
    }
    print(table(results), end="\n\n")
    kept = verdicts(results)
    for ok, line in kept:
        print("ok  " if ok else "MISS", line)
    _bench.write_json(
        args.json,
        {
            "levels": results,
            "verdicts": [{"ok": ok, "what": line} for ok, line in kept],
        },
    )


if __name__ == "__main__":
    main()
