import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jfleet import optax_meta as meta
from jfleet._errors import ConfigError
from tests.optax_meta.simulate import (
    AXIS,
    assert_bits,
    assert_close,
    collectives,
    noise,
    run_replicas,
    train,
)

PARAMS = {"w": jnp.asarray(noise((4, 3), 1), jnp.float32), "b": jnp.ones(3)}


def grads_of(num, seed=0):
    return [
        {"w": jnp.asarray(noise((4, 3), t + seed)), "b": jnp.asarray(noise((3,), t))}
        for t in range(num)
    ]


def mean(trees):
    return jax.tree.map(lambda *x: sum(x) / len(x), *trees)


def test_b16_clip_acts_once_on_the_merged_gradient():
    tx = meta.gradient_merge(
        optax.chain(meta.clip_by_global_norm(1.0), optax.sgd(1.0)), 4
    )
    grads = [jnp.array([10.0, 0.0])] + [jnp.array([0.0, 0.1])] * 3
    params, _ = train(tx, jnp.zeros(2), grads)[-1]
    assert_close(params, np.array([-0.999550, -0.029987]), rtol=2e-5)


@pytest.mark.parametrize("sync", ["last", "each"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_b29_all_micro_batches_enter_the_mean_over_replicas(sync, dtype):
    tx = meta.gradient_merge(optax.sgd(1.0), 2, sync=sync, axis_name=AXIS)

    def grads(r, t, params):
        return jnp.full(8, (r + 10 * t) / 8, dtype)

    runs = run_replicas(tx, jnp.zeros(8, dtype), grads, num=8)
    params, _ = next(itertools.islice(runs, 1, None))
    assert_close(params, np.full((8, 8), -1.0625))


def test_b31_schedule_moves_once_per_window():
    tx = meta.gradient_merge(optax.sgd(optax.linear_schedule(0.0, 0.8, 8)), 4)
    out = train(tx, jnp.zeros((16, 4)), [jnp.ones((16, 4))] * 16)
    seen = [float(p[0, 0]) for p, _ in out]
    want = [0.0] * 7 + [-0.1] * 4 + [-0.3] * 4 + [-0.6]
    assert_close(seen, want, rtol=0, atol=1e-6)
    assert int(out[-1][1].num_steps) == 4


def test_b34_micro_batches_count_by_weight_or_equally():
    grads = [jnp.asarray(1.0), jnp.asarray(5.0)]  # means over 6 and 2 valid items
    plain = train(meta.gradient_merge(optax.sgd(1.0), 2), jnp.zeros(()), grads)
    assert float(plain[-1][0]) == -3.0
    tx = meta.gradient_merge(optax.sgd(1.0), 2)
    params = jnp.zeros(())
    state = tx.init(params)
    for g, weight in zip(grads, [6, 2], strict=True):
        updates, state = tx.update(g, state, params, weight=weight)
    assert float(updates) == -2.0


@pytest.mark.parametrize("sync", ["last", "each"])
def test_b34_totals_are_divided_by_all_weights(sync):
    """Unequal counts on replicas and micro batches; one of them is empty."""
    totals = np.array([[6.0, 1.0], [10.0, 0.0], [3.0, 4.0]])  # micro step, replica
    weights = np.array([[6.0, 2.0], [2.0, 0.0], [1.0, 5.0]])
    tx = meta.gradient_merge(
        optax.sgd(1.0), 3, gradients="total", sync=sync, axis_name=AXIS
    )
    runs = run_replicas(
        tx,
        jnp.zeros(()),
        lambda r, t, p: jnp.asarray(totals)[t, r],
        extra=lambda r, t: {"weight": jnp.asarray(weights)[t, r]},
        num=2,
    )
    params, _ = next(itertools.islice(runs, 2, None))
    assert_close(params, np.full(2, -totals.sum() / weights.sum()))


def test_an_empty_micro_batch_may_have_a_gradient_of_nan():
    tx = meta.gradient_merge(optax.sgd(1.0), 2)
    state = tx.init(jnp.zeros(()))
    _, state = tx.update(jnp.asarray(jnp.nan), state, jnp.zeros(()), weight=0)
    updates, _ = tx.update(jnp.asarray(4.0), state, jnp.zeros(()), weight=2)
    assert float(updates) == -4.0


@pytest.mark.parametrize(
    "base",
    [
        optax.sgd(0.1, momentum=0.9),
        meta.lars(0.1, stacked="w"),
        meta.lamb(0.1),
        meta.dgc(0.1, sparsity=(0.5,), min_size=8),
    ],
    ids=["momentum", "lars", "lamb", "dgc"],
)
def test_b35_k_micro_batches_are_one_large_batch(base):
    """Buffers and counters of the base move once per window."""
    micro = grads_of(12)
    large = [mean(micro[4 * i : 4 * i + 4]) for i in range(3)]
    params, state = train(meta.gradient_merge(base, 4), PARAMS, micro)[-1]
    want_params, want_state = train(base, PARAMS, large)[-1]
    assert_close(params, want_params, rtol=1e-5, atol=1e-7)
    assert_close(state.inner, want_state, rtol=1e-5, atol=1e-6)
    assert int(state.num_steps) == 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_b36_half_precision_gradients_are_summed_in_float32(dtype):
    tx = meta.gradient_merge(meta.master_weights(optax.sgd(2.0**-10)), 1024, avg=False)
    params = jnp.ones((2,), dtype)
    state = tx.init(params)
    assert state.acc.dtype == jnp.float32

    def micro(carry, _):
        params, state = carry
        updates, state = tx.update(jnp.ones((2,), dtype), state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, state), _ = jax.lax.scan(micro, (params, state), length=1024)
    assert_close(state.inner.master, np.zeros(2), rtol=0, atol=1e-6)
    assert_close(params, np.zeros(2))


@pytest.mark.parametrize("avg", [True, False])
def test_equals_multi_steps_of_optax(avg):
    base = optax.adam(optax.linear_schedule(0.1, 0.2, 4))
    scale = 1 if avg else 3
    other = optax.MultiSteps(optax.chain(optax.scale(scale), base), 3)
    ours = train(meta.gradient_merge(base, 3, avg), PARAMS, grads_of(9))
    theirs = train(other.gradient_transformation(), PARAMS, grads_of(9))
    for (a, _), (b, _) in zip(ours, theirs, strict=True):
        assert_close(a, b, rtol=2e-5, atol=1e-7)


def test_nothing_moves_inside_a_window():
    tx = meta.gradient_merge(optax.adam(0.1), 3)
    out = train(tx, PARAMS, grads_of(3))
    first = tx.init(PARAMS)
    for params, state in out[:2]:
        assert_bits((params, state.inner), (PARAMS, first.inner))
    assert int(out[2][1].inner[0].count) == 1
    assert_bits(out[2][1].acc, jax.tree.map(jnp.zeros_like, out[2][1].acc))


def test_flush_averages_what_was_seen():
    tx = meta.gradient_merge(optax.sgd(1.0), 4)
    update = jax.jit(tx.update)
    state = tx.init(jnp.zeros(()))
    for flush, g in [(False, 3.0), (True, 5.0)]:
        updates, state = update(jnp.asarray(g), state, jnp.zeros(()), flush=flush)
    assert float(updates) == -4.0
    assert int(state.count) == 0
    # Without another micro batch: what is left; and nothing if nothing is left.
    _, state = update(jnp.asarray(7.0), state, jnp.zeros(()))
    for want in (-7.0, 0.0):
        updates, state = tx.update(None, state, jnp.zeros(()), flush=True)
        assert float(updates) == want
    assert int(state.num_steps) == 2


def test_flush_over_replicas_is_the_mean_of_all_micro_batches():
    tx = meta.gradient_merge(optax.sgd(1.0), 4, axis_name=AXIS)
    runs = run_replicas(
        tx,
        jnp.zeros(()),
        lambda r, t, p: r + 10.0 * t,
        extra=lambda r, t: {"flush": t == 2},
        num=4,
    )
    params, _ = next(itertools.islice(runs, 2, None))
    assert_close(params, np.full(4, -11.5))


def test_sum_over_replicas():
    for k, want in [(1, -6.0), (2, -6.0)]:
        tx = meta.gradient_merge(optax.sgd(1.0), k, reduce="sum", axis_name=AXIS)
        runs = run_replicas(tx, jnp.zeros(()), lambda r, t, p: r + 0.0, num=4)
        params, _ = next(itertools.islice(runs, k - 1, None))
        assert_close(params, np.full(4, want))


def test_b111_b112_no_result_scales_with_the_number_of_devices():
    for num in (2, 8):
        for avg, want in [(True, -31.5), (False, -63.0)]:
            tx = meta.gradient_merge(optax.sgd(1.0), 2, avg, axis_name=AXIS)
            rows = jnp.arange(64.0).reshape(num, -1)
            runs = run_replicas(
                tx,
                jnp.zeros(()),
                lambda r, t, p, rows=rows: rows[r].mean(),
                num=num,
            )
            params, _ = next(itertools.islice(runs, 1, None))
            assert_close(params, np.full(num, want))


def test_reductions_and_the_inner_step_are_inside_the_condition():
    tx = meta.gradient_merge(
        optax.chain(meta.replica_mean(axis_name=AXIS), optax.sgd(0.1)), 3
    )
    seen = collectives(tx.update, PARAMS, tx.init(PARAMS), PARAMS)
    assert seen
    assert all("cond" in inside for _, inside, _ in seen)


def test_bad_calls_are_named():
    tx = meta.gradient_merge(optax.sgd(0.1), 2, gradients="total")
    with pytest.raises(ConfigError, match="weight must be passed"):
        tx.update(jnp.zeros(()), tx.init(jnp.zeros(())), jnp.zeros(()))
    with pytest.raises(ConfigError, match="flush=True"):
        tx.update(None, tx.init(jnp.zeros(())), jnp.zeros(()))
