"""fp16_allreduce: gradients cross the network in 16 bits.

At level os_g that is a reduce-scatter of half the width. ``error_feedback`` adds what
the rounding lost to the next gradient.
"""

import jax
import optax
import tasks

import jfleet

jax.config.update("jax_num_cpu_devices", 8)  # simulated, without accelerators

STEPS, ROWS = 20, 128


def train(dtype: str, *, error_feedback: bool = False) -> dict:
    task = tasks.digits()
    strategy = jfleet.DistributedStrategy(fp16_allreduce=True, sharding=True)
    strategy.sharding_configs = {"level": "os_g"}
    strategy.fp16_allreduce_configs = {
        "dtype": dtype,
        "error_feedback": error_feedback,
    }
    opt = jfleet.distributed_optimizer(optax.adam(5e-3), strategy)

    step = opt.minimize(task.loss)
    state = opt.create(task.params)
    held_out = jax.jit(task.loss)
    before = float(held_out(state.params, task.held_out))
    sent = jfleet.explain(step, state, task.batch(0, ROWS)).sent
    scattered = [s for s in sent if s.kind == "reduce-scatter"]
    for i in range(STEPS):
        state, _ = step(state, task.batch(i, ROWS))
    return {
        "before": before,
        "after": float(held_out(state.params, task.held_out)),
        "bytes": sum(s.wire_bytes for s in scattered),
    }


def main() -> dict:
    jfleet.init()
    results = {
        "float32": train("float32"),
        "float16": train("float16"),
        "float16, error feedback": train("float16", error_feedback=True),
    }
    for name, r in results.items():
        print(
            f"{name:23}: loss {r['before']:.6f} -> {r['after']:.6f};"
            f" its reduce-scatter sends {r['bytes']:,.0f} bytes per device and step"
        )
    return results


if __name__ == "__main__":
    main()
