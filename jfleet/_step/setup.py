"""What a strategy needs of a training step."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import AxisType, Mesh

from jfleet import optax_meta as meta
from jfleet._errors import ConfigError
from jfleet._resolving.builtin_rules import TABLE
from jfleet._resolving.placement import placement_policy
from jfleet._resolving.resolution import Resolution
from jfleet._types import AxisName
from jfleet.mesh import batch_axes, current_mesh
from jfleet.optax_meta.sharding import sharding
from jfleet.resolver import build

OWN_PARAMS = ("localsgd", "adaptive_localsgd")
IN_STEP = ("gradient_merge", "fp16_allreduce")
"""What the step does itself: the merging of micro batches and the 16-bit mean."""


@dataclasses.dataclass(frozen=True)
class WindowInit:
    """The transformation of one window; also its ``init``."""

    base: Any
    resolution: Resolution

    def __call__(self, params: Any) -> Any:
        return build(self.resolution, self.base).init(params)


@dataclasses.dataclass(frozen=True)
class _WindowUpdate:
    made: WindowInit

    def __call__(
        self, updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, Any]:
        tx = build(self.made.resolution, self.made.base)
        return tx.update(updates, state, params, **extra)


@dataclasses.dataclass(frozen=True)
class Setup:
    """A resolution, seen from the step that it needs."""

    base: Any
    resolution: Resolution
    mesh: Any
    platform: str | None = None
    """What compiles the step, where the mesh has no devices to say so."""

    @property
    def scatters_by_hand(self) -> bool:
        """Whether the compiler needs help to reduce-scatter gradients.

        Those of TPUs and GPUs find it themselves, layer by layer inside a scan, where a
        reduction by hand would wait for the whole gradient. That of CPUs does not.
        """
        return self.compiles_on == "cpu"

    @property
    def compiles_on(self) -> str:
        """``cpu``, ``gpu`` or ``tpu``."""
        if self.platform is not None:
            return self.platform
        if isinstance(self.mesh, Mesh):
            return self.mesh.devices.flat[0].platform
        return jax.default_backend()

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Mesh axes that split a batch."""
        if self.resolution.mesh_shape:
            return self.resolution.data_axes
        return batch_axes(self.mesh)

    @property
    def own_axes(self) -> tuple[str, ...]:
        """Axes whose replicas keep parameters or residuals of their own."""
        axes = self.resolution.axes
        found = {
            a
            for rule in self.resolution.rules
            if rule.own_parameters
            for a in axes.get(rule.name, ())
        }
        return tuple(a for a in self.mesh.axis_names if a in found)

    @property
    def own_params(self) -> bool:
        """Whether every replica has parameters of its own."""
        return any(name in self.resolution for name in OWN_PARAMS)

    @property
    def num_micro(self) -> int:
        """Micro batches per step."""
        merge = self._merge()
        return 1 if merge is None else merge.k_steps

    @property
    def averages(self) -> bool:
        """Whether a window counts as its mean, not as its sum."""
        merge = self._merge()
        return merge is None or merge.avg

    @property
    def sync(self) -> str:
        """When a window is reduced: ``last``, ``each`` or ``auto``."""
        merge = self._merge()
        return "auto" if merge is None else merge.sync

    def _merge(self) -> Any:
        return self._options("gradient_merge")

    def _options(self, name: str) -> Any:
        resolution = self.resolution
        return resolution.options(name) if name in resolution else None

    def size(self, axes: tuple[str, ...]) -> int:
        """Devices along some axes."""
        return math.prod(self.mesh.shape[a] for a in axes)

    @property
    def num_summed(self) -> int:
        """What a mean gradient is multiplied with before the optimizer sees it."""
        summed = self.resolution.scale_strategy == "sum"
        return self.size(self.data_axes) if summed else 1

    def window_resolution(self) -> Resolution:
        """The resolution without what the step does itself."""
        found = self.resolution
        return dataclasses.replace(
            found,
            rules=tuple(r for r in found.rules if r.name not in IN_STEP),
            choices=tuple(
                dataclasses.replace(c, on=False) if c.name in IN_STEP else c
                for c in found.choices
            ),
        )

    def window(self) -> Any:
        """The transformation of one window."""
        made = WindowInit(self.base, self.window_resolution())
        return optax.GradientTransformationExtraArgs(made, _WindowUpdate(made))

    def transformation(self, params: Any) -> Any:
        """The same with its placement, for these parameters."""
        tx = self.window()
        policy = placement_policy(self.resolution, self.mesh, params)
        return tx if policy is None else sharding(tx, policy)

    def replica_transformation(self, axis_name: AxisName) -> Any:
        """The same for one replica, where the axes are in scope."""
        return build(self.window_resolution(), self.base, axis_name=axis_name)

    def wrap_loss(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """Apply what the strategy does to a loss, of parameters and anything else."""
        for wrap in self.resolution.loss_wrappers(self.base):
            loss = wrap(loss)
        return loss

    def reducer(self, sum_leaf: Callable[[Any, int], Any] | None = None) -> Any:
        """The 16-bit mean over ``reducer_axes``, or None; see ``fp16_allreduce``."""
        options = self._options("fp16_allreduce")
        if options is None:
            return None
        return meta.fp16_allreduce(
            optax.identity(),
            dtype=options.dtype,
            order=options.order,
            scale=options.scale,
            error_feedback=options.error_feedback,
            on_overflow="pass",
            axis_name=self.reducer_axes or None,
            sum_leaf=sum_leaf if self.reducer_axes else None,
        )

    @property
    def reducer_axes(self) -> tuple[str, ...]:
        """Axes of the 16-bit mean."""
        return self.resolution.axes.get("fp16_allreduce", ())

    def clip_exclude(self) -> tuple[str, ...]:
        """Frozen parameters, which do not count in a norm."""
        options = self._options("clip")
        return () if options is None else options.exclude


def setup_of(base: Any, resolution: Resolution, mesh: Any) -> Setup:
    """Check that a step can be built, and say what it needs.

    Raises:
        ConfigError: a mesh without devices, or features that no step combines yet.
    """
    mesh = current_mesh() if mesh is None else mesh
    if not isinstance(mesh, Mesh):
        raise ConfigError(
            f"mesh {dict(mesh.shape)} is abstract and holds no arrays; make the "
            "optimizer with mesh=jfleet.init() to train"
        )
    setup = Setup(base, resolution, _with_auto_axes(mesh))
    _check_rules(setup)
    return setup


def _with_auto_axes(mesh: Mesh) -> Mesh:
    """The same devices with Auto axes: a loss is written for one device."""
    kinds = (AxisType.Auto,) * len(mesh.axis_names)
    if mesh.axis_types == kinds:
        return mesh
    return Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)


def _check_rules(setup: Setup) -> None:
    known = {rule.name for rule in TABLE}
    for rule in setup.resolution.rules:
        if rule.name not in known and (rule.replica_gradients or rule.own_parameters):
            raise ConfigError(
                f"minimize cannot run the extension {rule.name!r}, which works on the "
                "gradients of single replicas; call opt.update inside jax.shard_map"
            )
    for name in OWN_PARAMS:
        if name in setup.resolution and "sync_batch_norm" in setup.resolution:
            raise ConfigError(
                f"minimize cannot combine {name} with sync_batch_norm: replicas would "
                "exchange statistics in every step; switch sync_batch_norm off, since "
                "model_state is averaged at every synchronisation"
            )
    options = setup._options("sharding")
    if options is not None and options.offload and setup.own_axes:
        raise ConfigError(
            "minimize cannot combine sharding_configs['offload'] with features that "
            f"keep state per replica (over {'+'.join(setup.own_axes)}); set offload to "
            "False"
        )
