"""One tensor through one step of DGC."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jfleet._types import AxisName
from jfleet.optax_meta import _collectives as collectives


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """Arguments of ``dgc`` that a single tensor needs."""

    momentum: Any
    nesterov: bool
    handover: str
    factor_masking: bool
    returns: bool
    axis_name: AxisName | None


def dense_step(
    settings: Settings, g: jax.Array, u: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Momentum SGD on a mean gradient; returns direction and momentum.

    Consistent Nesterov keeps u = m * trace, which is what the compressed phase means by
    u: both forms give the same direction, g + m * trace.
    """
    m = jnp.asarray(settings.momentum, g.dtype)
    if settings.returns:
        # After a compressed phase u is each replica's own; all must take one step.
        u = collectives.pmean(u, settings.axis_name)
    if settings.nesterov and settings.handover == "consistent":
        u = m * (u + g)
        return u + g, u
    u = m * u + g
    return (g + m * u if settings.nesterov else u), u


def compressed_step(
    settings: Settings, g: jax.Array, u: jax.Array, v: jax.Array, num_kept: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Accumulate, send the largest entries; returns direction, u and v."""
    m = jnp.asarray(settings.momentum, g.dtype)
    if settings.nesterov:
        u = m * (u + g)
        v = v + u + g
    else:
        u = m * u + g
        v = v + u
    flat = v.reshape(-1)
    _, index = jax.lax.top_k(jnp.abs(flat), num_kept)  # ties: the lower index
    direction = _exchanged(flat[index], index, flat, settings.axis_name)
    v = flat.at[index].set(0).reshape(v.shape)
    if settings.factor_masking:
        u = u.reshape(-1).at[index].set(0).reshape(u.shape)
    return direction.reshape(g.shape), u, v


def _exchanged(values, index, flat, axis_name) -> jax.Array:
    """Mean over the replicas of what each sent; only values and indices travel."""
    zeros = jnp.zeros_like(flat)
    if axis_name:
        values = jax.lax.all_gather(values, axis_name, tiled=True)
        index = jax.lax.all_gather(index, axis_name, tiled=True)
    return zeros.at[index].add(values) / collectives.size(axis_name)
