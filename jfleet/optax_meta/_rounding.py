"""Rounding to a narrower float, without leaving the wider one."""

import jax
import jax.numpy as jnp


def round_to(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Nearest value of ``dtype`` (ties to even, overflow to infinity), as dtype of x.

    Unlike a cast there and back, no compiler pass may remove it.

    >>> import jax.numpy as jnp
    >>> print(round_to(jnp.array([1.001, 7e4, 3e-8]), "float16"))
    [1.0009766e+00           inf 5.9604645e-08]
    """
    info, own = jnp.finfo(dtype), jnp.finfo(x.dtype)
    if info.bits >= own.bits:
        return x
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    rounded = jax.lax.reduce_precision(x, info.nexp, info.nmant)
    if info.nexp == own.nexp:
        return rounded
    # reduce_precision flushes the subnormals of the narrow type. They are the multiples
    # of its smallest number, a power of two.
    step = float(info.smallest_subnormal)
    subnormal = jnp.round(x / step) * step
    return jnp.where(jnp.abs(x) < float(info.tiny), subnormal, rounded)
