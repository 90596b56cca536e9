"""Tiny models and states for tests."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState

LEVELS = ("os", "os_g", "p_g_os")


class MLP(nn.Module):
    """16 -> 32 -> 8."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(8)(nn.relu(nn.Dense(32)(x)))


def make_state(tx=None, *, model=None, cls=TrainState, **fields):
    model = MLP() if model is None else model
    params = model.init(jax.random.key(0), jnp.ones((1, 16)))["params"]
    tx = optax.adam(1e-2) if tx is None else tx
    return cls.create(apply_fn=model.apply, params=params, tx=tx, **fields)


def make_batch(seed=0, rows=64):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 16)).astype(np.float32)
    y = rng.normal(size=(rows, 8)).astype(np.float32)
    return {"x": x, "y": y}


def train_step(state, batch):
    """The step that a user writes; it knows nothing of jfleet."""

    def loss_fn(params):
        out = state.apply_fn({"params": params}, batch["x"])
        return jnp.mean((out - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def train(state, batches, *, donate=False, step=train_step):
    jitted = jax.jit(step, donate_argnums=0 if donate else ())
    loss = None
    for batch in batches:
        state, loss = jitted(state, batch)
        # Many queued steps can starve the collectives of simulated devices.
        jax.block_until_ready(loss)
    return state, loss


class NnxMLP(nnx.Module):
    """16 -> 32 -> 8, with batch norm and dropout when asked for."""

    def __init__(self, rngs, *, noisy=False):
        self.first = nnx.Linear(16, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs) if noisy else None
        self.drop = nnx.Dropout(0.5, rngs=rngs) if noisy else None
        self.last = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        if self.norm is not None:
            x = self.drop(self.norm(x))
        return self.last(nnx.relu(x))


def make_nnx(tx=None, **options):
    model = NnxMLP(nnx.Rngs(0), **options)
    tx = optax.adam(1e-2) if tx is None else tx
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def nnx_loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def nnx_step(loss_fn=nnx_loss):
    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss

    return step


@functools.cache
def reference(steps, tx_factory=None):
    """The unsharded run that sharded runs are compared with."""
    state = make_state(tx_factory() if tx_factory else None)
    return train(state, [make_batch(i) for i in range(steps)])


def assert_trees_close(got, want, rtol=1e-5, atol=1e-7):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=rtol, atol=atol)


def assert_trees_equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def shardings_of(tree):
    """The sharding of every leaf, by path."""
    return {
        jax.tree_util.keystr(k): x.sharding
        for k, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def device_bytes(tree, device=None):
    """Bytes of a tree on one device."""
    device = jax.devices()[0] if device is None else device
    return sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
        if shard.device == device
    )
