"""sharding: the three levels of ZeRO, by bytes per device and what is exchanged.

The level changes where arrays live, never their values: the losses agree.
"""

import collections

import jax
import measure
import optax
import tasks

import jfleet

jax.config.update("jax_num_cpu_devices", 8)  # simulated, without accelerators

STEPS, ROWS = 10, 128


def train(level: str | None) -> dict:
    task = tasks.digits()
    strategy = jfleet.DistributedStrategy(sharding=level is not None)
    if level is not None:
        strategy.sharding_configs = {"level": level}
    opt = jfleet.distributed_optimizer(optax.adam(5e-3), strategy)

    step = opt.minimize(task.loss)
    state = opt.create(task.params)
    exchanged = collections.Counter()
    for s in jfleet.explain(step, state, task.batch(0, ROWS)).sent:
        exchanged[s.kind] += s.bytes
    losses = []
    for i in range(STEPS):
        state, metrics = step(state, task.batch(i, ROWS))
        losses.append(float(metrics.loss))
    return {
        "losses": losses,
        "params": measure.device_bytes(state.params),
        "optimizer": measure.device_bytes(state.opt_state),
        "exchanged": dict(exchanged),
    }


def main() -> dict:
    jfleet.init()
    results = {}
    for level in (None, "os", "os_g", "p_g_os"):
        r = results[level] = train(level)
        exchanged = ", ".join(f"{k} {n:,}" for k, n in sorted(r["exchanged"].items()))
        print(
            f"{level or 'none':6}: loss {r['losses'][0]:.5f} -> {r['losses'][-1]:.5f};"
            f" bytes per device: parameters {r['params']:,}, optimizer"
            f" {r['optimizer']:,}\n        exchanged: {exchanged}"
        )
    return results


if __name__ == "__main__":
    main()
