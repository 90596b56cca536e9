"""Every optax optimizer, at every level: right values, planned bytes, stable layout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import jfleet
from jfleet.optax_meta.sharding import sharding
from tests.helpers import count_compilations
from tests.placement import optax_table as table

LEVELS = ("os", "os_g", "p_g_os")


def make_params(name):
    rng = np.random.default_rng(0)
    params = {
        "emb": rng.normal(size=(17, 16)),
        "head": rng.normal(size=(16, 24)),
        "bias": rng.normal(size=(7,)),
        "scale": rng.normal(size=()),
    }
    if name in table.NO_SCALARS:
        params["scale"] = rng.normal(size=(1,))
    if name == "split_real_and_imaginary":
        params["head"] = params["head"] + 1j * rng.normal(size=(16, 24))
    return jax.tree.map(jnp.asarray, params)


def make_batches(steps):
    rng = np.random.default_rng(1)
    return [rng.normal(size=(16, 17)) for _ in range(steps)]


def loss_fn(params, rows):
    hidden = jnp.tanh(rows @ params["emb"])
    out = hidden @ params["head"]
    cost = jnp.mean(jnp.abs(out - 0.5) ** 2) + jnp.mean((params["bias"] - 1.0) ** 2)
    return cost + jnp.mean(hidden) * jnp.sum(params["scale"]) * 0.1


def make_step(tx, name):
    tx = optax.with_extra_args_support(tx)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, rows):
        params, opt_state = state
        if name in table.PER_EXAMPLE:
            one = jax.grad(lambda p, row: loss_fn(p, row[None]))
            grads = jax.vmap(one, (None, 0))(params, rows)
            value = loss_fn(params, rows)
        else:
            value, grads = jax.value_and_grad(loss_fn)(params, rows)
            grads = jax.tree.map(jnp.conj, grads)
        extra = {}
        if name in table.VALUE | table.VALUE_FN:
            extra["value"] = value
        if name in table.VALUE_FN:
            extra |= {"grad": grads, "value_fn": lambda p: loss_fn(p, rows)}
        if name in table.OBJECTIVE:
            extra["obj_fn"] = lambda p: loss_fn(p, rows)
        updates, opt_state = tx.update(grads, opt_state, params, **extra)
        return (optax.apply_updates(params, updates), opt_state), value

    return step


def run(tx, state, name, steps, mesh=None):
    """Return the last state and value, and the compilations after the first step."""
    step = make_step(tx, name)
    batches = make_batches(steps)
    if mesh is not None:
        batches = [jfleet.shard_batch(rows, mesh=mesh) for rows in batches]
    state, value = step(state, batches[0])
    with count_compilations() as count:
        for rows in batches[1:]:
            state, value = jax.block_until_ready(step(state, rows))
    return state, value, count.compilations


def device_bytes(tree):
    device = jax.devices()[0]
    total = 0
    for leaf in jax.tree.leaves(tree):
        data = (
            jax.random.key_data(leaf)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else leaf
        )
        total += sum(
            s.data.nbytes for s in data.addressable_shards if s.device == device
        )
    return total


def check(name, steps):
    mesh = jfleet.new_group(range(8))
    with jax.enable_x64(True):
        tx = table.TABLE[name]()
        params = make_params(name)
        start = (params, tx.init(params))
        copy = jax.tree.map(jnp.copy, start)
        (want, want_opt), want_value, plain_again = run(tx, copy, name, steps)
        for level in LEVELS:
            planned = jfleet.plan(start, level, mesh=mesh)
            state = jfleet.group_sharded_parallel(start, level, mesh=mesh)
            assert device_bytes(state[0]) == planned.device_bytes("params")
            assert device_bytes(state[1]) == planned.device_bytes("opt_state")
            before = jax.tree.map(lambda x: x.sharding, state)
            pinned = sharding(tx, planned.policy)
            state, value, again = run(pinned, state, name, steps, mesh)
            # Some states of optax change type by themselves in the first step.
            assert again <= plain_again, f"{level}: compiled again after step one"
            assert jax.tree.map(lambda x: x.sharding, state) == before, level
            np.testing.assert_allclose(value, want_value, rtol=1e-9)
            for got, ref in zip(
                jax.tree.leaves(state), jax.tree.leaves((want, want_opt)), strict=True
            ):
                if jnp.issubdtype(got.dtype, jax.dtypes.prng_key):
                    got, ref = jax.random.key_data(got), jax.random.key_data(ref)
                assert got.dtype == ref.dtype
                np.testing.assert_allclose(
                    np.asarray(got), np.asarray(ref), rtol=1e-9, atol=1e-12
                )


@pytest.mark.parametrize("name", table.TABLE)
def test_sharded_equals_unsharded(name):
    check(name, steps=5)


def test_only_line_searches_change_their_state_type():
    """Keeps the allowance of ``check`` honest."""
    changing = set()
    for name in ("adam", "backtracking", "zoom", "lbfgs_linesearch"):
        params = make_params(name)
        tx = table.TABLE[name]()
        state = jax.tree.map(jnp.copy, (params, tx.init(params)))
        if run(tx, state, name, 3)[2]:
            changing.add(name)
    assert changing == {"backtracking", "zoom", "lbfgs_linesearch"}


@pytest.mark.slow
@pytest.mark.parametrize("name", table.TABLE)
def test_sharded_equals_unsharded_over_100_steps(name):
    check(name, steps=100)


@pytest.mark.parametrize("module", [optax, optax.contrib], ids=lambda m: m.__name__)
def test_no_export_of_optax_is_forgotten(module):
    missing = [n for n in table.exported_names(module) if not table.is_covered(n)]
    assert not missing, f"add to tests/placement/optax_table.py: {missing}"
