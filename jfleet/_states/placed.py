"""Flax states whose new parameters stay where the plan says.

A step adds updates to parameters outside of what jfleet wraps, and nothing pins the
sum: XLA is free to leave it split. So a placed flax state is of a subclass of its own
class, whose ``replace`` (which ``apply_gradients`` ends with) pins new parameters. That
also saves work: shards are added, and the sum is gathered, once.
"""

import dataclasses
import functools
from typing import Any

import jax
from flax import struct

from jfleet._layout import Policy, constrain, is_explicit
from jfleet.optax_meta.sharding import Layouts, ShardedTransformation


def can_pin(cls: type, policy: Policy) -> bool:
    """Whether states of a class can pin their parameters."""
    return hasattr(cls, "_flax_dataclass") and not is_explicit(policy.mesh)


def placed(state: Any) -> Any:
    """Return a flax state as one that pins its parameters."""
    cls = _placed_class(type(state))
    fields = dataclasses.fields(state)
    return cls(**{f.name: getattr(state, f.name) for f in fields})


@functools.cache
def _placed_class(cls: type) -> type:
    """A subclass with another ``replace``, one for each class."""
    if getattr(cls, "_jfleet_placed", False):
        return cls
    body = {"__doc__": cls.__doc__, "__module__": cls.__module__}
    new: Any = struct.dataclass(type(cls.__name__, (cls,), body))
    plain_replace = new.replace

    def replace(self: Any, **updates: Any) -> Any:
        tx = updates.get("tx", self.tx)
        if "params" in updates and isinstance(tx, ShardedTransformation):
            updates["params"] = _pin(updates["params"], tx.policy)
        return plain_replace(self, **updates)

    new.replace = replace
    new._jfleet_placed = True
    new.__qualname__ = cls.__qualname__
    return new


def _pin(params: Any, policy: Policy) -> Any:
    """Pin the sum of parameters and updates: split first, then as it rests."""
    if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(params)):
        return params
    layouts = Layouts(params, policy)
    if policy.split_updates:
        params = constrain(params, layouts.updates(params), policy.mesh)
    return constrain(params, layouts.params(params), policy.mesh)
