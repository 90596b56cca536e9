"""The state of training and what a step reports."""

import dataclasses
from typing import Any, NamedTuple

import jax


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """Everything that a step changes; a pytree.

    Under localsgd and adaptive_localsgd ``params``, ``model_state`` and the inner
    optimizer state differ between the replicas: their arrays have a leading replica
    dim, split over the replica axes. ``opt.params(state)`` is the mean of the replicas.
    """

    step: jax.Array
    """Calls of the step so far."""
    params: Any
    """The parameters."""
    opt_state: Any
    """State of ``tx``."""
    model_state: Any = None
    """What the model keeps beside its parameters, such as batch statistics."""
    replica_state: Any = None
    """What the reduction keeps on every replica, such as rounding residuals."""
    shown: Any = None
    """Metrics of the last synchronisation, where replicas do not meet every step."""
    tx: Any = None
    """The transformation of one window, with its placement."""

    def replace(self, **changes: Any) -> "TrainState":
        """Return a state with some fields changed."""
        return dataclasses.replace(self, **changes)


_DATA = ("step", "params", "opt_state", "model_state", "replica_state", "shown")
jax.tree_util.register_dataclass(
    TrainState, data_fields=list(_DATA), meta_fields=["tx"]
)


class Metrics(NamedTuple):
    """What one step reports: replicated scalars, the same on every process."""

    loss: jax.Array  # mean over the window; of the last sync under localsgd
    grad_norm: jax.Array  # global norm before clipping; see ``minimize``
    clip_factor: jax.Array  # what the gradient was multiplied with; 1 without clip
    loss_scale: jax.Array  # the one this step's loss was multiplied with
    skipped_steps: jax.Array  # steps skipped for an overflow so far; dtype=int32
    synchronised: jax.Array  # whether replicas exchanged parameters or gradients
    aux: Any = None  # auxiliary result of the loss, with ``has_aux``
