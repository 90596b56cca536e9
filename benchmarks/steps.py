"""The steps of ``minimize`` against whole steps written by hand, strategy by strategy.

    python benchmarks/steps.py
    python benchmarks/steps.py --strategy "localsgd x os_g" --rounds 15

Both train the decoder of the examples on 8 simulated devices and take turns in one
process; each round gives one ratio of CPU seconds, and the median of the rounds is
reported with its quartiles. Temporaries are those of the compiled programs. The first
round is not counted; its losses must agree.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _bench
import corpus
import jax
import jax.numpy as jnp
import optax
import reference
import step_reference
from decoder import Decoder

import jfleet

TIME_LIMIT = MEMORY_LIMIT = 1.05
NUM_MICRO, PERIOD, STEPS = 4, 4, 4
RATE = 1e-3

MERGE = {"gradient_merge_configs": {"k_steps": NUM_MICRO, "sync": "last"}}
LOCAL = {"localsgd_configs": {"k_steps": PERIOD, "begin_step": 0}}
AMP = {"amp_configs": {"dtype": "bfloat16"}}
# name: (switches, level, mesh, hand-written step, loss gap allowed)
STRATEGIES: dict[str, tuple[dict[str, Any], str, dict[str, int], Callable, float]] = {
    "gradient_merge x os_g": (
        {"gradient_merge": True, **MERGE},
        "os_g",
        {"data": 8},
        lambda *args: step_reference.merged(*args, NUM_MICRO),
        1e-4,
    ),
    "amp bfloat16 x p_g_os": (
        {"amp": True, **AMP},
        "p_g_os",
        {"data": 8},
        functools.partial(step_reference.half, late=False),
        2e-2,
    ),
    "amp bfloat16 x p_g_os, cast in each layer": (
        {"amp": True, **AMP},
        "p_g_os",
        {"data": 8},
        functools.partial(step_reference.half, late=True),
        2e-2,
    ),
    "fp16_allreduce x os_g": (
        {"fp16_allreduce": True},
        "os_g",
        {"data": 8},
        step_reference.narrow,
        1e-3,
    ),
    "localsgd x os_g": (
        {"localsgd": True, **LOCAL},
        "os_g",
        {"replica": 2, "shard": 4},
        lambda *args: step_reference.local(*args, PERIOD),
        1e-4,
    ),
}


def measure(name: str, model: Decoder, length: int, rows: int, rounds: int) -> dict:
    """Interleave both programs of one strategy."""
    switches, level, shape, by_hand, allowed = STRATEGIES[name]
    sizes = tuple(shape.values())
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    mesh = jax.make_mesh(sizes, tuple(shape), axis_types=auto)
    text = corpus.load(None, length=length)
    rows *= NUM_MICRO if "gradient_merge" in switches else 1
    batches = [jfleet.shard_batch(text.batch(i, rows), mesh=mesh) for i in range(STEPS)]

    def init():
        return model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]

    shapes = jax.eval_shape(init)
    tx = optax.adamw(RATE)
    create, step = by_hand(shapes, tx, mesh, model.num_heads)
    strategy = jfleet.DistributedStrategy(
        **switches, sharding=True, sharding_configs={"level": level}
    )
    opt = jfleet.distributed_optimizer(tx, strategy, mesh=mesh)

    def loss_fn(params, tokens):
        return reference.loss_fn(params, tokens, model.num_heads, shapes_of, _as_it_is)

    shapes_of = jax.tree.map(lambda x: (None,) * x.ndim, shapes)
    ours = opt.minimize(loss_fn)
    programs = [(create(init), step), (opt.create(init), ours)]
    memory = [s.lower(x, batches[0]).compile().memory_analysis() for x, s in programs]
    ratios, first = [], [0.0, 0.0]
    states = [state for state, _ in programs]
    for turn in range(rounds + 1):
        seconds = [0.0, 0.0]
        for i in (0, 1) if turn % 2 else (1, 0):
            start = time.process_time()
            for batch in batches:
                states[i], metrics = programs[i][1](states[i], batch)
                jax.block_until_ready(metrics)
            seconds[i] = time.process_time() - start
            if not turn:
                loss = metrics.loss if i else metrics[0].mean()
                first[i] = float(loss)
        if turn:
            ratios.append(seconds[1] / seconds[0])
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "ratio": statistics.median(ratios),
        "quartiles": [quartiles[0], quartiles[2]],
        "temporaries": [m.temp_size_in_bytes for m in memory],
        "arguments": [m.argument_size_in_bytes for m in memory],
        "losses": first,
        "allowed_gap": allowed,
    }


def _as_it_is(weights: Any, _: Any) -> Any:
    return weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--strategy", choices=STRATEGIES, help="default: all")
    add("--rounds", type=int, default=9, help="counted ones; default: %(default)s")
    add("--rows", type=int, default=16, help="per step; default: %(default)s")
    add("--length", type=int, default=64, help="bytes per row; default: %(default)s")
    add("--width", type=int, default=256, help="of the model; default: %(default)s")
    add("--layers", type=int, default=4, help="default: %(default)s")
    add("--json", type=Path)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    model = Decoder(width=args.width, num_layers=args.layers)
    names = [args.strategy] if args.strategy else list(STRATEGIES)
    results = {
        name: measure(name, model, args.length, args.rows, args.rounds)
        for name in names
    }
    rows = []
    for name, r in results.items():
        hand, ours = r["temporaries"]
        gap = abs(r["losses"][1] / r["losses"][0] - 1)
        kept = r["ratio"] <= TIME_LIMIT and ours <= MEMORY_LIMIT * hand
        rows.append(
            (
                name,
                f"{r['ratio']:.3f} ({r['quartiles'][0]:.3f}-{r['quartiles'][1]:.3f})",
                f"{ours / _bench.MIB:.2f} of {hand / _bench.MIB:.2f}",
                "ok" if kept else "MISS",
                f"{gap:.0e}",
            )
        )
    header = ("strategy", "CPU time of by hand", "temporaries MiB", "limits", "gap")
    print(_bench.markdown(header, rows))
    _bench.write_json(args.json, {"results": results})
    for name, r in results.items():
        if abs(r["losses"][1] / r["losses"][0] - 1) > r["allowed_gap"]:
            raise SystemExit(f"{name}: the programs differ: losses {r['losses']}")


if __name__ == "__main__":
    main()
