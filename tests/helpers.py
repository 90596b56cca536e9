"""Small tools shared by the tests."""

import contextlib

import jax

_counts = {"compilations": 0}


def _on_event(name, *_args, **_kwargs):
    if name == "/jax/core/compile/backend_compile_duration":
        _counts["compilations"] += 1


jax.monitoring.register_event_duration_secs_listener(_on_event)


class Count:
    """How many programs XLA compiled inside a ``with`` block."""

    compilations = 0


@contextlib.contextmanager
def count_compilations():
    count, before = Count(), _counts["compilations"]
    yield count
    count.compilations = _counts["compilations"] - before
