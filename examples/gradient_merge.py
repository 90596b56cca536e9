"""gradient_merge: one optimizer step from several micro batches.

The batch is the whole window. ``sync="last"`` adds up on every device and reduces once
a window; ``sync="each"`` reduces every micro batch into an accumulator that is split.
"""

import jax
import optax
import tasks

import jfleet

jax.config.update("jax_num_cpu_devices", 8)  # simulated, without accelerators

K_STEPS, ROWS = 4, 128


def train(sync: str | None, steps: int = 10) -> dict:
    task = tasks.digits()
    strategy = jfleet.DistributedStrategy(sharding=True)
    strategy.sharding_configs = {"level": "os_g"}
    if sync is not None:
        strategy.gradient_merge = True
        strategy.gradient_merge_configs = {"k_steps": K_STEPS, "sync": sync}
    opt = jfleet.distributed_optimizer(optax.adam(3e-3), strategy)

    step = opt.minimize(task.loss)
    state = opt.create(task.params)
    report = jfleet.explain(step, state, task.batch(0, ROWS))
    reduced = sum(s.bytes for s in report.sent if s.kind == "reduce-scatter")
    reduced += sum(s.bytes for s in report.sent if s.kind == "all-reduce")
    whole = sum(x.nbytes for x in jax.tree.leaves(state.params))
    losses = []
    for i in range(steps):
        state, metrics = step(state, task.batch(i, ROWS))
        losses.append(float(metrics.loss))
    return {
        "losses": losses,
        "rounds": reduced / whole,
        "sent": report.wire_bytes,
    }


def main() -> dict:
    jfleet.init()
    names = {
        None: f"one batch of {ROWS} rows",
        "last": f"{K_STEPS} micro batches, sync='last'",
        "each": f"{K_STEPS} micro batches, sync='each'",
    }
    results = {}
    for sync, name in names.items():
        r = results[sync] = train(sync)
        print(
            f"{name:29}: loss {r['losses'][0]:.6f} -> {r['losses'][-1]:.6f}; a step"
            f" reduces {r['rounds']:.1f} x the gradients and sends"
            f" {r['sent'] / 2**10:,.0f} KiB per device"
        )
    return results


if __name__ == "__main__":
    main()
