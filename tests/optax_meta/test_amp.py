import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jfleet import optax_meta as meta
from jfleet.optax_meta._rounding import round_to
from tests.optax_meta.simulate import (
    AXIS,
    assert_bits,
    assert_close,
    noise,
    run_replicas,
    train,
)

INF = jnp.inf
W = jnp.zeros((4, 2))


def scaled_grad(g, state):
    return jnp.asarray(g, jnp.float32) * state.scale


def feed(tx, params, grads):
    """Train with gradients that are multiplied by the scale of their step."""
    state, out = tx.init(params), []
    update = jax.jit(tx.update)
    for g in grads:
        g = jax.tree.map(lambda x, s=state: scaled_grad(x, s), g)
        updates, state = update(g, state, params)
        params = optax.apply_updates(params, updates)
        out.append((params, state))
    return out


def test_b19_scale_stays_finite_and_comes_down():
    tx = meta.dynamic_loss_scaling(
        optax.sgd(0.1), incr_every=1, decr_every=1, decr_ratio=0.5
    )
    w = jnp.ones((8, 1))
    state = tx.init(w)

    def step(carry, bad):
        w, state = carry
        g = jnp.where(bad, INF, 2e-6 * w * state.scale)
        updates, state = tx.update(g, state, w)
        return (optax.apply_updates(w, updates), state), state.scale

    bad = jnp.arange(300) == 249
    (w, state), scales = jax.lax.scan(step, (w, state), bad)
    assert np.isfinite(scales).all()
    assert np.isfinite(w).all()
    largest = float(jnp.finfo(jnp.float32).max)
    assert float(scales[248]) * 2 > largest
    assert float(scales[249]) == float(scales[248]) / 2


def test_b20_gradients_are_divided_by_the_scale_of_their_own_loss():
    clip = meta.clip_by_global_norm(1e9)
    tx = meta.dynamic_loss_scaling(
        optax.chain(clip, optax.sgd(1.0)), init_scale=4.0, incr_every=1
    )
    w = jnp.zeros((16, 4))
    out = feed(tx, w, [jnp.ones_like(w)] * 3)
    for i, (params, state) in enumerate(out, start=1):
        assert_bits(params, jnp.full_like(w, -i))
        assert float(state.scale) == 4.0 * 2**i
        assert float(state.inner[0].norm) == 8.0


@pytest.mark.parametrize("leaf", ["a", "b", "z"])
@pytest.mark.parametrize("bad", [INF, -INF, jnp.nan])
def test_b21_one_bad_leaf_leaves_everything_untouched(leaf, bad):
    params = {"a": jnp.ones((16, 4)), "b": jnp.ones((16, 4)), "z": jnp.ones(8)}
    good = jax.tree.map(jnp.ones_like, params)
    broken = {**good, leaf: good[leaf].at[(-1,) * good[leaf].ndim].set(bad)}
    tx = meta.dynamic_loss_scaling(optax.adam(0.1), decr_every=1)
    out = feed(tx, params, [good, broken, good, good])
    assert_bits((out[1][0], out[1][1].inner), (out[0][0], out[0][1].inner))
    assert_close(out[1][1].scale, out[0][1].scale * 0.8)
    assert bool(out[1][1].found_inf)
    assert int(out[3][1].num_skipped) == 1
    without = feed(tx, params, [good] * 3)
    assert_close((out[-1][0], out[-1][1].inner), (without[-1][0], without[-1][1].inner))


def test_b23_skipped_steps_do_not_advance_schedules():
    base = optax.adam(optax.linear_schedule(0.0, 0.8, 8))
    tx = meta.dynamic_loss_scaling(base)
    w = jnp.zeros((16, 4))
    one, bad = jnp.ones_like(w), jnp.full_like(w, INF)
    params, state = feed(tx, w, [one, bad, bad, one, one, one])[-1]
    want, want_state = train(base, w, [one] * 4)[-1]
    assert_close((params, state.inner), (want, want_state))
    assert int(state.inner[0].count) == 4


def test_b24_clipping_sees_true_gradients():
    tx = meta.dynamic_loss_scaling(
        optax.chain(meta.clip_by_global_norm(1.0), optax.sgd(1.0)),
        init_scale=1024.0,
        dynamic=False,
    )
    w = jnp.zeros((16, 4))
    params, _ = feed(tx, w, [jnp.full_like(w, 0.0625)])[-1]
    assert_bits(params, jnp.full_like(w, -0.0625))


@pytest.mark.parametrize(("scale", "scaled"), [(65536.0, 65536e-8), (2.0**-8, 1000.0)])
def test_b26_unscaling_happens_in_float32(scale, scaled):
    """The true gradients, 1e-8 and 256000, do not exist in float16."""
    tx = meta.master_weights(
        meta.dynamic_loss_scaling(optax.sgd(1.0), init_scale=scale, floor=2.0**-9)
    )
    w = jnp.zeros((16, 4), jnp.float16)
    state = tx.init(w)
    g = jnp.full_like(w, scaled)
    _, state = tx.update(g, state, w)
    want = -float(g[0, 0]) / scale
    assert_close(state.master, np.full((16, 4), want), rtol=1e-3)
    assert np.isfinite(state.master).all()


def test_b27_only_consecutive_bad_steps_lower_the_scale():
    tx = meta.dynamic_loss_scaling(
        optax.sgd(0.1),
        init_scale=1024.0,
        decr_every=2,
        decr_ratio=0.5,
        incr_every=3,
        incr_ratio=2.0,
    )
    grads = [INF if c == "B" else 1.0 for c in "BGBBGGGBGG"]
    out = feed(tx, jnp.zeros(()), [jnp.asarray(g) for g in grads])
    scales = [float(s.scale) for _, s in out]
    assert scales == [1024, 1024, 1024, 512, 512, 512, 1024, 1024, 1024, 1024]
    moved = [float(p) for p, _ in out]
    assert moved[0] == 0.0
    assert moved[1] == moved[3]


def test_one_replica_stops_all():
    tx = meta.dynamic_loss_scaling(
        optax.chain(meta.replica_mean(axis_name=AXIS), optax.sgd(1.0)), axis_name=AXIS
    )
    bad = jnp.array([1.0, 1.0, jnp.nan, 1.0])
    params, state = next(run_replicas(tx, jnp.zeros(()), [bad]))
    assert_bits(params, jnp.zeros(4))
    assert state.found_inf.all()


@pytest.mark.parametrize("k", [2, 3])
def test_one_overflow_voids_the_window_of_a_gradient_merge(k):
    tx = meta.gradient_merge(
        meta.dynamic_loss_scaling(optax.adam(0.1), decr_every=1, init_scale=8.0), k
    )
    grads = [jnp.asarray(8.0)] * (k - 1) + [jnp.asarray(INF)]
    out = train(tx, jnp.zeros(()), [*grads, *[jnp.asarray(6.4)] * k])
    params, state = out[k - 1]
    assert float(params) == 0.0
    assert_close(state.inner.scale, 6.4)
    assert float(state.acc) == 0.0
    params, state = out[-1]
    assert_close(params, -0.1, rtol=2e-5)
    assert int(state.inner.inner[0].count) == 1
    assert int(state.inner.num_skipped) == 1


def test_loss_scale_is_found_anywhere():
    tx = optax.chain(
        optax.identity(),
        meta.gradient_merge(meta.dynamic_loss_scaling(optax.sgd(0.1), init_scale=2.0)),
    )
    assert float(meta.loss_scale(tx.init(W))) == 2.0
    assert meta.loss_scale(optax.sgd(0.1).init(W)) == 1.0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("jit", [True, False])
def test_parameters_are_their_masters_rounded(dtype, jit):
    """Steps that cross zero, shrink by many orders, vanish and overflow."""
    w = jnp.asarray(noise((512,), 3), dtype)
    w = w.at[:8].set(jnp.asarray([1, -1, 1e-3, 0, 300, 1, 2, -2], dtype))
    steps = [
        w.astype(jnp.float32) - jnp.asarray(noise((512,), 5)) * 1e-7,
        jnp.asarray(noise((512,), 6)),
        jnp.asarray(noise((512,), 7)) * 1e-4,
        jnp.full(512, 1e-9),
        jnp.asarray(noise((512,), 8)) * 1e4,
    ]
    tx = meta.master_weights(optax.identity())

    def step(w, state, g):
        updates, state = tx.update(g, state, w)
        assert updates.dtype == jnp.float32
        return optax.apply_updates(w, updates), state

    step = jax.jit(step) if jit else step
    state = tx.init(w)
    for g in steps:
        before = state.master
        w, state = step(w, state, -g)
        assert w.dtype == dtype
        assert_bits(w, np.asarray(state.master).astype(w.dtype))
        # The master is the float32 sum up to one rounding of its terms.
        exact = np.float64(before) - np.float64(g)
        size = np.maximum(np.abs(np.float64(before)), np.abs(np.float64(g)))
        assert (np.abs(np.float64(state.master) - exact) <= 2.0**-23 * size).all()


def test_a_target_that_no_update_reaches_moves_the_master_by_one_rounding():
    """From 1.0 to -2**-24: the float32 difference is -1.0, so 0.0 is reached."""
    tx = meta.master_weights(optax.identity())
    w = jnp.ones((), jnp.bfloat16)
    state = tx.init(w)._replace(master=jnp.float32(0.999))
    step = -np.float32(0.999) - np.float32(2.0**-24)
    assert np.float32(0.999) + step == -(2.0**-24)
    updates, state = tx.update(jnp.asarray(step), state, w)
    w = optax.apply_updates(w, updates)
    assert float(w) == float(state.master) == 0.0


def test_b73_small_bfloat16_updates_are_not_lost():
    w = jnp.ones((16, 4), jnp.bfloat16)
    grads = [jnp.ones_like(w)] * 100
    params, state = train(meta.master_weights(optax.adam(1e-3)), w, grads)[-1]
    assert_bits(params, jnp.full_like(w, 0.8984375))
    assert_close(state.master, np.full((16, 4), 0.9), rtol=0, atol=1e-4)
    assert state.inner[0].mu.dtype == state.inner[0].nu.dtype == jnp.float32
    bare, _ = train(optax.adam(1e-3), w, grads)[-1]
    assert_bits(bare, w)  # the test has power: without masters nothing moves


def test_b71_update_dtype_does_not_depend_on_the_kind_of_rate():
    rates = [1e-3, jnp.bfloat16(1e-3), np.float32(1e-3), lambda count: 1e-3]
    w = jnp.ones((16, 4), jnp.bfloat16)
    for rate in rates:
        for tx in (
            meta.master_weights(optax.adam(rate)),
            meta.lars(rate),
            meta.lamb(rate),
            meta.dgc(rate),
        ):
            before = [x.dtype for x in jax.tree.leaves(tx.init(w))]
            params, state = train(tx, w, [jnp.ones_like(w)] * 2)[-1]
            assert params.dtype == jnp.bfloat16
            assert [x.dtype for x in jax.tree.leaves(state)] == before


def test_masters_exist_for_16_bit_leaves_only():
    params = {"low": jnp.ones(2, jnp.float16), "high": jnp.ones(2), "n": jnp.int32(3)}
    state = meta.master_weights(optax.sgd(0.1)).init(params)
    assert state.master["low"].dtype == jnp.float32
    assert state.master["high"] is None
    assert state.master["n"] is None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_equals_a_cast(dtype):
    info = jnp.finfo(dtype)
    tiny = float(info.smallest_subnormal)
    x = np.concatenate(
        [noise((2000,), 1) * 2.0**e for e in (-30, -24, -20, -15, -14, -13, 0, 15, 17)]
        + [np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 65519.9, 65520.0])]
        + ([np.array([tiny, 0.5 * tiny, 1.5 * tiny])] if dtype == "float16" else [])
    ).astype(np.float32)
    with np.errstate(over="ignore"):
        want = x.astype(info.dtype).astype(np.float32)
    assert_bits(jax.jit(lambda x: round_to(x, dtype))(x), want)


def test_cast_loss_computes_low_and_answers_high():
    seen = {}

    def loss(params, x, labels):
        seen.update({k: v.dtype for k, v in params.items()}, x=x.dtype, n=labels.dtype)
        return jnp.sum(params["kernel"] * x) + params["norm"].sum()

    params = {"kernel": jnp.ones(3), "norm": jnp.ones(2)}
    low = meta.cast_loss(loss, "float16", keep_fp32="norm")
    args = (jnp.ones(3), jnp.arange(3))
    value, grads = jax.value_and_grad(low)(params, *args)
    assert value.dtype == jnp.float32
    assert {str(g.dtype) for g in jax.tree.leaves(grads)} == {"float32"}
    assert (seen["kernel"], seen["x"]) == (jnp.float16, jnp.float16)
    assert (seen["norm"], seen["n"]) == (jnp.float32, jnp.int32)
    meta.cast_loss(loss, "float16", cast_inputs=False)(params, *args)
    assert seen["x"] == jnp.float32


def test_float32_is_neutral_for_the_loss():
    def loss(w):
        return jnp.sum(jnp.sin(w) ** 2)

    w = jnp.linspace(0, 1, 7)
    neutral = meta.scale_loss(meta.cast_loss(loss, "float32"))
    assert_bits(jax.grad(neutral, argnums=1)(1.0, w), jax.grad(loss)(w))


def test_scaled_losses_keep_their_weight_and_auxiliary_result():
    def pair(w):
        return (w * 3, jnp.asarray(5.0))

    assert tuple(map(float, meta.scale_loss(pair)(4.0, 1.0))) == (12.0, 5.0)
    with_aux = meta.scale_loss(lambda w: (w.astype(jnp.float16), "aux"), has_aux=True)
    loss, aux = with_aux(2.0**20, jnp.asarray(3.0))
    assert (float(loss), aux) == (3 * 2.0**20, "aux")
    f = meta.scaled_value_and_grad(lambda a, b: (a * b, a), argnums=1, has_aux=True)
    (value, aux), grad = f(8.0, jnp.asarray(3.0), jnp.asarray(2.0))
    assert (float(value), float(aux), float(grad)) == (6.0, 3.0, 24.0)
