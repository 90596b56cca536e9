"""``auto`` on facts: every candidate is planned, and the fastest that fits is taken.

The candidates are levels, mesh splits, recompute policies and reduction schedules (and,
at ``accuracy="mixed"``, bfloat16 compute). Each is planned as ``jfleet.plan_step``
plans: from a trace on shapes, without devices. Nothing is measured and nothing random,
so the same question has the same answer.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from jfleet._errors import ConfigError, ConfigTypeError, JfleetError
from jfleet._plan_text import human
from jfleet._planning.hardware import Hardware, hardware_of
from jfleet._planning.step_plan import StepPlan, plan_step
from jfleet._tuning.candidates import Candidate, candidates, free_switches, mesh_splits
from jfleet._tuning.choice import Planned, next_up, ranked, why_not
from jfleet._tuning.sizes import Sizes
from jfleet._tuning.target import compile_step, mesh_over
from jfleet.distributed import distributed_optimizer
from jfleet.strategy import DistributedStrategy

CHOOSES = ("sharding", "recompute", "amp")
"""Switches that auto decides by plans; the others it leaves alone."""
MEMORY_SHARE = 0.9
"""Share of a chip's memory that may be planned; the rest is the runtime's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoPlan:
    """What auto chose, and what it chose from; ``print`` it."""

    base: Any
    memory_bytes: int | None
    """The limit for one device."""
    hardware: Hardware | None
    found: tuple[Planned, ...]
    """All candidates with their numbers, in the order they were made."""
    order: tuple[Planned, ...]
    """Those that fit, best first."""
    best: Planned
    free: tuple[str, ...]
    """The switches that were left to auto."""
    verified: tuple[str, ...] = ()
    """What the compiler said, where it was asked."""

    @property
    def strategy(self) -> DistributedStrategy:
        """The chosen strategy, with everything spelled out."""
        return self.best.candidate.strategy

    @property
    def mesh_shape(self) -> dict[str, int]:
        """The chosen mesh: ``jfleet.init`` takes it."""
        return dict(self.best.candidate.mesh_shape)

    @property
    def plan(self) -> StepPlan | None:
        """The plan of the chosen step; None without a loss."""
        return self.best.plan

    def optimizer(self, mesh: Any, params: Any = None) -> Any:
        """The chosen optimizer on a mesh of the chosen shape."""
        if dict(mesh.shape) != self.mesh_shape:
            raise ConfigError(
                f"mesh must have the chosen shape {self.mesh_shape}, got "
                f"{dict(mesh.shape)}; make it with jfleet.init({self.mesh_shape})"
            )
        return distributed_optimizer(self.base, self.strategy, mesh=mesh, params=params)

    def explain(self) -> str:
        """The choice, the candidates, why each lost, and what would change it."""
        return "\n".join(_lines(self))

    def to_json(self, *, indent: int | None = None) -> str:
        """The choice and every candidate, as JSON."""
        return json.dumps(
            {
                "strategy": json.loads(self.strategy.to_json()),
                "mesh_shape": [list(a) for a in self.mesh_shape.items()],
                "memory_bytes": self.memory_bytes,
                "verified": list(self.verified),
                "candidates": [
                    {
                        "name": p.candidate.name,
                        "peak_bytes": p.peak_bytes,
                        _unit(self).replace(" ", "_"): p.cost,
                        "verdict": why_not(p, self.best, self.memory_bytes, "cost"),
                    }
                    for p in self.found
                ],
            },
            indent=indent,
        )

    def __str__(self) -> str:
        return self.explain()


def auto_plan(
    base: Any,
    params: Any,
    loss_fn: Callable[..., Any] | None = None,
    batch: Any = None,
    *,
    devices: Any = None,
    mesh: Any = None,
    hardware: str | Hardware | None = None,
    memory_bytes: int | None = None,
    strategy: DistributedStrategy | None = None,
    verify: bool = False,
    compiler: str | None = None,
    model_state: Any = None,
    has_aux: bool = False,
    rng: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> AutoPlan:
    """Choose the fastest strategy and mesh that fit the memory of a device.

    Args:
        base: the optax optimizer.
        params: the parameters, arrays or shapes.
        loss_fn: as for ``opt.minimize``. Without it activations and time are unknown:
            then parameters, gradients, optimizer state and traffic decide.
        batch: the rows of all devices (and micro batches), arrays or shapes.
        devices: how many there will be, or the devices; default all of this process
            group. Every split of them into replicas and shards is considered.
        mesh: instead of ``devices``, a mesh that is fixed, perhaps abstract.
        hardware: the chip, by name (``"v5e"``) or as ``jfleet.Hardware``; it gives the
            estimate of time and, unless told, the memory.
        memory_bytes: memory of one device that may be used; default 0.9 of the chip's,
            or ``auto_configs["device_memory_bytes"]``.
        strategy: what is set in it stays; default ``DistributedStrategy(auto=True)``.
        verify: compile the winner for ``devices`` (or a mesh of real ones), and fall
            back to the next candidate while the compiler says that it does not fit.
        compiler: as for ``plan_step``.
        model_state: as for ``plan_step``.
        has_aux: as for ``plan_step``.
        rng: as for ``plan_step``.
        progress: called with (candidates planned, candidates).

    Returns:
        The choice: ``strategy``, ``mesh_shape``, ``plan``, ``explain()``.

    Raises:
        ConfigError: nothing fits; the text says what comes closest.

    Example:
        >>> import jax, jax.numpy as jnp, jfleet, optax
        >>> w = jax.ShapeDtypeStruct((4096, 4096), "float32")
        >>> x = jax.ShapeDtypeStruct((64, 4096), "float32")
        >>> def loss_fn(w, x):
        ...     return jnp.mean((x @ w) ** 2)
        >>> chosen = auto_plan(
        ...     optax.adam(1e-3), w, loss_fn, x, devices=8, hardware="v5e",
        ...     memory_bytes=160 * 2**20,
        ... )
        >>> chosen.strategy.sharding_configs["level"]
        'p_g_os'
    """
    strategy = DistributedStrategy(auto=True) if strategy is None else strategy
    if not isinstance(strategy, DistributedStrategy):
        raise ConfigTypeError(
            f"strategy must be a DistributedStrategy, got {type(strategy).__name__}"
        )
    if loss_fn is not None and batch is None:
        raise ConfigError(
            "auto_plan with a loss needs the batch: shapes are enough, such as "
            "jax.ShapeDtypeStruct((256, 1024), 'int32')"
        )
    chip = hardware_of(hardware)
    if loss_fn is not None and chip is None:
        raise ConfigError(
            "auto_plan needs the hardware to estimate times; pass hardware='v5e' or "
            "another name, or describe it with jfleet.Hardware(...)"
        )
    limit = _limit(strategy, chip, memory_bytes)
    options = strategy.options("auto_configs")
    shapes, real = _meshes(devices, mesh, wide=_is_free(strategy))
    ways = candidates(strategy, shapes, traced=loss_fn is not None)
    known = {"model_state": model_state, "has_aux": has_aux, "rng": rng}
    found = []
    sizes = None if loss_fn is not None else Sizes.of(params, base.init)
    for number, one in enumerate(ways):
        if sizes is None:
            planned = _planned(one, base, params, loss_fn, batch, chip, compiler, known)
        else:
            planned = Planned(
                candidate=one,
                peak_bytes=sizes.peak_bytes(one) + (options.activation_bytes or 0),
                cost=sizes.wire_bytes(one),
            )
        found.append(planned)
        if progress is not None:
            progress(number + 1, len(ways))
    order = ranked(found, limit)
    if not order:
        raise ConfigError(_nothing_fits(found, limit))
    chosen = AutoPlan(
        base=base,
        memory_bytes=limit,
        hardware=chip,
        found=tuple(found),
        order=tuple(order),
        best=order[0],
        free=tuple(n for n in CHOOSES if n in free_switches(strategy)),
    )
    if not verify:
        return chosen
    if loss_fn is None:
        raise ConfigError(
            "verify=True compiles the step, so it needs loss_fn and batch"
        )
    return _verified(chosen, real, params, loss_fn, batch, known)


def _is_free(strategy: DistributedStrategy) -> bool:
    """Whether devices may be split into replicas of shards."""
    on = strategy.to_dict().get("sharding") is True
    return on or "sharding" in free_switches(strategy)


def _limit(
    strategy: DistributedStrategy, chip: Hardware | None, memory_bytes: int | None
) -> int | None:
    if memory_bytes is not None:
        if isinstance(memory_bytes, bool) or not memory_bytes > 0:
            raise ConfigError(f"memory_bytes must be above 0, got {memory_bytes!r}")
        return int(memory_bytes)
    told = strategy.options("auto_configs").device_memory_bytes
    if told is not None:
        return int(told * MEMORY_SHARE)
    return None if chip is None else int(chip.memory_bytes * MEMORY_SHARE)


def _meshes(
    devices: Any, mesh: Any, *, wide: bool
) -> tuple[list[Mapping[str, int]], Sequence[Any] | None]:
    """Mesh shapes to consider, and the devices if there are any."""
    if mesh is not None:
        if devices is not None:
            raise ConfigError("pass devices or mesh, not both")
        real = list(mesh.devices.flat) if isinstance(mesh, Mesh) else None
        return [dict(mesh.shape)], real
    if devices is None:
        devices = jax.devices()
    if isinstance(devices, int) and not isinstance(devices, bool):
        if devices < 1:
            raise ConfigError(f"devices must be at least 1, got {devices}")
        here = jax.devices()
        real = here if len(here) == devices else None
        return list(mesh_splits(devices, wide=wide)), real
    real = list(devices)
    return list(mesh_splits(len(real), wide=wide)), real


def _planned(
    one: Candidate,
    base: Any,
    params: Any,
    loss_fn: Any,
    batch: Any,
    chip: Hardware | None,
    compiler: str | None,
    known: dict[str, Any],
) -> Planned:
    axes = (AxisType.Auto,) * len(one.mesh_shape)
    sizes, names = [n for _, n in one.mesh_shape], [a for a, _ in one.mesh_shape]
    mesh = AbstractMesh(tuple(sizes), tuple(names), axis_types=axes)
    try:
        opt = distributed_optimizer(base, one.strategy, mesh=mesh, params=params)
        plan = plan_step(
            opt, params, loss_fn, batch, hardware=chip, compiler=compiler, **known
        )
    except JfleetError as error:
        return Planned(candidate=one, peak_bytes=None, cost=None, refused=str(error))
    time = plan.time
    assert time is not None
    return Planned(
        candidate=one,
        peak_bytes=plan.memory.peak_bytes,
        cost=(time.low_seconds + time.high_seconds) / 2,
        plan=plan,
    )


def _nothing_fits(found: Sequence[Planned], limit: int | None) -> str:
    able = [p for p in found if p.peak_bytes is not None]
    if not able:
        return f"auto found nothing that can run: {found[0].refused}"
    least = min(able, key=lambda p: p.peak_bytes or 0)
    assert least.peak_bytes is not None
    assert limit is not None
    return (
        f"auto found nothing that fits {human(limit)} per device; the smallest of "
        f"{len(found)} candidates is {least.candidate.name} with "
        f"{human(least.peak_bytes)}, {human(least.peak_bytes - limit)} too much: take "
        "more devices, fewer rows per device or gradient_merge, or allow "
        "auto_configs={'accuracy': 'mixed'}"
    )


def _verified(
    chosen: AutoPlan,
    devices: Sequence[Any] | None,
    params: Any,
    loss_fn: Any,
    batch: Any,
    known: dict[str, Any],
) -> AutoPlan:
    """Compile the winner; while it does not fit, the next."""
    if devices is None:
        raise ConfigError(
            "verify=True compiles for real devices or those of a topology, and devices "
            "is only a number; pass devices=jax.devices(), or "
            "jfleet.topology_devices('v5e:16x16')"
        )
    said = []
    for one in chosen.order:
        mesh = mesh_over(devices, dict(one.candidate.mesh_shape))
        opt = distributed_optimizer(
            chosen.base, one.candidate.strategy, mesh=mesh, params=params
        )
        compiled = compile_step(opt, mesh, params, loss_fn, batch, **known)
        memory = compiled.memory_analysis()
        peak = (
            memory.argument_size_in_bytes
            + memory.temp_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
        )
        fits = chosen.memory_bytes is None or peak <= chosen.memory_bytes
        said.append(
            f"{one.candidate.name}: the compiler needs {human(peak)}, planned were "
            f"{human(one.peak_bytes or 0)}: {'fits' if fits else 'does not fit'}"
        )
        if fits:
            return dataclasses.replace(chosen, best=one, verified=tuple(said))
    raise ConfigError(
        "auto planned candidates that fit, and the compiler fits none of them:\n  "
        + "\n  ".join(said)
    )


def _unit(chosen: AutoPlan) -> str:
    return "estimated seconds" if chosen.best.plan is not None else "bytes sent"


def _cost_text(chosen: AutoPlan, cost: float | None) -> str:
    if cost is None:
        return ""
    if chosen.best.plan is None:
        return f"sends {human(int(cost))}"
    return f"{cost * 1e3:.3g} ms"


def _lines(chosen: AutoPlan) -> list[str]:
    best, limit = chosen.best, chosen.memory_bytes
    of = "" if limit is None else f" of {human(limit)}"
    chip = "" if chosen.hardware is None else f" on {chosen.hardware.name}"
    half = any(p.candidate.half for p in chosen.found)
    lines = [
        f"auto chose {best.candidate.name}: {human(best.peak_bytes or 0)}{of} per "
        f"device, {_cost_text(chosen, best.cost)} per step{chip} (estimate)",
        f"left to auto: {', '.join(chosen.free) or 'the mesh alone'}; nothing that "
        "changes the result beyond rounding was considered"
        f"{', but bfloat16 compute' if half else ''}",
        "",
        f"{len(chosen.found)} candidates:",
    ]
    unit = "time" if best.plan is not None else "traffic"
    width = max(len(p.candidate.name) for p in chosen.found)
    for one in chosen.found:
        peak = "" if one.peak_bytes is None else human(one.peak_bytes)
        cost = _cost_text(chosen, one.cost)
        verdict = why_not(one, best, limit, unit)
        lines.append(
            f"  {one.candidate.name:<{width}} {peak:>10} {cost:>12}  {verdict}"
        )
    up = next_up(chosen.found, best, limit)
    if up is not None:
        more = human(up.peak_bytes - (limit or 0))
        lines += [
            "",
            f"next up: {up.candidate.name} would take {_cost_text(chosen, up.cost)};"
            f" it needs {more} more per device",
        ]
    if chosen.verified:
        lines += ["", "asked the compiler:", *(f"  {v}" for v in chosen.verified)]
    return lines
