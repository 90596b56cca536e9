"""adaptive_localsgd: the interval between two averages follows the loss and the rate.

While the loss is high it pays to meet rarely, near the end it pays to meet often:
k = ceil(sqrt(rate_0 / rate * loss / loss_0) * k_0), between 1 and max_k_steps.
"""

import jax
import optax
import tasks

import jfleet

jax.config.update("jax_num_cpu_devices", 8)  # simulated, without accelerators

STEPS, ROWS = 40, 256


def main() -> dict:
    jfleet.init()
    task = tasks.digits()
    strategy = jfleet.DistributedStrategy(adaptive_localsgd=True)
    strategy.adaptive_localsgd_configs = {"init_k_steps": 8, "begin_step": 1}
    # The rule reads the rate, so the optimizer must be one that shows it.
    base = jfleet.optimizer(optax.sgd, learning_rate=0.3, momentum=0.9)
    opt = jfleet.distributed_optimizer(base, strategy)

    step = opt.minimize(task.loss)
    state = opt.create(task.params)
    held_out = jax.jit(task.loss)
    before = float(held_out(opt.params(state), task.held_out))
    meetings = []
    for i in range(STEPS):
        state, metrics = step(state, task.batch(i, ROWS))
        if metrics.synchronised:
            meetings.append(i + 1)
            print(f"step {i + 1:2}: averaged, loss {float(metrics.loss):.4f}")
    after = float(held_out(opt.params(state), task.held_out))
    print(f"held-out loss {before:.4f} -> {after:.4f}, {len(meetings)} averages")
    return {"before": before, "after": after, "meetings": meetings}


if __name__ == "__main__":
    main()
