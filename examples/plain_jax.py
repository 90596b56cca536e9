"""Plain JAX at p_g_os: parameters in a dict, a loss function, optax.

The model is a small language model written out by hand: the mean of the last bytes'
embeddings goes through two layers and predicts the next byte of Python's own library.
"""

import corpus
import jax
import measure
import optax

import jfleet

jax.config.update("jax_num_cpu_devices", 8)  # simulated, without accelerators

STEPS, ROWS, LENGTH, WIDTH = 30, 64, 8, 64


def init(key: jax.Array) -> dict:
    embed, hidden, head = jax.random.split(key, 3)
    return {
        "embed": jax.random.normal(embed, (LENGTH, 256, WIDTH)) * 0.3,
        "hidden": jax.random.normal(hidden, (WIDTH, WIDTH)) * WIDTH**-0.5,
        "head": jax.random.normal(head, (WIDTH, 256)) * 0.01,
    }


def loss_fn(params: dict, tokens: jax.Array) -> jax.Array:
    """Predict the last byte of each row of (rows, LENGTH + 1)."""
    x = sum(params["embed"][i, tokens[:, i]] for i in range(LENGTH))
    x = x + jax.nn.gelu(x @ params["hidden"])
    logits = x @ params["head"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, -1])
    return losses.mean()


def main() -> dict:
    mesh = jfleet.init()
    tx = optax.adam(1e-2)

    def new_state(key):
        params = init(key)
        return {"params": params, "opt_state": tx.init(params)}

    key = jax.random.key(0)
    plan = jfleet.plan(jax.eval_shape(new_state, key), "p_g_os", mesh=mesh, tx=tx)
    print(plan)
    state = jfleet.create_sharded(new_state, key, level="p_g_os", mesh=mesh, tx=tx)
    sharded_tx = jfleet.optax_meta.sharding(tx, plan.policy)
    sharded_loss = jfleet.gather_at_use(loss_fn, state["params"])

    @jax.jit
    def train_step(state, tokens):
        params = state["params"]
        loss, grads = jax.value_and_grad(sharded_loss)(params, tokens)
        updates, opt_state = sharded_tx.update(grads, state["opt_state"], params)
        return {
            "params": optax.apply_updates(params, updates),
            "opt_state": opt_state,
        }, loss

    text = corpus.load(None, length=LENGTH)
    held_out = jax.jit(sharded_loss)
    test = text.held_out_rows(1024)
    before = float(held_out(state["params"], test))
    for i in range(STEPS):
        rows = jfleet.shard_batch(text.batch(i, ROWS))
        state, loss = train_step(state, rows)
        if i % 10 == 0:
            print(f"step {i:2}: loss {float(loss):.3f}")
    after = float(held_out(state["params"], test))
    whole = sum(x.nbytes for x in jax.tree.leaves(state))
    mine = measure.device_bytes(state)
    print(f"held-out loss {before:.3f} -> {after:.3f} nats per byte")
    print(f"the state has {whole:,} bytes, {mine:,} of them on each device")
    return {"before": before, "after": after, "bytes": (whole, mine)}


if __name__ == "__main__":
    main()
