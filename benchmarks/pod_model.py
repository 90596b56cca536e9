"""A Llama-3-shaped decoder and its training step, as a user writes them.

Plain functions, float32 parameters, bfloat16 compute, scanned and fully rematerialised
layers. Nothing here knows about devices.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The sizes of a decoder."""

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    vocab: int = 128_256

    @property
    def head_dim(self) -> int:
        """Elements of one attention head."""
        return self.width // self.heads

    def params(self) -> dict[str, Any]:
        """Return the parameters as shapes; nothing this big fits this machine."""
        kv_width = self.kv_heads * self.head_dim

        def array(*shape):
            return jax.ShapeDtypeStruct(shape, jnp.float32)

        def stacked(*shape):
            return array(self.layers, *shape)

        return {
            "embed": array(self.vocab, self.width),
            "layers": {
                "attention_norm": stacked(self.width),
                "query": stacked(self.width, self.width),
                "key": stacked(self.width, kv_width),
                "value": stacked(self.width, kv_width),
                "out": stacked(self.width, self.width),
                "mlp_norm": stacked(self.width),
                "gate": stacked(self.width, self.hidden),
                "up": stacked(self.width, self.hidden),
                "down": stacked(self.hidden, self.width),
            },
            "norm": array(self.width),
            "head": array(self.width, self.vocab),
        }


SHAPES = {
    "1b": Shape(layers=16, width=2048, hidden=8192, heads=32, kv_heads=8),
    "8b": Shape(layers=32, width=4096, hidden=14_336, heads=32, kv_heads=8),
    "70b": Shape(layers=80, width=8192, hidden=28_672, heads=64, kv_heads=8),
}


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32**2, axis=-1, keepdims=True) + 1e-5)
    return x32.astype(x.dtype) * scale


def layer(x: jax.Array, w: dict[str, jax.Array], shape: Shape) -> jax.Array:
    w = jax.tree.map(lambda a: a.astype(jnp.bfloat16), w)
    heads = (*x.shape[:2], -1, shape.head_dim)
    h = rms_norm(x, w["attention_norm"])
    q, k, v = ((h @ w[name]).reshape(heads) for name in ("query", "key", "value"))
    h = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + h.reshape(x.shape) @ w["out"]
    h = rms_norm(x, w["mlp_norm"])
    return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]


def apply(params: dict[str, Any], tokens: jax.Array, *, shape: Shape) -> jax.Array:
    """Return the logits of every next token."""

    @jax.checkpoint
    def body(x, w):
        return layer(x, w, shape), None

    x = params["embed"].astype(jnp.bfloat16)[tokens]
    x, _ = jax.lax.scan(body, x, params["layers"])
    x = rms_norm(x, params["norm"].astype(jnp.bfloat16))
    return x @ params["head"].astype(jnp.bfloat16)


def train_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
    def loss_fn(params):
        logits = state.apply_fn(params, tokens)[:, :-1].astype(jnp.float32)
        targets = tokens[:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss
