import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jfleet import optax_meta as meta
from tests.optax_meta.simulate import (
    AXIS,
    assert_bits,
    assert_close,
    collectives,
    noise,
    run_replicas,
)

W = jnp.zeros((16, 4))


def one_step(grads, base=None, **options):
    """First step from zeros with one gradient per replica; (params, state)."""
    tx = meta.fp16_allreduce(base or optax.sgd(1.0), axis_name=AXIS, **options)
    grads = jnp.broadcast_to(jnp.asarray(grads)[:, None, None], (len(grads), 16, 4))
    return next(run_replicas(tx, W, [grads]))


def test_b74_scale_then_cast_neither_overflows_nor_sums_to_infinity():
    params, _ = one_step([10000.0] * 8)
    assert_close(params, np.full((8, 16, 4), -10000.0), rtol=1e-3)
    params, state = one_step([60000.0, 60000.0, -60000.0, -60000.0] * 2)
    assert_bits(params, jnp.zeros((8, 16, 4)))
    assert not state.found_inf.any()


def test_b74_the_smallest_magnitude_that_is_kept():
    """2e-7 / 8 is under half the smallest float16; a scale keeps it."""
    params, _ = one_step([2e-7] * 8)
    assert_bits(params, jnp.zeros((8, 16, 4)))
    for order in ("scale_then_cast", "cast_then_scale", "sum_then_scale"):
        params, _ = one_step([2e-7] * 8, scale=True, order=order)
        assert_close(params, np.full((8, 16, 4), -2e-7), rtol=1e-3)


@pytest.mark.parametrize(
    "order", ["scale_then_cast", "cast_then_scale", "sum_then_scale"]
)
@pytest.mark.parametrize("size", [1e-30, 1e-3, 7e4, 1e30])
def test_a_scale_avoids_overflow_and_underflow(order, size):
    params, state = one_step([size] * 3 + [-size], scale=True, order=order)
    assert_close(params, np.full((4, 16, 4), -size / 2), rtol=2e-3)
    assert not state.found_inf.any()


def test_an_overflow_skips_the_step_everywhere():
    params, state = one_step([1e6, 1.0], optax.adam(0.1))
    assert_bits(params, jnp.zeros((2, 16, 4)))
    assert state.found_inf.all()
    assert state.num_skipped.tolist() == [1, 1]
    assert_bits(state.inner[0].count, jnp.zeros(2, jnp.int32))
    params, _ = one_step([1e6, 1.0], on_overflow="pass")
    assert np.isinf(params).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "order", ["scale_then_cast", "cast_then_scale", "sum_then_scale"]
)
def test_error_feedback_loses_nothing_in_the_long_run(dtype, order):
    """A gradient that rounds to a neighbour: the sum of updates is right anyway.

    Only one replica has a gradient, so that the sum on the wire is exact.
    """
    own = jnp.asarray(noise((1, 16, 4), 1) * 0.3 + 0.1, jnp.float32)
    grads = [jnp.concatenate([own, jnp.zeros((3, 16, 4))])] * 40
    total = {}
    for feedback in (False, True):
        tx = meta.fp16_allreduce(
            optax.sgd(1.0),
            dtype=dtype,
            order=order,
            error_feedback=feedback,
            axis_name=AXIS,
        )
        runs = run_replicas(tx, W, grads)
        params, _ = next(itertools.islice(runs, 39, None))
        exact = -40 * np.float64(grads[0]).mean(0)
        total[feedback] = np.abs(np.float64(params[0]) - exact).max()
    assert total[True] < 0.3 * total[False]


def test_error_feedback_survives_an_overflow():
    tx = meta.fp16_allreduce(optax.sgd(1.0), error_feedback=True, axis_name=AXIS)
    grads = [jnp.full((2, 16, 4), 0.1), jnp.full((2, 16, 4), 1e9)]
    (_, first), (_, second) = itertools.islice(run_replicas(tx, W, grads), 2)
    assert float(jnp.max(jnp.abs(first.residual))) > 0
    assert_bits(second.residual, first.residual)


def test_other_dtypes_are_averaged_as_they_are():
    params = {"low": jnp.zeros(3, jnp.bfloat16), "full": jnp.zeros(3)}
    tx = meta.fp16_allreduce(optax.identity(), axis_name=AXIS)
    seen = collectives(tx.update, params, tx.init(params), params)
    assert sorted(operand for _, _, [operand] in seen) == [
        ("float16", (3,)),
        ("float32", (3,)),
    ]
    with jax.enable_x64(True):
        wide = jnp.zeros(3, jnp.float64)
        updates, _ = tx_alone().update(wide + 0.1, tx_alone().init(wide), wide)
        assert updates.dtype == jnp.float64
        assert float(updates[0]) == float(np.float16(0.1))


def tx_alone():
    return meta.fp16_allreduce(optax.identity())


def test_the_inner_optimizer_sees_float32():
    _, state = one_step([0.5, 0.25], optax.trace(0.9))
    assert state.inner.trace.dtype == jnp.float32


def test_on_eight_devices_the_reduction_is_16_bits_wide():
    mesh = jax.make_mesh((8,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    tx = meta.fp16_allreduce(optax.sgd(1.0), axis_name=AXIS)

    def step(g):
        updates, state = tx.update(g[0], tx.init(W), W)
        return updates, state.found_inf

    mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P(AXIS), out_specs=P()))
    grads = jnp.asarray(noise((8, 16, 4), 2), jnp.float32)
    updates, found = mapped(grads)
    assert not bool(found)
    assert_close(updates, -np.float64(grads).mean(0), rtol=0, atol=1e-3)
    text = mapped.lower(grads).as_text()
    reduces = [line for line in text.splitlines() if "-> tensor<16x4xf16>" in line]
    assert reduces
