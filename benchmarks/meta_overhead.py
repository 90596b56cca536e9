"""A resolved strategy against the same mathematics written by hand, on one device.

    python benchmarks/meta_overhead.py
    python benchmarks/meta_overhead.py --width 1024 --rounds 15 --json overhead.json

Both programs train the same MLP (25 million parameters at the default width) on the
same batches and take turns in one process; each round gives one ratio of CPU seconds,
and the median of the rounds is reported with its quartiles. Losses after all steps must
agree. The first round is not counted.

Each strategy runs twice: as the step of ``minimize``, against a hand-written step, and
as an optax transformation, against the same mathematics written as one. A
transformation must return updates for somebody else to add, zeros where nothing moves;
a step need not. Steps also report the norm of the gradient, both of them.
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

LIMIT = {"optax": 1.03, "minimize": 1.05}
RATE, MERGE = 1e-3, 4


Program = tuple[Callable[[Any], Any], Callable[[Any, jax.Array], tuple[Any, Any]]]
"""``init(params) -> state`` and ``step(state, batch) -> (state, (loss, norm))``."""


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


def by_hand_amp() -> Program:
    tx = optax.adam(RATE)

    def step(state, batch):
        params, opt = state
        loss, grads = jax.value_and_grad(low_loss)(params, batch)

        def take():
            updates, new = tx.update(grads, opt, params)
            return optax.apply_updates(params, updates), new

        new = jax.lax.cond(finite(grads), take, lambda: (params, opt))
        return new, (loss, optax.global_norm(grads))

    return lambda params: (params, tx.init(params)), step


def by_hand_merge() -> Program:
    tx = optax.adam(RATE)

    def step(state, window):
        params, opt = state

        def add(sums, rows):
            loss, grads = jax.value_and_grad(loss_fn)(params, rows)
            return jax.tree.map(jnp.add, sums, (grads, loss)), None

        zeros = jax.tree.map(jnp.zeros_like, params), jnp.zeros(())
        rows = window.reshape(MERGE, -1, window.shape[-1])
        (grads, loss), _ = jax.lax.scan(add, zeros, rows)
        grads = jax.tree.map(lambda g: g / MERGE, grads)
        updates, opt = tx.update(grads, opt, params)
        norm = optax.global_norm(grads)
        return (optax.apply_updates(params, updates), opt), (loss / MERGE, norm)

    return lambda params: (params, tx.init(params)), step


def optax_amp() -> Program:
    """Skips as a transformation must: with updates of zero."""
    tx = optax.adam(RATE)

    def update(grads, opt, params):
        zeros = lambda: jax.tree.map(jnp.zeros_like, grads)  # noqa: E731
        return jax.lax.cond(
            finite(grads), lambda: tx.update(grads, opt, params), lambda: (zeros(), opt)
        )

    return in_optax(optax.GradientTransformation(tx.init, update), low_loss)


def optax_merge() -> Program:
    """Accumulates as a transformation must: with updates of zero in between."""
    tx = optax.adam(RATE)

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return tx.init(params), zeros, jnp.zeros((), jnp.int32)

    def update(grads, state, params):
        opt, acc, count = state
        acc = jax.tree.map(jnp.add, acc, grads)

        def take():
            mean = jax.tree.map(lambda a: a / MERGE, acc)
            updates, new = tx.update(mean, opt, params)
            return updates, (new, jax.tree.map(jnp.zeros_like, acc), count * 0)

        def wait():
            return jax.tree.map(jnp.zeros_like, acc), (opt, acc, count + 1)

        return jax.lax.cond(count == MERGE - 1, take, wait)

    return in_optax(optax.GradientTransformation(init, update), loss_fn)


def in_optax(tx: Any, loss: Callable) -> Program:
    def step(state, batch):
        params, opt = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), (value, None)

    return lambda params: (params, tx.init(params)), step


def by_hand_lamb() -> Program:
    b1, b2, eps, decay = 0.9, 0.999, 1e-8, 0.01

    def init(params):
        mu, nu = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        return params, (mu, nu, jnp.zeros((), jnp.int32))

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

        params = jax.tree.map(move, params, mu, nu)
        return (params, (mu, nu, count)), (loss, optax.global_norm(grads))

    return init, step


def by_hand_lars() -> Program:
    coeff, decay, momentum = 0.001, 0.0005, 0.9

    def init(params):
        return params, jax.tree.map(jnp.zeros_like, params)

    def step(state, batch):
        params, velocity = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)

        def speed(w, g, v):
            up, down = jnp.linalg.norm(w), jnp.linalg.norm(g)
            local = RATE * coeff * up / (down + decay * up)
            local = jnp.where((up > 0) & (down > 0), local, RATE)
            return momentum * v + local * (g + decay * w)

        velocity = jax.tree.map(speed, params, grads, velocity)
        params = jax.tree.map(jnp.subtract, params, velocity)
        return (params, velocity), (loss, optax.global_norm(grads))

    return init, step


def without_norm(step: Callable) -> Callable:
    def run(state, batch):
        state, (loss, _) = step(state, batch)
        return state, (loss, None)

    return run


def minimized(base: Any, **settings: Any) -> Program:
    """Jfleet's whole step."""
    strategy = jfleet.DistributedStrategy(**settings)
    optimizer = jfleet.distributed_optimizer(base, strategy)
    step = optimizer.minimize(loss_fn)

    def run(state, batch):
        state, metrics = step(state, batch)
        return state, (metrics.loss, metrics.grad_norm)

    return optimizer.create, run


def transformed(base: Any, **settings: Any) -> Program:
    """Jfleet's transformation in a step of somebody's own."""
    strategy = jfleet.DistributedStrategy(**settings)
    optimizer = jfleet.distributed_optimizer(base, strategy)
    return in_optax(optimizer, optimizer.wrap_loss(loss_fn))


ADAM = jfleet.optimizer(optax.adam, learning_rate=RATE)
SGD = jfleet.optimizer(optax.sgd, learning_rate=RATE, momentum=0.9)
MERGING: dict[str, Any] = {
    "gradient_merge": True,
    "gradient_merge_configs": {"k_steps": MERGE},
}
STRATEGIES: dict[str, tuple[Any, dict[str, Any], Callable, Callable]] = {
    "amp": (ADAM, {"amp": True}, by_hand_amp, optax_amp),
    "gradient_merge": (ADAM, MERGING, by_hand_merge, optax_merge),
    "lamb": (ADAM, {"lamb": True}, by_hand_lamb, by_hand_lamb),
    "lars": (SGD, {"lars": True}, by_hand_lars, by_hand_lars),
}
FORMS = ("minimize", "optax")


def measure(name: str, form: str, width: int, rounds: int) -> dict[str, Any]:
    """Interleave both programs; return the ratios and both losses after a round."""
    base, settings, by_hand, by_hand_in_optax = STRATEGIES[name]
    whole = form == "minimize"
    pair = (
        by_hand() if whole else by_hand_in_optax(),
        minimized(base, **settings) if whole else transformed(base, **settings),
    )
    window = whole and name == "gradient_merge"
    num_rows, num_calls = (64 * MERGE, 1) if window else (64, MERGE)
    batch = np.random.default_rng(0).normal(size=(num_rows, width)).astype(np.float32)
    batch = jfleet.shard_batch(batch)
    steps, states = [], []
    for init, step in pair:
        states.append(init(make_params(width)))
        by_us = whole and len(steps) == 1
        if not whole:
            step = without_norm(step)
        steps.append(step if by_us else jax.jit(step, donate_argnums=0))
    ratios, first = [], [0.0, 0.0]
    for round_number in range(rounds + 1):
        seconds = [0.0, 0.0]
        for i in (0, 1) if round_number % 2 else (1, 0):
            start = time.process_time()
            for _ in range(num_calls):
                states[i], (loss, _) = steps[i](states[i], batch)
            jax.block_until_ready(states[i])
            seconds[i] = time.process_time() - start
            # Later on, 16-bit programs go their own ways.
            first[i] = first[i] or float(loss)
        if round_number:
            ratios.append(seconds[1] / seconds[0])
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "ratio": statistics.median(ratios),
        "quartiles": [quartiles[0], quartiles[2]],
        "loss_by_hand": first[0],
        "loss_jfleet": first[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--strategy", choices=STRATEGIES, help="default: all")
    parser.add_argument("--form", choices=FORMS, help="default: both")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    jfleet.init()
    results = {
        (name, form): measure(name, form, args.width, args.rounds)
        for name in ([args.strategy] if args.strategy else STRATEGIES)
        for form in ([args.form] if args.form else FORMS)
    }
    rows = [
        (
            *key,
            f"{r['ratio']:.3f} ({r['quartiles'][0]:.3f}-{r['quartiles'][1]:.3f})",
            "ok" if r["ratio"] <= LIMIT[key[1]] else f"MISS {LIMIT[key[1]]}",
            f"{abs(r['loss_jfleet'] / r['loss_by_hand'] - 1):.0e}",
        )
        for key, r in results.items()
    ]
    header = ("strategy", "form", "CPU time of by hand", "limit", "loss gap")
    print(_bench.markdown(header, rows))
    named = {" ".join(key): r for key, r in results.items()}
    _bench.write_json(args.json, {"width": args.width, "results": named})
    worst = max(abs(r["loss_jfleet"] / r["loss_by_hand"] - 1) for r in results.values())
    if worst > 1e-3:
        raise SystemExit(f"the programs do not compute the same: loss gap {worst:.1e}")


if __name__ == "__main__":
    main()
