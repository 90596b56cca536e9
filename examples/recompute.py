"""recompute: forget activations in the forward pass, compute them again when needed.

The loss and its gradient stay as they were; what a step needs beside its state shrinks.
"""

import jax
import jax.numpy as jnp
import optax
import tasks

import jfleet

jax.config.update("jax_num_cpu_devices", 8)  # simulated, without accelerators

WIDTH, LAYERS, ROWS = 64, 12, 256


def init(key: jax.Array) -> dict:
    keys = jax.random.split(key, LAYERS + 2)
    scale = (2 / WIDTH) ** 0.5
    layers = [scale * jax.random.normal(k, (WIDTH, WIDTH)) for k in keys[2:]]
    return {
        "in": 0.1 * jax.random.normal(keys[0], (64, WIDTH)),
        "layers": jnp.stack(layers),
        "out": 0.1 * jax.random.normal(keys[1], (WIDTH, 10)),
    }


def loss_fn(params: dict, batch: dict) -> jax.Array:
    """A deep residual network whose layers are scanned, as deep models are."""

    def layer(x, w):
        hidden = jax.nn.gelu(x @ w)
        return x + jnp.tanh(hidden) / LAYERS, None

    x, _ = jax.lax.scan(layer, batch["x"] @ params["in"], params["layers"])
    logits = x @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def train(params: dict, policy: str | None, steps: int = 5) -> tuple[float, float, int]:
    strategy = jfleet.DistributedStrategy(recompute=policy is not None)
    if policy is not None:
        strategy.recompute_configs = {"policy": policy}
    opt = jfleet.distributed_optimizer(optax.adam(1e-2), strategy)
    step = opt.minimize(loss_fn)
    state = opt.create(params)

    train_data, _ = tasks.load_images()
    compiled = step.lower(state, tasks.rows_of(train_data, 0, ROWS)).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    losses = []
    for i in range(steps):
        state, metrics = step(state, tasks.rows_of(train_data, i, ROWS))
        losses.append(float(metrics.loss))
    return losses[0], losses[-1], temporary


def main() -> dict:
    jfleet.init()
    params = jax.jit(init)(jax.random.key(0))
    results = {}
    for policy in (None, "dots_saveable", "nothing_saveable"):
        first, last, temporary = results[policy] = train(params, policy)
        print(
            f"{policy or 'off':17}: loss {first:.6f} -> {last:.6f},"
            f" {temporary / 2**20:.2f} MiB beside the state"
        )
    return results


if __name__ == "__main__":
    main()
