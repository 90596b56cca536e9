"""A plan of one training step: memory, traffic and time on one device.

The step is traced on shapes; nothing is placed and nothing compiled. What one device
would run is read off the trace, and from that everything else.
"""

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import jax

from jfleet._errors import ConfigError, ConfigTypeError, nearest
from jfleet._planning.compare import Comparison, compare
from jfleet._planning.compilers import COMPILERS
from jfleet._planning.device import device_program
from jfleet._planning.formulas import Formulas
from jfleet._planning.hardware import Hardware, hardware_of
from jfleet._planning.liveness import Run
from jfleet._planning.memory import StepMemory, aliases_of, step_memory
from jfleet._planning.report import plan_text
from jfleet._planning.roofline import PhaseWork, TimeEstimate, estimate, step_work
from jfleet._planning.tracing import (
    TracedStep,
    mesh_sizes,
    trace_function,
    trace_strategy,
)
from jfleet._planning.traffic import StepTraffic, step_traffic

FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What a training step will take, per device; ``print`` it."""

    level: str | None
    """Level of sharding, None without."""
    applied: tuple[str, ...]
    """What the strategy switches on, in order of application."""
    mesh_shape: tuple[tuple[str, int], ...]
    """Axis names and sizes."""
    compiler: str
    """The compiler whose habits the memory follows: ``cpu``, ``tpu`` or ``gpu``."""
    memory: StepMemory
    traffic: StepTraffic
    work: tuple[PhaseWork, ...]
    """Operations and memory traffic by phase; empty where no loss was given."""
    time: TimeEstimate | None
    """An estimate, where hardware was named and a loss given."""
    hardware: Hardware | None
    notes: tuple[str, ...]
    """What could not be followed, or is only assumed."""

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(n for _, n in self.mesh_shape)

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the memory of the hardware; None if unknown."""
        if self.hardware is None:
            return None
        return self.memory.peak_bytes <= self.hardware.memory_bytes

    def on(self, hardware: str | Hardware) -> "StepPlan":
        """The same step on other hardware."""
        return _timed(self, hardware_of(hardware))

    def compare(self, compiled: Any) -> Comparison:
        """Put the plan beside what the compiler says of the compiled step.

        Args:
            compiled: what ``step.lower(state, batch).compile()`` returns.
        """
        return compare(self, compiled)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        plain = dataclasses.asdict(self)
        plain["format"] = FORMAT_VERSION
        plain["mesh_shape"] = [list(a) for a in self.mesh_shape]
        plain["fits"] = self.fits
        plain["memory"]["peak_bytes"] = self.memory.peak_bytes
        plain["memory"]["state_bytes"] = self.memory.state_bytes
        plain["traffic"]["wire_bytes"] = self.traffic.wire_bytes
        for row, t in zip(
            plain["traffic"]["transfers"], self.traffic.transfers, strict=True
        ):
            row["wire_bytes"] = t.wire_bytes
        if self.time is not None:
            plain["time"] |= {
                "kind": "estimate",
                "low_seconds": self.time.low_seconds,
                "high_seconds": self.time.high_seconds,
            }
        return plain

    def to_json(self, *, indent: int | None = None) -> str:
        """Everything, as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        return plan_text(self)


def plan_step(
    opt: Any,
    params: Any,
    loss_fn: Callable[..., Any] | None = None,
    batch: Any = None,
    *,
    mesh: Any = None,
    hardware: str | Hardware | None = None,
    compiler: str | None = None,
    model_state: Any = None,
    has_aux: bool = False,
    rng: bool = False,
    donate: bool = True,
    per_replica: bool | None = None,
) -> StepPlan:
    """Plan the step of a strategy before anything runs.

    The step that ``opt.minimize(loss_fn)`` would compile is traced on shapes, and the
    program of one device is read off the trace. Without a loss only what the strategy
    itself decides is known: state exactly, gradients and their reduction.

    Args:
        opt: from ``jfleet.distributed_optimizer``.
        params: the parameters, arrays or ``jax.ShapeDtypeStruct``.
        loss_fn: as for ``opt.minimize``.
        batch: the rows of all devices (and micro batches), arrays or shapes.
        mesh: Mesh or AbstractMesh; default that of ``opt``.
        hardware: a name such as ``"v5e"`` or a ``jfleet.Hardware``, for an estimate
            of time and for ``fits``.
        compiler: ``"cpu"``, ``"tpu"`` or ``"gpu"``; default what the hardware needs,
            else that of this process.
        model_state: what the model keeps beside its parameters, arrays or shapes.
        has_aux: as for ``opt.minimize``.
        rng: as for ``opt.minimize``.
        donate: as for ``opt.minimize``.
        per_replica: as for ``opt.minimize``.

    Returns:
        The plan: ``memory``, ``traffic``, ``time``; readable when printed.

    Raises:
        ConfigError: a mesh, a batch or hardware that does not fit.
        ConfigTypeError: an argument of the wrong type.

    Example:
        >>> import jax, jax.numpy as jnp, jfleet, optax
        >>> mesh = jax.sharding.AbstractMesh((8,), ("data",))
        >>> strategy = jfleet.DistributedStrategy(sharding=True)
        >>> opt = jfleet.distributed_optimizer(optax.adam(1e-3), strategy, mesh=mesh)
        >>> w = jax.ShapeDtypeStruct((512, 256), "float32")
        >>> x = jax.ShapeDtypeStruct((64, 512), "float32")
        >>> plan = plan_step(opt, w, lambda w, x: jnp.mean((x @ w) ** 2), x)
        >>> plan.memory.of("optimizer state").bytes
        131076
        >>> sorted(plan.traffic.bytes_by_kind())
        ['all-gather', 'all-reduce', 'reduce-scatter']
    """
    if not all(hasattr(opt, name) for name in ("resolution", "base", "mesh")):
        raise ConfigTypeError(
            "opt must come from jfleet.distributed_optimizer, got "
            f"{type(opt).__name__}; for a step of your own use jfleet.plan_program"
        )
    if loss_fn is not None and batch is None:
        raise ConfigError(
            "plan_step with a loss needs the batch: shapes are enough, such as "
            "jax.ShapeDtypeStruct((256, 1024), 'int32')"
        )
    traced = trace_strategy(
        opt,
        params,
        loss_fn,
        batch,
        mesh=mesh,
        model_state=model_state,
        has_aux=has_aux,
        rng=rng,
        donate=donate,
        per_replica=per_replica,
        platform=_compiler_name(hardware_of(hardware), compiler),
    )
    return _planned(traced, hardware_of(hardware), compiler)


def plan_program(
    step: Callable[..., Any],
    *arguments: Any,
    mesh: Any = None,
    level: str | None = None,
    hardware: str | Hardware | None = None,
    compiler: str | None = None,
    donate: bool = True,
) -> StepPlan:
    """Plan a training step of your own before anything runs.

    Args:
        step: any function that jit would take; its first argument is the state.
        *arguments: the state and the rest, arrays or ``jax.ShapeDtypeStruct``, with
            the shardings they will have; what has none is whole on every device.
        mesh: default the one that the arguments lie on.
        level: the level of the state, for the title.
        hardware: as for ``plan_step``.
        compiler: as for ``plan_step``.
        donate: whether the state is donated.

    Example:
        >>> import jax, jax.numpy as jnp, jfleet
        >>> from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P
        >>> auto = (jax.sharding.AxisType.Auto,)
        >>> mesh = AbstractMesh((8,), ("data",), axis_types=auto)
        >>> def shape(*dims, spec):
        ...     where = NamedSharding(mesh, spec)
        ...     return jax.ShapeDtypeStruct(dims, "float32", sharding=where)
        >>> w, x = shape(512, 256, spec=P()), shape(64, 512, spec=P("data"))
        >>> grad = jax.grad(lambda w, x: jnp.mean((x @ w) ** 2))
        >>> plan = plan_program(grad, w, x)
        >>> plan.traffic.bytes_by_kind() == {"all-reduce": 512 * 256 * 4}
        True
    """
    if not callable(step):
        raise ConfigTypeError(f"step must be a function, got {step!r}")
    sizes = mesh_sizes(arguments, mesh)
    traced = trace_function(step, arguments, sizes, donate=donate)
    traced = dataclasses.replace(traced, level=level)
    return _planned(traced, hardware_of(hardware), compiler)


def _planned(
    traced: TracedStep, hardware: Hardware | None, compiler: str | None
) -> StepPlan:
    name = _compiler_name(hardware, compiler)
    notes: tuple[str, ...]
    if traced.jaxpr is None:
        formulas = Formulas(traced)
        memory, traffic, work = formulas.memory(), formulas.traffic(), ()
        notes = ("no loss was given: activations are not counted, uses are assumed",)
    else:
        program, notes = device_program(traced, COMPILERS[name])
        aliases = aliases_of(traced, program)
        run = Run(program, COMPILERS[name], aliases)
        memory = step_memory(traced, program, run, aliases, COMPILERS[name])
        traffic, work = step_traffic(traced, program), step_work(run)
    resolution = None if traced.setup is None else traced.setup.resolution
    plan = StepPlan(
        level=traced.level,
        applied=() if resolution is None else resolution.applied,
        mesh_shape=tuple(traced.sizes.items()),
        compiler=name,
        memory=memory,
        traffic=traffic,
        work=work,
        time=None,
        hardware=None,
        notes=notes,
    )
    return _timed(plan, hardware)


def _timed(plan: StepPlan, hardware: Hardware | None) -> StepPlan:
    time = None
    if hardware is not None and plan.work:
        time = estimate(plan.work, plan.traffic, dict(plan.mesh_shape), hardware)
    return dataclasses.replace(plan, hardware=hardware, time=time)


def _compiler_name(hardware: Hardware | None, compiler: str | None) -> str:
    if compiler is not None:
        if compiler not in COMPILERS:
            raise ConfigError(
                f"compiler must be one of {list(COMPILERS)}, got {compiler!r}"
                f"{nearest(str(compiler), COMPILERS)}"
            )
        return compiler
    if hardware is not None:
        return "tpu" if hardware.torus_dims else "gpu"
    backend = jax.default_backend()
    return backend if backend in COMPILERS else "gpu"
