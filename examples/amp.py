"""amp: compute in half precision, keep float32 master parameters.

bfloat16 needs nothing else. float16 has a small range, so its loss is multiplied with
a scale that adapts: a step whose gradient overflows changes nothing but the scale.
"""

import jax
import optax
import tasks

import jfleet

jax.config.update("jax_num_cpu_devices", 8)  # simulated, without accelerators

CONFIGS = {
    "float32": {},
    "bfloat16": {},
    # Starts far too large, to be seen coming down.
    "float16": {"init_loss_scaling": 2.0**24, "decr_ratio": 0.01},
}


def train(dtype: str, steps: int = 20) -> tuple[float, float, int]:
    task = tasks.digits()
    strategy = jfleet.DistributedStrategy(amp=True)
    strategy.amp_configs = {"dtype": dtype, **CONFIGS[dtype]}
    opt = jfleet.distributed_optimizer(optax.adam(3e-3), strategy)

    step = opt.minimize(task.loss)
    state = opt.create(task.params)
    held_out = jax.jit(task.loss)
    before = float(held_out(state.params, task.held_out))
    for i in range(steps):
        state, metrics = step(state, task.batch(i, 128))
        if dtype == "float16" and i < 4:
            print(
                f"  step {i}: loss scale {float(metrics.loss_scale):10,.0f},"
                f" steps skipped so far {int(metrics.skipped_steps)}"
            )
    after = float(held_out(state.params, task.held_out))
    return before, after, int(metrics.skipped_steps)


def main() -> dict:
    jfleet.init()
    results = {}
    for dtype in CONFIGS:
        before, after, skipped = results[dtype] = train(dtype)
        print(f"{dtype:8}: loss {before:.5f} -> {after:.5f}, {skipped} steps skipped")
    return results


if __name__ == "__main__":
    main()
