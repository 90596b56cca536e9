"""dgc: send only the largest entries of a gradient, keep the rest for later.

After a few dense steps only 1 entry in 100 is sent, with its index. What is not sent is
not lost: it waits on its device, with momentum, until it is among the largest.
"""

import jax
import optax
import tasks

import jfleet

jax.config.update("jax_num_cpu_devices", 8)  # simulated, without accelerators

STEPS, ROWS, DENSE_STEPS = 60, 128, 10


def train(share: float) -> dict:
    task = tasks.digits()
    strategy = jfleet.DistributedStrategy(dgc=share < 1)
    strategy.dgc_configs = {
        "sparsity": [1 - share],
        "rampup_begin_step": DENSE_STEPS,
        "min_size": 512,  # biases are not worth it
    }
    # dgc is momentum SGD itself, so it must know the momentum of the optimizer.
    base = jfleet.optimizer(optax.sgd, learning_rate=0.1, momentum=0.9)
    opt = jfleet.distributed_optimizer(base, strategy)

    step = opt.minimize(task.loss)
    state = opt.create(task.params)
    held_out = jax.jit(task.loss)
    before = float(held_out(state.params, task.held_out))
    sent = jfleet.explain(step, state, task.batch(0, ROWS)).sent
    # Both phases are in the program: a dense one, and one of values and indices.
    sparse = [s for s in sent if s.kind == "all-gather"]
    for i in range(STEPS):
        state, _ = step(state, task.batch(i, ROWS))
    return {
        "before": before,
        "after": float(held_out(state.params, task.held_out)),
        "bytes": sum(s.wire_bytes for s in sparse or sent),
    }


def main() -> dict:
    jfleet.init()
    results = {}
    for share in (1.0, 0.01):
        r = results[share] = train(share)
        print(
            f"{share:4.0%} of the entries: loss {r['before']:.4f} -> {r['after']:.4f},"
            f" {r['bytes']:,.0f} bytes per device and step"
        )
    return results


if __name__ == "__main__":
    main()
