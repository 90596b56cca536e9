"""Whole training steps with a strategy, as an expert would write them by hand.

One ``shard_map`` over the mesh, every collective written out. Nothing here imports
jfleet. Each maker returns ``(create, step)``: ``create(init) -> state`` and the jitted
``step(state, tokens) -> (state, (loss, norm))``, where norm is that of the gradient.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import reference
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Made = tuple[Callable[[Callable[[], Any]], Any], Any]
AXIS = reference.AXIS


class State(NamedTuple):
    """Parameters and optimizer state; ``count`` is of steps."""

    params: Any
    opt_state: Any
    count: jax.Array


def _setup(params: Any, tx: Any, level: str, mesh: Mesh) -> tuple[State, Any]:
    at_rest, split = reference.layouts(params, tx, level, mesh)
    return State(at_rest.params, at_rest.opt_state, P()), split


def _maker(tx: Any, specs: State, mesh: Mesh) -> Callable[[Callable[[], Any]], State]:
    def create(init):
        def make():
            params = init()
            return State(params, tx.init(params), jnp.zeros((), jnp.int32))

        shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), specs)
        return jax.jit(make, out_shardings=shardings)()

    return create


def _own(x: jax.Array, spec: P, num: int, axis: str = AXIS) -> jax.Array:
    dim = reference.split_dim(spec)
    if dim is None:
        return x
    size = x.shape[dim] // num
    start = jax.lax.axis_index(axis) * size
    return jax.lax.dynamic_slice_in_dim(x, start, size, dim)


def _scattered_mean(g: jax.Array, spec: P, num: int, axis: str = AXIS) -> jax.Array:
    dim = reference.split_dim(spec)
    if dim is None:
        return jax.lax.psum(g, axis) / num
    g = jax.lax.psum_scatter(g, axis, scatter_dimension=dim, tiled=True)
    return g / num


def _gathered(x: jax.Array, spec: P, axis: str = AXIS) -> jax.Array:
    dim = reference.split_dim(spec)
    if dim is None:
        return x
    return jax.lax.all_gather(x, axis, axis=dim, tiled=True)


def _norm(grads: Any, split: Any, axis: str = AXIS) -> jax.Array:
    squares = [jnp.sum(g * g) for g in jax.tree.leaves(grads)]
    parts = [reference.split_dim(s) is not None for s in jax.tree.leaves(split)]
    local = sum(s for s, p in zip(squares, parts, strict=True) if p)
    whole = sum((s for s, p in zip(squares, parts, strict=True) if not p), 0.0)
    return jnp.sqrt(jax.lax.psum(local, axis) + whole)


def merged(params: Any, tx: Any, mesh: Mesh, heads: int, num_micro: int) -> Made:
    """Gradient accumulation at os_g: local sums, one reduce-scatter."""
    specs, split = _setup(params, tx, "os_g", mesh)
    num = mesh.size
    gather = lambda w, _: w  # noqa: E731

    def step(state, tokens):
        def add(sums, rows):
            found = jax.value_and_grad(reference.loss_fn)(
                state.params, rows, heads, split, gather
            )
            return jax.tree.map(jnp.add, sums, found), None

        rows = tokens.reshape(num_micro, -1, tokens.shape[-1])
        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params)
        (loss, grads), _ = jax.lax.scan(add, zeros, rows)
        grads = jax.tree.map(lambda g: g / num_micro, grads)
        new, norm = _updated(tx, state, grads, split, num, _scattered_mean)
        return new, (jax.lax.pmean(loss / num_micro, AXIS), norm)

    return _maker(tx, specs, mesh), _jitted(step, specs, mesh)


def narrow(params: Any, tx: Any, mesh: Mesh, heads: int) -> Made:
    """float16 reduce-scatter at os_g; a sum that overflows skips the step."""
    specs, split = _setup(params, tx, "os_g", mesh)
    num = mesh.size

    def mean16(g, spec, num):
        g = (g / num).astype(jnp.float16)
        return (_scattered_mean(g, spec, 1)).astype(jnp.float32)

    def step(state, tokens):
        loss, grads = jax.value_and_grad(reference.loss_fn)(
            state.params, tokens, heads, split, lambda w, _: w
        )
        new, norm = _updated(tx, state, grads, split, num, mean16)
        ok = jnp.isfinite(norm)
        keep = functools.partial(jnp.where, ok)
        new = jax.tree.map(keep, new, state)._replace(count=new.count)
        return new, (jax.lax.pmean(loss, AXIS), norm)

    return _maker(tx, specs, mesh), _jitted(step, specs, mesh)


def _updated(tx, state, grads, split, num, mean) -> tuple[State, jax.Array]:
    grads = jax.tree.map(lambda g, s: mean(g, s, num), grads, split)
    weights = jax.tree.map(lambda w, s: _own(w, s, num), state.params, split)
    updates, opt_state = tx.update(grads, state.opt_state, weights)
    weights = optax.apply_updates(weights, updates)
    weights = jax.tree.map(_gathered, weights, split)
    return State(weights, opt_state, state.count + 1), _norm(grads, split)


def half(params: Any, tx: Any, mesh: Mesh, heads: int, *, late: bool) -> Made:
    """bfloat16 at p_g_os: float32 shards, gathered in bfloat16, where they are used.

    The shards are cast all at once before the model, as is usual, or ``late``, each in
    its own layer and once more going backward, which keeps no 16-bit copy of them.
    """
    specs, split = _setup(params, tx, "p_g_os", mesh)
    gather = reference._constraint_gather(mesh)

    def low(w):
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), w)

    def loss_fn(w, tokens):
        if late:
            cast = lambda w, spec: gather(low(w), spec)  # noqa: E731
            return reference.loss_fn(w, tokens, heads, split, cast)
        return reference.loss_fn(low(w), tokens, heads, split, gather)

    def step(state, tokens):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, tokens)
        shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), split)
        grads = jax.lax.with_sharding_constraint(grads, shardings)
        norm = optax.global_norm(grads)

        def take():
            updates, opt_state = tx.update(grads, state.opt_state, state.params)
            return optax.apply_updates(state.params, updates), opt_state

        new = jax.lax.cond(
            jnp.isfinite(norm), take, lambda: (state.params, state.opt_state)
        )
        return State(*new, state.count + 1), (loss.astype(jnp.float32), norm)

    shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), specs)
    whole = NamedSharding(mesh, P())
    jitted = jax.jit(
        step,
        in_shardings=(shardings, NamedSharding(mesh, P(AXIS))),
        out_shardings=(shardings, (whole, whole)),
        donate_argnums=0,
    )
    return _maker(tx, specs, mesh), jitted


def local(params: Any, tx: Any, mesh: Mesh, heads: int, period: int) -> Made:
    """LocalSGD over ``replica``, os_g over ``shard``: parameters meet now and then."""
    num = mesh.shape["shard"]
    inner = Mesh(mesh.devices[0], (AXIS,))
    at_rest, split = _setup(params, tx, "os_g", inner)

    def outer(spec):
        return P("replica", *("shard" if e else None for e in spec))

    specs = State(
        jax.tree.map(outer, at_rest.params), jax.tree.map(outer, at_rest.opt_state), P()
    )

    def create(init):
        def make():
            w = init()
            start = State(w, tx.init(w), jnp.zeros((), jnp.int32))
            count = mesh.shape["replica"]
            lead = lambda x: jnp.broadcast_to(x, (count, *x.shape))  # noqa: E731
            return jax.tree.map(lead, start)._replace(count=start.count)

        shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), specs)
        return jax.jit(make, out_shardings=shardings)()

    def step(state, tokens):
        own = jax.tree.map(lambda x: x[0], state._replace(count=None))
        loss, grads = jax.value_and_grad(reference.loss_fn)(
            own.params, tokens, heads, split, lambda w, _: w
        )
        on = functools.partial
        grads = jax.tree.map(
            lambda g, s: _scattered_mean(g, s, num, "shard"), grads, split
        )
        weights = jax.tree.map(lambda w, s: _own(w, s, num, "shard"), own.params, split)
        updates, opt_state = tx.update(grads, own.opt_state, weights)
        weights = optax.apply_updates(weights, updates)
        count = state.count + 1
        meet = count % period == 0
        weights = jax.lax.cond(
            meet, on(jax.lax.pmean, axis_name="replica"), lambda w: w, weights
        )
        weights = jax.tree.map(lambda w, s: _gathered(w, s, "shard"), weights, split)
        loss = jax.lax.pmean(loss, "shard")
        norm = _norm(grads, split, "shard")
        lead = jax.tree.map(lambda x: x[None], (weights, opt_state))
        return State(*lead, count), (loss[None], norm[None])

    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(specs, P(("replica", "shard"))),
        out_specs=(specs, (P("replica"), P("replica"))),
        check_vma=False,
    )
    return create, jax.jit(mapped, donate_argnums=0)


def _jitted(step: Any, specs: State, mesh: Mesh) -> Any:
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(specs, P(AXIS)),
        out_specs=(specs, P()),
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=0)
