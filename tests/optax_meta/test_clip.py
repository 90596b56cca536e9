import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jfleet import optax_meta as meta
from tests.optax_meta.simulate import assert_bits, assert_close, train


def one_update(tx, grads):
    updates, state = tx.update(grads, tx.init(grads), grads)
    return updates, state


def test_b10_every_element_counts_once():
    """Inside shard_map: w is split over 8 devices, b is whole on each."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    grads = {"w": jnp.full((16, 4), 0.5), "b": jnp.ones(3)}
    tx = optax.chain(
        meta.clip_by_global_norm(1.0, axis_name="d", replicated="b"), optax.sgd(1.0)
    )
    specs = {"w": P("d"), "b": P()}

    def step(grads):
        updates, state = tx.update(grads, tx.init(grads), grads)
        return updates, state[0].norm

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(specs,), out_specs=(specs, P()))
    updates, norm = jax.jit(mapped)(grads)
    assert_close(norm, 4.358899)
    assert_close(updates["w"], np.full((16, 4), -0.114708), rtol=5e-6)
    assert_close(updates["b"], np.full(3, -0.229416), rtol=5e-6)


def test_b12_frozen_leaves_do_not_count():
    grads = {"w": jnp.full((16, 4), 0.5), "f": jnp.full((8, 8), 10.0)}
    excluding = meta.clip_by_global_norm(1.0, exclude="f")
    updates, state = one_update(excluding, grads)
    assert float(state.norm) == 4.0
    assert_bits(updates, {"w": jnp.full((16, 4), 0.125), "f": grads["f"]})
    masked = optax.masked(meta.clip_by_global_norm(1.0), {"w": True, "f": False})
    updates, state = one_update(masked, grads)
    assert float(state.inner_state.norm) == 4.0
    assert_bits(updates["w"], jnp.full((16, 4), 0.125))


@pytest.mark.parametrize("limit", [0.0, lambda count: jnp.where(count < 2, 1.0, 0.0)])
def test_b13_a_limit_of_zero_gives_zero(limit):
    tx = optax.chain(meta.clip_by_global_norm(limit), optax.adam(0.1))
    w = jnp.ones((16, 4))
    for params, _ in train(tx, w, [jnp.zeros_like(w)] * 4):
        assert_bits(params, w)
    updates, _ = one_update(meta.clip_by_global_norm(0.0), jnp.ones(3))
    assert_bits(updates, jnp.zeros(3))


def test_b15_the_factor_is_applied_in_float32():
    grads = jnp.full((1024, 1024), 6e4, jnp.float16)
    updates, state = one_update(meta.clip_by_global_norm(1.0), grads)
    assert updates.dtype == jnp.float16
    assert_close(state.norm, 6e4 * 1024, rtol=1e-3)
    assert_close(updates[:1], np.full((1, 1024), 1 / 1024), rtol=1e-3)


@pytest.mark.parametrize("size", [1e-30, 1e-25, 1e-6, 1.0, 1e19, 1e30])
def test_norms_neither_overflow_nor_underflow(size):
    grads = {"a": jnp.full((3, 4), size), "b": jnp.zeros(5), "c": jnp.full(4, -size)}
    assert_close(meta.global_norm(grads), 4 * size, rtol=1e-6)
    updates, _ = one_update(meta.clip_by_global_norm(size), grads)
    assert_close(updates["a"], np.full((3, 4), size / 4), rtol=1e-6)


def test_norm_of_nothing_is_zero():
    assert float(meta.global_norm({})) == 0.0
    assert float(meta.global_norm({"n": jnp.int32(3)})) == 0.0
    updates, _ = one_update(meta.clip_by_global_norm(1.0), {"n": jnp.int32(3)})
    assert int(updates["n"]) == 3


@pytest.mark.parametrize(
    "rule",
    [
        "bias$",
        ["zzz", "bias$"],
        [("block", "bias")],
        lambda path: path == "block/bias",
        {"block": {"bias": True, "kernel": False}},
    ],
    ids=["regex", "regexes", "path", "function", "tree"],
)
def test_rules_on_paths(rule):
    grads = {"block": {"bias": jnp.full(2, 100.0), "kernel": jnp.full(4, 0.5)}}
    assert float(meta.global_norm(grads, exclude=rule)) == 1.0


def test_a_tree_that_does_not_fit_is_named():
    with pytest.raises(ValueError, match="exclude must be a rule on paths or a tree"):
        meta.global_norm({"a": jnp.ones(2)}, exclude={"b": True})
