"""Give memory that was freed back to the system.

TensorStore and Orbax allocate in many threads. glibc keeps what each of them frees for
that thread, which after a load can be as much again as the state that was loaded.
"""

import ctypes
from collections.abc import Callable


def trim() -> None:
    """Return freed memory to the system, where the C library can."""
    if _trim is not None:
        _trim(0)


def _find() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None  # Another C library, which need not do the same.


_trim = _find()
