"""Classes of memory, and the class of a value that is made of others."""

from collections.abc import Iterable

PARAMS = "parameters"
MASTERS = "masters"
STATE = "optimizer state"
EXTRA = "other state"
BATCH = "batch"
GRADS = "gradients"
SUMS = "accumulators"
GATHERED = "gathered parameters"
ACTIVATIONS = "activations"
UPDATES = "updates"
REST = "rest"

AT_REST = (PARAMS, MASTERS, STATE, EXTRA, BATCH)
"""What a step gets as arguments."""
KINDS = (*AT_REST, GRADS, SUMS, GATHERED, ACTIVATIONS, UPDATES, REST)

MEANING = {
    PARAMS: "parameters, as the level splits them",
    MASTERS: "float32 copies of low-precision parameters",
    STATE: "state of the optimizer, without masters",
    EXTRA: "step number, model state, residuals of the reduction, metrics",
    BATCH: "rows of this device",
    GRADS: "sums over rows: gradients, before and after they are reduced",
    SUMS: "sums of gradients over the turns of a loop, such as micro batches",
    GATHERED: "parameters that are gathered, cast or laid out anew for their use",
    ACTIVATIONS: "what depends on rows: kept for the backward pass, or in use",
    UPDATES: "new state and whatever the optimizer computes on the way to it",
    REST: "constants, masks, indices",
}


def mixed(kinds: Iterable[str]) -> str:
    """The class of what is computed from values of some classes.

    >>> mixed([PARAMS, ACTIVATIONS]), mixed([GRADS, STATE])
    ('activations', 'updates')
    """
    found = set(kinds)
    if found & {STATE, MASTERS, UPDATES}:
        return UPDATES
    if found & {ACTIVATIONS, BATCH}:
        return ACTIVATIONS
    if found & {GRADS, SUMS}:
        return UPDATES if PARAMS in found else GRADS
    if found & {PARAMS, GATHERED}:
        return GATHERED
    return EXTRA if EXTRA in found else REST


def of_sum(kinds: Iterable[str]) -> str:
    """The class of a sum over rows."""
    kind = mixed(kinds)
    return GRADS if kind == ACTIVATIONS else kind
