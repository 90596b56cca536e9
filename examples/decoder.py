"""A small byte-level decoder: the model that the example and the benchmarks train.

Nothing in this file knows about jfleet or about devices.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

VOCAB_SIZE = 256  # one token per byte


def rope(x: jax.Array) -> jax.Array:
    """Rotate (batch, time, head, dim) queries or keys by their position."""
    num_positions, half = x.shape[1], x.shape[-1] // 2
    frequency = 10_000.0 ** (-jnp.arange(half) / half)
    angle = jnp.arange(num_positions)[:, None] * frequency[None, :]
    cos, sin = jnp.cos(angle)[None, :, None, :], jnp.sin(angle)[None, :, None, :]
    a, b = jnp.split(x, 2, axis=-1)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return turned.astype(x.dtype)  # x may be bfloat16, the angles are not


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each behind an RMS norm."""

    num_heads: int

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        """Map (batch, time, width) to the same shape; the pair is what scan wants."""
        batch, time, width = x.shape
        heads = (batch, time, self.num_heads, width // self.num_heads)
        h = nn.RMSNorm(name="attention_norm")(x)
        qkv = nn.Dense(3 * width, use_bias=False, name="qkv")(h)
        q, k, v = (part.reshape(heads) for part in jnp.split(qkv, 3, axis=-1))
        h = jax.nn.dot_product_attention(rope(q), rope(k), v, is_causal=True)
        x = x + nn.Dense(width, use_bias=False, name="out")(h.reshape(x.shape))
        h = nn.RMSNorm(name="mlp_norm")(x)
        h = nn.gelu(nn.Dense(4 * width, use_bias=False, name="up")(h))
        return x + nn.Dense(width, use_bias=False, name="down")(h), None


class Decoder(nn.Module):
    """Bytes in, next-byte logits out; the blocks are scanned and rematerialised."""

    width: int = 256
    num_heads: int = 4
    num_layers: int = 4

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Map (batch, time) bytes to (batch, time, 256) logits."""
        x = nn.Embed(VOCAB_SIZE, self.width, name="embed")(tokens)
        blocks = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.num_layers,
        )
        x, _ = blocks(self.num_heads, name="blocks")(x, None)
        x = nn.RMSNorm(name="norm")(x)
        return nn.Dense(VOCAB_SIZE, use_bias=False, name="head")(x)


def next_byte_losses(
    apply_fn: Callable[..., jax.Array], params: Any, tokens: jax.Array
) -> jax.Array:
    """Return the cross entropy, in nats, of every byte but the first of each row."""
    logits = apply_fn({"params": params}, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
