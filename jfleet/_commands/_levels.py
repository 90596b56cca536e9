"""A step at every level: plans side by side, and which of them to take."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jfleet._commands._problem import Problem
from jfleet._commands._target_options import Place, at_level
from jfleet._commands._user_code import UserCodeError, told_warnings, user_code
from jfleet._errors import JfleetError
from jfleet._planning import kinds
from jfleet._planning.step_plan import StepPlan, plan_step
from jfleet._resolving.placement import placement_policy
from jfleet._states.adapters import Parts, take_apart
from jfleet._step.setup import Setup
from jfleet._tree import leaf_bytes, path_str
from jfleet._tuning.auto import MEMORY_SHARE
from jfleet._tuning.candidates import Candidate
from jfleet._tuning.choice import Planned, ranked
from jfleet._types import LEVELS
from jfleet.distributed import distributed_optimizer
from jfleet.plan import Plan, Row, plan_parts
from jfleet.strategy import DistributedStrategy

UNSHARDED = "no sharding"
OTHER = "other"
_STACK = (
    *(kinds.PARAMS, kinds.MASTERS, kinds.STATE, kinds.GRADS, kinds.SUMS),
    *(kinds.GATHERED, kinds.ACTIVATIONS, kinds.UPDATES),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planning:
    """A step of one strategy, planned."""

    strategy: DistributedStrategy
    params: Any
    opt: Any
    plan: StepPlan
    warned: tuple[str, ...] = ()
    """What jfleet warns of."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What has to be said of it."""
        return (*self.warned, *self.plan.notes)

    @property
    def name(self) -> str:
        """Its level, in words."""
        return self.plan.level or UNSHARDED


@dataclasses.dataclass(frozen=True, kw_only=True)
class Levels:
    """A step at every level."""

    found: dict[str, Planning]
    """By level, those that can run."""
    refused: dict[str, str]
    """By level, why the others cannot."""
    limit_bytes: int | None
    """What a device has for the step, as far as that is known."""
    ranked: tuple[str, ...]
    """Those that fit, best first; empty where nothing says what fits."""

    @property
    def names(self) -> tuple[str, ...]:
        """All levels, in order."""
        known = (UNSHARDED, *LEVELS)
        return tuple(n for n in known if n in self.found or n in self.refused)

    @property
    def closest(self) -> str:
        """The best that fits; if none does, or nothing says so, the smallest."""
        if self.ranked:
            return self.ranked[0]
        found = self.found
        return min(found, key=lambda name: found[name].plan.memory.peak_bytes)


def plan_at(problem: Problem, place: Place, strategy: DistributedStrategy) -> Planning:
    """Plan the step of a strategy.

    Raises:
        JfleetError: the strategy cannot run.
        UserCodeError: the loss raised an error.
    """
    with told_warnings() as warned, user_code(problem.script):
        opt = distributed_optimizer(
            problem.tx, strategy, mesh=place.mesh, params=problem.params
        )
        plan = plan_step(
            opt,
            problem.params,
            problem.loss_fn,
            problem.batch,
            hardware=place.hardware,
            compiler=place.compiler,
            **problem.options,
        )
    return Planning(
        strategy=strategy,
        params=problem.params,
        opt=opt,
        plan=plan,
        warned=tuple(warned),
    )


def plan_levels(
    problem: Problem,
    place: Place,
    strategy: DistributedStrategy | None,
    report: Callable[[int, int], None],
) -> Levels:
    """Plan the step without sharding and at every level.

    Raises:
        JfleetError: it can run at no level.
        UserCodeError: the loss raised an error.
    """
    found: dict[str, Planning] = {}
    refused: dict[str, str] = {}
    first: JfleetError | None = None
    levels = (None, *LEVELS)
    for number, level in enumerate(levels):
        try:
            planned = plan_at(problem, place, at_level(strategy, level))
            found[planned.name] = planned
        except UserCodeError:
            raise
        except JfleetError as error:
            first = first or error
            refused[level or UNSHARDED] = str(error)
        report(number + 1, len(levels))
    if first is not None and not found:
        raise first
    limit = limit_of(place)
    order = () if limit is None and place.hardware is None else _ranked(found, limit)
    return Levels(found=found, refused=refused, limit_bytes=limit, ranked=order)


def limit_of(place: Place) -> int | None:
    """Bytes that a step may take: what the user says, else most of the chip's."""
    if place.memory_bytes is not None or place.hardware is None:
        return place.memory_bytes
    return int(place.hardware.memory_bytes * MEMORY_SHARE)


def _ranked(found: Mapping[str, Planning], limit: int | None) -> tuple[str, ...]:
    """As auto would take them: the fastest, of equally fast ones the simplest."""
    planned = [
        Planned(
            candidate=Candidate(
                mesh_shape=one.plan.mesh_shape,
                level=one.plan.level,
                recompute=None,
                sync=None,
                half=False,
                strategy=one.strategy,
            ),
            peak_bytes=one.plan.memory.peak_bytes,
            cost=cost_of(one.plan),
        )
        for one in found.values()
    ]
    order = ranked(planned, limit)
    return tuple(p.candidate.level or UNSHARDED for p in order)


def cost_of(plan: StepPlan) -> float:
    """Seconds, estimated; bytes that a device sends where no time is known."""
    if plan.time is None:
        return plan.traffic.wire_bytes
    return (plan.time.low_seconds + plan.time.high_seconds) / 2


def stack_of(plan: StepPlan) -> dict[str, int]:
    """Bytes by class at the worst moment of a step; they add up to the peak."""
    memory = plan.memory
    stack = {kind: memory.of(kind).bytes for kind in _STACK}
    stack = {kind: size for kind, size in stack.items() if size}
    # An argument that the step does not use counts in its class, but not at the peak.
    return {**stack, OTHER: max(memory.peak_bytes - sum(stack.values()), 0)}


def sent_of(plan: StepPlan) -> dict[str, float]:
    """Bytes that a device sends per step, by kind of collective and mesh axes."""
    sent: dict[str, float] = {}
    for t in plan.traffic.transfers:
        name = f"{t.kind} over {'+'.join(t.axes)}"
        sent[name] = sent.get(name, 0.0) + t.share * t.wire_bytes
    return sent


def parts_of(problem: Problem, planned: Planning) -> Parts:
    """Parameters and the state of the optimizer, as a step keeps them, at any level."""
    opt = planned.opt
    setup = Setup(opt.base, opt.resolution, opt.mesh)
    with user_code(problem.script):
        state = jax.eval_shape(setup.window().init, problem.params)
    return take_apart({"params": problem.params, "opt_state": state})


def layout_of(planned: Planning, parts: Parts) -> Plan | None:
    """Where every array of a state lies; None where the strategy lays nothing out."""
    opt = planned.opt
    policy = placement_policy(opt.resolution, opt.mesh, planned.params)
    return None if policy is None else plan_parts(parts, policy)


def rows_of(planned: Planning, parts: Parts) -> Sequence[Row]:
    """A row for every array, also where nothing is laid out."""
    layout = layout_of(planned, parts)
    if layout is not None:
        return layout.rows
    return [
        Row(
            kind=leaf.kind,
            path=path_str(leaf.path),
            shape=tuple(leaf.shape),
            dtype=str(leaf.dtype),
            spec=PartitionSpec(),
            total_bytes=leaf_bytes(leaf),
            device_bytes=leaf_bytes(leaf),
            reason="nothing is split without sharding",
            stored_shape=tuple(leaf.shape),
        )
        for leaf in parts.leaves
    ]
