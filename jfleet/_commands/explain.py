"""``explain``: what a compiled step sends and holds, and what should not be there."""

import argparse
import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jfleet._commands._answer import compiled_lines
from jfleet._commands._compiled import Compiled, check_can_compile, compile_planned
from jfleet._commands._console import make_console
from jfleet._commands._levels import plan_at
from jfleet._commands._problem import TARGET_HELP, is_script, load_problem
from jfleet._commands._program_text import explain_hlo
from jfleet._commands._target_options import (
    add_place_options,
    add_strategy_options,
    chips_of,
    parse_mesh,
    place_of,
    strategy_of,
)
from jfleet._errors import ConfigError
from jfleet.strategy import DistributedStrategy


def add_parser(subparsers: Any) -> None:
    """Add the parser of this command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "explain",
        help="compile a training step and say what it sends and holds",
        description="Compile a training step for the devices here (on CPU as many as"
        " the mesh needs are simulated) or for a topology, and say what it sends and"
        " holds, beside its plan, and what should not be there.",
    )
    parser.add_argument(
        "target",
        metavar="TARGET",
        help=TARGET_HELP + " Or HLO text that was saved from compiled.as_text(), of"
        " which only the collectives are told.",
    )
    add_place_options(parser)
    add_strategy_options(parser)
    parser.add_argument("--json", action="store_true", help="write JSON")


def run(args: argparse.Namespace) -> int:
    """Compile, and show what was found."""
    if args.target.endswith(".json"):
        raise ConfigError(
            f"{args.target} holds shapes, and there is no step to compile without a "
            "loss; give a script"
        )
    if not is_script(args.target):
        return _explain_text(args)
    compiled = _compiled(args)
    if args.json:
        print(json.dumps(compiled.to_dict(), indent=1))
    else:
        notes = [f"Note: {text}" for text in compiled.warned]
        text = "\n".join([*compiled_lines(compiled), *notes])
        make_console().print(text, soft_wrap=True)
    return 0


def _compiled(args: argparse.Namespace) -> Compiled:
    chips = chips_of(args)
    if chips is None:
        _simulate(args)
    problem = load_problem(args.target)
    check_can_compile(problem)
    strategy = strategy_of(args, problem.strategy)
    place = place_of(args, strategy, chips)
    devices = _devices(place.num_devices) if chips is None else chips
    planned = plan_at(problem, place, strategy or DistributedStrategy())
    return compile_planned(problem, place, planned, devices)


def _simulate(args: argparse.Namespace) -> None:
    """On CPU, have as many devices as the options ask for, if that can still be said.

    It must be said before JAX starts its backends, so before the script runs, and it
    means nothing to other platforms.
    """
    num = args.devices
    if args.mesh is not None:
        sizes = parse_mesh(args.mesh).values()
        if -1 not in sizes:
            num = math.prod(sizes)
    told = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    before = getattr(jax.config, "jax_num_cpu_devices", -1)
    if num is not None and not told and before < num:
        with contextlib.suppress(RuntimeError):  # JAX has started: it is what it is
            jax.config.update("jax_num_cpu_devices", num)


def _devices(num: int) -> Sequence[Any]:
    devices = jax.devices()
    if len(devices) < num:
        raise ConfigError(
            f"the mesh has {num} devices and {len(devices)} of platform "
            f"{devices[0].platform} are here; set JAX_PLATFORMS=cpu to simulate them, "
            "or compile for a --topology"
        )
    return devices[:num]


def _explain_text(args: argparse.Namespace) -> int:
    unfit = ("devices", "topology", "level", "strategy")
    for name in (n for n in unfit if getattr(args, n) is not None):
        raise ConfigError(
            f"--{name} is for a script; of HLO text only --mesh is asked, to name axes"
        )
    try:
        text = Path(args.target).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"TARGET must be a script.py or a file of HLO text; {args.target}: {error}"
        ) from error
    sizes: Mapping[str, int] = {} if args.mesh is None else parse_mesh(args.mesh)
    found = explain_hlo(args.target, text, sizes)
    if args.json:
        print(found.to_json())
    else:
        make_console().print(str(found), soft_wrap=True)
    return 0
