"""Options of what decides where things run: sharding, meshes, auto.

Written like ``_options``: the text under a field is its documentation.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jfleet._errors import ConfigError, nearest
from jfleet._settings import checks as c
from jfleet._settings.checks import check_fields, option
from jfleet._types import LEVELS

STAGES = {1: "os", 2: "os_g", 3: "p_g_os"}


def _level(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        if value not in STAGES:
            raise ValueError("stages are 1 (os), 2 (os_g) and 3 (p_g_os)")
        return STAGES[value]
    if not isinstance(value, str):
        raise TypeError
    if value not in LEVELS:
        raise ValueError(nearest(value, LEVELS)[2:])
    return value


def _rule(value: Any) -> tuple[str, tuple[Any, ...]]:
    """A (pattern, spec) pair; the spec is a plain tuple, so that it can be saved."""
    example = "a rule is (pattern, spec), such as ('kernel$', (None, 'shard'))"
    if isinstance(value, str) or not hasattr(value, "__len__") or len(value) != 2:
        raise TypeError(example)
    pattern, spec = value
    spec = () if spec is None else spec
    if isinstance(spec, str | Mapping) or not hasattr(spec, "__iter__"):
        raise TypeError(example)
    return c.regex(pattern), tuple(_spec_entry(entry, example) for entry in spec)


def _spec_entry(entry: Any, example: str) -> Any:
    if entry is None or isinstance(entry, str):
        return entry
    if isinstance(entry, list | tuple) and all(isinstance(a, str) for a in entry):
        return tuple(entry)
    raise TypeError(example)


RULES = c.sequence("a sequence of (pattern, spec) rules", _rule)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ShardingConfigs:
    """Split optimizer state, gradients and parameters over devices (ZeRO)."""

    BLOCK: ClassVar[str] = "sharding_configs"

    level: str = option("os_g", c.Check("'os', 'os_g', 'p_g_os' or 1, 2, 3", _level))
    """What is split: optimizer state (``os``), also gradients (``os_g``), also
    parameters (``p_g_os``). fleet's ``stage`` 1, 2, 3 is accepted under both names."""
    degree: int | None = option(None, c.optional(c.degree()))
    """Number of devices to split over, checked against the mesh axis. None or -1: as
    many as the axis has. Also under fleet's name ``sharding_degree``."""
    axis: tuple[str, ...] | None = option(None, c.optional(c.names()))
    """Mesh axes to split over. None: the only axis, else ``shard``, ``fsdp``,
    ``zero`` or ``data``, the first that the mesh has."""
    optimizer_axis: tuple[str, ...] | None = option(None, c.optional(c.names()))
    """Mesh axes for the optimizer state, if more than ``axis``."""
    min_shard_size: int = option(0, c.integer(0))
    """Parameters with fewer elements stay whole; 0 splits all that can be split."""
    offload: bool = option(False, c.boolean())
    """Keep the optimizer state in pinned host memory between steps."""
    rules: tuple[tuple[str, tuple[Any, ...]], ...] = option((), RULES)
    """(regular expression on the path, spec) pairs that come before the automatic
    choice; a spec is a sequence of axis names and None, and None alone is whole."""
    exclude: tuple[str, ...] = option((), c.patterns())
    """Parameters whose path matches stay whole."""

    def __post_init__(self):
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorParallelConfigs:
    """Split single layers over devices, by rules or by the specs they come with."""

    BLOCK: ClassVar[str] = "tensor_parallel_configs"

    degree: int | None = option(None, c.optional(c.degree()))
    """Number of devices per layer, checked against the mesh axis. None or -1: as many
    as the axis has. Also under fleet's name ``tensor_parallel_degree``."""
    axis: str = option("model", c.text())
    """Mesh axis of the split."""
    rules: tuple[tuple[str, tuple[Any, ...]], ...] = option((), RULES)
    """(regular expression on the path, spec) pairs. Empty: parameters keep the specs
    that they carry (flax metadata, or arrays that are sharded already)."""

    def __post_init__(self):
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SyncBatchNormConfigs:
    """Batch statistics over all replicas, weighted by their counts."""

    BLOCK: ClassVar[str] = "sync_batch_norm_configs"

    axis: tuple[str, ...] | None = option(None, c.optional(c.names()))
    """Mesh axes between the replicas. None: all data axes."""

    def __post_init__(self):
        check_fields(self)


def _one(what: str, remedy: str) -> c.Check:
    def normal_form(value):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError
        if value != 1:
            raise ValueError(remedy)
        return value

    return c.Check(f"1: jfleet has no {what}", normal_form)


ORDER = ("dp", "pp", "sharding", "sep", "mp")


def _order(value: Any) -> str:
    if value not in ORDER:
        raise ValueError(f"{value!r} is not one of {', '.join(ORDER)}")
    return value


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HybridConfigs:
    """The mesh in fleet's words; see ``DistributedStrategy.mesh_shape``."""

    BLOCK: ClassVar[str] = "hybrid_configs"

    dp_degree: int = option(-1, c.degree())
    """Devices along the data-parallel axis; -1 for the rest."""
    mp_degree: int = option(1, c.integer(1))
    """Devices along the tensor-parallel axis."""
    sharding_degree: int = option(1, c.integer(1))
    """Devices along the axis that state is split over."""
    pp_degree: int = option(
        1,
        _one("pipeline parallelism", "use sharding level 'p_g_os' to fit a big model"),
    )
    """Only 1."""
    sep_degree: int = option(
        1, _one("segment parallelism", "split the sequence dim with rules of your own")
    )
    """Only 1."""
    order: tuple[str, ...] = option(
        ORDER, c.sequence(f"a permutation of {list(ORDER)}", _order)
    )
    """Axes from the outermost to the innermost; neighbours in the last one are the
    closest devices."""

    def __post_init__(self):
        check_fields(self)
        if sorted(self.order) != sorted(ORDER):
            raise ConfigError(
                f"{self.BLOCK}['order'] must name each of {list(ORDER)} once, got "
                f"{list(self.order)}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GradientScaleConfigs:
    """How the gradients of the replicas become one."""

    BLOCK: ClassVar[str] = "gradient_scale_configs"

    scale_strategy: str = option(
        "avg",
        c.choice(
            "avg", "sum", hints={"customized": "scale the loss in your loss function"}
        ),
    )
    """``avg``: their mean. ``sum``: their sum, so the rate must not grow with N."""

    def __post_init__(self):
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AutoConfigs:
    """How ``auto`` decides, and what it may know about the problem."""

    BLOCK: ClassVar[str] = "auto_configs"

    mode: str = option("strict", c.choice("strict", "fill"))
    """``strict``: choose every switch, and only if none was set. ``fill``: keep what
    was set and choose the rest."""
    accuracy: str = option("exact", c.choice("exact", "mixed", "any"))
    """``exact``: only what gives the same result up to rounding order. ``mixed``: also
    bfloat16 compute. ``any``: also what changes training, where the network described
    below makes it pay."""
    device_memory_bytes: int | None = option(None, c.optional(c.integer(1)))
    """Memory of one device. None: unknown."""
    activation_bytes: int | None = option(None, c.optional(c.integer(0)))
    """Activations that one device keeps for the backward pass. None: unknown."""
    network_bytes_per_second: float | None = option(None, c.optional(c.positive()))
    """What one device can send to the other replicas. None: unknown."""
    compute_seconds: float | None = option(None, c.optional(c.positive()))
    """Time of one step without communication. None: unknown."""

    def __post_init__(self):
        check_fields(self)
