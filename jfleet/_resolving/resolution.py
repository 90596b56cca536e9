"""What the resolver decided, for machines and for people."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from jfleet._resolving.builtin_rules import fixed_scale
from jfleet._resolving.rules import Axes, Context, Rule
from jfleet._settings.checks import FrozenDict

JSON_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One feature: whether it runs, who wanted that, and why."""

    name: str
    """Name of the switch or of the third party's rule."""
    on: bool
    """Whether it runs."""
    source: str
    """``user``, ``auto`` or ``default``."""
    reason: str
    """Why, in words."""
    numbers: FrozenDict
    """The numbers that the reason rests on."""
    options: Any = None
    """Its options, complete; None where it does not run."""
    axes: Axes = ()
    """Mesh axes that it works over."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Resolution:
    """What runs, in order of application, and what does not."""

    choices: tuple[Choice, ...]
    """One per rule of the registry, in order of application."""
    rules: tuple[Rule, ...]
    """The rules that run, in order of application."""
    strict_auto: bool
    """Whether auto chose every switch."""
    notes: tuple[str, ...]
    """What was warned about."""
    mesh_shape: FrozenDict
    """Axis names and sizes; empty where the mesh is unknown."""
    data_axes: Axes
    """Axes that split a batch."""
    scale_strategy: str
    """``avg`` or ``sum``: how gradients of replicas become one."""

    @property
    def applied(self) -> tuple[str, ...]:
        """Names of what runs, in order of application."""
        return tuple(c.name for c in self.choices if c.on)

    @property
    def refused(self) -> dict[str, str]:
        """What ``auto`` considered and declined, with the reasons."""
        off = (c for c in self.choices if c.source == "auto" and not c.on)
        return {c.name: c.reason for c in off}

    def __contains__(self, name: object) -> bool:
        return name in self.applied

    def __getitem__(self, name: str) -> Choice:
        for choice in self.choices:
            if choice.name == name:
                return choice
        raise KeyError(name)

    def options(self, name: str) -> Any:
        """Complete options of a feature that runs, else None."""
        return self[name].options

    @property
    def axes(self) -> dict[str, Axes]:
        """Mesh axes of every feature that works over some."""
        return {c.name: c.axes for c in self.choices if c.on and c.axes}

    @property
    def reducer(self) -> str:
        """How gradients of replicas become one: ``mean`` or the name of a feature.

        ``localsgd`` and ``adaptive_localsgd`` stand for no reduction at all. Over the
        data axes that the feature does not cover, it is the mean.
        """
        names = [r.name for r in self.rules if "reducer" in r.replaces]
        return names[0] if names else "mean"

    @property
    def local_axes(self) -> Axes:
        """Data axes over which the step needs the gradient of every replica."""
        wanted = {
            a
            for r in self.rules
            if r.replica_gradients
            for a in self.axes.get(r.name, ())
        }
        merge = self.options("gradient_merge") if "gradient_merge" in self else None
        if merge is not None and merge.sync == "last":
            wanted |= set(self.data_axes)
        return tuple(a for a in self.mesh_shape if a in wanted)

    @property
    def num_local(self) -> int:
        """Number of replicas along ``local_axes``."""
        return math.prod(self.mesh_shape[a] for a in self.local_axes)

    @property
    def needs_replica_gradients(self) -> bool:
        """Whether the gradient that autodiff gives under jit is not enough."""
        return self.num_local > 1

    @property
    def batch_norm_axes(self) -> Axes:
        """Axis names over which the model itself must take its batch statistics.

        Empty without ``sync_batch_norm``, and where a batch is one global array, so
        that its statistics are global anyway.
        """
        return tuple(
            a for a in self.axes.get("sync_batch_norm", ()) if a in self.local_axes
        )

    @property
    def scales_loss(self) -> bool:
        """Whether the loss must be multiplied with a scale that is not always 1."""
        options = self.options("amp") if "amp" in self else None
        return options is not None and not fixed_scale(options)

    def context(self, base: Any, *, scope: Axes = (), totals: bool = False) -> Context:
        """What rules see when they are built."""
        return Context(
            base=base,
            applied={c.name: c.options for c in self.choices if c.on},
            axes=self.axes,
            mesh_shape=self.mesh_shape or None,
            scope=scope,
            scale_strategy=self.scale_strategy,
            totals=totals,
        )

    def loss_wrappers(self, base: Any = None) -> tuple[Callable, ...]:
        """Functions from loss to loss, in the order in which to apply them."""
        context = self.context(base)
        return tuple(
            rule.wrap_loss(self.options(rule.name), context)
            for rule in self.rules
            if rule.wrap_loss is not None
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for ``to_json``."""
        return {
            "jfleet_resolution": JSON_VERSION,
            "applied": list(self.applied),
            "strict_auto": self.strict_auto,
            "reducer": self.reducer,
            "local_axes": list(self.local_axes),
            "scale_strategy": self.scale_strategy,
            "mesh": dict(self.mesh_shape) or None,
            "notes": list(self.notes),
            "choices": [_choice_dict(c) for c in self.choices],
        }

    def to_json(self, *, indent: int | None = None) -> str:
        """Everything, as JSON."""
        return json.dumps(self.to_dict(), indent=indent, default=dict)

    def explain(self) -> str:
        """Say what runs, in which order, what does not, and why."""
        return explain(self)


def options_dict(options: Any) -> dict[str, Any]:
    """Options as a dict, whatever they are."""
    if options is None:
        return {}
    if isinstance(options, Mapping):
        return dict(options)
    return {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}


def _choice_dict(choice: Choice) -> dict[str, Any]:
    return {
        "name": choice.name,
        "on": choice.on,
        "source": choice.source,
        "reason": choice.reason,
        "numbers": dict(choice.numbers),
        "options": options_dict(choice.options) if choice.on else None,
        "axes": list(choice.axes),
    }


def explain(resolution: Resolution) -> str:
    """The text of ``Resolution.explain``."""
    mesh = resolution.mesh_shape
    sizes = " x ".join(f"{a}={n}" for a, n in mesh.items()) if mesh else "unknown mesh"
    lines = [f"Strategy on {sizes}" + (", chosen by auto" * resolution.strict_auto)]
    lines += ["Applied, in this order:"] if resolution.applied else ["Applied: nothing"]
    for number, choice in enumerate((c for c in resolution.choices if c.on), start=1):
        lines.append(f"  {number}. {_line(choice, resolution)}")
    lines.append(f"Gradients of the replicas: {_reduction(resolution)}")
    if "sync_batch_norm" in resolution:
        lines.append(f"Batch statistics: {_statistics(resolution)}")
    off = [c for c in resolution.choices if not c.on and c.source != "default"]
    lines += ["Not applied:"] * bool(off)
    lines += [f"  - {c.name}: {c.reason}{_numbers(c)}" for c in off]
    lines += [f"Note: {note}" for note in resolution.notes]
    return "\n".join(lines)


def _statistics(resolution: Resolution) -> str:
    axes = resolution.batch_norm_axes
    if not axes:
        return "over the whole batch, which is one global array"
    return (
        f"the model takes them over the axis names {axes}, for instance by flax's "
        f"BatchNorm(axis_name={axes}) or jfleet.optax_meta.sync_batch_norm"
    )


def _line(choice: Choice, resolution: Resolution) -> str:
    rule = next(r for r in resolution.rules if r.name == choice.name)
    over = f" over {'+'.join(choice.axes)}" if choice.axes else ""
    options = {k: v for k, v in options_dict(choice.options).items() if k != "axis"}
    text = ", ".join(f"{k}={v!r}" for k, v in options.items() if v not in (None, ()))
    return (
        f"{choice.name}{over}: {rule.summary}\n"
        f"       why: {choice.reason}{_numbers(choice)}\n"
        f"       with: {text or 'no options'}"
    )


def _numbers(choice: Choice) -> str:
    if not choice.numbers:
        return ""
    return " [" + ", ".join(f"{k}={v:,}" for k, v in choice.numbers.items()) + "]"


def _reduction(resolution: Resolution) -> str:
    how = "sum" if resolution.scale_strategy == "sum" else "mean"
    covered = {
        a
        for r in resolution.rules
        if "reducer" in r.replaces
        for a in resolution.axes.get(r.name, ())
    }
    parts = [
        f"{r.name} over {'+'.join(resolution.axes.get(r.name, ())) or 'one device'}"
        for r in resolution.rules
        if "reducer" in r.replaces
    ]
    rest = [a for a in resolution.data_axes if a not in covered]
    if rest or not parts:
        parts.append(f"{how} over {'+'.join(rest) or 'one device'}")
    return ", ".join(parts)
