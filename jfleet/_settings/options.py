"""The options of every switch: one frozen dataclass each, every field documented.

The text under a field is its documentation; ``DistributedStrategy`` builds these
objects from the ``*_configs`` dicts, and the resolver reads them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jfleet._errors import ConfigError
from jfleet._settings import checks as c
from jfleet._settings.checks import FrozenDict, check_fields, option


def _outer(value: Any) -> FrozenDict:
    if not isinstance(value, Mapping):
        raise TypeError("for instance {'name': 'sgd', 'learning_rate': 0.7}")
    if not isinstance(value.get("name"), str):
        raise ValueError("the key 'name' is missing")
    for key, entry in value.items():
        if not isinstance(key, str) or not isinstance(entry, str | int | float):
            raise TypeError(f"{key!r}: {entry!r} is not a number")
    return FrozenDict(value, "outer")


OUTER = c.optional(
    c.Check("a dict with the name of an optax optimizer and its arguments", _outer)
)
SCALE_KEYS = frozenset(
    {
        "init_loss_scaling",
        "incr_every_n_steps",
        "decr_every_n_nan_or_inf",
        "incr_ratio",
        "decr_ratio",
        "min_loss_scaling",
        "use_dynamic_loss_scaling",
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AmpConfigs:
    """Mixed precision: compute in ``dtype``, keep float32 master parameters."""

    BLOCK: ClassVar[str] = "amp_configs"

    dtype: str = option("bfloat16", c.dtype("bfloat16", "float16", "float32"))
    """Compute dtype. bfloat16 needs no loss scale; float16 does; float32 is neutral."""
    init_loss_scaling: float = option(32768.0, c.positive())
    """First loss scale. With bfloat16 or float32 the scale is fixed at 1 unless you
    set this or another key of the scale yourself."""
    incr_every_n_steps: int = option(1000, c.integer(1))
    """Consecutive finite steps after which the scale grows."""
    decr_every_n_nan_or_inf: int = option(2, c.integer(1))
    """Consecutive non-finite steps after which the scale shrinks."""
    incr_ratio: float = option(2.0, c.real("a finite number >= 1", lambda x: x >= 1))
    """Factor of growth; growth that would overflow float32 does not happen."""
    decr_ratio: float = option(
        0.8, c.real("a number between 0 and 1, both excluded", lambda x: 0 < x < 1)
    )
    """Factor of shrinking."""
    min_loss_scaling: float = option(1.0, c.positive())
    """The scale never shrinks below this."""
    use_dynamic_loss_scaling: bool = option(True, c.boolean())
    """False keeps the scale at ``init_loss_scaling``; overflow is still skipped."""
    keep_fp32: tuple[str, ...] = option((), c.patterns())
    """Parameters whose path matches one of these regular expressions stay float32."""
    on_overflow: str = option("skip", c.choice("skip", "zero_grad"))
    """``skip`` changes nothing but the scale; ``zero_grad`` steps the base with a
    gradient of zero, as fleet does: momentum still moves the parameters."""

    def __post_init__(self):
        check_fields(self)


RECOMPUTE_POLICIES = (
    "nothing_saveable",
    "everything_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "offload_dots",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecomputeConfigs:
    """Recompute activations in the backward pass instead of keeping them."""

    BLOCK: ClassVar[str] = "recompute_configs"

    policy: str = option("nothing_saveable", c.choice(*RECOMPUTE_POLICIES))
    """What the forward pass keeps: a policy of ``jax.checkpoint`` by name, or dots in
    pinned host memory (``offload_dots``)."""
    blocks: str = option("auto", c.choice("auto", "scan", "whole"))
    """What is recomputed as one: each step of a scan over layers (``scan``), the loss
    as a whole (``whole``), or scans where there are any (``auto``)."""

    def __post_init__(self):
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GradientMergeConfigs:
    """Accumulate the gradients of ``k_steps`` calls, then update once."""

    BLOCK: ClassVar[str] = "gradient_merge_configs"

    k_steps: int = option(1, c.integer(1))
    """Micro batches per optimizer step; 1 changes nothing."""
    avg: bool = option(True, c.boolean())
    """True uses the mean of the window, False its sum."""
    sync: str = option("auto", c.choice("auto", "last", "each"))
    """``last``: one reduction per window and a full accumulator on every replica.
    ``each``: one reduction per call and an accumulator that can be sharded.
    ``auto``: ``last`` where the step has a gradient per replica, or where the whole sum
    is kept on every device anyway (no sharding, or level ``os``); else ``each``.
    The result is the same."""

    def __post_init__(self):
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LocalsgdConfigs:
    """Every replica trains alone and parameters are averaged now and then."""

    BLOCK: ClassVar[str] = "localsgd_configs"

    k_steps: int = option(1, c.integer(1))
    """Steps between two averages; 1 averages after every step."""
    begin_step: int = option(1, c.integer(0))
    """Up to this step parameters are averaged after every step."""
    average_state: bool = option(False, c.boolean())
    """Also average the state of the inner optimizer."""
    outer: Mapping[str, Any] | None = option(None, OUTER)
    """Optimizer of the averaged change, such as ``{"name": "sgd", "learning_rate":
    0.7, "momentum": 0.9, "nesterov": True}``. None is plain averaging."""
    axis: tuple[str, ...] | None = option(None, c.optional(c.names()))
    """Mesh axes between the replicas. None: the data axes that are not sharded over."""

    def __post_init__(self):
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveLocalsgdConfigs:
    """LocalSGD whose interval follows the loss and the learning rate."""

    BLOCK: ClassVar[str] = "adaptive_localsgd_configs"

    init_k_steps: int = option(1, c.integer(1))
    """First interval; the rule scales it."""
    begin_step: int = option(1, c.integer(0))
    """Up to this step parameters are averaged after every step."""
    max_k_steps: int = option(16, c.integer(1))
    """The interval never grows beyond this."""
    form: str = option("paper", c.choice("paper", "fleet"))
    """``fleet`` takes the first interval inside the square root."""
    average_state: bool = option(False, c.boolean())
    """Also average the state of the inner optimizer."""
    outer: Mapping[str, Any] | None = option(None, OUTER)
    """As ``localsgd_configs["outer"]``."""
    axis: tuple[str, ...] | None = option(None, c.optional(c.names()))
    """Mesh axes between the replicas. None: the data axes that are not sharded over."""

    def __post_init__(self):
        check_fields(self)
        if self.init_k_steps > self.max_k_steps:
            raise ConfigError(
                f"{self.BLOCK}['init_k_steps'] must be at most max_k_steps "
                f"({self.max_k_steps}), got {self.init_k_steps}; raise max_k_steps too"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DgcConfigs:
    """Send only the largest gradient entries; keep the rest for later."""

    BLOCK: ClassVar[str] = "dgc_configs"

    rampup_begin_step: int = option(0, c.integer(0))
    """Steps (from 0) before this one are ordinary momentum."""
    rampup_step: int = option(1, c.integer(1))
    """Steps over which the list ``sparsity`` is walked through."""
    sparsity: tuple[float, ...] = option(
        (0.999,),
        c.sequence(
            "a sequence of at least one number in [0, 1)", c.fraction, empty=False
        ),
    )
    """Share of the entries that stays at home, level by level; 0 is dense."""
    min_size: int = option(16384, c.integer(1))
    """Parameters with fewer elements, and those that are not float32, stay dense."""
    clip_norm: float | None = option(None, c.optional(c.positive()))
    """Limit of the local gradient, before it is accumulated."""
    clip_scope: str = option("global", c.choice("global", "per_tensor"))
    """Whether ``clip_norm`` limits the whole local gradient or each tensor."""
    dense_phase_clip: str = option("aggregate", c.choice("aggregate", "none"))
    """Before ``rampup_begin_step``: clip the mean gradient, or leave it."""
    factor_masking: bool = option(True, c.boolean())
    """Clear the momentum of the entries that were sent."""
    k_rounding: str = option("ceil", c.choice("ceil", "floor"))
    """How the number of entries to send is rounded; at least 1 is sent."""
    nesterov_handover: str = option("consistent", c.choice("consistent", "paddle"))
    """What dense Nesterov steps leave behind for the compressed ones."""
    weight_decay: float = option(0.0, c.non_negative())
    """L2 decay that is added to the gradient."""
    weight_decay_mode: str = option("local", c.choice("local", "outside"))
    """``local``: before accumulation. ``outside``: a dense momentum of its own."""
    axis: tuple[str, ...] | None = option(None, c.optional(c.names()))
    """Mesh axes between the replicas. None: the data axes that are not sharded over."""

    def __post_init__(self):
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LarsConfigs:
    """Scale the rate of every parameter by the ratio of its norms."""

    BLOCK: ClassVar[str] = "lars_configs"

    lars_coeff: float = option(0.001, c.positive())
    """Trust coefficient."""
    lars_weight_decay: float = option(0.0005, c.non_negative())
    """L2 decay, also part of the denominator."""
    epsilon: float = option(0.0, c.non_negative())
    """Added to the denominator."""
    exclude_from_weight_decay: tuple[str, ...] = option((), c.patterns())
    """Regular expressions on paths of parameters without decay."""
    trust_on_excluded: bool = option(False, c.boolean())
    """Whether excluded parameters are scaled too; False gives them the plain rate."""
    stacked: tuple[str, ...] = option((), c.patterns())
    """Parameters that stack layers along dim 0: one norm per layer."""

    def __post_init__(self):
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LambConfigs:
    """Adam whose update is scaled by a trust ratio per parameter."""

    BLOCK: ClassVar[str] = "lamb_configs"

    lamb_weight_decay: float = option(0.01, c.non_negative())
    """Decay that is added to the Adam direction."""
    exclude_from_weight_decay: tuple[str, ...] = option((), c.patterns())
    """Regular expressions on paths of parameters without decay."""
    trust_on_excluded: bool = option(False, c.boolean())
    """Whether excluded parameters get a trust ratio; False gives them 1."""
    stacked: tuple[str, ...] = option((), c.patterns())
    """Parameters that stack layers along dim 0: one norm per layer."""

    def __post_init__(self):
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fp16AllreduceConfigs:
    """Average float32 gradients in 16 bits on the wire."""

    BLOCK: ClassVar[str] = "fp16_allreduce_configs"

    dtype: str = option("float16", c.dtype("float16", "bfloat16", "float32"))
    """Dtype on the wire; float32 changes nothing."""
    order: str = option(
        "scale_then_cast",
        c.choice("scale_then_cast", "cast_then_scale", "sum_then_scale"),
    )
    """When to divide by the number of replicas."""
    scale: bool = option(False, c.boolean())
    """Scale every tensor into the range of ``dtype``, so that nothing overflows."""
    error_feedback: bool = option(False, c.boolean())
    """Carry what rounding lost to the next step."""
    axis: tuple[str, ...] | None = option(None, c.optional(c.names()))
    """Mesh axes between the replicas. None: all data axes."""

    def __post_init__(self):
        check_fields(self)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ClipConfigs:
    """Limit the global norm of the gradient, frozen parameters not counted."""

    BLOCK: ClassVar[str] = "clip_configs"

    max_norm: float = option(1.0, c.non_negative())
    """Limit of the global norm; 0 makes every gradient zero."""
    exclude: tuple[str, ...] = option((), c.patterns())
    """Frozen parameters: neither counted nor clipped."""

    def __post_init__(self):
        check_fields(self)
