"""The command line: ``python -m jfleet COMMAND``.

Exit codes: 0 done, 1 it failed, 2 it was asked for something that cannot work; those of
``launch`` are the ones of the script. Each command is a module in ``jfleet/_commands``.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from types import ModuleType

import jfleet
from jfleet import _commands
from jfleet._errors import ConfigError, ConfigTypeError, JfleetError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the words after ``python -m jfleet``; default those of this process.

    Returns:
        The exit code.
    """
    commands = _commands.load()
    args = _parser(commands).parse_args(argv)
    try:
        code = commands[args.command].run(args)
        sys.stdout.flush()  # here, where a closed pipe is no surprise
        return code
    except (ConfigError, ConfigTypeError) as error:
        return _complain(error, 2)
    except JfleetError as error:
        return _complain(error, 1)
    except BrokenPipeError:  # such as: jfleet inspect ... | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser(commands: dict[str, ModuleType]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jfleet", description="Distributed strategies for JAX."
    )
    version = f"jfleet {jfleet.__version__}"
    parser.add_argument("--version", action="version", version=version)
    subparsers = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", title="commands"
    )
    for module in commands.values():
        module.add_parser(subparsers)
    return parser


def _complain(error: JfleetError, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code
