r"""LARS: a learning rate per layer around momentum SGD.

.. math::

    \eta_l &= \eta \, c \, \frac{\lVert w \rVert}
             {\lVert g \rVert + \lambda \lVert w \rVert + \epsilon} \\
    v &\leftarrow m v + \eta_l (g + \lambda w), \qquad w \leftarrow w - v

The denominator is the sum of the norms, as in the paper. ``optax.lars`` takes the norm
of the sum, which differs by a few percent after a few steps. Decay 0 alone does not
switch the ratio off. Where a norm is 0, :math:`\eta_l = \eta`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jfleet._types import AxisName, PyTree
from jfleet.optax_meta import _common as common
from jfleet.optax_meta._layers import Layers, layers_of


class LarsState(NamedTuple):
    """State of :func:`lars`."""

    count: jax.Array  # steps so far; shape=(), dtype=int32
    velocity: PyTree  # like the parameters, float32 or wider
    local_lr: PyTree  # rate of each layer in the last step; shape=() or (layers, 1, ..)


def lars(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float = 0.9,
    *,
    coeff: float = 0.001,
    weight_decay: float = 0.0005,
    eps: float = 0.0,
    nesterov: bool = False,
    exclude: common.Rule = (),
    trust_on_excluded: bool = False,
    stacked: common.Rule = (),
    axis_name: AxisName | None = None,
    replicated: common.Rule = (),
) -> optax.GradientTransformationExtraArgs:
    """Momentum SGD whose rate follows the norms of each layer.

    It replaces the momentum or SGD base.

    Args:
      learning_rate: the global rate, a number or a schedule. It is inside the velocity.
      momentum: m.
      coeff: the trust coefficient c.
      weight_decay: decay of the weights, inside the ratio and the gradient.
      eps: added to the denominator.
      nesterov: step along ``m v + eta_l (g + decay w)`` instead of ``v``.
      exclude: rule on paths of parameters without decay (biases, norm scales).
      trust_on_excluded: whether excluded parameters keep the ratio; by default they
        take the plain rate.
      stacked: rule on paths of leaves whose first dim stacks the layers of a scan;
        they have one norm per layer.
      axis_name: inside ``shard_map``: the axis over which parameters are split. Norms
        are always those of whole tensors.
      replicated: rule on paths of leaves that every peer of ``axis_name`` holds whole.

    Raises:
      ConfigError: if a number is out of range.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> params = {"kernel": jnp.ones((4, 4)), "bias": jnp.zeros(4)}
      >>> tx = lars(0.1, exclude="bias")
      >>> updates, state = tx.update(params, tx.init(params), params)
      >>> print({k: f"{float(v):.6f}" for k, v in state.local_lr.items()})
      {'bias': '0.100000', 'kernel': '0.000100'}

    References:
      You, Gitman, Ginsburg, `Large Batch Training of Convolutional Networks
      <https://arxiv.org/abs/1708.03888>`_, 2017
    """
    common.check_rate("learning_rate", learning_rate)
    common.check_number("momentum", momentum, low=0, high=1, open_high=True)
    for name, value in [("coeff", coeff), ("weight_decay", weight_decay), ("eps", eps)]:
        common.check_number(name, value, low=0)
    common.check_flag("nesterov", nesterov)
    layers = Layers(exclude, trust_on_excluded, stacked, axis_name, replicated)

    def init(params: PyTree) -> LarsState:
        return LarsState(
            count=jnp.zeros((), jnp.int32),
            velocity=jax.tree.map(lambda p: jnp.zeros_like(common.wide(p)), params),
            local_lr=layers_of(params, layers).ratio_like(),
        )

    def update(updates, state, params=None, **extra_args):
        del extra_args
        common.need_params(params, "lars")
        view = layers_of(params, layers)
        grads, weights = view.wide_leaves(updates), view.wide_leaves(params)
        rate = common.rate_at(learning_rate, state.count)
        norms = view.norms(weights + grads)
        half = len(weights)
        rows = zip(
            weights,
            grads,
            jax.tree.leaves(state.velocity),
            norms[:half],
            norms[half:],
            view.excluded,
            strict=True,
        )
        stepped = [_step(rate, *row) for row in rows]
        new_updates, velocity, local = common.unzip(stepped, 3)
        return view.updates(new_updates), LarsState(
            count=common.increment(state.count),
            velocity=view.unflatten(velocity),
            local_lr=view.unflatten(local),
        )

    def _step(rate, w, g, v, w_norm, g_norm, excluded):
        eta, m, c, decay, epsilon = (
            jnp.asarray(x, w.real.dtype)
            for x in (rate, momentum, coeff, weight_decay, eps)
        )
        decay = jnp.zeros_like(decay) if excluded else decay
        local = jnp.broadcast_to(eta, w_norm.shape)
        if not excluded or trust_on_excluded:
            both = (w_norm > 0) & (g_norm > 0)
            divisor = jnp.where(both, g_norm + decay * w_norm + epsilon, 1)
            local = jnp.where(both, eta * c * w_norm / divisor, local)
        step = local * (g + decay * w)
        v = m * v + step
        return -(m * v + step if nesterov else v), v, local

    return optax.GradientTransformationExtraArgs(init, update)
