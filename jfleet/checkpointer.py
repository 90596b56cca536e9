"""The checkpoints of a run: saved while it trains, found again when it resumes.

Why not Orbax's ``CheckpointManager``: for it a step is complete when a folder was
renamed, and the newest folder is the one to resume from. Here a step is complete when a
manifest with checksums of every file is in place, and the one to resume from is the
newest that *passes* them. A manager around that would commit twice, delete by the names
of folders, and hold a background thread around ours. The arrays are written by Orbax
all the same.
"""

import json
import os
import warnings
from typing import Any

import jax

from jfleet._checkpoint import restoring, saving
from jfleet._checkpoint.commit import folder_of
from jfleet._checkpoint.handle import Pending, SaveHandle
from jfleet._checkpoint.manifest import Manifest
from jfleet._checkpoint.preemption import Watch
from jfleet._checkpoint.restoring import LoadReport as LoadReport
from jfleet._checkpoint.steps import (
    check_free,
    clean,
    complete_steps,
    folder_of_step,
    list_steps,
    read_step,
)
from jfleet._checkpoint.together import MAIN, Agreement, from_first, same_everywhere
from jfleet._errors import CheckpointError, ConfigError, ConfigTypeError, JfleetWarning


class Checkpointer:
    """The checkpoint directory of a run.

    Use it as a context manager around the training loop, with one call of
    ``maybe_save`` after every step. All processes of a run make the same calls, on a
    directory that all of them see.

    On SIGTERM, which announces a preemption, the next call saves, waits until the
    checkpoint is complete, and sets ``preempted``; leave the loop then. SIGTERM is
    watched from ``__enter__`` or the first save until ``close``.

    Attributes:
        directory: where the checkpoints are, one folder for each step.
        keep: how many complete checkpoints are kept; None keeps all.
        every: ``maybe_save`` saves at multiples of it.
        async_: whether saves go on in the background.

    Example:
        >>> import tempfile, jax.numpy as jnp, jfleet
        >>> directory = tempfile.mkdtemp()
        >>> def run(num_steps):
        ...     state, first = {"w": jnp.zeros(2)}, 0
        ...     with Checkpointer(directory, every=10) as checkpointer:
        ...         if checkpointer.steps():
        ...             state, extra = checkpointer.restore(state)
        ...             first = extra["row"]
        ...         for step in range(first + 1, num_steps + 1):
        ...             state = {"w": state["w"] + 1}
        ...             checkpointer.maybe_save(step, state, extra={"row": step})
        ...             if checkpointer.preempted:
        ...                 break
        ...     return first, state["w"]
        >>> run(25)[0], run(30)[0]
        (0, 20)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        every: int = 1,
        async_: bool = True,
    ):
        """Say where and how often; nothing is read or written yet.

        Raises:
            ConfigError: ``keep`` or ``every`` below 1.
            ConfigTypeError: an argument of the wrong type.
        """
        if keep is not None:
            _check_number("keep", keep, 1)
        _check_number("every", every, 1)
        if not isinstance(async_, bool):
            raise ConfigTypeError(f"async_ must be True or False, got {async_!r}")
        self.directory = folder_of(directory)
        self.keep, self.every, self.async_ = keep, every, async_
        self._handle: SaveHandle | None = None
        self._last: int | None = None
        self._has_saved = False
        self._preempted = False
        self._watching = False
        self._report = LoadReport()

    def __repr__(self) -> str:
        return (
            f"Checkpointer({os.fspath(self.directory)!r}, keep={self.keep},"
            f" every={self.every}, async_={self.async_})"
        )

    def __enter__(self) -> "Checkpointer":
        self._watch()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self.close()
        except CheckpointError as late:
            if error is None:
                raise
            error.add_note(f"and {late}")

    @property
    def preempted(self) -> bool:
        """True once a save for SIGTERM is complete: leave the loop."""
        return self._preempted

    @property
    def report(self) -> LoadReport:
        """What the last ``restore`` converted, kept as it was, and did not load."""
        return self._report

    def steps(self) -> list[int]:
        """Steps whose save was completed, in order; reads no arrays.

        A file that changed since then shows only in ``latest`` and ``restore``.
        """
        self.wait()
        return from_first(lambda: complete_steps(self.directory))

    def latest(self) -> int | None:
        """The newest step that is complete and whose every file has its checksum.

        Reads all files of that checkpoint; None if there is no such step.
        """
        self.wait()
        for step in reversed(self._listed()):
            if isinstance(self._whole(step), Manifest):
                return step
        return None

    def problems(self) -> dict[int, str]:
        """Why each step that cannot be loaded cannot; reads all files of all steps."""
        self.wait()
        found = {step: self._whole(step) for step in self._listed()}
        return {s: str(e) for s, e in found.items() if not isinstance(e, Manifest)}

    def maybe_save(self, step: int, state: Any, *, extra: Any = None) -> bool:
        """Save if it is time to: at a multiple of ``every``, or after SIGTERM.

        Args:
            step: how many steps the run has made.
            state: what is saved; it may be donated once this returns.
            extra: small values that JSON keeps as they are, equal in all processes,
                such as the position in the data.

        Returns:
            True if a save was begun (or made, with ``async_=False``).

        Raises:
            CheckpointError: this save, or an earlier one in the background, failed; the
                text names the step. (With several processes an error of the background
                comes up at the next save, in all of them.) Also: the directory has a
                newer step.
            ConfigTypeError: a ``step`` or ``extra`` of the wrong type.
        """
        _check_number("step", step, 0)
        self._watch()
        stop = Watch.reached() and not self._preempted
        due = step % self.every == 0
        if not stop and not due:
            if jax.process_count() == 1 and self._handle and self._handle.done():
                self.wait()
            return False
        lost = self._handle is not None and self._handle.failed
        saved = step != self._last or lost
        if saved:
            self._save(step, state, extra)
        self._after(stop)
        return saved

    def save(self, step: int, state: Any, *, extra: Any = None) -> None:
        """Save now, also where the step is no multiple of ``every``.

        Arguments and errors are those of ``maybe_save``. A checkpoint of the same step
        is replaced; it stays loadable until the new one is complete.
        """
        _check_number("step", step, 0)
        self._watch()
        stop = Watch.reached() and not self._preempted
        self._save(step, state, extra)
        self._after(stop)

    def restore(
        self,
        state: Any,
        step: int | None = None,
        *,
        strict: bool = True,
        donate: bool = False,
    ) -> tuple[Any, Any]:
        """Load a checkpoint into a state of any layout.

        Args:
            state: what the result looks like, and where it lies; it may be abstract.
            step: which one; None takes the newest whose files are all as they were
                written, and warns of newer ones that are not.
            strict: every leaf must be stored with the same type, and no other. If
                False, what another strategy, optimizer or number of replicas stored is
                converted where that has a meaning, the rest stays as in ``state``, and
                a warning and ``report`` name each such leaf.
            donate: delete the arrays of ``state`` before the new ones are read, so that
                never two states are in memory.

        Returns:
            The state, and ``extra`` of the save.

        Raises:
            CheckpointError: nothing to load, a damaged checkpoint, or another model's.
            PlacementError: an array cannot be laid out as ``state`` wants it.
        """
        self.wait()
        if step is None:
            step, manifest = self._newest()
        else:
            _check_number("step", step, 0)
            manifest = self._read(step)
        folder = folder_of_step(self.directory, step)
        loaded, self._report = restoring.restore(
            folder, manifest, state, strict=strict, donate=donate, checked=True
        )
        if self._report.differences:
            warnings.warn(
                f"checkpoint {folder} does not fit this state everywhere; what fits was"
                f" loaded, the rest is as it was:{self._report}",
                JfleetWarning,
                stacklevel=2,
            )
        self._last = step
        assert manifest.run is not None
        return loaded, manifest.run["extra"]

    def wait(self) -> None:
        """Wait until the save in the background is complete.

        Raises:
            CheckpointError: it failed; the text names the step.
        """
        with Agreement():
            self._surface()

    def close(self) -> None:
        """Wait as ``wait`` does, and leave SIGTERM to whoever had it before."""
        try:
            self.wait()
        finally:
            if self._watching:
                self._watching = False
                Watch.remove(self)

    def _watch(self) -> None:
        if not self._watching:
            self._watching = True
            Watch.add(self)

    def _surface(self) -> None:
        handle, self._handle = self._handle, None
        if handle is None:
            return
        handle.join()
        if handle.failed:
            self._last = None
        handle.surface()

    def _save(self, step: int, state: Any, extra: Any) -> None:
        with Agreement():
            text = _as_json(extra)
            self._surface()
        same_everywhere("step and extra", [step, text])
        first, directory = not self._has_saved, self.directory
        run = saving.Run(
            step=step,
            extra=json.loads(text),
            check=lambda: check_free(directory, step, first=first),
            clean=lambda: clean(directory, step, self.keep),
        )
        folder = folder_of_step(directory, step)
        self._handle = saving.begin(state, folder, overwrite=True, run=run)
        Pending.add(self._handle)
        self._has_saved, self._last = True, step
        if not self.async_:
            self.wait()

    def _after(self, stop: bool) -> None:
        """End a save; after SIGTERM it must be complete."""
        if not stop:
            stop = not self._preempted and any(MAIN.exchange(Watch.noted()))
        if stop:
            self.wait()
            self._preempted = True

    def _listed(self) -> list[int]:
        return from_first(lambda: list_steps(self.directory))

    def _read(self, step: int) -> Manifest:
        """Read a manifest and compare all files with it."""
        with Agreement():
            manifest = read_step(self.directory, step)
        restoring.verify(folder_of_step(self.directory, step), manifest)
        return manifest

    def _whole(self, step: int) -> Manifest | CheckpointError:
        try:
            return self._read(step)
        except CheckpointError as error:
            return error

    def _newest(self) -> tuple[int, Manifest]:
        """The newest step that is whole; newer ones that are not are named."""
        skipped = []
        for step in reversed(self._listed()):
            found = self._whole(step)
            if isinstance(found, Manifest):
                if skipped:
                    warnings.warn(
                        f"step {step} is the newest that loads; not used:"
                        + "".join(f"\n  step {s}: {e}" for s, e in skipped),
                        JfleetWarning,
                        stacklevel=3,
                    )
                return step, found
            skipped.append((step, found))
        raise CheckpointError(
            f"{self.directory} holds no checkpoint that can be loaded"
            + "".join(f"\n  step {s}: {e}" for s, e in skipped)
            + "; start without restore, or give the directory of a run"
        )


def _check_number(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        hint = "; convert an array with int(...)" if hasattr(value, "dtype") else ""
        raise ConfigTypeError(f"{name} must be an integer, got {value!r}{hint}")
    if value < least:
        raise ConfigError(f"{name} must be at least {least}, got {value}")


def _as_json(extra: Any) -> str:
    """Return the text of values that come back from it as they are."""
    try:
        text = json.dumps(extra, allow_nan=False)
        same = json.loads(text) == extra
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigTypeError(
            f"extra must hold what JSON can hold, got {extra!r} ({error}); convert"
            " arrays with .tolist(), and put large ones into the state"
        ) from error
    if not same:
        raise ConfigTypeError(
            f"extra must come back from JSON as it is, got {extra!r}, which would come"
            f" back as {json.loads(text)!r}; use lists, and strings as keys"
        )
    return text
