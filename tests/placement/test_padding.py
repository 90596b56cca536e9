"""``pad=True``: arrays that nothing divides rest padded, and compute as they are."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jfleet
from tests.models import (
    LEVELS,
    assert_trees_close,
    assert_trees_equal,
    device_bytes,
    make_batch,
    make_nnx,
    make_state,
    shardings_of,
    train,
)


class Odd(nn.Module):
    """16 -> 37 -> 8, with dims that 8 does not divide."""

    @nn.compact
    def __call__(self, x):
        odd = self.param("odd", nn.initializers.lecun_normal(), (37, 41))
        x = nn.tanh(nn.Dense(37)(x)) @ odd
        return nn.Dense(8)(x)


@pytest.fixture(scope="module")
def mesh():
    return jfleet.new_group(range(8))


def batches(steps, mesh=None):
    out = [make_batch(i) for i in range(steps)]
    return out if mesh is None else [jfleet.shard_batch(b, mesh=mesh) for b in out]


def logical(state, like):
    return jax.tree.map(
        lambda x, y: np.asarray(x)[tuple(map(slice, y.shape))], state, like
    )


OPTIMIZERS = {
    "adam": lambda: optax.adam(1e-2),
    "clip_lamb": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.lamb(1e-2)),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "muon": lambda: optax.contrib.muon(1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_values_layout_and_bytes(level, name, mesh):
    plain = make_state(OPTIMIZERS[name](), model=Odd())
    planned = jfleet.plan(plain, level, mesh=mesh, pad=True)
    state = jfleet.group_sharded_parallel(plain, level, mesh=mesh, pad=True)
    assert device_bytes(state.opt_state) == planned.device_bytes("opt_state")
    assert device_bytes(state.params) == planned.device_bytes("params")
    before = shardings_of(state)
    state, loss = train(state, batches(4, mesh), donate=True)
    assert shardings_of(state) == before
    want, want_loss = train(plain, batches(4))
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    assert_trees_close(
        logical(state.params, want.params),
        jax.tree.map(np.asarray, want.params),
        rtol=1e-5,
        atol=1e-6,
    )
    assert_trees_close(
        logical(state.opt_state, want.opt_state),
        jax.tree.map(np.asarray, want.opt_state),
        rtol=1e-5,
        atol=1e-6,
    )


def test_what_is_padded_and_what_not(mesh):
    state = jfleet.group_sharded_parallel(
        make_state(model=Odd()), "p_g_os", mesh=mesh, pad=True
    )
    assert state.params["odd"].shape == (37, 48)
    assert state.params["odd"].sharding.spec == P(None, "data")
    assert state.opt_state[0].mu["odd"].shape == (37, 48)
    assert state.params["Dense_0"]["bias"].shape == (40,)
    assert state.params["Dense_1"]["bias"].shape == (8,)
    assert not np.asarray(state.params["odd"])[:, 41:].any()
    planned = jfleet.plan(make_state(model=Odd()), "p_g_os", mesh=mesh, pad=True)
    [row] = [r for r in planned.of_kind("params") if r.path == "odd"]
    assert (row.shape, row.stored_shape) == ((37, 41), (37, 48))
    assert row.reason == "dim 1 padded from 41 to 48, which 8 divides"
    assert jfleet.Plan.from_json(planned.to_json()) == planned


def test_without_it_nothing_is_padded_and_the_plan_says_so(mesh):
    planned = jfleet.plan(make_state(model=Odd()), "p_g_os", mesh=mesh)
    assert {r.path for r in planned.whole("params")} >= {"odd", "Dense_0/bias"}
    assert all(r.shape == r.stored_shape for r in planned.rows)


def test_min_shard_size_still_holds(mesh):
    state = jfleet.group_sharded_parallel(
        make_state(model=Odd()), "p_g_os", mesh=mesh, pad=True, min_shard_size=1000
    )
    assert state.params["odd"].shape == (37, 48)
    assert state.params["Dense_0"]["bias"].shape == (37,)


@pytest.mark.parametrize("after", LEVELS)
@pytest.mark.parametrize("pad", [False, True])
def test_another_level_cuts_and_pads_anew(after, pad, mesh):
    plain = make_state(model=Odd())
    state = jfleet.group_sharded_parallel(plain, "p_g_os", mesh=mesh, pad=True)
    again = jfleet.group_sharded_parallel(state, after, mesh=mesh, pad=pad)
    fresh = jfleet.group_sharded_parallel(plain, after, mesh=mesh, pad=pad)
    assert shardings_of(again) == shardings_of(fresh)
    assert_trees_equal(jax.tree.leaves(again), jax.tree.leaves(fresh))
    small = jfleet.new_group(range(5))
    other = jfleet.group_sharded_parallel(state, after, mesh=small, pad=pad)
    fresh = jfleet.group_sharded_parallel(plain, after, mesh=small, pad=pad)
    assert_trees_equal(jax.tree.leaves(other), jax.tree.leaves(fresh))


@pytest.mark.parametrize("level", LEVELS)
def test_save_and_load(level, mesh, tmp_path):
    plain = make_state(model=Odd())
    state = jfleet.group_sharded_parallel(plain, level, mesh=mesh, pad=True)
    state, _ = train(state, batches(2, mesh))
    jfleet.save_group_sharded_model(state, tmp_path / "ckpt")
    small = jfleet.new_group(range(5))
    for target in (
        state,
        jfleet.group_sharded_parallel(plain, "p_g_os", mesh=small, pad=True),
        jfleet.group_sharded_parallel(plain, "os", mesh=small),
        plain,
    ):
        loaded = jfleet.load_group_sharded_model(tmp_path / "ckpt", target)
        if target is not plain:
            assert shardings_of(loaded) == shardings_of(target)
        assert_trees_equal(
            logical(loaded.params, plain.params), logical(state.params, plain.params)
        )
        assert_trees_equal(
            logical(loaded.opt_state, plain.opt_state),
            logical(state.opt_state, plain.opt_state),
        )
    train(loaded, batches(1))


def test_nnx_models_keep_their_shapes_and_pad_only_the_state(mesh):
    model, optimizer = make_nnx()
    odd = jnp.ones((37, 41))
    model.odd = type(model.first.kernel)(odd)
    optimizer = type(optimizer)(model, optax.adam(1e-2), wrt=optimizer.wrt)
    model, optimizer = jfleet.group_sharded_parallel(
        (model, optimizer), "p_g_os", mesh=mesh, pad=True
    )
    assert model.odd.get_value().shape == (37, 41)
    assert optimizer.opt_state[0].mu["odd"].get_value().shape == (37, 48)


@pytest.mark.parametrize("bad", [1, "yes", None])
def test_refused_by_type(bad, mesh):
    with pytest.raises(TypeError, match="pad must be"):
        jfleet.plan(make_state(), "os", mesh=mesh, pad=bad)


def test_explicit_axes_are_refused():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with pytest.raises(jfleet.ConfigError, match="Auto axes"):
        jfleet.plan(make_state(), "os", mesh=mesh, pad=True)
