"""Running code of the user: its errors by its own lines, its prints kept apart.

Only the frames of the user's files are shown. What a script prints goes to stderr, for
stdout belongs to the command.
"""

import contextlib
import sys
import traceback
import warnings
from collections.abc import Generator
from pathlib import Path

from jfleet._errors import JfleetError, JfleetWarning

_OWN = Path(__file__).parent.parent
_INSTALLED = ("site-packages", "dist-packages")


class UserCodeError(JfleetError):
    """Code of the user raised an error."""


@contextlib.contextmanager
def user_code(script: Path | None, *, all_errors: bool = False) -> Generator[None]:
    """Show errors of a user's code by the lines of their files.

    Args:
        script: their file; what lies in its folder and below is theirs too. None where
            there is no code of theirs.
        all_errors: everything that is raised inside is theirs. Else an error of jfleet
            is an answer to the command, and one that passed no line of theirs is a
            mistake of jfleet.

    Raises:
        UserCodeError: in place of their error.
    """
    if script is None:
        yield
        return
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:
        if isinstance(error, JfleetError) and not all_errors:
            raise
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if _is_theirs(frame.filename, script.parent)
        ]
        if not frames and not all_errors:
            raise
        raise UserCodeError(_text(script, frames, error)) from error


def _is_theirs(name: str, folder: Path) -> bool:
    path = Path(name).resolve()
    if name.startswith("<"):  # no file: "<frozen importlib._bootstrap>"
        return False
    if not path.is_relative_to(folder.resolve()) or path.is_relative_to(_OWN):
        return False
    return not set(_INSTALLED) & set(path.parts)


def _text(
    script: Path, frames: list[traceback.FrameSummary], error: BaseException
) -> str:
    lines = [f"{script} raised an error:\n"]
    if frames:
        lines += ["Traceback (most recent call last, your files only):\n"]
        lines += traceback.format_list(frames)
    if isinstance(error, SystemExit):
        lines.append(
            f"SystemExit: {error.code}; the script is imported to be planned, not run: "
            'put what trains behind `if __name__ == "__main__":`\n'
        )
    else:
        only = traceback.TracebackException(type(error), error, None)
        # A hint of JAX on the frames that it leaves out; here all of its are left out.
        notes = getattr(only, "__notes__", None) or []
        only.__notes__ = [n for n in notes if "JAX_TRACEBACK_FILTERING" not in n]
        lines += list(only.format_exception_only())
    return "".join(lines).rstrip("\n")


@contextlib.contextmanager
def told_warnings() -> Generator[list[str]]:
    """Collect what jfleet warns of, each text once, to be part of the answer."""
    told: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", category=JfleetWarning)
        yield told
    for one in caught:
        if not issubclass(one.category, JfleetWarning):
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        elif str(one.message) not in told:
            told.append(str(one.message))
