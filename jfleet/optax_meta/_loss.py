"""The loss phase of mixed precision: casting and scaling of a loss function."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp

from jfleet._errors import ConfigError, ConfigTypeError
from jfleet._types import PyTree
from jfleet.optax_meta import _common as common


def cast_params(
    params: PyTree,
    dtype: jax.typing.DTypeLike = "bfloat16",
    *,
    keep_fp32: common.Rule = (),
) -> PyTree:
    """Cast the floating leaves, except those that ``keep_fp32`` names.

    Args:
      params: parameters, or any tree.
      dtype: the compute dtype.
      keep_fp32: rule on paths of leaves that stay as they are.

    Example:
      >>> import jax.numpy as jnp
      >>> params = {"norm": jnp.ones(2), "kernel": jnp.ones(2), "step": 3}
      >>> low = cast_params(params, keep_fp32="norm")
      >>> str(low["norm"].dtype), str(low["kernel"].dtype), low["step"]
      ('float32', 'bfloat16', 3)
    """
    dtype = _compute_dtype(dtype)
    keep = common.mask_of(keep_fp32, params, "keep_fp32")
    return jax.tree.map(lambda x, k: x if k else _cast(x, dtype), params, keep)


def _compute_dtype(dtype: jax.typing.DTypeLike) -> Any:
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ConfigError(f"dtype must be a floating dtype, got {str(dtype)!r}")
    return dtype


def _cast(x: Any, dtype: Any) -> Any:
    is_array = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)
    return x.astype(dtype) if is_array else x


def cast_loss(
    loss_fn: Callable[..., Any],
    dtype: jax.typing.DTypeLike = "bfloat16",
    *,
    keep_fp32: common.Rule = (),
    cast_inputs: bool = True,
) -> Callable[..., Any]:
    """Wrap a loss so that it computes in ``dtype``.

    Gradients come back in the dtype of the parameters that were passed: float32
    parameters are the master weights, and nothing else is needed for bfloat16.

    Args:
      loss_fn: ``loss_fn(params, *args, **kwargs)``.
      dtype: the compute dtype.
      keep_fp32: rule on paths of parameters that stay as they are.
      cast_inputs: also cast the floating arrays among the other arguments.

    Returns:
      A function with the same arguments; its floating results are float32 or wider.
    """
    dtype = _compute_dtype(dtype)
    common.check_rule("keep_fp32", keep_fp32)
    common.check_flag("cast_inputs", cast_inputs)

    @wraps(loss_fn)
    def cast_fn(params, *args, **kwargs):
        params = cast_params(params, dtype, keep_fp32=keep_fp32)
        if cast_inputs:
            args, kwargs = jax.tree.map(lambda x: _cast(x, dtype), (args, kwargs))
        result = loss_fn(params, *args, **kwargs)
        return jax.tree.map(_widened, result)

    return cast_fn


def _widened(x: Any) -> Any:
    is_array = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)
    return common.wide(x) if is_array else x


def scale_loss(
    loss_fn: Callable[..., Any], *, has_aux: bool = False
) -> Callable[..., Any]:
    """Turn ``loss_fn(*args)`` into ``f(scale, *args)``, whose loss is multiplied.

    A loss may be a pair ``(total, weight)``; then only the total is scaled.

    Args:
      loss_fn: returns the loss, or with ``has_aux`` a pair of loss and anything.
      has_aux: whether there is an auxiliary result.
    """

    @wraps(loss_fn)
    def scaled_fn(scale, *args, **kwargs):
        result = loss_fn(*args, **kwargs)
        loss, aux = result if has_aux else (result, None)
        if isinstance(loss, tuple):
            loss = (_times(loss[0], scale), *loss[1:])
        else:
            loss = _times(loss, scale)
        return (loss, aux) if has_aux else loss

    return scaled_fn


def _times(loss: jax.Array, scale: Any) -> jax.Array:
    """A product in float32: a loss of 16 bits would overflow."""
    loss = common.wide(loss)
    return loss * jnp.asarray(scale, loss.dtype)


def scaled_value_and_grad(
    loss_fn: Callable[..., Any], *, argnums: int | tuple = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """``jax.value_and_grad`` of a scaled loss: ``f(scale, *args)``.

    Args:
      loss_fn: a scalar loss.
      argnums: which of its arguments to differentiate.
      has_aux: whether it returns a pair of loss and anything.

    Returns:
      A function that returns the true loss and the *scaled* gradients, as
      ``dynamic_loss_scaling`` takes them.

    Example:
      >>> import jax.numpy as jnp
      >>> f = scaled_value_and_grad(lambda w: w**2)
      >>> print(*f(1024.0, jnp.asarray(3.0)))
      9.0 6144.0
    """
    if not callable(loss_fn):
        raise ConfigTypeError(f"loss_fn must be a function, got {loss_fn!r}")

    def with_value(scale, *args, **kwargs):
        result = loss_fn(*args, **kwargs)
        loss, aux = result if has_aux else (result, None)
        return _times(loss, scale), (loss, aux)

    nums = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    shifted = tuple(n + 1 if n >= 0 else n for n in nums)
    grad_fn = jax.value_and_grad(
        with_value,
        argnums=shifted[0] if isinstance(argnums, int) else shifted,
        has_aux=True,
    )

    @wraps(loss_fn)
    def value_and_grad(scale, *args, **kwargs):
        (_, (loss, aux)), grads = grad_fn(scale, *args, **kwargs)
        return ((loss, aux) if has_aux else loss), grads

    return value_and_grad
