"""The commands of ``python -m jfleet``: a module each, under the name of the command.

A module has ``add_parser(subparsers)``, which adds a parser of that name, and
``run(args) -> int``, which returns the exit code or raises an error of jfleet.
"""

import importlib
from types import ModuleType

NAMES = (
    "devices",
    "explain",
    "inspect",
    "launch",
    "plan",
)


def load() -> dict[str, ModuleType]:
    """Import every command, by name."""
    return {name: importlib.import_module(f"{__name__}.{name}") for name in NAMES}
