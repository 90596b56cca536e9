import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jfleet import optax_meta as meta
from jfleet._errors import ConfigError
from jfleet.optax_meta.sync_batch_norm import BatchStatistics, running_average
from tests.optax_meta.simulate import AXIS, assert_bits, assert_close, noise

COUNTS = (1, 4, 2, 3)


def batches(shift=0.0):
    """Padded batches of unequal size, and what belongs to them."""
    x = noise((4, 4, 5), 1) + np.arange(4)[:, None, None] + shift
    mask = np.arange(4)[None] < np.array(COUNTS)[:, None]
    return jnp.asarray(x, jnp.float32), jnp.asarray(mask), x[mask]


@pytest.mark.parametrize("shift", [0.0, 1000.0])
def test_statistics_are_weighted_by_count(shift):
    x, mask, valid = batches(shift)
    stats = jax.vmap(
        lambda x, m: meta.batch_statistics(x, weights=m, axis_name=AXIS),
        axis_name=AXIS,
    )(x, mask)
    for r in range(4):
        assert_close(stats.mean[r], valid.mean(0), rtol=1e-6, atol=1e-6)
        assert_close(stats.var[r], valid.var(0), rtol=1e-3 if shift else 1e-5)
    assert stats.count.tolist() == [10.0] * 4


def test_gradients_equal_those_of_the_whole_batch():
    x, mask, valid = batches()

    def whole(x):
        y = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)
        return jnp.sum(jnp.sin(y))

    want = jax.grad(whole)(jnp.asarray(valid, jnp.float32))

    def split(x):
        def of_replica(x, m):
            y, _ = meta.sync_batch_norm(x, weights=m, axis_name=AXIS)
            return jnp.sum(jnp.sin(y) * m[:, None])

        return jax.vmap(of_replica, axis_name=AXIS)(x, mask).sum()

    got = jax.grad(split)(x)
    assert_close(got[mask], want, rtol=1e-4, atol=1e-5)
    assert_bits(got[~mask], jnp.zeros((6, 5)))


def test_without_an_axis_it_is_plain_batch_norm():
    x = jnp.asarray(noise((8, 3, 5), 3), jnp.float32)
    y, stats = meta.sync_batch_norm(x, jnp.full(5, 2.0), jnp.ones(5), eps=1e-3)
    flat = np.float64(x).reshape(-1, 5)
    want = 2 * (np.float64(x) - flat.mean(0)) / np.sqrt(flat.var(0) + 1e-3) + 1
    assert_close(y, want, rtol=1e-5, atol=1e-6)
    assert float(stats.count) == 24.0


def test_channels_may_be_anywhere_and_low_precision_stays():
    x = jnp.asarray(noise((4, 5, 6, 6), 3), jnp.bfloat16)
    y, stats = meta.sync_batch_norm(x, feature_dims=1)
    assert y.dtype == jnp.bfloat16
    assert stats.mean.dtype == jnp.float32
    assert stats.mean.shape == (5,)
    moved, _ = meta.sync_batch_norm(jnp.moveaxis(x, 1, -1))
    assert_bits(y, jnp.moveaxis(moved, -1, 1))


def test_on_eight_devices_as_on_one():
    mesh = jax.make_mesh((8,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.asarray(noise((16, 5), 4), jnp.float32)
    mapped = jax.shard_map(
        lambda x: meta.sync_batch_norm(x, axis_name=AXIS),
        mesh=mesh,
        in_specs=P(AXIS),
        out_specs=(P(AXIS), P()),
    )
    assert_close(jax.jit(mapped)(x), meta.sync_batch_norm(x), rtol=1e-5, atol=1e-6)


def test_running_average_is_unbiased():
    old = BatchStatistics(jnp.zeros(1), jnp.ones(1), jnp.asarray(0.0))
    new = BatchStatistics(jnp.ones(1), jnp.full(1, 3.0), jnp.asarray(4.0))
    out = running_average(old, new, momentum=0.75)
    assert_close((out.mean, out.var, out.count), ([0.25], [1.75], 4.0))


def test_bad_dims_are_named():
    with pytest.raises(ConfigError, match="feature_dims"):
        meta.batch_statistics(jnp.ones((2, 3)), feature_dims=2)
    with pytest.raises(ConfigError, match="weights must fit"):
        meta.batch_statistics(jnp.ones((2, 3)), weights=jnp.ones(3))
