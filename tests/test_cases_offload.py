"""Reports on optimizer state in host memory, replayed at every level.

The number in a name is that of the report in the project's list of cases.
"""

import jax
import numpy as np
import optax
import pytest

import jfleet
from jfleet import optax_meta
from jfleet._errors import ConfigError
from tests.helpers import count_compilations
from tests.models import LEVELS, assert_trees_equal, make_batch, make_state, train_step
from tests.train_step import oracle

F32 = np.float32


def assert_on_host(opt_state):
    """Arrays rest in host memory; scalars stay on the device, at all times."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state):
        kind = "pinned_host" if leaf.ndim else "device"
        assert leaf.sharding.memory_kind == kind, jax.tree_util.keystr(path)


def optimizer_on(mesh, level, names, offload, base=None, **configs):
    strategy = oracle.strategy_of(names, level, **configs)
    strategy.sharding_configs = {"level": level, "offload": offload}
    base = oracle.base_of(names) if base is None else base
    return jfleet.distributed_optimizer(base, strategy, mesh=mesh)


def run(opt, batches):
    step, state = opt.minimize(oracle.loss_fn), opt.create(oracle.params(F32))
    for rows in batches:
        state, metrics = step(state, rows)
        jax.block_until_ready(metrics)
    return step, state, metrics


@pytest.mark.parametrize("level", LEVELS)
def test_b93_an_overflow_in_the_first_step_is_skipped(level):
    mesh = oracle.mesh_of(data=4)
    good = [oracle.batch(i, 32, F32) for i in range(3)]
    bad = {**good[0], "x": np.full_like(good[0]["x"], np.inf)}
    amp = {"amp_configs": {"dtype": "float32", "decr_every_n_nan_or_inf": 1}}
    configs = {**amp, "base": optax.adam(0.1)}
    kept = optimizer_on(mesh, level, ("amp",), False, **configs)
    moved = optimizer_on(mesh, level, ("amp",), True, **configs)
    step, state, metrics = run(moved, [bad])
    assert metrics.skipped_steps == 1
    assert_trees_equal(state.params, oracle.params(F32))
    assert_on_host(state.opt_state)
    moments = [x for x in jax.tree.leaves(state.opt_state.inner) if x.ndim]
    assert moments
    assert not any(np.any(m) for m in moments)
    for rows in good:
        state, metrics = step(state, rows)
        jax.block_until_ready(metrics)
        assert_on_host(state.opt_state)
    assert metrics.loss_scale < oracle.SCALE
    _, expected, _ = run(kept, [bad, *good])
    assert_trees_equal(state.params, expected.params)
    assert_trees_equal(state.opt_state, expected.opt_state)


@pytest.mark.parametrize("level", LEVELS)
def test_b95_memory_kinds_never_change(level, tmp_path):
    mesh = jfleet.new_group(range(8))
    start = make_state()
    state = jfleet.group_sharded_parallel(start, level, mesh=mesh, offload=True)
    step = jax.jit(train_step, donate_argnums=0)
    assert_on_host(state.opt_state)
    for number in range(4):
        state, loss = step(state, jfleet.shard_batch(make_batch(number), mesh=mesh))
        jax.block_until_ready(loss)
        assert_on_host(state.opt_state)
    jfleet.save_group_sharded_model(state, tmp_path / "saved")
    fresh = jfleet.group_sharded_parallel(start, level, mesh=mesh, offload=True)
    state = jfleet.load_group_sharded_model(tmp_path / "saved", fresh)
    batches = [jfleet.shard_batch(make_batch(i), mesh=mesh) for i in (4, 5)]
    with count_compilations() as count:
        for batch in batches:
            assert_on_host(state.opt_state)
            state, loss = step(state, batch)
            jax.block_until_ready(loss)
    assert count.compilations == 0
    assert_on_host(state.opt_state)


def _masked():
    def mask(params):
        return {key: key == "w" for key in params}

    return optax.adamw(0.1, mask=mask)


COMBINATIONS = {
    "adam": ((), optax.adam(0.1)),
    "adamw_mask": ((), _masked()),
    "lamb": (("lamb",), None),
    "lars": (("lars",), None),
    "adafactor": ((), optax.adafactor(0.1, min_dim_size_to_factor=4)),
    "clip_adam": ((), optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1))),
    "clip_switch": (("clip",), None),
    "gradient_merge": (("gradient_merge",), None),
    "recompute": (("recompute",), None),
    "fp16_allreduce": (("fp16_allreduce",), None),
}
REFUSED = ("localsgd", "adaptive_localsgd", "dgc")
QUICK = {"adam": LEVELS, "gradient_merge": ("p_g_os",), "lamb": ("os_g",)}
"""Levels of the everyday run; the slow one has every combination at every level."""


def combinations():
    for name in COMBINATIONS:
        for level in LEVELS:
            quick = level in QUICK.get(name, ())
            yield pytest.param(name, level, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("name", "level"), list(combinations()))
def test_b96_every_combination_runs(name, level):
    names, base = COMBINATIONS[name]
    mesh = oracle.mesh_of(data=4)
    batches = [oracle.batch(i, 64, F32) for i in range(3)]
    moved = optimizer_on(mesh, level, names, True, base=base)
    kept = optimizer_on(mesh, level, names, False, base=base)
    _, state, _ = run(moved, batches)
    assert_on_host(state.opt_state)
    assert all(x.sharding.memory_kind == "device" for x in state.params.values())
    _, expected, _ = run(kept, batches)
    for got, want in zip(
        jax.tree.leaves((state.params, state.opt_state)),
        jax.tree.leaves((expected.params, expected.opt_state)),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", REFUSED)
def test_b96_the_others_are_refused_by_name(name):
    mesh = oracle.mesh_of(replica=2, shard=2)
    opt = optimizer_on(mesh, "os", (name,), True)
    with pytest.raises(ConfigError, match=r"'offload'.*replica"):
        opt.minimize(oracle.loss_fn)


def test_b96_gradient_merge_as_a_transformation_runs_too():
    """In a step of one's own, where the window is part of the state."""
    mesh = jfleet.new_group(range(4))
    tx = optax_meta.gradient_merge(optax.adam(1e-2), 2)
    results = []
    for offload in (True, False):
        state = jfleet.group_sharded_parallel(
            make_state(tx=tx), "os_g", mesh=mesh, offload=offload
        )
        step = jax.jit(train_step, donate_argnums=0)
        for number in range(4):
            state, loss = step(state, jfleet.shard_batch(make_batch(number), mesh=mesh))
            jax.block_until_ready(loss)
        results.append(state.params)
    assert_trees_equal(*results)
