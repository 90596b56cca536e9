"""The example's decoder, trained as an expert would write it in plain JAX and optax.

Two hand-written forms of each level, on one mesh axis ``data``:

``constraints``
    one program for all devices; shardings on the arguments, sharding constraints
    inside, XLA adds the communication.
``shard_map``
    one program per device, every collective written out.

Nothing here imports jfleet. Parameters have the layout of the example's flax model, and
every form computes what that model computes.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXIS = "data"
LEVELS = ("dp", "os", "os_g", "p_g_os")
Gather = Callable[[Any, Any], Any]
"""From weights and their specs to weights that can be multiplied with."""


class State(NamedTuple):
    """Parameters and optimizer state."""

    params: Any
    opt_state: Any


# The model, on plain arrays.


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * (jax.lax.rsqrt(mean_square + 1e-6) * scale.reshape(1, 1, -1))


def rope(x: jax.Array) -> jax.Array:
    """Rotate (batch, time, head, dim) queries or keys by their position."""
    num_positions, half = x.shape[1], x.shape[-1] // 2
    frequency = 10_000.0 ** (-jnp.arange(half) / half)
    angle = jnp.arange(num_positions)[:, None] * frequency[None, :]
    cos, sin = jnp.cos(angle)[None, :, None, :], jnp.sin(angle)[None, :, None, :]
    a, b = jnp.split(x, 2, axis=-1)
    turned = [a * cos - b * sin, b * cos + a * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def block(x: jax.Array, w: Any, num_heads: int) -> jax.Array:
    batch, time, width = x.shape
    heads = (batch, time, num_heads, width // num_heads)
    h = rms_norm(x, w["attention_norm"]["scale"])
    qkv = jnp.split(h @ w["qkv"]["kernel"], 3, axis=-1)
    q, k, v = (part.reshape(heads) for part in qkv)
    h = jax.nn.dot_product_attention(rope(q), rope(k), v, is_causal=True)
    x = x + h.reshape(x.shape) @ w["out"]["kernel"]
    h = rms_norm(x, w["mlp_norm"]["scale"])
    return x + jax.nn.gelu(h @ w["up"]["kernel"]) @ w["down"]["kernel"]


def loss_fn(
    params: Any, tokens: jax.Array, num_heads: int, specs: Any, gather: Gather
) -> jax.Array:
    """Return the mean loss; ``gather`` is called where a weight is about to be used."""

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def body(x, w):
        one_layer = jax.tree.map(lambda spec: P(*spec[1:]), specs["blocks"])
        return block(x, gather(w, one_layer), num_heads), None

    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x = gather(params["embed"], specs["embed"])["embedding"][inputs]
    x, _ = jax.lax.scan(body, x, params["blocks"])
    x = rms_norm(x, gather(params["norm"], specs["norm"])["scale"])
    logits = x @ gather(params["head"], specs["head"])["kernel"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


# Layout: the largest dim that the devices divide, the first of equals.


def split_dim(spec: P) -> int | None:
    return next((dim for dim, entry in enumerate(spec) if entry is not None), None)


def spec_of(shape: tuple[int, ...], num_devices: int) -> P:
    sizes = [size if size % num_devices == 0 else 0 for size in shape]
    if not any(sizes):
        return P()
    dim = sizes.index(max(sizes))
    return P(*[None] * dim, AXIS)


def layouts(params: Any, tx: optax.GradientTransformation, level: str, mesh: Mesh):
    """Return the specs at rest of params and optimizer state, and the split ones."""
    split = jax.tree.map(lambda x: spec_of(x.shape, mesh.size), params)
    whole = jax.tree.map(lambda _: P(), split)
    moments = whole if level == "dp" else split
    opt_state = optax.tree_map_params(
        tx,
        lambda _, spec: spec,
        jax.eval_shape(tx.init, params),
        moments,
        transform_non_params=lambda _: P(),
    )
    at_rest = State(split if level == "p_g_os" else whole, opt_state)
    return at_rest, split


def create(init: Callable[[], Any], tx: Any, level: str, mesh: Mesh) -> State:
    """Return a state that is born in its layout."""
    at_rest, _ = layouts(jax.eval_shape(init), tx, level, mesh)

    def make():
        params = init()
        return State(params, tx.init(params))

    return jax.jit(make, out_shardings=_shardings(at_rest, mesh))()


def _shardings(specs: Any, mesh: Mesh) -> Any:
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


# Form one: constraints.


def constraints_step(params: Any, tx: Any, level: str, mesh: Mesh, num_heads: int):
    """Return the jitted step ``(state, tokens) -> (state, loss)``."""
    at_rest, split = layouts(params, tx, level, mesh)
    state_shardings = _shardings(at_rest, mesh)
    gather = _constraint_gather(mesh) if level == "p_g_os" else lambda w, _: w

    def step(state, tokens):
        loss, grads = jax.value_and_grad(loss_fn)(
            state.params, tokens, num_heads, split, gather
        )
        if level in ("os_g", "p_g_os"):
            grads = jax.lax.with_sharding_constraint(grads, _shardings(split, mesh))
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state), loss

    return jax.jit(
        step,
        in_shardings=(state_shardings, NamedSharding(mesh, P(AXIS))),
        out_shardings=(state_shardings, NamedSharding(mesh, P())),
        donate_argnums=0,
    )


def _constraint_gather(mesh: Mesh) -> Gather:
    """Gather going forward; the gradient comes back as a shard."""

    def one(weight, spec):
        constrain = jax.lax.with_sharding_constraint

        @jax.custom_vjp
        def gathered(w):
            return constrain(w, NamedSharding(mesh, P()))

        def backward(_, g):
            return (constrain(g, NamedSharding(mesh, spec)),)

        gathered.defvjp(lambda w: (gathered(w), None), backward)
        return gathered(weight)

    return lambda weights, specs: jax.tree.map(one, weights, specs)


# Form two: shard_map.


def shard_map_step(params: Any, tx: Any, level: str, mesh: Mesh, num_heads: int):
    """Return the jitted step ``(state, tokens) -> (state, loss)``."""
    at_rest, split = layouts(params, tx, level, mesh)
    num_devices = mesh.size
    gather = _all_gather if level == "p_g_os" else lambda w, _: w

    def mean(g, spec):
        if level == "p_g_os" and any(spec):
            return g / num_devices  # the transpose of all_gather has summed already
        if level == "os_g" and any(spec):
            dim = split_dim(spec)
            g = jax.lax.psum_scatter(g, AXIS, scatter_dimension=dim, tiled=True)
            return g / num_devices
        return jax.lax.pmean(g, AXIS)

    def own_part(x, spec):
        if not any(spec):
            return x
        dim = split_dim(spec)
        size = x.shape[dim] // num_devices
        start = jax.lax.axis_index(AXIS) * size
        return jax.lax.dynamic_slice_in_dim(x, start, size, dim)

    def step(state, tokens):
        loss, grads = jax.value_and_grad(loss_fn)(
            state.params, tokens, num_heads, split, gather
        )
        grads, weights = jax.tree.map(mean, grads, split), state.params
        if level == "os":
            grads = jax.tree.map(own_part, grads, split)
        if level in ("os", "os_g"):
            weights = jax.tree.map(own_part, weights, split)
        updates, opt_state = tx.update(grads, state.opt_state, weights)
        weights = optax.apply_updates(weights, updates)
        if level in ("os", "os_g"):
            weights = _all_gather(weights, split)
        return State(weights, opt_state), jax.lax.pmean(loss, AXIS)

    manual = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(at_rest, P(AXIS)),
        out_specs=(at_rest, P()),
        check_vma=False,
    )
    return jax.jit(manual, donate_argnums=0)


def _all_gather(weights: Any, specs: Any) -> Any:
    def one(weight, spec):
        if not any(spec):
            return weight
        return jax.lax.all_gather(weight, AXIS, axis=split_dim(spec), tiled=True)

    return jax.tree.map(one, weights, specs)


STEPS = {"constraints": constraints_step, "shard_map": shard_map_step}
"""The forms by name."""
