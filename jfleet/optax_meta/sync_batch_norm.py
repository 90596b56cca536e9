r"""Batch statistics over all replicas, weighted by how many items each holds.

.. math:: \mu = \frac{\sum_i n_i \mu_i}{\sum_i n_i}, \qquad
          \sigma^2 = \frac{\sum_i n_i (\sigma_i^2 + (\mu_i - \mu)^2)}{\sum_i n_i}

Where the batch is one global array (plain ``jax.jit``), statistics are global already
and ``axis_name`` stays ``None``. Inside ``shard_map`` and ``vmap`` these functions take
the axis. ``flax.linen.BatchNorm(axis_name=...)`` is the same for equal counts only.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jfleet._errors import ConfigError
from jfleet._types import AxisName
from jfleet.optax_meta import _collectives as collectives
from jfleet.optax_meta import _common as common


class BatchStatistics(NamedTuple):
    """Statistics of a batch, the same on all replicas."""

    mean: jax.Array  # shape of the feature dims, float32 or wider
    var: jax.Array  # biased variance, as mean
    count: jax.Array  # items per feature over all replicas; shape=()


def batch_statistics(
    x: jax.Array,
    *,
    feature_dims: int | Sequence[int] = -1,
    weights: jax.Array | None = None,
    axis_name: AxisName | None = None,
) -> BatchStatistics:
    """Mean and variance of every feature over the batches of all replicas.

    Differentiable. Replicas may hold different numbers of items: mark the padding with
    weight 0.

    Args:
      x: activations.
      feature_dims: the dims that are kept; statistics are over the others.
      weights: weight of each item, broadcastable to the other dims of ``x`` (a mask of
        shape ``(batch,)`` is enough). Default: every item counts once.
      axis_name: axis of the replicas.

    Raises:
      ConfigError: if a dim is out of range or ``weights`` does not fit.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> x = jnp.array([[[1.0], [3.0]], [[8.0], [0.0]]])  # two replicas
      >>> valid = jnp.array([[1, 1], [1, 0]])
      >>> def stats(x, valid):
      ...     return batch_statistics(x, weights=valid, axis_name="replica")
      >>> out = jax.vmap(stats, axis_name="replica")(x, valid)
      >>> print(out.mean[:, 0], out.count)
      [4. 4.] [3. 3.]
    """
    common.check_axis_name(axis_name)
    x = common.wide(x)
    dims = _batch_dims(x, feature_dims)
    weights = _spread(weights, x, dims)

    def total(values):
        return jnp.sum(values * weights, axis=dims, keepdims=True)

    own = jnp.sum(weights)
    sums, count = collectives.psum((total(x), own), axis_name)
    mean = sums / count
    # Centred at the common mean: a second small reduction, but no digits are lost
    # where the mean is large.
    var = collectives.psum(total(jnp.square(x - mean)), axis_name) / count
    return BatchStatistics(jnp.squeeze(mean, dims), jnp.squeeze(var, dims), count)


def _batch_dims(x: jax.Array, feature_dims: int | Sequence[int]) -> tuple[int, ...]:
    kept = (feature_dims,) if isinstance(feature_dims, int) else tuple(feature_dims)
    if not all(-x.ndim <= d < x.ndim for d in kept):
        raise ConfigError(
            f"feature_dims must be dims of x, which has shape {x.shape}, "
            f"got {feature_dims!r}"
        )
    kept = {d % x.ndim for d in kept}
    return tuple(d for d in range(x.ndim) if d not in kept)


def _spread(weights: jax.Array | None, x: jax.Array, dims: tuple[int, ...]):
    """Weights in the shape of x with 1 in the feature dims."""
    shape = tuple(x.shape[d] if d in dims else 1 for d in range(x.ndim))
    if weights is None:
        return jnp.ones(shape, x.dtype)
    weights = jnp.asarray(weights, x.dtype)
    batch_shape = [x.shape[d] for d in dims]
    fits = weights.ndim <= len(dims) and all(
        w in (1, b) for w, b in zip(weights.shape, batch_shape, strict=False)
    )
    if not fits:
        raise ConfigError(
            f"weights must fit the dims of items, {tuple(batch_shape)}, "
            f"got shape {weights.shape}"
        )
    missing = (1,) * (len(dims) - weights.ndim)
    sizes = iter((*weights.shape, *missing))
    spread = weights.reshape([next(sizes) if d in dims else 1 for d in range(x.ndim)])
    return jnp.broadcast_to(spread, shape)


def sync_batch_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    eps: float = 1e-5,
    feature_dims: int | Sequence[int] = -1,
    weights: jax.Array | None = None,
    axis_name: AxisName | None = None,
) -> tuple[jax.Array, BatchStatistics]:
    """Normalise ``x`` with the statistics of all replicas.

    Args:
      x: activations.
      scale: factor per feature, or None for 1.
      bias: offset per feature, or None for 0.
      eps: added to the variance.
      feature_dims: see :func:`batch_statistics`.
      weights: see :func:`batch_statistics`.
      axis_name: axis of the replicas.

    Returns:
      The normalised activations in the dtype of ``x``, and the statistics, for running
      averages.

    Example:
      >>> import jax.numpy as jnp
      >>> y, stats = sync_batch_norm(jnp.array([[1.0], [3.0]]), eps=0.0)
      >>> print(y[:, 0], stats.mean, stats.var)
      [-1.  1.] [2.] [1.]
    """
    common.check_number("eps", eps, low=0)
    stats = batch_statistics(
        x, feature_dims=feature_dims, weights=weights, axis_name=axis_name
    )
    dims = _batch_dims(x, feature_dims)

    def per_feature(value):
        return jnp.expand_dims(common.wide(value), dims)

    y = (common.wide(x) - per_feature(stats.mean)) * jax.lax.rsqrt(
        per_feature(stats.var) + eps
    )
    y = y if scale is None else y * per_feature(scale)
    y = y if bias is None else y + per_feature(bias)
    return y.astype(x.dtype), stats


def running_average(
    old: BatchStatistics, new: BatchStatistics, *, momentum: float = 0.99
) -> BatchStatistics:
    """Move running statistics towards those of a batch; the variance is unbiased.

    Args:
      old: running statistics.
      new: statistics of a batch.
      momentum: how much of the old is kept.
    """
    common.check_number("momentum", momentum, low=0, high=1)
    unbiased = new.var * new.count / jnp.maximum(new.count - 1, 1)
    keep = jnp.asarray(momentum, new.mean.dtype)
    return BatchStatistics(
        mean=keep * old.mean + (1 - keep) * new.mean,
        var=keep * old.var + (1 - keep) * unbiased,
        count=old.count + new.count,
    )
