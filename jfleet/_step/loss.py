"""The gradient of a window of micro batches, of one replica or of the global batch.

A loss is ``mean`` over its rows, or a pair ``(total, weight)``. Of a pair the total is
differentiated, so that sums over micro batches and replicas divide exactly.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jfleet._errors import ConfigError, ConfigTypeError
from jfleet._tree import is_array, leaves_with_paths, path_str
from jfleet.optax_meta import _common as common


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossForm:
    """A loss function, and what it takes and returns."""

    fn: Callable[..., Any]
    has_aux: bool
    model_state: bool
    rng: bool

    def __call__(self, params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        """Call the user's function with the arguments that it declared."""
        states = (model_state,) if self.model_state else ()
        keys = (rng,) if self.rng else ()
        return self.fn(params, *states, batch, *keys)

    def read(self, result: Any) -> "Parsed":
        """Take apart what the function returned.

        Raises:
            ConfigTypeError: it returned something else than declared.
        """
        num = 1 + self.model_state + self.has_aux
        wanted = ("loss", "model_state", "aux")
        names = [
            n
            for n, on in zip(
                wanted, (True, self.model_state, self.has_aux), strict=True
            )
            if on
        ]
        if num > 1 and not (isinstance(result, tuple) and len(result) == num):
            raise ConfigTypeError(
                f"loss_fn must return ({', '.join(names)}), as minimize was told, got "
                f"{type(result).__name__}; change it or the arguments of minimize"
            )
        loss, *rest = result if num > 1 else (result,)
        found = dict(zip(names[1:], rest, strict=True))
        if isinstance(loss, tuple) and len(loss) != 2:
            raise ConfigTypeError(
                f"loss_fn must return a scalar or (total, weight), got {len(loss)} "
                "values; for an auxiliary result pass has_aux=True to minimize, for a "
                "model state model_state=True"
            )
        total, weight = loss if isinstance(loss, tuple) else (loss, None)
        for name, value in (("loss", total), ("weight", weight)):
            if value is not None and _shape(value) != ():
                raise ConfigTypeError(
                    f"loss_fn must return a scalar {name}, got {_described(value)}; "
                    "take its mean, or return (total, weight); for an auxiliary result "
                    "pass has_aux=True to minimize"
                )
        return Parsed(total, weight, found.get("model_state"), found.get("aux"))


def _shape(value: Any) -> Any:
    """The shape of an array or a number; None of anything else."""
    known = is_array(value) or isinstance(value, bool | int | float)
    return jnp.shape(value) if known else None


def _described(value: Any) -> str:
    shape = _shape(value)
    return f"a {type(value).__name__}" if shape is None else f"shape {shape}"


class Parsed(NamedTuple):
    """What a loss function returned."""

    total: Any
    weight: Any
    model_state: Any
    aux: Any


class Window(NamedTuple):
    """Sums over the micro batches of a window."""

    grads: Any  # of the scaled losses; float32 or wider if there are several
    total: jax.Array  # of the losses
    weight: Any  # of the weights; None where the loss is a mean
    model_state: Any  # after the last micro batch
    aux: Any  # floats averaged, integers summed


def window(
    loss: Callable[..., Parsed],
    params: Any,
    model_state: Any,
    batch: Any,
    rng: Any,
    *,
    scale: Any,
    num_micro: int,
    pin: Callable[[Any], Any],
) -> Window:
    """Run all micro batches of a window.

    Args:
        loss: ``loss(params, model_state, batch, rng) -> Parsed``.
        params: the parameters.
        model_state: the model state, handed from one micro batch to the next.
        batch: rows of the whole window.
        rng: a random key or None; each micro batch gets its own.
        scale: what the loss is multiplied with before it is differentiated.
        num_micro: number of micro batches.
        pin: constrains gradients to their layout.
    """

    def one(model_state: Any, rows: Any, index: Any) -> Window:
        key = None if rng is None else jax.random.fold_in(rng, index)
        grads, parsed = _gradient(loss, params, model_state, rows, key, scale)
        return Window(pin(grads), *parsed)

    if num_micro == 1:
        return one(model_state, batch, 0)
    rows = jax.tree.map(lambda x: _split(x, num_micro), batch)
    first = jax.tree.map(lambda x: x[0], rows)
    shapes = jax.eval_shape(one, model_state, first, 0)
    check_aux(shapes.aux, "with gradient_merge")
    start = jax.tree.map(_zeros, shapes)._replace(model_state=model_state)

    def body(sums: Window, xs: Any) -> tuple[Window, None]:
        index, rows = xs
        now = one(sums.model_state, rows, index)
        return Window(
            pin(jax.tree.map(_add, sums.grads, now.grads)),
            _add(sums.total, now.total),
            None if now.weight is None else _add(sums.weight, now.weight),
            now.model_state,
            jax.tree.map(_add, sums.aux, now.aux),
        ), None

    start = start._replace(grads=pin(start.grads))
    sums, _ = jax.lax.scan(body, start, (jnp.arange(num_micro), rows))
    return sums._replace(aux=jax.tree.map(lambda x: _mean(x, num_micro), sums.aux))


def _gradient(
    loss: Callable[..., Parsed],
    params: Any,
    model_state: Any,
    rows: Any,
    key: Any,
    scale: Any,
) -> tuple[Any, Parsed]:
    leaves, treedef = jax.tree.flatten(params)
    trained = [common.is_float(x) for x in leaves]

    def scaled(floats: list[Any]) -> tuple[jax.Array, Parsed]:
        rest = iter(floats)
        full = [next(rest) if t else x for x, t in zip(leaves, trained, strict=True)]
        parsed = loss(treedef.unflatten(full), model_state, rows, key)
        total = common.wide(parsed.total)
        new = _same_types(parsed.model_state, model_state)
        weight = parsed.weight
        weight = None if weight is None else jnp.asarray(weight, total.dtype)
        parsed = parsed._replace(
            total=total, weight=weight, model_state=new, aux=_arrays(parsed.aux)
        )
        return total * jnp.asarray(scale, total.dtype), parsed

    floats = [x for x, t in zip(leaves, trained, strict=True) if t]
    (_, parsed), grads = jax.value_and_grad(scaled, has_aux=True)(floats)
    rest = iter(grads)
    full = [
        next(rest) if t else jnp.zeros_like(x)
        for x, t in zip(leaves, trained, strict=True)
    ]
    return treedef.unflatten(full), parsed


def _arrays(tree: Any) -> Any:
    return jax.tree.map(jnp.asarray, tree)


def _same_types(new: Any, old: Any) -> Any:
    """The new model state in the types of the old one, so that no step recompiles."""
    if jax.tree.structure(new) != jax.tree.structure(old):
        raise ConfigTypeError(
            "loss_fn must return a model state like the one it got: "
            f"{jax.tree.structure(old)}, got {jax.tree.structure(new)}; pass "
            "model_state= to opt.create"
        )
    return jax.tree.map(lambda x, y: jnp.asarray(x, y.dtype), new, old)


def _split(x: Any, num_micro: int) -> jax.Array:
    """Rows of micro batch j: every ``num_micro``-th, from j.

    A device then keeps its rows: (B/k, k) and not (k, B/k), whose first dim would cut
    across the devices.
    """
    if x.ndim == 0:
        return jnp.broadcast_to(x, (num_micro,))
    parts = x.reshape(x.shape[0] // num_micro, num_micro, *x.shape[1:])
    return jnp.swapaxes(parts, 0, 1)


def _zeros(shape: Any) -> jax.Array:
    """The start of a sum: float32 or wider."""
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        raise ConfigTypeError("aux must hold arrays, got a random key")
    return jnp.zeros_like(common.wide(jnp.zeros(shape.shape, shape.dtype)))


def _add(total: jax.Array, x: jax.Array) -> jax.Array:
    return total + x.astype(total.dtype)


def _mean(x: jax.Array, count: int) -> jax.Array:
    return x / count if jnp.issubdtype(x.dtype, jnp.inexact) else x


def check_aux(aux: Any, where: str) -> None:
    for path, leaf in leaves_with_paths(aux):
        if leaf.shape != ():
            raise ConfigError(
                f"aux {path_str(path)!r} must be a scalar {where}, got shape "
                f"{leaf.shape}: floats are averaged and integers summed over micro "
                "batches and replicas; reduce it in loss_fn"
            )


def check_rows(batch: Any, num_replicas: int, num_micro: int) -> None:
    """Refuse rows that cannot be split.

    Raises:
        ConfigError: the text names the leaf.
    """
    for path, leaf in leaves_with_paths(batch):
        shape = jnp.shape(leaf)
        if shape and shape[0] % (num_replicas * num_micro):
            raise ConfigError(
                f"batch leaf {path_str(path)!r} of shape {shape} has {shape[0]} rows, "
                f"which {num_replicas} replicas x {num_micro} micro batches do not "
                f"divide; drop or pad rows to a multiple of {num_replicas * num_micro}"
            )
