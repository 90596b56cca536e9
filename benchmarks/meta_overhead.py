"""A resolved strategy against the same mathematics written by hand, on one device.

    python benchmarks/meta_overhead.py
    python benchmarks/meta_overhead.py --width 1024 --rounds 15 --json overhead.json

Both programs train the same MLP (25 million parameters at the default width) on the
same batches and take turns in one process; each round gives one ratio of CPU seconds,
and the median of the rounds is reported with its quartiles. Losses after all steps must
agree. The first round is not counted.
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

import jfleet

LIMIT = 1.03
RATE, MERGE = 1e-3, 4


def make_params(width: int) -> Any:
    keys = jax.random.split(jax.random.key(0), 6)
    scale = width**-0.5
    return {
        f"w{i}": jax.random.normal(key, (width, width)) * scale
        for i, key in enumerate(keys)
    }


def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
    hidden = batch
    for i in range(len(params)):
        hidden = jnp.tanh(hidden @ params[f"w{i}"])
    return jnp.mean((hidden - 0.5) ** 2).astype(jnp.float32)


def low_loss(params: Any, batch: jax.Array) -> jax.Array:
    low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    return loss_fn(low, batch.astype(jnp.bfloat16))


def finite(tree: Any) -> jax.Array:
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]))


def by_hand_amp() -> tuple[Callable, Callable]:
    tx = optax.adam(RATE)

    def step(state, batch):
        params, opt = state
        loss, grads = jax.value_and_grad(low_loss)(params, batch)
        ok = finite(grads)

        def take():
            updates, new = tx.update(grads, opt, params)
            return optax.apply_updates(params, updates), new

        return jax.lax.cond(ok, take, lambda: (params, opt)), loss

    return tx.init, step


def by_hand_merge() -> tuple[Callable, Callable]:
    tx = optax.adam(RATE)

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return tx.init(params), zeros, jnp.zeros((), jnp.int32)

    def step(state, batch):
        params, (opt, acc, count) = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        acc = jax.tree.map(jnp.add, acc, grads)

        def take():
            mean = jax.tree.map(lambda a: a / MERGE, acc)
            updates, new = tx.update(mean, opt, params)
            cleared = jax.tree.map(jnp.zeros_like, acc)
            return optax.apply_updates(params, updates), (new, cleared, count * 0)

        def wait():
            return params, (opt, acc, count + 1)

        return jax.lax.cond(count == MERGE - 1, take, wait), loss

    return init, step


def by_hand_lamb() -> tuple[Callable, Callable]:
    b1, b2, eps, decay = 0.9, 0.999, 1e-8, 0.01

    def init(params):
        return (
            jax.tree.map(jnp.zeros_like, params),
            jax.tree.map(jnp.zeros_like, params),
            jnp.zeros((), jnp.int32),
        )

    def step(state, batch):
        params, (mu, nu, count) = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        count = count + 1
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, mu, grads)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, nu, grads)

        def move(w, m, v):
            r = m / (1 - b1**count) / (jnp.sqrt(v / (1 - b2**count)) + eps) + decay * w
            up, down = jnp.linalg.norm(w), jnp.linalg.norm(r)
            trust = jnp.where((up > 0) & (down > 0), up / down, 1.0)
            return w - RATE * trust * r

        return (jax.tree.map(move, params, mu, nu), (mu, nu, count)), loss

    return init, step


def by_hand_lars() -> tuple[Callable, Callable]:
    coeff, decay, momentum = 0.001, 0.0005, 0.9

    def init(params):
        return jax.tree.map(jnp.zeros_like, params)

    def step(state, batch):
        params, velocity = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)

        def speed(w, g, v):
            up, down = jnp.linalg.norm(w), jnp.linalg.norm(g)
            local = RATE * coeff * up / (down + decay * up)
            local = jnp.where((up > 0) & (down > 0), local, RATE)
            return momentum * v + local * (g + decay * w)

        velocity = jax.tree.map(speed, params, grads, velocity)
        return (jax.tree.map(jnp.subtract, params, velocity), velocity), loss

    return init, step


def resolved(base: Any, **settings: Any) -> tuple[Callable, Callable]:
    optimizer = jfleet.distributed_optimizer(
        base, jfleet.DistributedStrategy(**settings)
    )
    wrapped = optimizer.wrap_loss(loss_fn)

    def step(state, batch):
        params, opt = state
        loss, grads = jax.value_and_grad(wrapped)(params, batch)
        updates, opt = optimizer.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), loss

    return optimizer.init, step


ADAM = jfleet.optimizer(optax.adam, learning_rate=RATE)
SGD = jfleet.optimizer(optax.sgd, learning_rate=RATE, momentum=0.9)
PAIRS = {
    "amp": (by_hand_amp, lambda: resolved(ADAM, amp=True)),
    "gradient_merge": (
        by_hand_merge,
        lambda: resolved(
            ADAM, gradient_merge=True, gradient_merge_configs={"k_steps": MERGE}
        ),
    ),
    "lamb": (by_hand_lamb, lambda: resolved(ADAM, lamb=True)),
    "lars": (by_hand_lars, lambda: resolved(SGD, lars=True)),
}


def measure(name: str, width: int, rounds: int) -> dict[str, Any]:
    """Interleave both programs; return the ratios and both last losses."""
    batch = np.random.default_rng(0).normal(size=(64, width)).astype(np.float32)
    steps, states, losses = [], [], [None, None]
    for make in PAIRS[name]:
        init, step = make()
        params = make_params(width)
        states.append((params, init(params)))
        steps.append(jax.jit(step, donate_argnums=0))
    ratios = []
    for round_number in range(rounds + 1):
        seconds = [0.0, 0.0]
        for i in (0, 1) if round_number % 2 else (1, 0):
            start = time.process_time()
            for _ in range(MERGE):
                states[i], losses[i] = steps[i](states[i], batch)
            jax.block_until_ready(states[i])
            seconds[i] = time.process_time() - start
        if round_number:
            ratios.append(seconds[1] / seconds[0])
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "ratio": statistics.median(ratios),
        "quartiles": [quartiles[0], quartiles[2]],
        "loss_by_hand": float(losses[0]),
        "loss_jfleet": float(losses[1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = {name: measure(name, args.width, args.rounds) for name in PAIRS}
    rows = [
        (
            name,
            f"{r['ratio']:.3f} ({r['quartiles'][0]:.3f}-{r['quartiles'][1]:.3f})",
            "ok" if r["ratio"] <= LIMIT else f"MISS {LIMIT}",
            f"{abs(r['loss_jfleet'] / r['loss_by_hand'] - 1):.0e}",
        )
        for name, r in results.items()
    ]
    print(
        _bench.markdown(("strategy", "CPU time of by hand", "limit", "loss gap"), rows)
    )
    _bench.write_json(args.json, {"width": args.width, "results": results})
    worst = max(abs(r["loss_jfleet"] / r["loss_by_hand"] - 1) for r in results.values())
    if worst > 1e-3:
        raise SystemExit(f"the programs do not compute the same: loss gap {worst:.1e}")


if __name__ == "__main__":
    main()
