"""Progress of long work: on stderr, and only where a person watches."""

import contextlib
from collections.abc import Callable, Generator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)


@contextlib.contextmanager
def progress(
    text: str, total: int | None = None, *, console: Console | None = None
) -> Generator[Callable[[int, int], None]]:
    """Show that something goes on; yield a function of (done, total).

    Args:
        text: what goes on.
        total: how many parts it has; None if it has no parts.
        console: where to show it; default stderr.
    """
    console = Console(stderr=True, highlight=False) if console is None else console
    columns = [SpinnerColumn(), TextColumn("{task.description}", markup=False)]
    if total is not None:
        columns += [BarColumn(), MofNCompleteColumn()]
    bar = Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with bar:
        task = bar.add_task(text, total=total)
        yield lambda done, all_: bar.update(task, completed=done, total=all_)
