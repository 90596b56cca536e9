r"""LAMB: a trust ratio per layer around Adam.

.. math::

    r = \frac{\hat m}{\sqrt{\hat v} + \epsilon} + \lambda w, \qquad
    w \leftarrow w - \eta \frac{\lVert w \rVert}{\lVert r \rVert} r

The moments are Adam's, in float32 or wider, with bias correction. The ratio is 1 where
a norm is 0, and it is not clamped. Beyond ``optax.lamb`` there are exclusions, norms of
split and of stacked tensors, the ratios in the state, and a bias correction without
cancellation: ``1 - 0.999**t`` has four digits in float32.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jfleet._types import AxisName, PyTree
from jfleet.optax_meta import _common as common
from jfleet.optax_meta._layers import Layers, layers_of


class LambState(NamedTuple):
    """State of :func:`lamb`."""

    count: jax.Array  # steps so far; shape=(), dtype=int32
    mu: PyTree  # first moment, like the parameters, float32 or wider
    nu: PyTree  # second moment, like the parameters, float32 or wider
    trust: PyTree  # ratio of each layer in the last step; shape=() or (layers, 1, ..)


def lamb(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    *,
    weight_decay: float = 0.01,
    exclude: common.Rule = (),
    trust_on_excluded: bool = False,
    stacked: common.Rule = (),
    axis_name: AxisName | None = None,
    replicated: common.Rule = (),
) -> optax.GradientTransformationExtraArgs:
    """Adam whose step has the size of each layer's weights.

    It replaces the Adam base and takes ``b1``, ``b2`` and ``eps`` from it.

    Args:
      learning_rate: a number or a schedule.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      weight_decay: decay of the weights, inside the ratio.
      exclude: rule on paths of parameters without decay (biases, norm scales).
      trust_on_excluded: whether excluded parameters keep the ratio; by default theirs
        is 1.
      stacked: rule on paths of leaves whose first dim stacks the layers of a scan;
        they have one norm per layer.
      axis_name: inside ``shard_map``: the axis over which parameters are split. Norms
        are always those of whole tensors.
      replicated: rule on paths of leaves that every peer of ``axis_name`` holds whole.

    Raises:
      ConfigError: if a number is out of range.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> params = {"kernel": jnp.full((4, 4), 2.0), "bias": jnp.zeros(4)}
      >>> grads = {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}
      >>> tx = lamb(0.1, weight_decay=0.0)
      >>> updates, state = tx.update(grads, tx.init(params), params)
      >>> print({k: f"{float(v):.4f}" for k, v in state.trust.items()})
      {'bias': '1.0000', 'kernel': '2.0000'}

    References:
      You et al., `Large Batch Optimization for Deep Learning: Training BERT in 76
      minutes <https://arxiv.org/abs/1904.00962>`_, 2020
    """
    common.check_rate("learning_rate", learning_rate)
    common.check_number("b1", b1, low=0, high=1, open_high=True)
    common.check_number("b2", b2, low=0, high=1, open_high=True)
    common.check_number("eps", eps, low=0)
    common.check_number("weight_decay", weight_decay, low=0)
    layers = Layers(exclude, trust_on_excluded, stacked, axis_name, replicated)

    def init(params: PyTree) -> LambState:
        zeros = jax.tree.map(lambda p: jnp.zeros_like(common.wide(p)), params)
        return LambState(
            count=jnp.zeros((), jnp.int32),
            mu=zeros,
            nu=jax.tree.map(jnp.copy, zeros),
            trust=layers_of(params, layers).ratio_like(),
        )

    def update(updates, state, params=None, **extra_args):
        del extra_args
        common.need_params(params, "lamb")
        view = layers_of(params, layers)
        grads = view.unflatten(view.wide_leaves(updates))
        mu = optax.tree.update_moment(grads, state.mu, b1, 1)
        nu = optax.tree.update_moment_per_elem_norm(grads, state.nu, b2, 2)
        mu, nu = common.cast_like(mu, grads), common.cast_like(nu, grads)
        count = common.increment(state.count)
        weights = view.wide_leaves(params)
        leaves = (weights, jax.tree.leaves(mu), jax.tree.leaves(nu), view.excluded)
        steps = [_direction(*row, count) for row in zip(*leaves, strict=True)]
        norms = view.norms(weights + steps)
        half = len(weights)
        rows = zip(norms[:half], norms[half:], view.excluded, strict=True)
        trust = [_trust(*row) for row in rows]
        rate = common.rate_at(learning_rate, state.count)
        steps = [
            -jnp.asarray(rate, t.dtype) * t * r
            for t, r in zip(trust, steps, strict=True)
        ]
        return view.updates(steps), LambState(count, mu, nu, view.unflatten(trust))

    def _direction(w, mu, nu, excluded, count):
        mean = mu / _correction(b1, count, mu.dtype)
        square = nu / _correction(b2, count, mu.dtype)
        r = mean / (jnp.sqrt(square) + jnp.asarray(eps, w.dtype))
        return r if excluded else r + jnp.asarray(weight_decay, w.dtype) * w

    def _trust(w_norm, r_norm, excluded):
        if excluded and not trust_on_excluded:
            return jnp.ones_like(w_norm)
        both = (w_norm > 0) & (r_norm > 0)
        return jnp.where(both, w_norm / jnp.where(both, r_norm, 1), 1)

    return optax.GradientTransformationExtraArgs(init, update)


def _correction(decay: Any, count: jax.Array, dtype: Any) -> jax.Array:
    """``1 - decay**count`` without cancellation."""
    if common.is_zero(decay):
        return jnp.ones((), dtype)
    known = isinstance(decay, float)
    log = math.log(decay) if known else jnp.log(jnp.asarray(decay, dtype))
    return -jnp.expm1(count.astype(dtype) * log)
