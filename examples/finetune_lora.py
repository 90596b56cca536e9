"""Fine-tuning with frozen layers: LoRA, at p_g_os.

A network that knows digits learns their mirror images. Its own weights stay as they
are, bit by bit; each gets a pair of thin matrices that learn. Frozen weights are split
over the devices like all others, but have no optimizer state.
"""

from typing import Any

import jax
import jax.numpy as jnp
import measure
import numpy as np
import optax
import tasks

import jfleet

jax.config.update("jax_num_cpu_devices", 8)  # simulated, without accelerators

RANK, STEPS, ROWS = 8, 60, 96
LAYERS = ("Dense_0", "Dense_1", "Dense_2")


def adapters(key: jax.Array, base: Any) -> Any:
    """Return thin matrices whose product is zero at first."""
    shapes = {name: base[name]["kernel"].shape for name in LAYERS}
    keys = dict(zip(LAYERS, jax.random.split(key, len(LAYERS)), strict=True))
    return {
        name: {
            "down": jax.random.normal(keys[name], (rows, RANK)) * rows**-0.5,
            "up": jnp.zeros((RANK, columns)),
        }
        for name, (rows, columns) in shapes.items()
    }


def merged(params: Any) -> Any:
    """The weights that the network runs with: base + down @ up."""
    base, lora = params["base"], params["lora"]
    low = {name: lora[name]["down"] @ lora[name]["up"] for name in LAYERS}
    return {n: {**base[n], "kernel": base[n]["kernel"] + low[n]} for n in LAYERS}


def mirrored(batch: dict) -> dict:
    images = batch["x"].reshape(-1, 8, 8)[:, :, ::-1]
    return {**batch, "x": np.ascontiguousarray(images).reshape(-1, 64)}


def pretrained(task: tasks.Task) -> Any:
    opt = jfleet.distributed_optimizer(optax.adam(1e-2), jfleet.DistributedStrategy())
    step, state = opt.minimize(task.loss), opt.create(task.params)
    for i in range(STEPS):
        state, _ = step(state, task.batch(i, ROWS))
    return state.params


def main() -> dict:
    jfleet.init()
    task = tasks.digits()
    base = pretrained(task)
    params = {"base": base, "lora": adapters(jax.random.key(1), base)}

    kinds = {"base": "frozen", "lora": "trained"}
    tx = optax.partition(
        {"frozen": optax.set_to_zero(), "trained": optax.adam(1e-2)}, kinds
    )
    strategy = jfleet.DistributedStrategy(sharding=True)
    strategy.sharding_configs = {"level": "p_g_os"}
    opt = jfleet.distributed_optimizer(tx, strategy)

    def loss_fn(params, batch):
        return task.loss(merged(params), batch)

    step, state = opt.minimize(loss_fn), opt.create(params)
    held_out = jax.jit(jfleet.gather_at_use(loss_fn, state.params))
    test = mirrored(task.held_out)
    upright = float(held_out(state.params, task.held_out))
    before = float(held_out(state.params, test))
    for i in range(STEPS):
        state, _ = step(state, mirrored(task.batch(i, ROWS)))
    after = float(held_out(state.params, test))
    kept = jax.tree.map(np.array_equal, base, state.params["base"])
    frozen = all(jax.tree.leaves(kept))
    print(f"loss on digits {upright:.3f}, on their mirror images {before:.3f}")
    print(f"after fine-tuning, on mirror images {after:.3f}")
    print(f"frozen weights are what they were: {'yes' if frozen else 'NO'}")
    sizes = {
        "frozen_bytes": measure.device_bytes(state.params["base"]),
        "trained_bytes": measure.device_bytes(state.params["lora"]),
        "optimizer_bytes": measure.device_bytes(state.opt_state),
    }
    for name, size in sizes.items():
        print(f"  {name.replace('_', ' ')} per device: {size:,}")
    return {"before": before, "after": after, "frozen": frozen, **sizes}


if __name__ == "__main__":
    main()
