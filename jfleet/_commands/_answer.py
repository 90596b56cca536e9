"""What ``plan`` has found out, as text and as JSON."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from rich.table import Table

from jfleet._commands._compiled import Compiled
from jfleet._commands._console import make_console
from jfleet._commands._levels import OTHER, Levels, Planning, limit_of, stack_of
from jfleet._commands._problem import Problem
from jfleet._commands._target_options import Place
from jfleet._plan_text import human
from jfleet._planning.report import seconds
from jfleet._tuning.auto import AutoPlan
from jfleet.plan import Plan

PEAK = "peak"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """Everything that was planned: one step, all levels, or what auto chose."""

    problem: Problem
    place: Place
    step: Planning | None = None
    """The step of one strategy."""
    layout: Plan | None = None
    """Its layout, where there is one."""
    levels: Levels | None = None
    auto: AutoPlan | None = None
    compiled: Compiled | None = None
    warned: tuple[str, ...] = ()
    """What jfleet warned of while auto chose."""

    @property
    def limit_bytes(self) -> int | None:
        """What a device has for a step."""
        return limit_of(self.place) if self.auto is None else self.auto.memory_bytes

    @property
    def heading(self) -> str:
        """What was planned, and for what."""
        shape = self.place.mesh_shape
        mesh = " x ".join(f"{axis}={size}" for axis, size in shape.items())
        chip = "" if self.place.hardware is None else f" of {self.place.hardware.name}"
        num = self.place.num_devices
        devices = "1 device" if num == 1 else f"{num} devices"
        return f"{self.problem.name}: mesh {mesh}, {devices}{chip}"


def to_dict(answer: Answer) -> dict[str, Any]:
    """Plain values, for JSON."""
    place, levels = answer.place, answer.levels
    found: dict[str, Any] = {
        "target": answer.problem.name,
        "mesh_shape": [list(item) for item in place.mesh_shape.items()],
        "hardware": None if place.hardware is None else place.hardware.name,
        "limit_bytes": answer.limit_bytes,
    }
    if answer.auto is not None:
        found["auto"] = json.loads(answer.auto.to_json())
        found["warnings"] = list(answer.warned)
    if levels is not None:
        found["levels"] = {n: p.plan.to_dict() for n, p in levels.found.items()}
        found["refused"] = levels.refused
        warned = dict.fromkeys(w for p in levels.found.values() for w in p.warned)
        found["warnings"] = list(warned)
        found["ranked"] = list(levels.ranked)
    if answer.step is not None:
        found["plan"] = answer.step.plan.to_dict()
        found["warnings"] = list(answer.step.warned)
        found["layout"] = (
            None if answer.layout is None else json.loads(answer.layout.to_json())
        )
    if answer.compiled is not None:
        found["compiled"] = answer.compiled.to_dict()
    return found


def show(answer: Answer) -> None:
    """Print for people."""
    console = make_console()
    if answer.auto is not None:
        console.print(answer.auto.explain(), soft_wrap=True)
        for line in _warnings(answer.warned):
            console.print(line, soft_wrap=True)
    elif answer.step is not None:
        console.print(answer.heading, "", soft_wrap=True)
        console.print(str(answer.step.plan), soft_wrap=True)
        if answer.layout is not None:
            console.print("", str(answer.layout), sep="\n", soft_wrap=True)
        for line in (*_warnings(answer.step.warned), *verdict(answer)):
            console.print(line, soft_wrap=True)
    else:
        assert answer.levels is not None
        console.print(f"{answer.heading}; per device", soft_wrap=True)
        console.print(_table(answer, answer.levels))
        for line in (*notes(answer.levels), *verdict(answer)):
            console.print(line, soft_wrap=True)
    if answer.compiled is not None:
        console.print("", *compiled_lines(answer.compiled), sep="\n", soft_wrap=True)


def _table(answer: Answer, levels: Levels) -> Table:
    table = Table()
    table.add_column("")
    for name in levels.names:
        table.add_column(name, justify="right")
    for name, cells in table_rows(answer, levels):
        table.add_row(name, *cells, end_section=name == OTHER or name.startswith(PEAK))
    return table


def table_rows(answer: Answer, levels: Levels) -> Iterator[tuple[str, list[str]]]:
    """Rows of the levels side by side: a name, then a cell for each level."""
    plans = [levels.found.get(name) for name in levels.names]
    stacks = [None if p is None else stack_of(p.plan) for p in plans]
    kinds = dict.fromkeys(k for stack in stacks if stack for k in stack)
    order = sorted(kinds, key=lambda kind: kind == OTHER)
    for kind in order:
        yield kind, ["" if s is None else human(s.get(kind, 0)) for s in stacks]
    complete = all(p is None or p.plan.memory.complete for p in plans)
    peak = PEAK if complete else f"{PEAK}, at least"
    yield peak, _cells(plans, lambda p: human(p.memory.peak_bytes))
    yield "sent per step", _cells(plans, lambda p: human(p.traffic.wire_bytes))
    if any(p is not None and p.plan.time for p in plans):
        yield "estimated time", _cells(plans, _time)
    limit = levels.limit_bytes
    if limit is not None:
        fits = {name: name in levels.ranked for name in levels.names}
        yield (
            f"fits {human(limit)}",
            [
                "" if p is None else "yes" if fits[name] else "NO"
                for name, p in zip(levels.names, plans, strict=True)
            ],
        )


def _cells(plans: Any, text: Any) -> list[str]:
    return ["" if p is None else text(p.plan) for p in plans]


def _time(plan: Any) -> str:
    if plan.time is None:
        return ""
    return f"{seconds(plan.time.low_seconds)} - {seconds(plan.time.high_seconds)}"


def notes(levels: Levels) -> Iterator[str]:
    """What has to be said of the levels."""
    for name, reason in levels.refused.items():
        yield f"{name} cannot run: {reason}"
    found = dict.fromkeys(n for p in levels.found.values() for n in p.notes)
    yield from (f"Note: {note}" for note in found)


def _warnings(warned: tuple[str, ...]) -> Iterator[str]:
    yield from (f"Note: {text}" for text in warned)


def verdict(answer: Answer) -> Iterator[str]:
    """What fits, and which level to take."""
    levels, limit = answer.levels, answer.limit_bytes
    if answer.auto is not None:
        return
    if answer.place.num_devices == 1:
        yield "There is one device only, so nothing is split; --devices 8 plans for 8"
    if answer.step is not None:
        if answer.place.memory_bytes is not None:
            peak = answer.step.plan.memory.peak_bytes
            fits = "fits" if peak <= answer.place.memory_bytes else "does NOT fit"
            yield f"{fits} {human(answer.place.memory_bytes)}"
        return
    assert levels is not None
    if limit is None:
        yield (
            "Which to take: name the hardware (--hardware v5e) for an estimate of time "
            "and the winner, or --memory 16GiB; the whole plan: --level os_g"
        )
    elif not levels.ranked:
        least = levels.found[levels.closest].plan.memory.peak_bytes
        yield (
            f"Nothing fits {human(limit)} per device; {levels.closest} comes closest, "
            f"with {human(least - limit)} too much: take more devices, fewer rows per "
            "device, recompute or gradient_merge, or see what --auto finds"
        )
    else:
        yield _winner(levels, limit)


def _winner(levels: Levels, limit: int) -> str:
    best = levels.found[levels.ranked[0]]
    what = f"sends least: {human(best.plan.traffic.wire_bytes)} per step"
    if best.plan.time is not None:
        what = f"is the fastest by the estimate: {_time(best.plan)} per step"
    rest = f"; the whole plan: --level {best.plan.level}" if best.plan.level else ""
    return f"Of those that fit {human(limit)}, {best.name} {what}{rest}"


def compiled_lines(compiled: Compiled) -> Iterator[str]:
    """The plan beside the compiler, and what should not be in the program."""
    yield f"Compiled for {compiled.where}, {compiled.name}:"
    yield str(compiled.comparison)
    yield ""
    yield str(compiled.report)
