"""What people write with parameters ``p`` (a: 32 x 64, b: 64 x 32) and a batch ``x``.

Each construct is a loss. ``GATHERED`` ones need a whole weight; ``ON_SHARDS`` ones are
computed without gathering anything; ``STACKED`` ones have layers in dim 0.
"""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

bf16 = jnp.bfloat16
GATHERED, ON_SHARDS, STACKED = {}, {}, {}


def rows(shape, seed=0):
    """Deterministic numbers around zero."""
    size = int(np.prod(shape))
    return jnp.asarray(np.sin(np.arange(size) ** 2.1 + seed).reshape(shape) * 0.1, "f4")


def inputs():
    x = rows((16, 32), 3) * 10
    return {"a": rows((32, 64)), "b": rows((64, 32), 1)}, x


def stacked_inputs():
    x = rows((16, 32), 3) * 10
    return {"a": rows((4, 32, 64)), "b": rows((4, 64, 32), 1)}, x


def squares(function):
    return lambda p, x: (function(p, x).astype(jnp.float32) ** 2).mean()


def matmuls(w):
    """The same product in every spelling; ``w`` makes the weight."""
    return squares(lambda p, x: x @ w(p["a"]))


def two_layers(p, x):
    return jnp.tanh(x @ p["a"]) @ p["b"]


# Products and library calls -----------------------------------------------------------

GATHERED |= {
    "two layers": squares(two_layers),
    "weight on the left": squares(lambda p, x: p["a"].T @ x.T),
    "jnp.dot": squares(lambda p, x: jnp.dot(x, p["a"])),
    "jnp.matmul": squares(lambda p, x: jnp.matmul(x, p["a"])),
    "einsum": squares(lambda p, x: jnp.einsum("bi,ij->bj", x, p["a"])),
    "einsum, weight first": squares(lambda p, x: jnp.einsum("ij,bi->bj", p["a"], x)),
    "tensordot": squares(lambda p, x: jnp.tensordot(x, p["a"], 1)),
    "lax.dot_general": squares(
        lambda p, x: lax.dot_general(x, p["a"], (((1,), (0,)), ((), ())))
    ),
    "take rows": squares(lambda p, x: jnp.take(p["a"], jnp.arange(16) % 32, axis=0)),
    "take_along_axis": squares(
        lambda p, x: jnp.take_along_axis(p["a"], jnp.zeros((32, 2), int), 1)
    ),
    "one-hot lookup": squares(
        lambda p, x: jax.nn.one_hot(jnp.arange(16) % 32, 32) @ p["a"]
    ),
    "tied table": squares(lambda p, x: (p["a"][jnp.arange(16) % 32] + 1) @ p["a"].T),
    "attention to weights": squares(
        lambda p, x: jax.nn.dot_product_attention(
            jnp.ones((1, 16, 2, 16)), *[p["a"].reshape(1, 64, 2, 16)] * 2
        )
    ),
    "top_k": squares(lambda p, x: lax.top_k(p["a"], 2)[0]),
    "qr": matmuls(lambda w: jnp.linalg.qr(w.T)[1]),
    "softmax of a weight": matmuls(jax.nn.softmax),
    "concatenate": matmuls(lambda w: jnp.concatenate([w, w], 1)),
    "stack": matmuls(lambda w: jnp.stack([w, w])[0]),
    "split": matmuls(lambda w: jnp.split(w, 2, 1)[0]),
    "pad": matmuls(lambda w: jnp.pad(w, ((0, 0), (0, 8)))),
    "broadcast_to": matmuls(lambda w: jnp.broadcast_to(w, (2, 32, 64))[0]),
    "scatter into": matmuls(lambda w: w.at[0].set(0.0)),
    "vectorize": matmuls(jnp.vectorize(lambda a: a * 2)),
    "apply_along_axis": matmuls(lambda w: jnp.apply_along_axis(lambda a: a * 2, 0, w)),
    "flattened together": squares(
        lambda p, x: x @ jax.flatten_util.ravel_pytree(p)[0][:2048].reshape(32, 64)
    ),
    "conv": squares(
        lambda p, x: lax.conv_general_dilated(
            x.reshape(16, 8, 4),
            p["a"].reshape(4, 8, 64).transpose(1, 0, 2)[:3],
            (1,),
            "SAME",
            dimension_numbers=("NHC", "HIO", "NHC"),
        )
    ),
}

# Layout, casts, arithmetic on the weight ---------------------------------------------

GATHERED |= {
    "transposed twice": matmuls(lambda w: lax.transpose(w.T, (1, 0))),
    "mT, swapaxes": matmuls(lambda w: w.mT.swapaxes(0, 1)),
    "slice": matmuls(lambda w: w[:, :32]),
    "new dim and back": matmuls(lambda w: w[None][0]),
    "reshape and back": matmuls(lambda w: w.reshape(64, 32).reshape(32, 64)),
    "split dim": matmuls(lambda w: w.reshape(32, 16, 4)[:, :, 0]),
    "reversed": matmuls(lambda w: w[::-1]),
    "bf16 product": squares(lambda p, x: x.astype(bf16) @ p["a"].astype(bf16)),
    "whole tree to bf16": squares(
        lambda p, x: two_layers(jax.tree.map(lambda a: a.astype(bf16), p), x)
    ),
    "cast up": matmuls(lambda w: w.astype(bf16).astype(jnp.float32)),
    "cast up and move": matmuls(lambda w: w.astype(bf16).T.astype(jnp.float32).T),
    "scaled": matmuls(lambda w: -w + (1 - w) + w / 2 + 2.0**w),
    "w % 1": matmuls(lambda w: w % 1.0),
    "power and abs": matmuls(lambda w: abs(w) + w**2),
    "where": matmuls(lambda w: jnp.where(w > 0, w, 0)),
    "mask of itself": matmuls(lambda w: w * (w > 0) * (w == w)),
    "maximum, relu": matmuls(lambda w: jnp.maximum(w, 0) + jax.nn.relu(w)),
    "lax.select": matmuls(lambda w: lax.select(jnp.ones((32, 64), bool), w, -w)),
    "zeros_like, full_like": matmuls(
        lambda w: jnp.zeros_like(w) + lax.full_like(w, 1.0) + w
    ),
    "times a constant array": matmuls(lambda w: jnp.ones((32, 64)) * w),
    "stop_gradient": matmuls(lambda w: w + lax.stop_gradient(w)),
    "optimization_barrier": matmuls(lax.optimization_barrier),
    "divided by its norm": matmuls(lambda w: w / jnp.linalg.norm(w)),
    "norm per column": matmuls(lambda w: w / jnp.linalg.norm(w, axis=0)),
    "dtype and shape read": matmuls(
        lambda w: w / (len(w) * w.ndim * w.size) if w.dtype == jnp.float32 else 0
    ),
    "is a jax.Array": matmuls(lambda w: w if isinstance(w, jax.Array) else None),
    "copied": lambda p, x: squares(two_layers)(copy.deepcopy(p), x),
    "asarray": matmuls(lambda w: jnp.array(jnp.asarray(w))),
    "weight decay": lambda p, x: (
        squares(two_layers)(p, x)
        + 0.1 * sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(p))
    ),
    "weight decay by vdot": lambda p, x: (
        squares(two_layers)(p, x)
        + 0.1 * sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(p))
    ),
    "global norm": lambda p, x: squares(two_layers)(p, x) + optax.tree.norm(p),
}
ON_SHARDS |= {
    "sum of squares": lambda p, x: sum((w**2).sum() for w in jax.tree.leaves(p)),
    "sum of bf16 squares": lambda p, x: sum(
        (w.astype(bf16).astype(jnp.float32) ** 2).sum() for w in jax.tree.leaves(p)
    ),
    "scaled activations": squares(lambda p, x: x * p["a"].sum() * p["b"].max()),
    "added to itself": squares(lambda p, x: lax.add(p["a"], p["a"]) + p["b"].T),
}


# Control flow and transformations ----------------------------------------------------


@jax.custom_vjp
def product(x, w):
    return x @ w.astype(x.dtype)


product.defvjp(
    lambda x, w: (product(x, w), (x, w)),
    lambda kept, g: (
        g @ kept[1].astype(g.dtype).T,
        (kept[0].T @ g).astype(kept[1].dtype),
    ),
)


@jax.custom_jvp
def squashed(w, flag):
    return jnp.tanh(w.astype(bf16)).astype(jnp.float32) * flag


squashed.defjvp(
    lambda primals, tangents: (
        squashed(*primals),
        tangents[0] * (1 - jnp.tanh(primals[0]) ** 2) * primals[1],
    )
)


def maml(p, x):
    inner = jax.grad(lambda p: squares(two_layers)(p, x))(p)
    return two_layers(jax.tree.map(lambda a, g: a - 0.1 * g, p, inner), x)


GATHERED |= {
    "custom_vjp": squares(lambda p, x: product(x, p["a"])),
    "custom_vjp in bf16": squares(lambda p, x: product(x.astype(bf16), p["a"])),
    "custom_jvp": squares(lambda p, x: x @ squashed(p["a"], 2)),
    "jit": squares(lambda p, x: jax.jit(two_layers)(p, x)),
    "the same jit twice": squares(
        lambda p, x: (lambda f: f(p["a"], x) + f(p["b"].T, x))(
            jax.jit(lambda w, x: x @ w)
        )
    ),
    "jit returns a cast weight": squares(
        lambda p, x: x @ jax.jit(lambda w: w.astype(bf16).T)(p["a"]).T
    ),
    "checkpoint": squares(lambda p, x: jax.checkpoint(two_layers)(p, x)),
    "checkpoint returns a cast weight": squares(
        lambda p, x: x @ jax.checkpoint(lambda w: w.astype(bf16))(p["a"])
    ),
    "checkpoint with policy": squares(
        lambda p, x: jax.checkpoint(
            two_layers, policy=jax.checkpoint_policies.dots_saveable
        )(p, x)
    ),
    "cond, captured": squares(
        lambda p, x: lax.cond(
            x.sum() > 0, lambda x: x @ p["a"], lambda x: x @ (2 * p["a"]), x
        )
    ),
    "cond, operand": squares(
        lambda p, x: lax.cond(
            x.sum() > 0, lambda x, w: x @ w, lambda x, w: x @ (2 * w), x, p["a"]
        )
    ),
    "cond returns the weight": squares(
        lambda p, x: x @ lax.cond(x.sum() > 0, lambda w: w, lambda w: w * 2, p["a"])
    ),
    "switch": squares(
        lambda p, x: lax.switch(
            jnp.int32(1), [lambda x: x @ p["a"], lambda x: 2 * (x @ p["a"])], x
        )
    ),
    "vmap over the batch": squares(
        lambda p, x: jax.vmap(lambda w, x: x @ w, (None, 0))(p["a"], x)
    ),
    "vmap, captured": squares(lambda p, x: jax.vmap(lambda x: x @ p["a"])(x)),
    "lax.map": squares(lambda p, x: lax.map(lambda row: row @ p["a"], x)),
    "scan, captured": squares(
        lambda p, x: lax.scan(lambda h, _: (two_layers(p, h), None), x, length=4)[0]
    ),
    "scan, captured in bf16": squares(
        lambda p, x: lax.scan(
            lambda h, _: (h @ (p["a"].astype(bf16) @ p["b"].astype(bf16)), None),
            x,
            length=4,
        )[0]
    ),
    "scan, captured and rematerialised": squares(
        lambda p, x: lax.scan(
            lambda h, _: (jax.checkpoint(two_layers)(p, h), None), x, length=4
        )[0]
    ),
    "scan, weight as carry": squares(
        lambda p, x: x @ lax.scan(lambda c, _: (c * 0.9, None), p["a"], length=3)[0]
    ),
    "fori_loop": squares(
        lambda p, x: lax.fori_loop(0, 3, lambda i, h: two_layers(p, h), x)
    ),
    "while": lambda p, x: (
        squares(two_layers)(p, x)
        + lax.stop_gradient(
            lax.while_loop(
                lambda c: c[0] < 3, lambda c: (c[0] + 1, two_layers(p, c[1])), (0, x)
            )[1]
        ).sum()
    ),
    "while, weight as carry": lambda p, x: (
        squares(two_layers)(p, x)
        + lax.stop_gradient(
            lax.while_loop(lambda c: c.sum() > 10, lambda c: c * 0.5, p["a"])
        ).sum()
    ),
    "gradient inside": squares(maml),
    "jvp inside": squares(
        lambda p, x: (
            jax.jvp(lambda w: x @ w, (p["a"],), (jnp.ones((32, 64)),))[1] + x @ p["a"]
        )
    ),
    "eval_shape inside": squares(
        lambda p, x: x @ p["a"] * jax.eval_shape(lambda w: w, p["a"]).size
    ),
    "debug callback": squares(
        lambda p, x: (jax.debug.callback(lambda _: None, p["a"]), x @ p["a"])[1]
    ),
    "pure callback": squares(
        lambda p, x: (
            x @ p["a"]
            + jax.pure_callback(
                lambda w: np.float32(w.sum()),
                jax.ShapeDtypeStruct((), jnp.float32),
                lax.stop_gradient(p["b"]),
            )
        )
    ),
    "jax.tree_util.Partial": squares(
        lambda p, x: jax.tree_util.Partial(lambda w, x: x @ w, p["a"])(x)
    ),
}

# Layers in dim 0 ---------------------------------------------------------------------


def over_layers(layer):
    return squares(lambda p, x: lax.scan(lambda h, w: (layer(w, h), None), x, p)[0])


def nested(p, x):
    groups = jax.tree.map(lambda a: a.reshape(2, 2, *a.shape[1:]), p)

    def group(h, ws):
        return lax.scan(lambda h, w: (two_layers(w, h), None), h, ws)

    return lax.scan(group, x, groups)[0]


def in_bf16(w, h):
    w = jax.tree.map(lambda a: a.astype(bf16), w)
    return two_layers(w, h.astype(bf16)).astype(h.dtype)


STACKED |= {
    "scan": over_layers(two_layers),
    "scan, checkpoint": over_layers(jax.checkpoint(two_layers)),
    "scan, checkpoint, bf16": over_layers(jax.checkpoint(in_bf16)),
    "scan, bf16": over_layers(in_bf16),
    "scan in two levels": squares(nested),
    "vmap ensemble": squares(lambda p, x: jax.vmap(two_layers, (0, None))(p, x)),
    "python loop": squares(
        lambda p, x: functools.reduce(
            lambda h, i: two_layers(jax.tree.map(lambda a: a[i], p), h), range(4), x
        )
    ),
    "scan over layer numbers": squares(
        lambda p, x: lax.scan(
            lambda h, i: (two_layers(jax.tree.map(lambda a: a[i], p), h), None),
            x,
            jnp.arange(4),
        )[0]
    ),
    "dynamic_index_in_dim": squares(
        lambda p, x: lax.scan(
            lambda h, i: (
                two_layers(
                    {k: lax.dynamic_index_in_dim(w, i, 0, False) for k, w in p.items()},
                    h,
                ),
                None,
            ),
            x,
            jnp.arange(4),
        )[0]
    ),
    "scan in a scan over steps": squares(
        lambda p, x: lax.scan(
            lambda h, _: (
                lax.scan(lambda h, w: (two_layers(w, h), None), h, p)[0],
                None,
            ),
            x,
            length=2,
        )[0]
    ),
    "associative_scan": squares(
        lambda p, x: lax.associative_scan(jnp.add, p["a"])[-1] @ p["b"][0]
    ),
}
