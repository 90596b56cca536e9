"""lamb: Adam whose every layer changes by the same share of its size.

Adam moves each weight by about the rate, so a layer of small weights is thrown about
while one of large weights hardly moves. LAMB scales the step of each layer by
|weights| / |step|: the rate is then the share by which any layer changes.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import tasks

import jfleet

jax.config.update("jax_num_cpu_devices", 8)  # simulated, without accelerators

STEPS, ROWS, RATE = 20, 1024, 0.05


def shares(old: Any, new: Any) -> dict[str, float]:
    """Return |new - old| / |old| of every kernel."""
    share = jax.tree.map(
        lambda a, b: float(jnp.linalg.norm(b - a) / jnp.linalg.norm(a)), old, new
    )
    return {name: layer["kernel"] for name, layer in sorted(share.items())}


def train(*, lamb: bool) -> dict:
    task = tasks.digits()
    strategy = jfleet.DistributedStrategy(lamb=lamb)
    strategy.lamb_configs = {"exclude_from_weight_decay": ["bias"]}
    # LAMB takes the rate, b1, b2 and eps from the optimizer that it replaces.
    base = jfleet.optimizer(optax.adam, learning_rate=RATE, b2=0.99)
    opt = jfleet.distributed_optimizer(base, strategy)

    step = opt.minimize(task.loss)
    state = opt.create(task.params)
    held_out = jax.jit(task.loss)
    before = float(held_out(state.params, task.held_out))
    for i in range(STEPS):
        state, _ = step(state, task.batch(i, ROWS))
        if i == 0:
            first = shares(task.params, state.params)
    after = float(held_out(state.params, task.held_out))
    return {"shares": first, "before": before, "after": after}


def main() -> dict:
    jfleet.init()
    results = {}
    for name, lamb in (("Adam", False), ("LAMB", True)):
        r = results[name] = train(lamb=lamb)
        layers = ", ".join(f"{layer} {s:.1%}" for layer, s in r["shares"].items())
        print(f"{name}: the first step changes {layers}")
        print(f"      held-out loss {r['before']:.3f} -> {r['after']:.3f}")
    return results


if __name__ == "__main__":
    main()
