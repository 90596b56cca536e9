"""What ``auto`` chooses, from the shape of the problem alone.

Pure arithmetic on sizes. ``accuracy="exact"`` may choose only what leaves the result
the same up to rounding order; every answer carries the reason and its numbers.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from jfleet._settings.placement_options import AutoConfigs

MEMORY_SHARE = 0.9
"""Share of the device memory that may be planned; the rest is workspace."""

NEVER = {
    "gradient_merge": "it changes how many calls make one optimizer step",
    "adaptive_localsgd": "it changes training; auto would choose localsgd",
    "lars": "it is another optimizer; auto never changes the optimizer",
    "lamb": "it is another optimizer; auto never changes the optimizer",
    "clip": "it changes training; the limit is yours to choose",
    "sync_batch_norm": "it changes the statistics that a model was written for",
    "tensor_parallel": "it needs rules that only you know",
}
"""Why auto leaves a switch off, whatever the problem."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Sizes that decide, None where unknown."""

    allowed: AutoConfigs
    """What auto may do and what it was told."""
    fixed: Mapping[str, bool]
    """Switches that the user set."""
    devices: int | None
    """Devices along the axes that state can be split over."""
    why_no_devices: str
    """Why they are unknown."""
    replicas: int | None
    """Devices along all data axes."""
    shared_axes: bool
    """Whether those axes overlap."""
    param_bytes: int | None
    """Bytes of all parameters."""
    state_bytes: int | None
    """Bytes of the optimizer state."""
    level: str
    """Level of sharding where the user switched it on."""
    sgd_base: bool
    """Whether the base is a ``jfleet.optimizer(optax.sgd, ...)``."""


@dataclasses.dataclass(frozen=True, slots=True)
class Proposal:
    """One answer."""

    on: bool
    reason: str
    numbers: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def propose(problem: Problem, names: list[str]) -> dict[str, Proposal]:
    """Answer for every name, in order; later answers know the earlier ones."""
    answers: dict[str, Proposal] = {}
    for name in (*ORDER, *names):
        if name in names and name not in answers:
            answers[name] = _answer(name, problem, answers)
    return answers


def _answer(name, problem, answers) -> Proposal:
    if name in NEVER:
        return Proposal(False, f"auto never chooses it: {NEVER[name]}")
    if name not in ORDER:
        return Proposal(False, "auto knows nothing about rules of third parties")
    return ORDER[name](problem, answers)


def _is_on(name: str, problem: Problem, answers: Mapping[str, Proposal]) -> bool:
    return problem.fixed.get(name) is True or (name in answers and answers[name].on)


def device_bytes(level: str | None, problem: Problem) -> int:
    """Bytes of parameters, gradients and optimizer state on one device."""
    params, state = problem.param_bytes or 0, problem.state_bytes or 0
    share = problem.devices or 1
    whole = params
    split = {
        None: (whole + whole + state, 0),
        "os": (whole + whole, state),
        "os_g": (whole, whole + state),
        "p_g_os": (0, whole + whole + state),
    }[level]
    return split[0] + math.ceil(split[1] / share)


def _budget(problem: Problem) -> int | None:
    memory = problem.allowed.device_memory_bytes
    if memory is None or problem.param_bytes is None:
        return None
    return int(memory * MEMORY_SHARE)


def _sharding(problem: Problem, answers: Mapping[str, Proposal]) -> Proposal:
    if problem.devices is None:
        return Proposal(False, problem.why_no_devices)
    numbers: dict[str, Any] = {"devices": problem.devices}
    if problem.devices == 1:
        return Proposal(False, "one device: there is nothing to split over", numbers)
    if problem.shared_axes:
        for name in ("localsgd", "adaptive_localsgd", "dgc"):
            if problem.fixed.get(name):
                reason = f"{name} needs the axis: every replica holds its own state"
                return Proposal(False, reason, numbers)
    if problem.param_bytes is None:
        reason = "splits optimizer state and gradients at the traffic of data parallel"
        return Proposal(True, reason, numbers, {"level": "os_g"})
    numbers |= {
        "param_bytes": problem.param_bytes,
        "state_bytes": problem.state_bytes,
        "bytes_per_device_now": device_bytes(None, problem),
    }
    level, reason = _level(problem)
    if level is None:
        return Proposal(False, reason, numbers)
    numbers["bytes_per_device"] = device_bytes(level, problem)
    return Proposal(True, reason, numbers, {"level": level})


def _level(problem: Problem) -> tuple[str | None, str]:
    budget = _budget(problem)
    activations = problem.allowed.activation_bytes or 0
    if budget is not None and device_bytes("os_g", problem) + activations > budget:
        return "p_g_os", (
            "os_g would not fit the device memory; splitting parameters too costs "
            "3 instead of 2 units of traffic"
        )
    if (problem.state_bytes or 0) <= (problem.param_bytes or 0) // 1000:
        return None, "the optimizer has no state worth splitting"
    return (
        "os_g",
        "splits optimizer state and gradients at the traffic of data parallel",
    )


def _recompute(problem: Problem, answers: Mapping[str, Proposal]) -> Proposal:
    budget, activations = _budget(problem), problem.allowed.activation_bytes
    if budget is None or activations is None:
        return Proposal(
            False,
            "it costs compute, and nothing says that memory is short; describe "
            "device_memory_bytes and activation_bytes (and pass params)",
        )
    level = None
    if _is_on("sharding", problem, answers):
        proposal = answers.get("sharding")
        level = proposal.options["level"] if proposal else problem.level
    needed = device_bytes(level, problem) + activations
    numbers = {"needed_bytes": needed, "budget_bytes": budget}
    if needed <= budget:
        return Proposal(False, "everything fits without it", numbers)
    return Proposal(True, "activations do not fit otherwise", numbers)


def _amp(problem: Problem, answers: Mapping[str, Proposal]) -> Proposal:
    if problem.allowed.accuracy == "exact":
        return Proposal(
            False, "accuracy is 'exact'; 'mixed' would allow bfloat16 compute"
        )
    return Proposal(
        True,
        f"accuracy {problem.allowed.accuracy!r} allows bfloat16 compute with float32 "
        "masters",
        options={"dtype": "bfloat16"},
    )


def _network(problem: Problem) -> Proposal | float:
    """Seconds of communication per second of compute, or why that is unknown."""
    allowed = problem.allowed
    if allowed.accuracy != "any":
        return Proposal(False, f"accuracy is {allowed.accuracy!r}; it changes training")
    rate, seconds = allowed.network_bytes_per_second, allowed.compute_seconds
    sizes = (problem.param_bytes, problem.replicas)
    if rate is None or seconds is None or None in sizes:
        return Proposal(
            False,
            "nothing says that the network is slow; describe network_bytes_per_second "
            "and compute_seconds (and pass mesh and params)",
        )
    num_bytes, replicas = problem.param_bytes or 0, problem.replicas or 1
    return 2 * num_bytes * (replicas - 1) / replicas / rate / seconds


def _pays(threshold: float, wins: Callable) -> Callable:
    """A feature that saves traffic pays from ``threshold`` on."""

    def answer(problem: Problem, answers: Mapping[str, Proposal]) -> Proposal:
        ratio = _network(problem)
        if isinstance(ratio, Proposal):
            return ratio
        numbers = {"communication_per_compute": round(ratio, 3)}
        if ratio <= threshold:
            text = f"communication takes {ratio:.2f} of the compute time"
            return Proposal(False, f"{text}; it pays above {threshold:g}", numbers)
        return wins(problem, answers, ratio, numbers)

    return answer


def _dgc(problem, answers, ratio, numbers) -> Proposal:
    if not problem.sgd_base:
        reason = "it needs a base made by jfleet.optimizer(optax.sgd, ...)"
        return Proposal(False, reason, numbers)
    others = ("lars", "lamb", "localsgd", "adaptive_localsgd", "fp16_allreduce")
    blocked = _taken(problem, answers, others) or _no_axis(problem, answers)
    if blocked:
        return Proposal(False, blocked, numbers)
    return Proposal(True, f"communication takes {ratio:.2f} of the compute", numbers)


def _localsgd(problem, answers, ratio, numbers) -> Proposal:
    others = ("dgc", "adaptive_localsgd", "fp16_allreduce")
    blocked = _taken(problem, answers, others) or _no_axis(problem, answers)
    if blocked:
        return Proposal(False, blocked, numbers)
    k_steps = min(16, math.ceil(ratio))
    reason = f"communication takes {ratio:.2f} of the compute; one average in {k_steps}"
    return Proposal(True, reason, numbers, {"k_steps": k_steps})


def _fp16_allreduce(problem, answers, ratio, numbers) -> Proposal:
    blocked = _taken(problem, answers, ("dgc", "localsgd", "adaptive_localsgd"))
    if blocked:
        return Proposal(False, blocked, numbers)
    reason = f"communication takes {ratio:.2f} of the compute time; this halves it"
    return Proposal(True, reason, numbers)


def _taken(problem, answers, others) -> str:
    """Which other feature stands in the way, or nothing."""
    for name in others:
        if _is_on(name, problem, answers):
            return f"it does not go with {name}, which is on"
    return ""


def _no_axis(problem, answers) -> str:
    """Why there is no axis for replicas of their own, or nothing."""
    if problem.shared_axes and _is_on("sharding", problem, answers):
        return (
            "sharding uses the only axis; a mesh {'replica': .., 'shard': ..} has two"
        )
    return ""


ORDER: dict[str, Callable[[Problem, Mapping[str, Proposal]], Proposal]] = {
    "sharding": _sharding,
    "recompute": _recompute,
    "amp": _amp,
    "dgc": _pays(2.0, _dgc),
    "localsgd": _pays(2.0, _localsgd),
    "fp16_allreduce": _pays(1.0, _fp16_allreduce),
}
"""What auto can choose, in the order in which it decides."""
