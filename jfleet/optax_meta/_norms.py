"""Norms that neither overflow nor underflow, of whole or of split tensors.

Squares of float32 numbers below 1e-19 or above 1e19 leave the range of float32. The
plain sum of squares is taken first; only if it cannot be trusted, the tensors are
divided by their largest entry and summed again.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jfleet._types import AxisName
from jfleet.optax_meta import _collectives as collectives
from jfleet.optax_meta._common import wide


def leaf_norms(
    leaves: Sequence[jax.Array],
    stacked: Sequence[bool],
    split: Sequence[bool],
    axis_name: AxisName | None,
) -> list[jax.Array]:
    """Return the norm of each tensor, or of each layer of a stacked tensor.

    Args:
      leaves: gradients or parameters.
      stacked: for each leaf, whether its first dim counts layers; the result then has
        shape (layers, 1, ..., 1), else shape ().
      split: for each leaf, whether every peer of ``axis_name`` holds another part.
      axis_name: axis over which split leaves are split.
    """
    if not leaves:
        return []
    args = [(wide(x), *flags) for x, *flags in zip(leaves, stacked, split, strict=True)]
    sums = [_sum(_squares(x), st, sp, axis_name) for x, st, sp in args]
    good = [
        _trusted(s, x.size / max(s.size, 1))
        for s, (x, *_) in zip(sums, args, strict=True)
    ]
    return collectives.cond(
        jnp.all(jnp.stack(good)),
        lambda: [jnp.sqrt(s) for s in sums],
        lambda: [_scaled_norm(x, st, sp, axis_name) for x, st, sp in args],
    )


def total_norm(
    leaves: Sequence[jax.Array],
    split: Sequence[bool],
    axis_name: AxisName | None,
    *,
    plain: bool = False,
) -> jax.Array:
    """Return the norm over all tensors together, in float32 or wider.

    ``plain`` is for a number to look at: the sum of squares is trusted as it comes.
    """
    if not leaves:
        return jnp.zeros((), jnp.float32)
    parts = [wide(x) for x in leaves]
    dtype = jnp.result_type(*(x.real.dtype for x in parts))
    total = _split_sum(
        [jnp.sum(_squares(x)).astype(dtype) for x in parts], split, axis_name
    )
    if plain:
        return jnp.sqrt(total)

    def scaled():
        tops = [jnp.max(jnp.abs(x), initial=0).astype(dtype) for x in parts]
        whole = [t for t, s in zip(tops, split, strict=True) if not s]
        local = [t for t, s in zip(tops, split, strict=True) if s]
        top = jnp.max(jnp.stack(whole)) if whole else jnp.zeros((), dtype)
        if local:
            peers = collectives.pmax(jnp.max(jnp.stack(local)), axis_name)
            top = jnp.maximum(top, peers)
        by = _divisor(top)
        squares = [jnp.sum(_squares(x / by)).astype(dtype) for x in parts]
        return _finish(top, _split_sum(squares, split, axis_name))

    good = _trusted(total, sum(x.size for x in parts))
    return collectives.cond(good, lambda: jnp.sqrt(total), scaled)


def _squares(x: jax.Array) -> jax.Array:
    """Squared magnitudes; a plain product is what XLA fuses best into a sum."""
    if jnp.iscomplexobj(x):
        return x.real * x.real + x.imag * x.imag
    return x * x


def _split_sum(
    sums: Sequence[jax.Array], split: Sequence[bool], axis_name: AxisName | None
) -> jax.Array:
    whole = sum((s for s, p in zip(sums, split, strict=True) if not p), jnp.zeros(()))
    local = [s for s, p in zip(sums, split, strict=True) if p]
    if not local:
        return whole.astype(sums[0].dtype)
    total = collectives.psum(sum(local[1:], local[0]), axis_name)
    return (whole + total).astype(sums[0].dtype)


def _sum(x: jax.Array, stacked: bool, split: bool, axis_name: AxisName | None):
    dims = tuple(range(1, x.ndim)) if stacked else None
    total = jnp.sum(x, axis=dims, keepdims=stacked)
    return collectives.psum(total, axis_name) if split else total


def _trusted(sums: jax.Array, num_terms: float) -> jax.Array:
    """A mean square this large loses at most one rounding to squares that vanish."""
    info = jnp.finfo(sums.dtype)
    low = max(num_terms, 1.0) * float(info.tiny) / float(info.eps)
    return jnp.all((sums > low) & (sums <= info.max))


def _scaled_norm(x: jax.Array, stacked: bool, split: bool, axis_name: AxisName | None):
    dims = tuple(range(1, x.ndim)) if stacked else None
    top = jnp.max(jnp.abs(x), axis=dims, keepdims=stacked, initial=0)
    top = collectives.pmax(top, axis_name) if split else top
    squares = _squares(x / _divisor(top))
    return _finish(top, _sum(squares, stacked, split, axis_name))


def _divisor(top: jax.Array) -> jax.Array:
    return jnp.where((top > 0) & jnp.isfinite(top), top, 1)


def _finish(top: jax.Array, squares: jax.Array) -> jax.Array:
    """``top`` decides where it is zero, infinite or not a number."""
    scaled = jnp.where(jnp.isfinite(top), top * jnp.sqrt(squares), top)
    return jnp.where(top == 0, jnp.zeros_like(scaled), scaled)


def clip_factor(norm: jax.Array, limit: jax.Array) -> jax.Array:
    """``min(1, limit / norm)``: 0 for a limit of 0, NaN for a norm of NaN."""
    safe = jnp.where(norm == 0, jnp.ones_like(norm), norm)
    factor = jnp.where(norm <= limit, jnp.ones_like(norm), limit / safe)
    return jnp.where(limit == 0, jnp.zeros_like(factor), factor)
