"""auto: describe the problem, and let jfleet choose the switches, with reasons.

By default it may choose only what leaves the result the same up to rounding.
"""

import jax
import optax
import tasks

import jfleet

jax.config.update("jax_num_cpu_devices", 8)  # simulated, without accelerators

STEPS, ROWS = 20, 128


def choose(**facts: object) -> object:
    strategy = jfleet.DistributedStrategy(auto=True, auto_configs=facts)
    return jfleet.distributed_optimizer(
        optax.adam(5e-3), strategy, params=tasks.digits().params
    )


def main() -> dict:
    mesh = jfleet.init({"replica": 2, "shard": -1})
    print(f"mesh {dict(mesh.shape)}\n")
    chosen = {
        "nothing known": choose(),
        "little memory": choose(device_memory_bytes=80_000, activation_bytes=60_000),
        "a slow network, anything allowed": choose(
            accuracy="any", network_bytes_per_second=1e6, compute_seconds=0.01
        ),
    }
    for name, opt in chosen.items():
        print(f"== {name}\n{opt.explain()}\n")

    task, opt = tasks.digits(), chosen["little memory"]
    step = opt.minimize(task.loss)
    state = opt.create(task.params)
    held_out = jax.jit(task.loss)
    before = float(held_out(opt.params(state), task.held_out))
    for i in range(STEPS):
        state, _ = step(state, task.batch(i, ROWS))
    after = float(held_out(opt.params(state), task.held_out))
    print(f"trained with what suits little memory: loss {before:.4f} -> {after:.4f}")
    applied = {name: opt.resolution.applied for name, opt in chosen.items()}
    return {"before": before, "after": after, "applied": applied}


if __name__ == "__main__":
    main()
