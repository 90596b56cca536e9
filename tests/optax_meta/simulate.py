"""Small helpers of these tests: replicas on one device, and looking into jaxprs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

AXIS = "replica"


def run_replicas(tx, params, grads, *, extra=None, num=None):
    """Train replicas under ``vmap``; yield (params, state), both with a leading dim.

    Args:
      tx: transformation that knows the axis "replica".
      params: start values, the same on all replicas.
      grads: one tree per step with a leading dim of replicas, or a function of
        (replica index, step, params of that replica).
      extra: function of (replica index, step) giving extra arguments.
      num: number of replicas, if ``grads`` is a function.
    """
    replicas = jnp.arange(num or jax.tree.leaves(grads[0])[0].shape[0])
    params = jax.tree.map(lambda p: jnp.stack([p] * len(replicas)), params)
    state = jax.vmap(lambda p: tx.init(p))(params)

    def step(r, t, g, state, params):
        g = grads(r, t, params) if callable(grads) else g
        more = extra(r, t) if extra else {}
        updates, state = tx.update(g, state, params, **more)
        return optax.apply_updates(params, updates), state

    step = jax.jit(jax.vmap(step, axis_name=AXIS, in_axes=(0, None, 0, 0, 0)))
    t = 0
    while True:
        g = replicas if callable(grads) else grads[t]
        params, state = step(replicas, jnp.asarray(t), g, state, params)
        yield params, state
        t += 1


def train(tx, params, grads, **extra):
    """Train on one device with a list of gradients; return (params, state) per step."""
    state, out = tx.init(params), []
    update = jax.jit(tx.update)
    for g in grads:
        updates, state = update(g, state, params, **extra)
        params = optax.apply_updates(params, updates)
        out.append((params, state))
    return out


def equations(jaxpr, inside=()):
    """All equations of a jaxpr with the names of the primitives around them."""
    for eqn in jaxpr.eqns:
        yield eqn, inside
        for value in eqn.params.values():
            for sub in value if isinstance(value, list | tuple) else (value,):
                sub = getattr(sub, "jaxpr", sub)
                if hasattr(sub, "eqns"):
                    yield from equations(sub, (*inside, eqn.primitive.name))


def collectives(function, *args, num=2):
    """(primitive name, primitives around it, dtype and shape of operands)."""
    closed = jax.make_jaxpr(function, axis_env=[(AXIS, num)])(*args)
    names = ("psum", "pmax", "all_gather", "psum_invariant", "pmin", "all_to_all")
    return [
        (
            e.primitive.name,
            inside,
            [(str(v.aval.dtype), v.aval.shape) for v in e.invars],
        )
        for e, inside in equations(closed.jaxpr)
        if e.primitive.name in names
    ]


def assert_close(tree, want, rtol=1e-6, atol=0.0):
    for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(
            np.asarray(x, np.float64), np.asarray(y, np.float64), rtol=rtol, atol=atol
        )


def assert_bits(tree, want):
    for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def spread(tree):
    """Largest difference between replicas."""
    return max(float(jnp.max(jnp.abs(x - x[:1]))) for x in jax.tree.leaves(tree))


def noise(shape, seed):
    """Fixed numbers in [-1, 1) without a random generator's version."""
    n = int(np.prod(shape))
    return np.sin(np.arange(n) * 12.9898 + seed * 78.233).reshape(shape) * 1.0
