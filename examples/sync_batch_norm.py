"""sync_batch_norm: batch statistics over all replicas, not those of each alone.

Here every replica sees other digits, as when data is split by source. A model that
normalises with the statistics of its own replica trains on something else than it is
judged with. A strategy that takes the gradient of every replica (here fp16_allreduce)
makes the difference; under plain jit the batch is one global array anyway.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tasks

import jfleet

jax.config.update("jax_num_cpu_devices", 8)  # simulated, without accelerators

STEPS, ROWS, RATE = 30, 256, 0.02


class Normed(nn.Module):
    """Two layers, and batch statistics over some mesh axes."""

    axes: Any

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        """Map (batch, 64) to (batch, 10)."""
        x = nn.Dense(32)(x)
        axis = self.axes or None
        x = nn.BatchNorm(not train, momentum=0.8, axis_name=axis if train else None)(x)
        return nn.Dense(10)(nn.relu(x))


def sorted_rows(data: dict, step: int) -> dict:
    rows = tasks.rows_of(data, step, ROWS)
    order = np.argsort(rows["y"], kind="stable")
    return {name: values[order] for name, values in rows.items()}


def train(*, sync: bool) -> dict:
    strategy = jfleet.DistributedStrategy(fp16_allreduce=True, sync_batch_norm=sync)
    opt = jfleet.distributed_optimizer(optax.adam(RATE), strategy)
    model = Normed(opt.resolution.batch_norm_axes)  # () without sync_batch_norm

    def loss(params, stats, batch, train=True):
        variables = {"params": params, "batch_stats": stats}
        logits, new = model.apply(
            variables, batch["x"], train=train, mutable=["batch_stats"]
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return losses.mean(), new["batch_stats"]

    train_data, test = tasks.load_images()
    variables = jax.jit(lambda key: model.init(key, jnp.ones((1, 64)), train=False))(
        jax.random.key(0)
    )
    step = opt.minimize(loss, model_state=True)
    state = opt.create(variables["params"], model_state=variables["batch_stats"])
    held_out = jax.jit(lambda p, stats: loss(p, stats, test, train=False)[0])
    before = float(held_out(state.params, state.model_state))
    for i in range(STEPS):
        state, metrics = step(state, sorted_rows(train_data, i))
    return {
        "before": before,
        "after": float(held_out(state.params, state.model_state)),
        "training": float(metrics.loss),
    }


def main() -> dict:
    jfleet.init()
    results = {}
    for name, sync in (("its own rows", False), ("all rows", True)):
        r = results[sync] = train(sync=sync)
        print(
            f"statistics of {name:12}: held-out loss {r['before']:.3f} ->"
            f" {r['after']:.3f} (in training {r['training']:.3f})"
        )
    return results


if __name__ == "__main__":
    main()
