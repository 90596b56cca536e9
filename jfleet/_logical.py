"""States whose arrays rest padded, seen in the shapes that they have.

A checkpoint holds logical shapes only, so that it loads on any number of devices.
"""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from jfleet._errors import ConfigTypeError
from jfleet._layout import named_sharding
from jfleet._placing.padding import fit
from jfleet._states.adapters import Parts, take_apart
from jfleet.optax_meta.sharding import ShardedTransformation
from jfleet.plan import without_padding


def _padded_parts(state: Any) -> Parts | None:
    """Take apart a state that may rest padded; None for any other."""
    try:
        parts = take_apart(state)
    except ConfigTypeError:
        return None
    if isinstance(parts.tx, ShardedTransformation) and parts.tx.policy.pad:
        return parts
    return None


def logical_state(state: Any) -> Any:
    """Return the state without padding; what is cut lies whole on every device.

    A state that is not padded is returned as it is.
    """
    parts = _padded_parts(state)
    if parts is None:
        return state
    mesh = parts.tx.policy.mesh
    values = []
    for old, new in zip(parts.leaves, without_padding(parts).leaves, strict=True):
        value = new.value
        if old.shape != new.shape:
            whole = named_sharding(mesh, PartitionSpec(), len(new.shape))
            if isinstance(value, jax.ShapeDtypeStruct):
                value = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=whole)
            else:
                value = jax.device_put(value, whole)
        values.append(value)
    return parts.rebuild(values, parts.tx, parts.apply_fn)


def stored_like(loaded: Any, state: Any) -> Any:
    """Pad and place a loaded state in the way that ``state`` rests."""
    wanted = _padded_parts(state)
    if wanted is None:
        return loaded
    values = [
        new.value
        if new.shape == old.shape
        else jax.device_put(fit(new.value, old.shape), old.value.sharding)
        for new, old in zip(take_apart(loaded).leaves, wanted.leaves, strict=True)
    ]
    return wanted.rebuild(values, wanted.tx, wanted.apply_fn)
