"""SIGTERM, with which a scheduler says that a machine will be taken away.

With one process a Python signal handler notes it. With several, JAX's preemption
service has a handler of its own in every process, and tells all of them the same moment
to stop at. Where that service is switched off, each process notes its own signal and
they exchange notes when they save.
"""

import signal
import threading
import warnings
import weakref
from typing import Any, ClassVar

import jax
from jax._src import distributed  # As in ``together``.
from jax.experimental import multihost_utils

from jfleet._errors import JfleetWarning


class Watch:
    """Notes SIGTERM while at least one user is registered; one for all of Python."""

    _users: ClassVar[weakref.WeakSet] = weakref.WeakSet()
    _on = False
    _previous: Any = None
    _received = False
    _calls = 0

    @classmethod
    def add(cls, user: object) -> None:
        """Start to watch, if nobody has yet."""
        if not cls._on and not _has_service():
            if threading.current_thread() is not threading.main_thread():
                warnings.warn(
                    "a Checkpointer that is first used outside of the main thread"
                    " cannot watch for SIGTERM; use it in the main thread to save"
                    " before a preemption",
                    JfleetWarning,
                    stacklevel=4,
                )
                return
            cls._on, cls._received = True, False
            cls._previous = signal.signal(signal.SIGTERM, cls._note)
        cls._users.add(user)

    @classmethod
    def remove(cls, user: object) -> None:
        """Stop to watch, if this was the last user; the handler before is back."""
        cls._users.discard(user)
        if not cls._users:
            cls._stop()

    @classmethod
    def _stop(cls) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        if not cls._on or not is_main:
            return
        cls._on, cls._received = False, False
        if signal.getsignal(signal.SIGTERM) == cls._note:
            signal.signal(signal.SIGTERM, cls._previous or signal.SIG_DFL)

    @classmethod
    def _note(cls, number: int, frame: Any) -> None:
        if cls._users:
            cls._received = True
        else:  # The last user went without close.
            cls._stop()
            signal.raise_signal(number)

    @classmethod
    def noted(cls) -> bool:
        """True if this process got the signal; processes may differ."""
        return cls._received

    @classmethod
    def reached(cls) -> bool:
        """True if all processes are to stop now; all of them call it together."""
        if _has_service():
            cls._calls += 1
            if multihost_utils.reached_preemption_sync_point(cls._calls):
                cls._received = True
            return cls._received
        return cls._received and jax.process_count() == 1


def _has_service() -> bool:
    state = distributed.global_state
    return jax.process_count() > 1 and state.preemption_sync_manager is not None
