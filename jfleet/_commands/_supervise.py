"""Processes that live and end together, and whose output is passed on."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from typing import IO, Any

_HANDLED = (signal.SIGINT, signal.SIGTERM)
_READ_SECS = 5
# Ends a process whose launcher is killed; then becomes the script.
_FOLLOW = """
import os, sys
try:
    import ctypes
    ctypes.CDLL(None).prctl(1, 9)
except (ImportError, OSError, AttributeError):
    pass
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class Supervisor:
    """Starts one command in several environments and sees to the end of all.

    Every process leads a group of its own, so that what it starts ends with it, and so
    that Ctrl-C reaches only this process, which passes it on.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        grace_secs: float,
    ):
        self._command = list(command)
        self._environments = environments
        self._grace_secs = grace_secs
        self._processes: list[subprocess.Popen[str]] = []
        self._threads: list[threading.Thread] = []
        self._running: set[int] = set()
        # Also written by signal handlers, which only a SimpleQueue allows.
        self._events: queue.SimpleQueue[tuple[str, int, int]] = queue.SimpleQueue()
        self._print_lock = threading.Lock()

    def run(self) -> int:
        """Return 0, or the exit code of the first that failed, or 128 + a signal."""
        with self._signals():
            try:
                for env in self._environments:
                    self._start(env)
                return self._wait()
            finally:
                self._signal_all(signal.SIGKILL)
                for thread in self._threads:
                    thread.join(_READ_SECS)

    def _start(self, env: Mapping[str, str]) -> None:
        command = self._command
        if sys.platform == "linux":
            follow = [sys.executable, "-I", "-S", "-c", _FOLLOW, str(os.getpid())]
            command = [*follow, *command]
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            process_group=0,
        )
        rank = len(self._processes)
        self._processes.append(process)
        self._running.add(rank)
        self._thread(self._pass_on, rank, process.stdout, sys.stdout)
        self._thread(self._pass_on, rank, process.stderr, sys.stderr)
        self._thread(self._reap, rank, process)

    def _thread(self, target: Any, *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _pass_on(self, rank: int, source: IO[str], target: IO[str]) -> None:
        """Copy lines; read on even if nobody takes them, or the process would stop."""
        with source:
            for line in source:
                with self._print_lock, contextlib.suppress(OSError, ValueError):
                    target.write(f"[{rank}] {line.removesuffix(chr(10))}\n")
                    target.flush()

    def _reap(self, rank: int, process: subprocess.Popen[str]) -> None:
        code = process.wait()
        _signal_group(process, signal.SIGKILL)  # what it has started
        self._events.put(("ended", rank, code))

    def _wait(self) -> int:
        result, kill_at = 0, None
        while self._running:
            left = None if kill_at is None else max(0, kill_at - time.monotonic())
            try:
                kind, rank, value = self._events.get(timeout=left)
            except queue.Empty:
                self._say(
                    f"{self._names()} did not end within {self._grace_secs:g} s;"
                    " sending SIGKILL"
                )
                self._signal_all(signal.SIGKILL)
                kill_at = None
                continue
            if kind == "signal":
                again = kill_at is not None
                hint = "" if again else "; once more ends them at once"
                self._say(f"got {_signal_name(value)}, ending {self._names()}{hint}")
                result = result or 128 + value
                self._signal_all(signal.SIGKILL if again else signal.Signals(value))
                kill_at = kill_at or time.monotonic() + self._grace_secs
                continue
            self._running.discard(rank)
            if value == 0 or result:
                continue
            result = value if value > 0 else 128 - value
            self._report(rank, value)
            self._signal_all(signal.SIGTERM)
            kill_at = time.monotonic() + self._grace_secs
        return result

    def _report(self, rank: int, code: int) -> None:
        how = f"exit code {code}"
        if code < 0:
            how = f"signal {-code} ({_signal_name(-code)})"
        rest = f"; ending {self._names()}" if self._running else ""
        self._say(
            f"process {rank} of {len(self._processes)} (pid"
            f" {self._processes[rank].pid}) ended with {how}{rest}"
        )

    def _names(self) -> str:
        ranks = [str(rank) for rank in sorted(self._running)]
        return f"process{'es' if len(ranks) > 1 else ''} {', '.join(ranks)}"

    def _signal_all(self, number: signal.Signals) -> None:
        for rank in sorted(self._running):
            _signal_group(self._processes[rank], number)

    def _say(self, text: str) -> None:
        with self._print_lock, contextlib.suppress(OSError, ValueError):
            print(f"jfleet launch: {text}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def _signals(self) -> Generator[None]:
        """Turn signals to this process into events."""

        def note(number: int, _frame: Any) -> None:
            self._events.put(("signal", -1, number))

        before = {number: signal.signal(number, note) for number in _HANDLED}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _signal_group(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
