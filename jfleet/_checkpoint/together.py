"""Processes that must agree: all go on, or all stop with an error.

Values travel through the key-value store of JAX's coordination service, not through
devices: a background thread may use it, and no collective can get in the way of a
step. With one process nothing travels.
"""

import json
from collections.abc import Callable
from typing import Any

import jax
from jax._src import distributed  # JAX has no public door to its key-value store.

from jfleet._errors import CheckpointError

TIMEOUT_SECS = 3600


class Channel:
    """A sequence of exchanges that all processes make in the same order."""

    def __init__(self, name: str):
        self._name = name
        self._round = 0

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all processes, in the order of the processes.

        Args:
            value: something small that JSON can hold.
        """
        return self._swap(value, lambda values: values)

    def gather(self, value: Any) -> list[Any]:
        """The same, but only the first process gets the values, others get ``[]``."""
        values = self._swap(value, lambda _: [])
        return values if jax.process_index() == 0 else []

    def _swap(self, value: Any, publish: Callable[[list[Any]], Any]) -> list[Any]:
        num = jax.process_count()
        if num == 1:
            return [value]
        client = distributed.global_state.client
        assert client is not None  # there are several processes
        prefix, self._round = f"jfleet/{self._name}/{self._round}", self._round + 1
        timeout = TIMEOUT_SECS * 1000
        client.key_value_set(f"{prefix}/{jax.process_index()}", json.dumps(value))
        if jax.process_index():
            return json.loads(client.blocking_key_value_get(f"{prefix}/all", timeout))
        values = [
            json.loads(client.blocking_key_value_get(f"{prefix}/{i}", timeout))
            for i in range(num)
        ]
        if self._round > 1:  # Everyone has read the round before.
            client.key_value_delete(f"jfleet/{self._name}/{self._round - 2}/")
        client.key_value_set(f"{prefix}/all", json.dumps(publish(values)))
        return values

    def stage(self, action: Callable[[], Any]) -> Any:
        """Run an action; if it fails in one process, raise in all of them.

        Returns:
            What the action returned here.
        """
        result = error = None
        try:
            result = action()
        except Exception as caught:
            error = caught
        texts = self.exchange(None if error is None else str(error))
        if error is not None:
            raise error
        failed = [rank for rank, text in enumerate(texts) if text is not None]
        if failed:
            raise CheckpointError(
                f"process {failed[0]} of {len(texts)} raised an error:"
                f" {texts[failed[0]]}"
            )
        return result


MAIN = Channel("main")
"""For the main thread."""
BACKGROUND = Channel("save")
"""For the thread of the save in the background, of which there is at most one."""


class Agreement:
    """A block of the main thread that succeeds in all processes or in none."""

    def __enter__(self) -> "Agreement":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and not isinstance(error, Exception):
            return  # An interrupt: the other processes will time out.
        failed = [f for f, bad in enumerate(MAIN.exchange(error is not None)) if bad]
        if error is None and failed:
            raise CheckpointError(
                f"process {failed[0]} of {jax.process_count()} raised an error, see"
                " there; all processes must see the same folder and hold the same"
                " state"
            )


def same_everywhere(name: str, value: Any) -> None:
    """Raise in all processes unless all have an equal value, which JSON can hold.

    Raises:
        CheckpointError: some process has another value.
    """
    values = MAIN.exchange(value)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise CheckpointError(
                f"{name} must be the same in all {len(values)} processes, but process"
                f" 0 has {values[0]!r} and process {rank} has {other!r}"
            )


def from_first(action: Callable[[], Any]) -> Any:
    """Run an action in the first process; all get its result, or an error.

    Args:
        action: returns something small that JSON can hold.
    """
    result, error = None, None
    if jax.process_index() == 0:
        try:
            result = action()
        except Exception as caught:
            error = caught
    first, text = MAIN.exchange([result, None if error is None else str(error)])[0]
    if error is not None:
        raise error
    if text is not None:
        raise CheckpointError(f"process 0 raised an error: {text}")
    return first if jax.process_index() else result
