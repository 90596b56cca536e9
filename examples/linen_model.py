"""flax linen at p_g_os, with a training step of your own under plain jax.jit.

A small decoder learns the text of Python's own library, byte by byte. The model and
the step are those of one device; only the lines that are marked know of jfleet.
"""

import corpus
import jax
import jax.numpy as jnp
import measure
import optax
from decoder import Decoder, next_byte_losses
from flax.training.train_state import TrainState

import jfleet

jax.config.update("jax_num_cpu_devices", 8)  # simulated, without accelerators

STEPS, ROWS, LENGTH = 25, 32, 32


def new_state(key: jax.Array) -> TrainState:
    model = Decoder(width=32, num_layers=2)
    params = model.init(key, jnp.zeros((1, LENGTH), jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-2))


@jax.jit
def train_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
    def loss_fn(params):
        return next_byte_losses(state.apply_fn, params, tokens).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


@jax.jit
def held_out(state: TrainState, tokens: jax.Array) -> jax.Array:
    return next_byte_losses(state.apply_fn, state.params, tokens).mean()


def main() -> dict:
    jfleet.init()  # jfleet: all devices
    state = jfleet.create_sharded(
        new_state, jax.random.key(0), level="p_g_os"
    )  # jfleet
    text = corpus.load(None, length=LENGTH)
    test = jfleet.shard_batch(text.held_out_rows(64))  # jfleet
    before = float(held_out(state, test))
    for i in range(STEPS):
        rows = jfleet.shard_batch(text.batch(i, ROWS))  # jfleet
        state, loss = train_step(state, rows)
        if i % 10 == 0:
            print(f"step {i:2}: loss {float(loss):.3f}")
    after = float(held_out(state, test))

    arrays = state.params, state.opt_state
    whole = sum(x.nbytes for x in jax.tree.leaves(arrays))
    mine = measure.device_bytes(arrays)
    print(f"held-out loss {before:.3f} -> {after:.3f} nats per byte")
    print(f"the state has {whole:,} bytes, {mine:,} of them on each device")
    return {"before": before, "after": after, "bytes": (whole, mine)}


if __name__ == "__main__":
    main()
