"""What a trained decoder is worth: its loss on other text, and what it writes."""

import functools
import zlib
from collections.abc import Callable
from typing import Any

import corpus
import jax
import jax.numpy as jnp
import numpy as np
from decoder import next_byte_losses
from rich.console import Console
from rich.text import Text

import jfleet

HELD_OUT_ROWS = 32
SAMPLES = 4  # lines to write at the end
Apply = Callable[..., jax.Array]


@functools.partial(jax.jit, static_argnums=0)
def row_losses(apply_fn: Apply, params: Any, tokens: jax.Array) -> jax.Array:
    return next_byte_losses(apply_fn, params, tokens).mean(axis=1)


@functools.partial(jax.jit, static_argnums=(0, 3))
def generate(apply_fn: Apply, params: Any, rows: jax.Array, num_bytes: int):
    """Sample the bytes that follow each row, one at a time."""

    def one_more(i, carry):
        rows, text = carry
        logits = apply_fn({"params": params}, rows)[:, -1]
        key = jax.random.fold_in(jax.random.key(0), i)
        new = jax.random.categorical(key, logits / 0.7)
        rows = jnp.concatenate([rows[:, 1:], new[:, None]], axis=1)
        return rows, text.at[:, i].set(new)

    text = jnp.zeros((rows.shape[0], num_bytes), jnp.int32)
    return jax.lax.fori_loop(0, num_bytes, one_more, (rows, text))[1]


class HeldOut:
    """The loss on rows that are never trained on; the same rows on any mesh."""

    def __init__(self, text: corpus.Corpus, mesh: jax.sharding.Mesh):
        rows = text.held_out_rows(HELD_OUT_ROWS)
        self.crc = zlib.crc32(text.held_out)
        self.num_rows = len(rows)
        padding = np.zeros((-len(rows) % mesh.size, rows.shape[1]), rows.dtype)
        self.batch = jfleet.shard_batch(np.concatenate([rows, padding]), mesh=mesh)

    def loss(self, apply_fn: Apply, params: Any) -> float:
        """Return the mean over rows, added up in double precision."""
        losses = np.asarray(row_losses(apply_fn, params, self.batch), np.float64)
        return float(losses[: self.num_rows].mean())


def show_sample(
    apply_fn: Apply,
    params: Any,
    text: corpus.Corpus,
    mesh: jax.sharding.Mesh,
    num_bytes: int,
    console: Console,
) -> None:
    """Print how the model goes on from a few places of the held-out text."""
    num_rows = mesh.size * -(-SAMPLES // mesh.size)
    rows = text.held_out_rows(num_rows)[:, :-1]
    placed = jfleet.shard_batch(rows, mesh=mesh)
    written = np.asarray(generate(apply_fn, params, placed, num_bytes))
    console.print("held-out text, and [bold]what the model writes next[/]:")
    for row, new in zip(rows[:SAMPLES], written[:SAMPLES], strict=True):
        line = Text(f"  {as_line(row[-16:])} | ", style="dim")
        console.print(line.append(as_line(new), style="bold not dim"), soft_wrap=True)


def as_line(text: np.ndarray) -> str:
    """Return bytes as ASCII, with line ends and the like as escapes."""
    return repr(bytes(text.tolist()))[2:-1]


def fingerprint(state: Any) -> int:
    """Return a checksum of every bit of the state, wherever its parts lie."""
    checksum = 0
    for leaf in jax.tree.leaves(state):
        checksum = zlib.crc32(np.asarray(leaf).tobytes(), checksum)
    return checksum
