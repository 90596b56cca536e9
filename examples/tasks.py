"""Two small tasks on real data, shared by the examples of single strategies.

Plain functions of parameters and a batch; nothing here knows about jfleet or devices.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import corpus
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from decoder import Decoder, next_byte_losses
from sklearn.datasets import load_digits

NUM_TEST = 357  # of the 1,797 digits; 1,440 are left to train on
HELD_OUT_ROWS = 64


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What to train, on what, and what to judge by."""

    params: Any
    """Where training starts; the same on every run."""
    loss: Callable[[Any, Any], jax.Array]
    """Mean loss over the rows of a batch."""
    batch: Callable[[int, int], Any]
    """Batch of a step, with so many rows; the same on every run."""
    held_out: Any
    """A batch that is never trained on."""


class Classifier(nn.Module):
    """64 pixels in, ten logits out."""

    width: int

    @nn.compact
    def __call__(self, pixels: jax.Array) -> jax.Array:
        """Map (batch, 64) to (batch, 10)."""
        hidden = nn.relu(nn.Dense(self.width)(pixels))
        hidden = nn.relu(nn.Dense(self.width)(hidden))
        return nn.Dense(10)(hidden)


def load_images() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return (train, test): ``x`` of shape (rows, 64) from 0 to 1, and labels ``y``."""
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x, y = (pixels[order] / 16).astype(np.float32), labels[order].astype(np.int32)
    return (
        {"x": x[NUM_TEST:], "y": y[NUM_TEST:]},
        {"x": x[:NUM_TEST], "y": y[:NUM_TEST]},
    )


def rows_of(data: dict[str, np.ndarray], step: int, num_rows: int) -> dict:
    """Return the rows of one step, drawn without repetition."""
    rng = np.random.default_rng(step)
    rows = rng.choice(len(data["y"]), num_rows, replace=False)
    return {name: values[rows] for name, values in data.items()}


@functools.cache
def digits(*, width: int = 64) -> Task:
    """Handwritten digits of scikit-learn, for a network of three layers."""
    train, test = load_images()
    model = Classifier(width)

    def loss(params: Any, batch: Any) -> jax.Array:
        logits = model.apply({"params": params}, batch["x"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return losses.mean()

    return Task(
        params=_initial(model, jnp.zeros((1, 64))),
        loss=loss,
        batch=lambda step, num_rows: rows_of(train, step, num_rows),
        held_out=test,
    )


@functools.cache
def text(*, width: int = 32, layers: int = 2, length: int = 32) -> Task:
    """The sources of Python's own library, byte by byte, for a small decoder."""
    source = corpus.load(None, length=length)
    model = Decoder(width=width, num_layers=layers)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        return next_byte_losses(model.apply, params, tokens).mean()

    return Task(
        params=_initial(model, jnp.zeros((1, length), jnp.int32)),
        loss=loss,
        batch=source.batch,
        held_out=source.held_out_rows(HELD_OUT_ROWS),
    )


def _initial(model: nn.Module, inputs: jax.Array) -> Any:
    return jax.jit(model.init)(jax.random.key(0), inputs)["params"]
