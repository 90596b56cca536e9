"""Equinox at p_g_os: a module is a pytree, so its arrays are the parameters.

Needs ``pip install equinox``. jfleet knows nothing of it and need not.
"""

import equinox as eqx
import jax
import measure
import optax
import tasks

import jfleet

jax.config.update("jax_num_cpu_devices", 8)  # simulated, without accelerators

STEPS, ROWS = 30, 96


def loss_fn(model: eqx.Module, batch: dict) -> jax.Array:
    logits = jax.vmap(model)(batch["x"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return losses.mean()


def main() -> dict:
    mesh = jfleet.init()
    model = eqx.nn.MLP(64, 10, width_size=64, depth=2, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    tx = optax.adamw(5e-3)
    state = {"params": params, "opt_state": tx.init(params)}

    plan = jfleet.plan(state, "p_g_os", mesh=mesh, tx=tx)
    state = jfleet.group_sharded_parallel(state, "p_g_os", mesh=mesh, tx=tx)
    tx = jfleet.optax_meta.sharding(tx, plan.policy)  # keeps the layout in your step
    loss_of = jfleet.gather_at_use(
        lambda params, batch: loss_fn(eqx.combine(params, static), batch),
        state["params"],
    )

    @jax.jit
    def train_step(state, batch):
        loss, grads = jax.value_and_grad(loss_of)(state["params"], batch)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = eqx.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, loss

    train, test = tasks.load_images()
    held_out = jax.jit(loss_of)
    before = float(held_out(state["params"], test))
    for i in range(STEPS):
        rows = jfleet.shard_batch(tasks.rows_of(train, i, ROWS))
        state, loss = train_step(state, rows)
        if i % 10 == 0:
            print(f"step {i:2}: loss {float(loss):.3f}")
    after = float(held_out(state["params"], test))

    whole = sum(x.nbytes for x in jax.tree.leaves(state))
    mine = measure.device_bytes(state)
    print(f"held-out loss {before:.3f} -> {after:.3f}")
    print(f"the state has {whole:,} bytes, {mine:,} of them on each device")
    return {"before": before, "after": after, "bytes": (whole, mine)}


if __name__ == "__main__":
    main()
