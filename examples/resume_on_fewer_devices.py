"""Save on all devices, go on with half of them at another level.

A checkpoint knows nothing of devices: build the state for the mesh and the level that
you have now, and load into it. The values are the same bit by bit, and the losses that
follow are those of a run that was never interrupted.
"""

import tempfile

import jax
import measure
import numpy as np
import optax
import tasks

import jfleet

jax.config.update("jax_num_cpu_devices", 8)  # simulated, without accelerators

STEPS, ROWS = 10, 128


def build(num_devices: int, level: str) -> tuple:
    """Return (step, a fresh state) for so many devices and a level."""
    task = tasks.digits()
    mesh = jfleet.new_group(range(num_devices))
    strategy = jfleet.DistributedStrategy(sharding=True)
    strategy.sharding_configs = {"level": level}
    opt = jfleet.distributed_optimizer(optax.adam(5e-3), strategy, mesh=mesh)
    return opt.minimize(task.loss), opt.create(task.params)


def train(step, state, first: int) -> tuple:
    losses = []
    for i in range(first, first + STEPS):
        state, metrics = step(state, tasks.digits().batch(i, ROWS))
        losses.append(float(metrics.loss))
    return state, losses


def report(text: str, state, losses: list[float]) -> None:
    mine = measure.device_bytes((state.params, state.opt_state))
    print(
        f"{text}: loss {losses[0]:.4f} -> {losses[-1]:.4f}, {mine:,} bytes per device"
    )


def main() -> dict:
    number = jax.device_count()
    fewer = max(1, number // 2)
    step, state = build(number, "os_g")
    state, early = train(step, state, 0)
    report(f"{number} devices, os_g", state, early)
    with tempfile.TemporaryDirectory() as folder:
        jfleet.save_group_sharded_model(state, f"{folder}/checkpoint")
        other_step, fresh = build(fewer, "p_g_os")
        resumed = jfleet.load_group_sharded_model(f"{folder}/checkpoint", fresh)
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(resumed), strict=True)
    same = all(np.array_equal(a, b) for a, b in pairs)
    print(
        f"loaded at step {int(resumed.step)}, the same bits: {'yes' if same else 'NO'}"
    )

    resumed, later = train(other_step, resumed, STEPS)
    report(f"{fewer} devices, p_g_os", resumed, later)
    state, uninterrupted = train(step, state, STEPS)
    report("never interrupted", state, uninterrupted)
    return {
        "before": early[0],
        "after": later[-1],
        "same": same,
        "losses": (later, uninterrupted),
    }


if __name__ == "__main__":
    main()
