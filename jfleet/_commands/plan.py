"""``plan``: what a training step will take, before it runs."""

import argparse
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jfleet._commands import _answer
from jfleet._commands._answer import Answer
from jfleet._commands._compiled import (
    Compiled,
    CompilerError,
    check_can_compile,
    compile_planned,
)
from jfleet._commands._levels import (
    Levels,
    Planning,
    layout_of,
    parts_of,
    plan_at,
    plan_levels,
)
from jfleet._commands._page import page_of
from jfleet._commands._problem import SHAPES_HELP, TARGET_HELP, Problem, load_problem
from jfleet._commands._progress import progress
from jfleet._commands._target_options import (
    Place,
    add_place_options,
    add_strategy_options,
    chips_of,
    place_of,
    strategy_of,
)
from jfleet._commands._user_code import told_warnings, user_code
from jfleet._errors import ConfigError, JfleetError
from jfleet._html import page_html
from jfleet._plan_text import human
from jfleet._planning.hardware import HARDWARE
from jfleet._tuning.auto import AutoPlan, auto_plan
from jfleet.strategy import DistributedStrategy


def add_parser(subparsers: Any) -> None:
    """Add the parser of this command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        help="plan a training step: memory, traffic, time, layout",
        description="Plan a training step: bytes on each device by class, what devices"
        " send each other, an estimate of time, and where every array lies. Nothing is"
        " placed and nothing run. Without --level and --strategy all levels are put"
        " side by side.",
    )
    add = parser.add_argument
    add("target", metavar="TARGET", help=TARGET_HELP + SHAPES_HELP)
    add_place_options(parser)
    add_strategy_options(parser)
    add("--auto", action="store_true", help="let auto choose, and say why")
    add(
        "--hardware",
        metavar="NAME",
        help=f"chip to estimate for: {', '.join(HARDWARE)} (default: the topology's)",
    )
    add(
        "--memory",
        metavar="SIZE",
        help="what a device has for the step, such as 16GiB (default: 0.9 of the"
        " hardware's)",
    )
    add(
        "--optimizer",
        metavar="NAME",
        help="optimizer of optax for a target of shapes (default: adam)",
    )
    add("--json", action="store_true", help="write JSON")
    add("--html", metavar="FILE", help="also write a page with pictures")


def run(args: argparse.Namespace) -> int:
    """Plan, and show it."""
    page = None if args.html is None else _page_path(args.html)
    chips = chips_of(args)
    problem = load_problem(args.target, args.optimizer)
    if chips is not None:
        check_can_compile(problem)
    strategy = strategy_of(args, problem.strategy)
    place = place_of(args, strategy, chips)
    if args.auto or (strategy is not None and strategy.auto):
        answer = _auto(problem, place, strategy)
    elif strategy is not None:
        answer = _one_step(problem, place, strategy)
    else:
        answer = _side_by_side(problem, place)
    if page is not None:
        _write(page, answer)
    if args.json:
        print(json.dumps(_answer.to_dict(answer), indent=1))
    else:
        _answer.show(answer)
    return 0


def _one_step(problem: Problem, place: Place, strategy: DistributedStrategy) -> Answer:
    step = plan_at(problem, place, strategy)
    return Answer(
        problem=problem,
        place=place,
        step=step,
        layout=layout_of(step, parts_of(problem, step)),
        compiled=_compiled(problem, place, step),
    )


def _side_by_side(problem: Problem, place: Place) -> Answer:
    levels = _levels(problem, place, None)
    best = levels.found[levels.closest]
    compiled = _compiled(problem, place, best)
    return Answer(problem=problem, place=place, levels=levels, compiled=compiled)


def _levels(
    problem: Problem, place: Place, strategy: DistributedStrategy | None
) -> Levels:
    with progress("planning every level", total=4) as report:
        return plan_levels(problem, place, strategy, report)


def _compiled(problem: Problem, place: Place, step: Planning) -> Compiled | None:
    if place.devices is None:
        return None
    return compile_planned(problem, place, step, place.devices)


def _auto(
    problem: Problem, place: Place, strategy: DistributedStrategy | None
) -> Answer:
    if problem.loss_fn is not None and place.hardware is None:
        raise ConfigError(
            "--auto needs the hardware to estimate times: --hardware v5e, or another "
            f"of {', '.join(HARDWARE)}"
        )
    strategy = DistributedStrategy() if strategy is None else strategy.copy()
    strategy.auto = True
    with (
        progress("planning candidates", total=0) as report,
        told_warnings() as warned,
        user_code(problem.script),
    ):
        chosen = auto_plan(
            problem.tx,
            problem.params,
            problem.loss_fn,
            problem.batch,
            mesh=place.mesh if place.fixed else None,
            devices=None if place.fixed else place.num_devices,
            hardware=place.hardware,
            memory_bytes=place.memory_bytes,
            strategy=strategy,
            compiler=place.compiler,
            progress=report,
            **problem.options,
        )
    compiled = None
    if place.devices is not None:
        chosen, compiled = _verified(problem, place, chosen, place.devices)
    place = dataclasses.replace(place, mesh_shape=chosen.mesh_shape)
    return Answer(
        problem=problem,
        place=place,
        auto=chosen,
        compiled=compiled,
        warned=tuple(warned),
    )


def _verified(
    problem: Problem, place: Place, chosen: AutoPlan, devices: Sequence[Any]
) -> tuple[AutoPlan, Compiled]:
    """Compile the best; while it does not fit, the next.

    Raises:
        JfleetError: the compiler fits none.
    """
    said = []
    for one in chosen.order:
        here = dataclasses.replace(place, mesh_shape=dict(one.candidate.mesh_shape))
        planned = plan_at(problem, here, one.candidate.strategy)
        try:
            compiled = compile_planned(problem, here, planned, devices)
        except CompilerError as error:
            said.append(str(error))
            continue
        need = compiled.report.peak_bytes
        fits = chosen.memory_bytes is None or need <= chosen.memory_bytes
        said.append(
            f"{one.candidate.name}: the compiler needs {human(need)}, planned were "
            f"{human(one.peak_bytes or 0)}: {'fits' if fits else 'does not fit'}"
        )
        if fits:
            return dataclasses.replace(chosen, best=one, verified=tuple(said)), compiled
    raise JfleetError(
        "auto planned candidates that fit, and the compiler fits none of them:\n  "
        + "\n  ".join(said)
    )


def _page_path(name: str) -> Path:
    path = Path(name)
    if not os.path.isdir(path.parent) or os.path.isdir(path):
        raise ConfigError(
            f"--html must be a file in a folder that exists, got {name!r}"
        )
    return path


def _write(path: Path, answer: Answer) -> None:
    """Write the page; it shows every level, also where one was asked for."""
    problem, place, step, levels = (
        answer.problem,
        answer.place,
        answer.step,
        answer.levels,
    )
    if answer.auto is not None:
        step = plan_at(problem, place, answer.auto.strategy)
    if levels is None:
        assert step is not None
        levels = _levels(problem, place, step.strategy)
    if step is None:
        step = levels.found[levels.closest]
    page = page_of(answer, step, levels, parts_of(problem, step))
    try:
        path.write_text(page_html(page), "utf-8")
    except OSError as error:
        raise JfleetError(f"--html {path} cannot be written: {error}") from error
