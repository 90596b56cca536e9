"""What auto chooses against an exhaustive search, measured on simulated devices.

    python benchmarks/auto_search.py
    python benchmarks/auto_search.py --model decoder --rounds 3 --json auto.json

For each model every candidate that auto considers is compiled and timed (CPU seconds of
all threads, the candidates taking turns), and its memory is read from the compiled
program. Then auto chooses, under two memory limits, from its plans alone. The ratio is
the measured time of its choice to that of the fastest candidate that fits.

The hardware is this machine, described by three rates that the script measures first:
products, memory copies, and copies between simulated devices, shared by all of them.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _bench
import jax
import jax.numpy as jnp
import numpy as np
import optax
import reference
from decoder import Decoder

import jfleet
from jfleet._planning.hardware import Hardware
from jfleet._tuning.auto import auto_plan
from jfleet._tuning.target import mesh_over

DEVICES, LIMIT = 8, 1.10
Problem = tuple[Any, Callable[..., jax.Array], np.ndarray]


def mlp() -> Problem:
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        f"w{i}": jax.random.normal(k, (512, 512)) / 23 for i, k in enumerate(keys)
    }

    def loss_fn(params, x):
        for i in range(len(params)):
            x = jnp.tanh(x @ params[f"w{i}"])
        return jnp.mean((x - 0.5) ** 2)

    rows = np.random.default_rng(0).normal(size=(256, 512)).astype(np.float32)
    return params, loss_fn, rows


def embedding() -> Problem:
    key = jax.random.key(0)
    params = {
        "table": jax.random.normal(key, (16384, 64)) / 8,
        "out": jax.random.normal(key, (64, 256)) / 8,
    }

    def loss_fn(params, tokens):
        x = params["table"][tokens[:, :-1]].mean(axis=1)
        logits = x @ params["out"]
        labels = tokens[:, -1] % 256
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    tokens = np.random.default_rng(0).integers(0, 16384, (128, 17), np.int32)
    return params, loss_fn, tokens


def decoder() -> Problem:
    model = Decoder(width=128, num_layers=3)
    start = jnp.zeros((1, 8), jnp.int32)
    params = jax.jit(model.init)(jax.random.key(0), start)["params"]
    specs = jax.tree.map(lambda x: (None,) * x.ndim, params)

    def loss_fn(params, tokens):
        whole = lambda w, _: w  # noqa: E731
        return reference.loss_fn(params, tokens, model.num_heads, specs, whole)

    tokens = np.random.default_rng(0).integers(0, 256, (32, 65), np.int32)
    return params, loss_fn, tokens


MODELS: dict[str, Callable[[], Problem]] = {
    "mlp": mlp,
    "embedding": embedding,
    "decoder": decoder,
}


def this_machine() -> Hardware:
    """Rates of one simulated device: its share of what all cores do together."""
    a = jnp.ones((1024, 1024))
    product = jax.jit(lambda a: a @ a)
    flops = 2 * 1024**3 / _seconds(lambda: product(a)) / DEVICES
    big = jnp.ones((64 * 2**20 // 4,))
    copy = jax.jit(lambda x: x + 1)
    moved = 2 * big.nbytes / _seconds(lambda: copy(big)) / DEVICES
    mesh = jax.make_mesh((DEVICES,), ("data",))
    spec = jax.sharding.PartitionSpec("data")
    split = jax.device_put(
        jnp.ones((DEVICES, 2**20)), jax.sharding.NamedSharding(mesh, spec)
    )
    reduce = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=spec, out_specs=spec
        )
    )
    sent = 2 * (DEVICES - 1) / DEVICES * 4 * 2**20
    links = sent / _seconds(lambda: reduce(split))
    return Hardware(
        name=f"{DEVICES} simulated devices",
        memory_bytes=2**30,
        flops=flops,
        memory_bandwidth=moved,
        link_bandwidth=links,
        near_devices=DEVICES,
    )


def _seconds(run: Callable[[], Any], repeats: int = 7) -> float:
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def search(name: str, hardware: Any, rounds: int) -> dict[str, Any]:
    """Measure all candidates of a model, then ask auto."""
    params, loss_fn, rows = MODELS[name]()
    tx = optax.adamw(1e-3)
    strategy = jfleet.DistributedStrategy(
        auto=True,
        auto_configs={"mode": "fill"},
        gradient_merge=True,
        gradient_merge_configs={"k_steps": 2},
    )

    def ask(memory_bytes: int | None) -> Any:
        return auto_plan(
            tx,
            params,
            loss_fn,
            rows,
            devices=DEVICES,
            hardware=hardware,
            strategy=strategy,
            memory_bytes=memory_bytes,
            compiler="cpu",
        )

    everything = ask(None)
    programs = [
        _program(p.candidate, tx, params, loss_fn, rows) for p in everything.order
    ]
    times: list[list[float]] = [[] for _ in programs]
    for turn in range(rounds + 1):
        for i, program in enumerate(programs):
            seconds = program.run(rows)
            if turn:
                times[i].append(seconds)
    measured = {
        p.candidate.name: (statistics.median(t), program.peak_bytes)
        for p, t, program in zip(everything.order, times, programs, strict=True)
    }
    peaks = sorted(peak for _, peak in measured.values())
    limits = [peaks[-1], peaks[len(peaks) // 4]]
    return {
        "settings": len(measured),
        "choices": [_judge(ask(limit), measured, limit) for limit in limits],
        "measured": measured,
    }


class _program:
    """One candidate, compiled and placed."""

    def __init__(self, candidate, tx, params, loss_fn, rows):
        mesh = mesh_over(jax.devices(), dict(candidate.mesh_shape))
        opt = jfleet.distributed_optimizer(tx, candidate.strategy, mesh=mesh)
        self.state = opt.create(params)
        self.step = opt.minimize(loss_fn)
        memory = self.step.lower(self.state, rows).compile().memory_analysis()
        self.peak_bytes = (
            memory.argument_size_in_bytes
            + memory.temp_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
        )

    def run(self, rows, steps: int = 3) -> float:
        start = time.process_time()
        for _ in range(steps):
            self.state, metrics = self.step(self.state, rows)
            jax.block_until_ready(metrics)
        return (time.process_time() - start) / steps


def _judge(chosen: Any, measured: dict[str, Any], limit: int) -> dict[str, Any]:
    name = chosen.best.candidate.name
    seconds, peak = measured[name]
    fitting = {n: t for n, (t, p) in measured.items() if p <= limit}
    best = min(fitting, key=lambda n: fitting[n])
    return {
        "limit_bytes": limit,
        "chosen": name,
        "fits": peak <= limit,
        "fastest": best,
        "ratio": seconds / fitting[best],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, help="default: all of them")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    hardware = this_machine()
    print(
        f"one simulated device: {hardware.flops / 1e9:.1f} GFLOP/s, "
        f"{hardware.memory_bandwidth / 1e9:.2f} GB/s of memory, "
        f"{hardware.link_bandwidth / 1e9:.2f} GB/s of links\n"
    )
    names = [args.model] if args.model else list(MODELS)
    results = {name: search(name, hardware, args.rounds) for name in names}
    rows = [
        (
            name,
            r["settings"],
            f"{c['limit_bytes'] / _bench.MIB:.2f} MiB",
            c["chosen"],
            c["fastest"],
            f"{c['ratio']:.3f}",
            "ok" if c["fits"] and c["ratio"] <= LIMIT else "MISS",
        )
        for name, r in results.items()
        for c in r["choices"]
    ]
    header = ("model", "settings", "memory", "chosen", "fastest", "ratio", "limits")
    print(_bench.markdown(header, rows))
    _bench.write_json(args.json, {"results": results})


if __name__ == "__main__":
    main()
