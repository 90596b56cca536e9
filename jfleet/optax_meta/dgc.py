r"""Deep gradient compression: send only the largest accumulated gradients.

Per replica, with momentum m, in an entry that is not sent:

.. math:: u \leftarrow m u + g, \qquad v \leftarrow v + u

The entries of :math:`v` that are largest in magnitude are sent and zeroed, in :math:`u`
too (momentum factor masking); the rest waits. The step is plain SGD with the mean of
what was sent, because momentum is already in :math:`u`. Small tensors, the steps before
the ramp and a sparsity of 0 take the dense path: momentum SGD with the mean gradient.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jfleet._types import AxisName, PyTree
from jfleet.optax_meta import _collectives as collectives
from jfleet.optax_meta import _common as common
from jfleet.optax_meta._dgc_leaf import Settings, compressed_step, dense_step
from jfleet.optax_meta._dgc_plan import Ramp, compressible, num_kept
from jfleet.optax_meta._dgc_plan import dgc_compressed_paths as dgc_compressed_paths
from jfleet.optax_meta._norms import clip_factor, total_norm


class DgcState(NamedTuple):
    """State of :func:`dgc`. ``u`` and ``v`` are each replica's own."""

    count: jax.Array  # steps so far, s; shape=(), dtype=int32
    sparsity: jax.Array  # of the last step, 0 in the dense phase; shape=()
    num_sent: PyTree  # entries sent in the last step, 0 if dense; shape=(), dtype=int32
    u: PyTree  # momentum, like the parameters, float32 or wider
    v: PyTree  # what waits to be sent; None for leaves that are never compressed
    decay: PyTree  # momentum of decay in mode "outside", else None


def dgc(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float = 0.9,
    *,
    nesterov: bool = False,
    rampup_begin_step: int = 0,
    rampup_step: int = 1,
    sparsity: tuple[float, ...] = (0.999,),
    min_size: int = 16384,
    clip_norm: float | None = None,
    clip_scope: str = "global",
    dense_phase_clip: str = "aggregate",
    k_rounding: str = "ceil",
    nesterov_handover: str = "consistent",
    weight_decay: float = 0.0,
    weight_decay_mode: str = "local",
    factor_masking: bool = True,
    exclude: common.Rule = (),
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Momentum SGD that exchanges a small part of the gradient entries.

    It replaces a momentum or SGD base and reduces over ``axis_name`` by itself, so it
    takes each replica's own gradients. Compressed are float32 (or wider) leaves with at
    least ``min_size`` entries; :func:`dgc_compressed_paths` lists them. Sending all
    entries is SGD *without* momentum, because of the masking; a sparsity of 0 is
    therefore taken as "dense".

    Args:
      learning_rate: number or schedule; outside the accumulators.
      momentum: m.
      nesterov: ``u = m (u + g); v = v + u + g``.
      rampup_begin_step: dense steps at the start.
      rampup_step: steps over which the sparsity levels are spread.
      sparsity: levels in [0, 1), the fraction of entries that waits.
      min_size: smaller tensors are never compressed.
      clip_norm: limit c; the norm of a local gradient divided by N is limited to
        c / sqrt(N) while compressing, that of the mean gradient to c in the dense
        phase.
      clip_scope: ``"global"`` (norm over all tensors of the replica) or
        ``"per_tensor"`` (small tensors are then limited to c after averaging).
      dense_phase_clip: ``"aggregate"``, or ``"none"`` to leave tensors of ``min_size``
        or more alone in the dense phase.
      k_rounding: whether the number of entries is rounded ``"ceil"`` or ``"floor"``.
      nesterov_handover: ``"consistent"``, or ``"paddle"`` to hand the dense velocity to
        the compressed phase without the factor m.
      weight_decay: L2 decay, added after clipping.
      weight_decay_mode: ``"local"`` (before accumulation) or ``"outside"`` (a dense
        momentum of its own, not compressed).
      factor_masking: zero u where v was sent.
      exclude: rule on paths of leaves that are never compressed.
      axis_name: axis of the replicas.

    Raises:
      ConfigError: if a number is out of range or a choice is unknown.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> tx = dgc(1.0, momentum=0.0, sparsity=(0.75,), min_size=4)
      >>> w = jnp.zeros(4)
      >>> update, state = tx.update(jnp.array([1.0, -4.0, 2.0, 3.0]), tx.init(w), w)
      >>> print(update, state.v)
      [-0.  4. -0. -0.] [1. 0. 2. 3.]

    Note:
      Received entries are the same on all replicas, but the type system of
      ``jax.shard_map`` cannot know that; use ``check_vma=False`` there.

    References:
      Lin et al., `Deep Gradient Compression <https://arxiv.org/abs/1712.01887>`_, 2018
    """
    common.check_rate("learning_rate", learning_rate)
    common.check_number("momentum", momentum, low=0, high=1, open_high=True)
    common.check_number("weight_decay", weight_decay, low=0)
    if clip_norm is not None:
        common.check_number("clip_norm", clip_norm, low=0)
    for name, value in [("nesterov", nesterov), ("factor_masking", factor_masking)]:
        common.check_flag(name, value)
    common.check_choice("clip_scope", clip_scope, ("global", "per_tensor"))
    common.check_choice("dense_phase_clip", dense_phase_clip, ("aggregate", "none"))
    common.check_choice("k_rounding", k_rounding, ("ceil", "floor"))
    handovers = ("consistent", "paddle")
    common.check_choice("nesterov_handover", nesterov_handover, handovers)
    common.check_choice("weight_decay_mode", weight_decay_mode, ("local", "outside"))
    common.check_axis_name(axis_name)
    common.check_rule("exclude", exclude)
    min_size = common.static_count("min_size", min_size, low=1)
    ramp = Ramp.of(rampup_begin_step, rampup_step, sparsity)
    local_decay = weight_decay_mode == "local" and not common.is_zero(weight_decay)
    outside = weight_decay_mode == "outside" and not common.is_zero(weight_decay)
    settings = Settings(
        momentum, nesterov, nesterov_handover, factor_masking, ramp.returns, axis_name
    )

    def init(params: PyTree) -> DgcState:
        zeros = jax.tree.map(lambda p: jnp.zeros_like(common.wide(p)), params)
        chosen = compressible(params, min_size, exclude)
        return DgcState(
            count=jnp.zeros((), jnp.int32),
            sparsity=jnp.zeros((), common.tree_wide_dtype(params)),
            num_sent=jax.tree.map(lambda p: jnp.zeros((), jnp.int32), params),
            u=zeros,
            v=jax.tree.map(lambda z, c: jnp.copy(z) if c else None, zeros, chosen),
            decay=jax.tree.map(jnp.copy, zeros) if outside else None,
        )

    def update(updates, state, params=None, **extra_args):
        del extra_args
        common.need_params(params, "dgc")
        leaves, treedef = jax.tree.flatten(params)
        columns = {
            "g": [common.wide(g) for g in treedef.flatten_up_to(updates)],
            "w": [common.wide(w) for w in leaves],
            "u": treedef.flatten_up_to(state.u),
            "v": treedef.flatten_up_to(state.v),
            "chosen": jax.tree.leaves(compressible(params, min_size, exclude)),
        }
        stages = [lambda level=level: _stage(columns, level) for level in ramp.stages]
        stage = ramp.stage_at(state.count)
        outcome = (
            stages[stage]()
            if isinstance(stage, int)
            else collectives.switch(stage, stages)
        )
        directions, u, v, num_sent = outcome
        decay = state.decay
        if outside:
            directions, decay = _decayed(directions, columns["w"], decay, treedef)
        rate = common.rate_at(learning_rate, state.count)
        steps = [
            (-jnp.asarray(rate, d.dtype) * d).astype(w.dtype)
            for d, w in zip(directions, leaves, strict=True)
        ]
        return treedef.unflatten(steps), DgcState(
            count=common.increment(state.count),
            sparsity=ramp.sparsity_of(stage).astype(state.sparsity.dtype),
            num_sent=treedef.unflatten(num_sent),
            u=treedef.unflatten(u),
            v=treedef.unflatten(v),
            decay=decay,
        )

    def _stage(columns: dict[str, list[Any]], level: float) -> tuple:
        """One step at a sparsity level; level 0 is the dense phase."""
        chosen = [c and level > 0 for c in columns["chosen"]]
        grads = list(columns["g"])
        if level > 0:
            grads = _clip_local(grads, chosen)
        means = [
            g if c else collectives.pmean(g, axis_name)
            for g, c in zip(grads, chosen, strict=True)
        ]
        if clip_norm is not None:
            means = _clip_mean(means, columns["chosen"], chosen, level)
        if local_decay:
            means = [
                g + jnp.asarray(weight_decay, w.dtype) * w
                for g, w in zip(means, columns["w"], strict=True)
            ]
        out = []
        for g, u, v, c in zip(means, columns["u"], columns["v"], chosen, strict=True):
            if c:
                k = num_kept(g.size, level, k_rounding)
                out.append((*compressed_step(settings, g, u, v, k), jnp.int32(k)))
            else:
                out.append((*dense_step(settings, g, u), v, jnp.int32(0)))
        return common.unzip(out, 4)

    def _clip_local(grads, chosen):
        if clip_norm is None:
            return grads
        # ||g / N|| <= c / sqrt(N), written for g itself.
        limit = clip_norm * collectives.size(axis_name) ** 0.5
        if clip_scope == "global":
            return _limited(grads, [True] * len(grads), limit)
        return [
            _limited([g], [c], limit)[0] for g, c in zip(grads, chosen, strict=True)
        ]

    def _clip_mean(means, large, compressed, level):
        """Limit mean gradients: all in the dense phase, else the small ones."""
        if level > 0 and clip_scope == "global":
            return means  # every tensor was clipped before averaging
        alone = dense_phase_clip == "none"
        which = [
            not c and not (alone and big and level == 0)
            for c, big in zip(compressed, large, strict=True)
        ]
        if clip_scope == "global":
            return _limited(means, which, clip_norm)
        return [
            _limited([g], [w], clip_norm)[0] for g, w in zip(means, which, strict=True)
        ]

    def _limited(grads, which, limit):
        """Scale the selected tensors by one factor, from their common norm."""
        norm = total_norm(
            [g for g, w in zip(grads, which, strict=True) if w],
            [False] * sum(which),
            None,
        )
        factor = clip_factor(norm, jnp.asarray(limit, norm.dtype))
        return [
            g * factor.astype(g.dtype) if w else g
            for g, w in zip(grads, which, strict=True)
        ]

    def _decayed(directions, weights, decay, treedef):
        rows = zip(directions, weights, treedef.flatten_up_to(decay), strict=True)
        out = []
        for direction, w, d in rows:
            pull = jnp.asarray(weight_decay, w.dtype) * w
            m = jnp.asarray(momentum, w.dtype)
            d = m * d + pull
            out.append((direction + (pull + m * d if nesterov else d), d))
        return [x for x, _ in out], treedef.unflatten([d for _, d in out])

    return optax.GradientTransformationExtraArgs(init, update)
