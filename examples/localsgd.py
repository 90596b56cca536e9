"""localsgd as DiLoCo: two pods train alone and meet every eighth step.

The mesh is ``replica x shard``. Inside a pod the state is split over ``shard`` as
always. Between the pods nothing is sent but, once in K steps, the change of the
parameters; an outer optimizer (Nesterov momentum) takes its mean as a gradient.
"""

import jax
import optax
import tasks

import jfleet

jax.config.update("jax_num_cpu_devices", 8)  # simulated, without accelerators

PODS, K_STEPS, ROWS, STEPS = 2, 8, 128, 33


def strategy(*, local: bool) -> jfleet.DistributedStrategy:
    s = jfleet.DistributedStrategy(sharding=True, sharding_configs={"level": "os_g"})
    if local:
        s.localsgd = True
        s.localsgd_configs = {"k_steps": K_STEPS, "begin_step": 1}
        outer = {"name": "sgd", "learning_rate": 0.7, "momentum": 0.9, "nesterov": True}
        s.localsgd_configs = {"outer": outer}
    return s


def train(mesh: jax.sharding.Mesh, *, local: bool) -> dict:
    task = tasks.digits()
    opt = jfleet.distributed_optimizer(
        optax.adam(2e-3), strategy(local=local), mesh=mesh
    )
    step = opt.minimize(task.loss)
    state = opt.create(task.params)
    held_out = jax.jit(task.loss)
    before = float(held_out(opt.params(state), task.held_out))

    sent = jfleet.explain(step, state, task.batch(0, ROWS)).sent
    between = [s for s in sent if "replica" in s.axes]
    meetings = 0
    for i in range(STEPS):
        state, metrics = step(state, task.batch(i, ROWS))
        meetings += bool(metrics.synchronised)
    return {
        "before": before,
        "after": float(held_out(opt.params(state), task.held_out)),
        "every_step": sum(s.wire_bytes for s in between if not s.in_conditional),
        "meeting": sum(s.wire_bytes for s in between if s.in_conditional),
        "meetings": meetings,
    }


def main() -> dict:
    mesh = jfleet.init({"replica": PODS, "shard": -1})
    results = {}
    for local, name in ((False, "every step"), (True, f"every {K_STEPS} steps")):
        r = results[name] = train(mesh, local=local)
        sent = STEPS * r["every_step"] + r["meetings"] * r["meeting"]
        print(
            f"meeting {name:13}: loss {r['before']:.3f} -> {r['after']:.3f};"
            f" {r['meetings']} meetings, {sent / 2**10:,.0f} KiB"
            f" per device between the pods in {STEPS} steps"
        )
    return results


if __name__ == "__main__":
    main()
