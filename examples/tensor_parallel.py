"""tensor_parallel: single layers split over a mesh axis, and ZeRO over the other.

The first layer is split by columns and the second by rows, so that the devices of one
``model`` group meet once, after the second. Rules on parameter paths say so.
"""

import jax
import measure
import optax
import tasks

import jfleet

jax.config.update("jax_num_cpu_devices", 8)  # simulated, without accelerators

STEPS, ROWS = 20, 128
RULES = [
    ("Dense_0/kernel", [None, "model"]),
    ("Dense_0/bias", ["model"]),
    ("Dense_1/kernel", ["model", None]),
]


def train(mesh: jax.sharding.Mesh, *, split: bool) -> dict:
    task = tasks.digits()
    strategy = jfleet.DistributedStrategy(sharding=True)
    strategy.sharding_configs = {"level": "os_g", "axis": "data"}
    if split:
        strategy.tensor_parallel = True
        strategy.tensor_parallel_configs = {"rules": RULES}
    opt = jfleet.distributed_optimizer(
        optax.adam(5e-3), strategy, mesh=mesh, params=task.params
    )

    step = opt.minimize(task.loss)
    state = opt.create(task.params)
    held_out = jax.jit(task.loss)
    before = float(held_out(state.params, task.held_out))
    for i in range(STEPS):
        state, _ = step(state, task.batch(i, ROWS))
    return {
        "before": before,
        "after": float(held_out(state.params, task.held_out)),
        "params": measure.device_bytes(state.params),
        "optimizer": measure.device_bytes(state.opt_state),
        "specs": {
            jax.tree_util.keystr(path, simple=True, separator="/"): leaf.sharding.spec
            for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)
        },
    }


def main() -> dict:
    mesh = jfleet.init({"data": 2, "model": -1})
    results = {}
    for name, split in (("whole layers", False), ("split layers", True)):
        r = results[split] = train(mesh, split=split)
        print(
            f"{name}: loss {r['before']:.5f} -> {r['after']:.5f}; bytes per device:"
            f" parameters {r['params']:,}, optimizer {r['optimizer']:,}"
        )
    for path, spec in results[True]["specs"].items():
        print(f"  {path:14} {spec}")
    return results


if __name__ == "__main__":
    main()
