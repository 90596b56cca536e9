"""flax nnx at p_g_os, with a training step of your own under plain nnx.jit.

``(model, optimizer)`` goes in and comes out. ``gather_at_use`` makes the loss gather
each parameter where it is used, instead of all of them at the start.
"""

import jax
import measure
import optax
import tasks
from flax import nnx

import jfleet

jax.config.update("jax_num_cpu_devices", 8)  # simulated, without accelerators

STEPS, ROWS = 30, 96


class Network(nnx.Module):
    """64 pixels in, ten logits out."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(64, 128, rngs=rngs)
        self.norm = nnx.LayerNorm(128, rngs=rngs)
        self.last = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map (batch, 64) to (batch, 10)."""
        return self.last(nnx.relu(self.norm(self.first(x))))


def loss_fn(model: Network, batch: dict) -> jax.Array:
    losses = optax.softmax_cross_entropy_with_integer_labels(
        model(batch["x"]), batch["y"]
    )
    return losses.mean()


def main() -> dict:
    model = Network(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(5e-3), wrt=nnx.Param)

    jfleet.init()
    pair = model, optimizer
    model, optimizer = jfleet.group_sharded_parallel(pair, level="p_g_os")
    sharded_loss = jfleet.gather_at_use(loss_fn, model)

    @nnx.jit
    def train_step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(sharded_loss)(model, batch)
        optimizer.update(model, grads)
        return loss

    train, test = tasks.load_images()
    held_out = nnx.jit(sharded_loss)
    before = float(held_out(model, test))
    for i in range(STEPS):
        rows = jfleet.shard_batch(tasks.rows_of(train, i, ROWS))
        loss = train_step(model, optimizer, rows)
        if i % 10 == 0:
            print(f"step {i:2}: loss {float(loss):.3f}")
    after = float(held_out(model, test))

    arrays = nnx.state((model, optimizer))
    whole = sum(x.nbytes for x in jax.tree.leaves(arrays))
    mine = measure.device_bytes(arrays)
    print(f"held-out loss {before:.3f} -> {after:.3f}")
    print(f"first.kernel lies as {model.first.kernel[...].sharding.spec}")
    print(f"the state has {whole:,} bytes, {mine:,} of them on each device")
    return {"before": before, "after": after, "bytes": (whole, mine)}


if __name__ == "__main__":
    main()
