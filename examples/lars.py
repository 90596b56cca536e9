"""lars: a rate for every layer, so that large batches stand large rates.

With 1,024 rows a step there are few steps, and each should go far. Momentum SGD at such
a rate breaks the layer whose gradient is large beside its weights; LARS scales the
rate of every layer by |weights| / |gradient|.
"""

import jax
import optax
import tasks

import jfleet

jax.config.update("jax_num_cpu_devices", 8)  # simulated, without accelerators

STEPS, ROWS, RATE = 20, 1024, 1.0


def train(*, lars: bool) -> list[float]:
    task = tasks.digits()
    strategy = jfleet.DistributedStrategy(lars=lars)
    strategy.lars_configs = {
        "lars_coeff": 0.01,
        "lars_weight_decay": 1e-4,
        "exclude_from_weight_decay": ["bias"],
    }
    # LARS takes the rate and the momentum from the optimizer that it replaces.
    base = jfleet.optimizer(optax.sgd, learning_rate=RATE, momentum=0.9)
    opt = jfleet.distributed_optimizer(base, strategy)

    step = opt.minimize(task.loss)
    state = opt.create(task.params)
    held_out = jax.jit(task.loss)
    losses = [float(held_out(state.params, task.held_out))]
    for i in range(STEPS):
        state, _ = step(state, task.batch(i, ROWS))
        if (i + 1) % 5 == 0:
            losses.append(float(held_out(state.params, task.held_out)))
    return losses


def main() -> dict:
    jfleet.init()
    print(f"held-out loss every 5 steps of {ROWS} rows, rate {RATE}")
    results = {}
    for name, lars in (("momentum SGD", False), ("LARS", True)):
        losses = results[name] = train(lars=lars)
        print(f"{name:12}: " + " -> ".join(f"{loss:.3f}" for loss in losses))
    return results


if __name__ == "__main__":
    main()
