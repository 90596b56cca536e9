"""LARS and LAMB: what both must get right about norms of layers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jfleet import optax_meta as meta
from jfleet._errors import ConfigError
from tests.optax_meta.simulate import assert_close, noise, train

FACTORIES = {
    "lars": lambda **k: meta.lars(0.1, **k),
    "lamb": lambda **k: meta.lamb(0.01, **k),
}


def layers():
    return {
        "a": jnp.asarray(10 * noise((16, 8), 1), jnp.float32),
        "b": jnp.asarray(0.1 * noise((16, 8), 2), jnp.float32),
        "z": jnp.zeros(8),
    }


def grads_of(num):
    return [
        jax.tree.map(lambda w, t=t: jnp.asarray(noise(w.shape, t + w.size)), layers())
        for t in range(num)
    ]


def test_b50_lamb_equals_optax_on_whole_layers():
    ours = train(meta.lamb(1e-2, weight_decay=0.01), layers(), grads_of(5))
    theirs = train(optax.lamb(1e-2, weight_decay=0.01), layers(), grads_of(5))
    for step in (0, 4):
        assert_close(ours[step][0], theirs[step][0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FACTORIES)
def test_b50_norms_are_those_of_whole_tensors_when_split(name):
    """Inside shard_map over 8 devices; z is whole on each."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    whole = FACTORIES[name]()
    split = FACTORIES[name](axis_name="d", replicated="z")
    params = layers()
    specs = {"a": P("d"), "b": P(None, "d"), "z": P()}

    def two_steps(params, *grads):
        state = split.init(params)
        for g in grads:
            updates, state = split.update(g, state, params)
            params = optax.apply_updates(params, updates)
        return params

    mapped = jax.shard_map(two_steps, mesh=mesh, in_specs=(specs,) * 3, out_specs=specs)
    grads = grads_of(2)
    want = train(whole, params, grads)[-1][0]
    got = jax.jit(mapped)(params, *grads)
    assert_close(got, want, rtol=2e-6, atol=1e-7)
    # The test has power: ratios of shards are something else.
    local = jax.vmap(lambda p, g: whole.update(g, whole.init(p), p)[0])
    blocks = [t["a"].reshape(8, 2, 8) for t in (params, grads[0])]
    update = local(*blocks).reshape(16, 8)
    right = whole.update(grads[0], whole.init(params), params)[0]["a"]
    assert float(jnp.max(jnp.abs(update / right - 1))) > 0.05


@pytest.mark.parametrize("name", FACTORIES)
def test_stacked_layers_have_one_norm_each(name):
    stacked = {"block": {"kernel": jnp.stack([layers()["a"], layers()["b"]])}}
    grads = [{"block": {"kernel": jnp.stack([g["a"], g["b"]])}} for g in grads_of(3)]
    got, state = train(FACTORIES[name](stacked="kernel"), stacked, grads)[-1]
    alone, _ = train(FACTORIES[name](), layers(), grads_of(3))[-1]
    want = jnp.stack([alone["a"], alone["b"]])
    assert_close(got["block"]["kernel"], want, rtol=1e-6, atol=1e-7)
    field = state.local_lr if name == "lars" else state.trust
    assert field["block"]["kernel"].shape == (2, 1, 1)
    with pytest.raises(ConfigError, match="stacked must name leaves"):
        FACTORIES[name](stacked="s").init({"s": jnp.ones(())})


@pytest.mark.parametrize(("decay", "factors"), [(0.0, (1, 1)), (0.5, (1.0, 0.6))])
def test_b51_lars_without_decay_keeps_the_ratio(decay, factors):
    w = jnp.array([1.0, -1.0] * 8)
    tx = meta.lars(0.1, 0.0, coeff=1e-3, weight_decay=decay)
    updates, _ = tx.update(jnp.full(16, 2.0), tx.init(w), w)
    # |g| = 8, |w| = 4: the rate is 1e-4 * 4 / (8 + 4 decay), the gradient 2 +- decay.
    assert_close(updates[0], -1e-4 * factors[0], rtol=1e-5)
    assert_close(updates[1], -1e-4 * factors[1], rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_b52_zero_norms_give_a_ratio_of_one(dtype):
    params = {
        "bias": jnp.zeros(8, dtype),
        "scale": jnp.zeros(16, dtype),
        "kernel": jnp.ones((16, 8), dtype),
    }
    signs = jnp.where(jnp.arange(8) % 2 == 0, 1, -1).astype(dtype)
    grads = {
        "bias": signs,
        "scale": jnp.tile(signs, 2),
        "kernel": jnp.zeros((16, 8), dtype),
    }
    for factory in (meta.lars, meta.lamb):
        tx = meta.master_weights(factory(1e-2, weight_decay=0.0))
        (first, state), (second, _) = train(tx, params, [grads] * 2)
        master = state.master["bias"] if dtype == "float16" else first["bias"]
        assert_close(master, -1e-2 * np.float64(signs), rtol=1e-4)
        assert_close(second["kernel"], params["kernel"], rtol=0)
        for leaf in jax.tree.leaves(second):
            assert np.isfinite(np.asarray(leaf, np.float32)).all()


def test_b52_zero_norms_as_in_optax():
    params = {"bias": jnp.zeros(8), "kernel": jnp.ones((16, 8))}
    grads = [{"bias": jnp.ones(8), "kernel": jnp.zeros((16, 8))}] * 2
    ours = train(meta.lamb(1e-2, weight_decay=0.0), params, grads)
    theirs = train(optax.lamb(1e-2), params, grads)
    assert_close(ours[-1][0], theirs[-1][0], rtol=1e-5)


def test_b55_lars_scales_the_gradient_and_not_the_velocity():
    w = jnp.ones(16)
    tx = meta.lars(0.1, 0.9, coeff=1e-3, weight_decay=0.0)
    params, state, moves = w, tx.init(w), []
    for g in (2.0, 0.02):
        updates, state = tx.update(jnp.full(16, g), state, params)
        params = optax.apply_updates(params, updates)
        moves.append(float(updates[0]))
    assert_close(moves, [-1.0e-4, -1.8999e-4], rtol=1e-4)
    decaying = meta.lars(0.1, 0.9, coeff=1e-3, weight_decay=0.01)
    updates, _ = decaying.update(jnp.full(16, 1e-9), decaying.init(w), w)
    assert (updates < 0).all()


@pytest.mark.parametrize("size", [1e-30, 1e-25, 1.0, 1e25])
def test_b56_tiny_gradients_keep_their_norm(size):
    w = jnp.ones(16)
    tx = meta.lars(0.1, 0.0, coeff=1e-3, weight_decay=0.0)
    updates, _ = tx.update(jnp.full(16, size), tx.init(w), w)
    assert_close(updates, np.full(16, -1e-4), rtol=1e-4)


def test_b56_tiny_gradients_behind_a_loss_scale():
    w = jnp.ones(16)
    tx = meta.dynamic_loss_scaling(
        meta.lars(0.1, 0.0, coeff=1e-3, weight_decay=0.0), init_scale=2.0**16
    )
    updates, _ = tx.update(jnp.full(16, 1e-25 * 2.0**16), tx.init(w), w)
    assert_close(updates, np.full(16, -1e-4), rtol=1e-4)


def test_lars_differs_from_the_norm_of_the_sum():
    """The documented difference from optax: first step with w parallel to g equal."""
    w = {"w": jnp.ones(4)}
    g = [{"w": jnp.full(4, 0.5)}]
    ours = train(meta.lars(0.1, coeff=1e-3, weight_decay=0.1), w, g)[-1][0]
    args = {"weight_decay": 0.1, "trust_coefficient": 1e-3}
    theirs = train(optax.lars(0.1, **args), w, g)[-1][0]
    assert_close(ours, theirs)
    g = [{"w": jnp.array([0.5, -0.5, 0.5, -0.5])}]
    ours = train(meta.lars(0.1, coeff=1e-3, weight_decay=0.1), w, g)[-1][0]
    theirs = train(optax.lars(0.1, **args), w, g)[-1][0]
    assert float(jnp.max(jnp.abs(ours["w"] - theirs["w"]))) > 1e-6


def test_lars_nesterov_against_numpy():
    w, v = np.float64(noise((5,), 1)), np.zeros(5)
    grads = [noise((5,), t) for t in range(3)]
    tx = meta.lars(0.1, 0.9, coeff=0.01, weight_decay=0.1, nesterov=True)
    params, _ = train(tx, jnp.asarray(w, jnp.float32), [jnp.asarray(g) for g in grads])[
        -1
    ]
    for g in grads:
        norms = np.linalg.norm(w), np.linalg.norm(g)
        step = 0.1 * 0.01 * norms[0] / (norms[1] + 0.1 * norms[0]) * (g + 0.1 * w)
        v = 0.9 * v + step
        w = w - (0.9 * v + step)
    assert_close(params, w, rtol=1e-5)
