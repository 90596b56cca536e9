"""A convolutional network with batch norm and dropout on handwritten digits.

What a loss may take and return beside parameters and a batch: model state (running
statistics), a random key, and an auxiliary result such as the accuracy.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import tasks

import jfleet

jax.config.update("jax_num_cpu_devices", 8)  # simulated, without accelerators

STEPS, ROWS = 40, 96


class ConvNet(nn.Module):
    """64 pixels in, ten logits out."""

    @nn.compact
    def __call__(self, pixels: jax.Array, *, train: bool) -> jax.Array:
        """Map (batch, 64) to (batch, 10)."""
        x = pixels.reshape(-1, 8, 8, 1)
        x = nn.Conv(16, (3, 3))(x)
        x = nn.relu(nn.BatchNorm(not train, momentum=0.8)(x))
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Conv(32, (3, 3))(x))
        x = nn.Dropout(0.2, deterministic=not train)(x.reshape(len(x), -1))
        return nn.Dense(10)(x)


model = ConvNet()


def loss_fn(params: Any, stats: Any, batch: dict, rng: jax.Array) -> tuple:
    logits, new = model.apply(
        {"params": params, "batch_stats": stats},
        batch["x"],
        train=True,
        mutable=["batch_stats"],
        rngs={"dropout": rng},
    )
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    correct = jnp.mean(logits.argmax(axis=1) == batch["y"])
    return losses.mean(), new["batch_stats"], {"accuracy": correct}


def init(key: jax.Array) -> tuple[Any, Any]:
    variables = model.init(key, jnp.zeros((1, 64)), train=False)
    return variables["params"], variables["batch_stats"]


def accuracy(params: Any, stats: Any, batch: dict) -> jax.Array:
    variables = {"params": params, "batch_stats": stats}
    logits = model.apply(variables, batch["x"], train=False)
    return jnp.mean(logits.argmax(axis=1) == batch["y"])


def main() -> dict:
    jfleet.init()
    strategy = jfleet.DistributedStrategy(sharding=True)
    strategy.sharding_configs = {"level": "p_g_os"}
    opt = jfleet.distributed_optimizer(optax.adam(5e-3), strategy)
    step = opt.minimize(loss_fn, model_state=True, rng=True, has_aux=True)
    state = opt.create(init, jax.random.key(0), model_state=True)  # born sharded

    train, test = tasks.load_images()
    key = jax.random.key(1)  # the step number is folded in
    judge = jax.jit(jfleet.gather_at_use(accuracy, state.params))
    before = float(judge(state.params, state.model_state, test))
    for i in range(STEPS):
        state, metrics = step(state, tasks.rows_of(train, i, ROWS), key)
        if i % 10 == 0:
            seen = float(metrics.aux["accuracy"])
            print(f"step {i:2}: loss {float(metrics.loss):.3f}, accuracy {seen:.1%}")
    after = float(judge(state.params, state.model_state, test))
    print(f"held-out accuracy {before:.1%} -> {after:.1%}")
    return {"before": before, "after": after}


if __name__ == "__main__":
    main()
