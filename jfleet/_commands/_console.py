"""How commands write for people."""

import sys

from rich.console import Console

_FILE_WIDTH = 160


def make_console() -> Console:
    """Return a console that shows names as they are, and wide in files and pipes."""
    width = None if sys.stdout.isatty() else _FILE_WIDTH
    return Console(width=width, highlight=False, markup=False, emoji=False)
