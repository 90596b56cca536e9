"""A step compiled for its target, beside its plan."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import jax

from jfleet._commands._levels import Planning
from jfleet._commands._problem import Problem
from jfleet._commands._progress import progress
from jfleet._commands._target_options import Place
from jfleet._commands._user_code import user_code
from jfleet._errors import ConfigError, JfleetError
from jfleet._planning.compare import Comparison
from jfleet._planning.explain import Report, explain
from jfleet._tuning.target import compile_step, mesh_over

_MAX_TEXT = 600


class CompilerError(JfleetError):
    """The compiler of the target refuses the step, for instance for want of memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """What the compiler says of a step."""

    where: str
    """What it was compiled for."""
    name: str
    """The level."""
    comparison: Comparison
    report: Report
    warned: tuple[str, ...]
    """What jfleet warned of."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "where": self.where,
            "level": self.name,
            "warnings": list(self.warned),
            "comparison": json.loads(self.comparison.to_json()),
            "report": json.loads(self.report.to_json()),
        }


def check_can_compile(problem: Problem) -> None:
    """Refuse to compile what has no loss, before anything is planned.

    Raises:
        ConfigError: there is no loss.
    """
    if problem.loss_fn is None:
        raise ConfigError(
            f"{problem.name} has no loss_fn and batch, so there is no step to compile; "
            "give a script whose function returns them"
        )


def compile_planned(
    problem: Problem, place: Place, planned: Planning, devices: Sequence[Any]
) -> Compiled:
    """Compile the step that was planned; its loss was checked to be there.

    Raises:
        CompilerError: the compiler refuses it.
        UserCodeError: the loss raised an error.
    """
    assert problem.loss_fn is not None
    mesh = mesh_over(devices, place.mesh_shape)
    where = place.topology or f"{len(devices)} devices of {devices[0].platform}"
    with progress(f"compiling {planned.name} for {where}"), user_code(problem.script):
        try:
            program = compile_step(
                planned.opt,
                mesh,
                problem.params,
                problem.loss_fn,
                problem.batch,
                **problem.options,
            )
        except jax.errors.JaxRuntimeError as error:
            raise CompilerError(
                f"the compiler for {where} refuses the step at {planned.name}, planned "
                f"were {planned.plan.memory.peak_bytes} bytes per device: "
                f"{str(error)[:_MAX_TEXT]}"
            ) from error
        report = explain(program, mesh=mesh, level=planned.plan.level)
    return Compiled(
        where=where,
        name=planned.name,
        comparison=planned.plan.compare(program),
        report=report,
        warned=planned.warned,
    )
