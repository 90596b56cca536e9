"""A save that goes on in the background, and the one that may be under way."""

import atexit
import os
import sys
import threading
from collections.abc import Callable

from etils import epath

from jfleet._checkpoint.commit import write_error
from jfleet._checkpoint.memory import trim
from jfleet._errors import CheckpointError

# Python 3.12.0 and 3.12.1 start no threads once the main thread has ended, not even for
# threads that still run (python/cpython#113964); Orbax needs some to end a write.
CAN_FINISH_AT_EXIT = not (3, 12, 0) <= sys.version_info[:3] < (3, 12, 2)


class SaveHandle:
    """A save that goes on in the background.

    The values are those at the time of the call. An error of the write is raised by
    ``wait``, or else by the next save or load, or else printed when Python ends.
    """

    def __init__(
        self, output: epath.Path, finish: Callable[[], None], step: int | None = None
    ):
        self._output = output
        self._finish: Callable[[], None] | None = finish
        self._step = step
        self._error: CheckpointError | None = None
        self._seen = False
        # Not a daemon: Python must not end before the checkpoint is complete.
        self._thread = threading.Thread(target=self._run, name="jfleet-save")
        self._thread.start()

    def __repr__(self) -> str:
        state = "done" if self.done() else "running"
        return f"SaveHandle({os.fspath(self._output)!r}, {state})"

    def _run(self) -> None:
        finish, self._finish = self._finish, None
        assert finish is not None
        try:
            finish()
        except BaseException as error:  # Whatever it is, wait() must show it.
            self._error = write_error(self._output, error, self._step)
        del finish  # It holds what was written.
        trim()

    def done(self) -> bool:
        """True if the write has ended, well or not."""
        return not self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """True if the write has ended with an error."""
        return self._error is not None

    def join(self) -> None:
        """Wait for the end of the write, whether it went well or not."""
        self._thread.join()

    def wait(self) -> None:
        """Wait until the checkpoint is complete.

        Raises:
            CheckpointError: it could not be written.
        """
        self.join()
        if self._error is not None:
            self._seen = True
            raise self._error

    def surface(self) -> None:
        """Wait; raise the error unless someone has seen it."""
        self.join()
        if not self._seen:
            self.wait()


class Pending:
    """The save in the background, of which there is at most one."""

    handle: SaveHandle | None = None

    @classmethod
    def add(cls, handle: SaveHandle) -> None:
        """Remember a save; a Python that cannot end it while it exits waits here."""
        cls.handle = handle
        if not CAN_FINISH_AT_EXIT:
            handle.join()

    @classmethod
    def finish(cls) -> None:
        """Wait for the save; raise its error unless someone has seen it."""
        handle, cls.handle = cls.handle, None
        if handle is not None:
            handle.surface()

    @classmethod
    def finish_at_exit(cls) -> None:
        """The same, but print the error."""
        try:
            cls.finish()
        except CheckpointError as error:
            print(f"jfleet: {error}", file=sys.stderr, flush=True)


# Plain atexit functions run after the thread pools that Orbax writes with are shut
# down. This hook, which the pools use themselves, runs before.
getattr(threading, "_register_atexit", atexit.register)(Pending.finish_at_exit)
