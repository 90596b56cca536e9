"""Errors that users can catch, and the one way to word them.

Every message says what is wrong, where, by which rule, and what to do:
``min_shard_size must be at least 0, got -1; pass 0 to shard every leaf``.
"""

import difflib
from collections.abc import Iterable


class JfleetError(Exception):
    """Base class of every error that jfleet raises on purpose."""


class ConfigError(JfleetError, ValueError):
    """A setting has a value that cannot work."""


class ConfigTypeError(JfleetError, TypeError):
    """A setting or argument has the wrong type."""


class PlacementError(JfleetError, ValueError):
    """An array cannot be, or was not, laid out as planned."""


class DonatedBufferError(PlacementError):
    """A state holds arrays whose buffers were donated to an earlier step."""


class CheckpointError(JfleetError, ValueError):
    """A checkpoint cannot be written, is incomplete, or belongs to another model."""


class DistributedError(JfleetError, RuntimeError):
    """Processes could not be connected or do not agree."""


class JfleetWarning(UserWarning):
    """Something works, but probably not as the user expects."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` or an empty string.

    >>> nearest("k_step", ["k_steps", "avg"])
    "; did you mean 'k_steps'?"
    """
    match = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {match[0]!r}?" if match else ""


def listing(names: Iterable[str], limit: int = 10) -> str:
    """Return at most ``limit`` names, and how many were left out.

    >>> listing(["a", "b", "c"], limit=2)
    "'a', 'b' and 1 more"
    """
    names = list(names)
    text = ", ".join(repr(n) for n in names[:limit])
    more = len(names) - limit
    return f"{text} and {more} more" if more > 0 else text
