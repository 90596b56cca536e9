"""Reports about accumulation and numerics, replayed through ``minimize``."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jfleet
from tests.models import assert_trees_close

PLACES = ("none", "os", "os_g", "p_g_os")


@pytest.fixture(scope="module")
def mesh():
    return jfleet.new_group(range(8))


def strategy_for(place, **settings):
    if place != "none":
        settings |= {"sharding": True, "sharding_configs": {"level": place}}
    return jfleet.DistributedStrategy(**settings)


def mlp_params(dtype=np.float32):
    rng = np.random.default_rng(0)
    sizes = [(16, 32), (32, 8)]
    return {
        f"w{i}": (rng.normal(size=s) / 4).astype(dtype) for i, s in enumerate(sizes)
    }


def mlp_loss(params, batch):
    out = jnp.tanh(batch["x"] @ params["w0"]) @ params["w1"]
    return jnp.mean((out - batch["y"]) ** 2)


def rows(seed, count):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(count, 16)).astype(np.float32),
        "y": rng.normal(size=(count, 8)).astype(np.float32),
    }


@pytest.mark.parametrize("place", PLACES)
def test_b30_every_micro_batch_reaches_the_optimizer(place, mesh):
    """Micro batch j of a window is rows j, j + k, ...: the mean is that of all rows."""
    strategy = strategy_for(
        place, gradient_merge=True, gradient_merge_configs={"k_steps": 4}
    )
    opt = jfleet.distributed_optimizer(optax.sgd(0.1), strategy, mesh=mesh)
    step, state = opt.minimize(mlp_loss), opt.create(mlp_params())
    want = last_only = mlp_params()
    for i in range(3):
        batch = rows(i, 64)
        state, _ = step(state, jfleet.shard_batch(batch, mesh=mesh))
        grads = jax.grad(mlp_loss)(want, batch)
        want = jax.tree.map(lambda p, g: p - 0.1 * g, want, grads)
        part = jax.tree.map(lambda x: x[3::4], batch)
        grads = jax.grad(mlp_loss)(last_only, part)
        last_only = jax.tree.map(lambda p, g: p - 0.1 * g, last_only, grads)
    assert_trees_close(state.params, want, rtol=1e-5, atol=1e-7)
    power = max(
        np.max(np.abs(np.asarray(a) - np.asarray(b)))
        for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(last_only), strict=True)
    )
    assert power > 1e-2


WEIGHTED = {
    "plain": {},
    "fp16_allreduce": {"fp16_allreduce": True},
    "localsgd": {"localsgd": True, "localsgd_configs": {"begin_step": 5}},
    "dgc": {"dgc": True, "dgc_configs": {"rampup_begin_step": 5}},
}


@pytest.mark.parametrize("name", WEIGHTED)
def test_b116_a_pair_counts_items_and_not_devices(name, mesh):
    """Device r holds r + 1 valid items of value r.

    Under localsgd every replica takes a step of its own, with the mean of its items,
    and the parameters are averaged: the mean of the means, 3.5, for gradient and loss.
    """
    mean = 3.5 if name == "localsgd" else 168 / 36
    counts = np.arange(8) + 1
    values = np.repeat(np.arange(8.0, dtype=np.float32)[:, None], 8, 1).reshape(64)
    mask = (np.arange(8)[None] < counts[:, None]).astype(np.float32).reshape(64)
    base = jfleet.optimizer(optax.sgd, learning_rate=1.0)
    opt = jfleet.distributed_optimizer(
        base, jfleet.DistributedStrategy(**WEIGHTED[name]), mesh=mesh
    )

    def loss_fn(w, batch):
        total = jnp.sum(batch["mask"] * batch["x"] * w)
        return total, jnp.sum(batch["mask"])

    step, state = opt.minimize(loss_fn), opt.create(jnp.ones(()))
    batch = jfleet.shard_batch({"x": values, "mask": mask}, mesh=mesh)
    state, metrics = step(state, batch)
    tolerance = 2e-3 if name == "fp16_allreduce" else 1e-6
    np.testing.assert_allclose(opt.params(state), 1 - mean, rtol=tolerance)
    np.testing.assert_allclose(metrics.loss, mean, rtol=1e-6)


def tied_params(dtype):
    rng = np.random.default_rng(0)
    sizes = {"ends": (36, 36), "a": (36, 36), "b": (36, 4), "c": (4, 36), "d": (36, 36)}
    return {k: jnp.asarray(rng.normal(size=s) / 6, dtype) for k, s in sizes.items()}


def tied_loss(params, x):
    hidden = x
    for name in ("ends", "a", "b", "c", "d", "ends"):
        hidden = jnp.tanh(hidden @ params[name])
    return jnp.mean((hidden - 0.1) ** 2)


def run_tied(place, k, dtype, mesh, steps):
    strategy = strategy_for(
        place,
        clip=True,
        clip_configs={"max_norm": 0.05},
        gradient_merge=k > 1,
        gradient_merge_configs={"k_steps": k},
    )
    opt = jfleet.distributed_optimizer(optax.adam(1e-3), strategy, mesh=mesh)
    step, state = opt.minimize(tied_loss), opt.create(tied_params(dtype))
    history = []
    for i in range(steps):
        x = np.random.default_rng(i).normal(size=(64, 36)).astype(dtype)
        state, metrics = step(state, jfleet.shard_batch(x, mesh=mesh))
        history.append((float(metrics.loss), float(metrics.grad_norm)))
    return np.array(history)


def run_tied_alone(dtype, steps):
    tx = optax.chain(optax.clip_by_global_norm(0.05), optax.adam(1e-3))
    params = tied_params(dtype)
    opt, history = tx.init(params), []
    for i in range(steps):
        x = np.random.default_rng(i).normal(size=(64, 36)).astype(dtype)
        loss, grads = jax.value_and_grad(tied_loss)(params, x)
        history.append((float(loss), float(optax.tree.norm(grads))))
        updates, opt = tx.update(grads, opt, params)
        params = optax.apply_updates(params, updates)
    return np.array(history)


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize(
    ("dtype", "rtol"),
    [
        pytest.param(np.float32, 1e-5, id="f32"),
        pytest.param(np.float64, 1e-12, id="f64", marks=pytest.mark.slow),
    ],
)
def test_b117_losses_and_norms_agree_at_every_level(k, dtype, rtol, mesh):
    with jax.enable_x64(dtype is np.float64):
        want = run_tied_alone(dtype, 20)
        assert want[:, 1].max() > 0.05  # the clip is active
        for place in PLACES:
            got = run_tied(place, k, dtype, mesh, 20)
            np.testing.assert_allclose(got, want, rtol=rtol, err_msg=place)
