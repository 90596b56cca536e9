"""What the meta optimizers share: argument checks, dtypes, rules on paths, rates."""

import math
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jfleet._errors import ConfigError, ConfigTypeError, listing, nearest
from jfleet._tree import map_with_path, path_str
from jfleet._types import AxisName, PyTree

Rule = Any  # str | re.Pattern | sequence of them or of path tuples | callable | tree


def check_number(
    name: str,
    value: Any,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    """Refuse a value outside the range; traced values cannot be looked at.

    >>> check_number("momentum", 1.5, low=0, high=1, open_high=True)
    Traceback (most recent call last):
        ...
    jfleet._errors.ConfigError: momentum must be in [0, 1), got 1.5
    """
    if isinstance(value, jax.core.Tracer):
        return
    if isinstance(value, bool) or not _is_scalar(value):
        raise ConfigTypeError(f"{name} must be a number, got {value!r}")
    number = float(value)
    low_ok = number > low if open_low else number >= low
    high_ok = number < high if open_high else number <= high
    if not (low_ok and high_ok):
        left = "(" if open_low or low == -math.inf else "["
        right = ")" if open_high or high == math.inf else "]"
        interval = f"{left}{low:g}, {high:g}{right}"
        raise ConfigError(f"{name} must be in {interval}, got {value!r}")


def check_count(name: str, value: Any, *, low: int) -> None:
    """Refuse what is not a whole number of at least ``low``."""
    if isinstance(value, jax.core.Tracer):
        return
    if isinstance(value, bool) or not _is_scalar(value):
        raise ConfigTypeError(f"{name} must be a whole number, got {value!r}")
    if float(value) != math.floor(float(value)) or float(value) < low:
        raise ConfigError(
            f"{name} must be a whole number of at least {low}, got {value!r}"
        )


def _is_scalar(value: Any) -> bool:
    if isinstance(value, numbers.Real):
        return True
    return isinstance(value, np.generic | np.ndarray | jax.Array) and value.ndim == 0


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Refuse what is not one of the named choices."""
    if value not in choices:
        hint = nearest(str(value), choices)
        raise ConfigError(
            f"{name} must be one of {listing(choices)}, got {value!r}{hint}"
        )


def check_flag(name: str, value: Any) -> None:
    """Refuse what is not a bool."""
    if not isinstance(value, bool | np.bool_):
        raise ConfigTypeError(f"{name} must be True or False, got {value!r}")


def check_rate(name: str, value: Any) -> None:
    """A learning rate is a number of at least 0 or a schedule."""
    if not callable(value):
        check_number(name, value, low=0)


def check_axis_name(value: AxisName | None) -> None:
    """An axis name is a string, a tuple of strings, or None."""
    names = value if isinstance(value, tuple) else (value,)
    if value is not None and not all(isinstance(n, str) and n for n in names):
        raise ConfigTypeError(
            f"axis_name must be a name, a tuple of names or None, got {value!r}"
        )


def lift(inner: Any, name: str = "inner") -> optax.GradientTransformationExtraArgs:
    """Give an optax transformation extra arguments; refuse anything else."""
    if not (hasattr(inner, "init") and hasattr(inner, "update")):
        raise ConfigTypeError(
            f"{name} must be an optax gradient transformation, got {inner!r}; "
            "pass for example optax.sgd(0.1)"
        )
    return optax.with_extra_args_support(inner)


def need_params(params: PyTree | None, name: str) -> None:
    """Refuse ``update(grads, state)`` where the parameters are needed."""
    if params is None:
        raise ConfigError(
            f"params must be given to the update of {name}, got None; "
            "call update(grads, state, params)"
        )


def rate_at(rate: Any, count: jax.Array) -> Any:
    """Value of a constant or of a schedule at 0-based step ``count``."""
    return rate(count) if callable(rate) else rate


def is_float(leaf: Any) -> bool:
    """True for what has a gradient: floating point and complex leaves."""
    return jnp.issubdtype(jnp.asarray(leaf).dtype, jnp.inexact)


def wide_dtype(dtype: Any) -> Any:
    """The wider of float32 and ``dtype``."""
    return jnp.promote_types(dtype, jnp.float32)


def wide(leaf: jax.Array) -> jax.Array:
    """The leaf in float32 or wider; integers stay integers."""
    leaf = jnp.asarray(leaf)
    return leaf.astype(wide_dtype(leaf.dtype)) if is_float(leaf) else leaf


def tree_wide_dtype(tree: PyTree) -> Any:
    """The widest of float32 and the real dtypes of the floating leaves."""
    dtypes = [jnp.asarray(x).real.dtype for x in jax.tree.leaves(tree) if is_float(x)]
    return jnp.result_type(jnp.float32, *dtypes)


def cast_like(tree: PyTree, like: PyTree) -> PyTree:
    """Give every leaf the dtype of its counterpart."""
    return jax.tree.map(
        lambda x, y: x if x.dtype == y.dtype else x.astype(y.dtype), tree, like
    )


def select(predicate: jax.Array, on_true: PyTree, on_false: PyTree) -> PyTree:
    """Leafwise choice between two trees of the same types."""
    return jax.tree.map(lambda a, b: jnp.where(predicate, a, b), on_true, on_false)


def update_in_own_types(
    inner: optax.GradientTransformationExtraArgs,
    grads: PyTree,
    like: PyTree,
    state: PyTree,
    params: PyTree,
    extra: Mapping[str, Any],
) -> tuple[PyTree, PyTree]:
    """Run ``inner`` on wide gradients and give back the types it has on ``like``.

    A 16-bit gradient that was summed or unscaled in float32 should reach ``inner``
    with all its digits, but the dtypes of its state and updates must not depend on
    that: otherwise a jitted step would compile a second time.
    """
    updates, new_state = inner.update(grads, state, params, **extra)
    if jax.tree.map(lambda x: x.dtype, grads) == jax.tree.map(lambda x: x.dtype, like):
        return updates, new_state
    own = jax.eval_shape(
        lambda g, s, p: inner.update(g, s, p, **extra), like, state, params
    )
    return cast_like(updates, own[0]), cast_like(new_state, own[1])


def mask_of(rule: Rule, tree: PyTree, name: str) -> PyTree:
    """Turn a rule on parameter paths into a tree of bools like ``tree``.

    Args:
      rule: nothing (``None``, ``()``), one regular expression or several (searched in
        ``"block/kernel"``), path tuples in a list, a function of the path string, or a
        tree of bools.
      tree: parameters or gradients.
      name: argument name for error messages.

    >>> mask_of(["bias$"], {"dense": {"bias": 1.0, "kernel": 2.0}}, "exclude")
    {'dense': {'bias': True, 'kernel': False}}
    """
    test = _path_test(rule, name)
    if test is not None:
        return map_with_path(lambda path, leaf: bool(test(path_str(path))), tree)
    if jax.tree.structure(rule) != jax.tree.structure(tree):
        raise ConfigError(
            f"{name} must be a rule on paths or a tree of bools like the parameters, "
            f"got a tree with {jax.tree.structure(rule)}; "
            f"the parameters have {jax.tree.structure(tree)}"
        )
    return jax.tree.map(bool, rule)


def _path_test(rule: Rule, name: str) -> Callable[[str], bool] | None:
    if rule is None:
        return lambda path: False
    if isinstance(rule, str | re.Pattern):
        rule = (rule,)
    if callable(rule):
        return rule
    kinds = str | re.Pattern | tuple
    if isinstance(rule, list | tuple | set | frozenset) and not hasattr(
        rule, "_fields"
    ):
        if not all(isinstance(r, kinds) for r in rule):
            return None
        paths = {path_str(r) for r in rule if isinstance(r, tuple)}
        patterns = [_compiled(r, name) for r in rule if not isinstance(r, tuple)]
        return lambda path: path in paths or any(p.search(path) for p in patterns)
    return None


def _compiled(pattern: str | re.Pattern, name: str) -> re.Pattern:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"{name} must hold regular expressions, got {pattern!r} ({error})"
        ) from error


def check_rule(name: str, rule: Rule) -> None:
    """Compile a rule early, so that a bad pattern is refused when it is set."""
    _path_test(rule, name)


def static_count(name: str, value: Any, *, low: int) -> int:
    """A whole number that decides shapes, so it must be known while tracing."""
    if isinstance(value, jax.core.Tracer):
        raise ConfigError(
            f"{name} must be known when the step is traced, got a traced value; "
            f"name it in static_args of optax.inject_hyperparams"
        )
    check_count(name, value, low=low)
    return int(value)


def is_zero(value: Any) -> bool:
    """True for a plain zero; a traced value may become anything."""
    return not isinstance(value, jax.core.Tracer) and not callable(value) and value == 0


def unzip(rows: Sequence[tuple], num_columns: int) -> tuple[list, ...]:
    """Turn rows into columns; no rows give empty columns."""
    return tuple([row[i] for row in rows] for i in range(num_columns))


def increment(count: jax.Array) -> jax.Array:
    """Count up, and stay at the largest number instead of wrapping around."""
    return cast(jax.Array, optax.safe_increment(count))
