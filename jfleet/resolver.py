"""Decide what runs: from a strategy, an optimizer and a mesh to a ``Resolution``.

``resolve`` walks the table of rules once, in order. A switch that the user set is
applied or raises with the reason and the remedy; only what ``auto`` proposed can be
refused. Nothing is searched, dropped or changed behind the user's back, and the
strategy is only read.
"""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import optax

from jfleet._errors import ConfigError, JfleetWarning
from jfleet._resolving import auto as _auto
from jfleet._resolving.axes import clash, data_axes, find_axes, size
from jfleet._resolving.builtin_rules import default_registry, reduce_mean, times
from jfleet._resolving.request import Request
from jfleet._resolving.resolution import Choice, Resolution
from jfleet._resolving.rules import NESTING, Context, Registry, Rule
from jfleet._settings.checks import FrozenDict, SettingTypeError
from jfleet._types import AxisName
from jfleet.optimizer import Optimizer
from jfleet.strategy import DistributedStrategy


def resolve(
    strategy: DistributedStrategy,
    *,
    base: Any,
    mesh_shape: Mapping[str, int] | None = None,
    params: Any = None,
    registry: Registry = default_registry,
) -> Resolution:
    """Decide which features run, in which order, with which options.

    A pure function: the same arguments give an equal Resolution, and none of them is
    changed. It warns (``JfleetWarning``) about settings that have no effect.

    Args:
        strategy: what the user wants.
        base: an optax transformation, or ``jfleet.optimizer(factory, ...)`` where a
            feature must read its hyperparameters.
        mesh_shape: axis names and sizes in order; None where it is unknown.
        params: parameters or their shapes, for what ``auto`` decides by size.
        registry: the table of rules.

    Returns:
        What runs, what does not, and why.

    Raises:
        ConfigError: a switch that the user set cannot run; the text says why and what
            to change.
        SettingTypeError: an argument of the wrong type.

    Example:
        >>> import jfleet, optax
        >>> strategy = jfleet.DistributedStrategy(gradient_merge=True, clip=True)
        >>> jfleet.resolve(strategy, base=optax.adam(1e-3)).applied
        ('gradient_merge', 'clip')
    """
    _check_arguments(strategy, base, mesh_shape, registry)
    request = Request(strategy, base, mesh_shape, params, registry)
    refused: dict[str, str] = {}
    while True:
        draft = _draft(request, refused)
        objection = _first_objection(draft, request)
        if objection is None:
            break
        name, reason = objection
        if name in request.fixed_on:
            raise ConfigError(f"strategy.{name} cannot run: {reason}")
        refused[name] = reason
    _check_degrees(draft, request)
    notes = (*request.notes(), *_small_notes(draft, request))
    for note in notes:
        warnings.warn(note, JfleetWarning, stacklevel=2)
    return Resolution(
        choices=tuple(_choice(rule, request, draft, refused) for rule in registry),
        rules=draft.rules,
        strict_auto=request.strict,
        notes=notes,
        mesh_shape=FrozenDict(mesh_shape or {}, "mesh_shape"),
        data_axes=data_axes(mesh_shape, draft.context.applied) if mesh_shape else (),
        scale_strategy=draft.context.scale_strategy,
    )


def build(
    resolution: Resolution,
    base: Any,
    *,
    axis_name: AxisName | None = None,
    totals: bool = False,
) -> Any:
    """Compose the optax transformation that a resolution describes.

    Args:
        resolution: from ``resolve`` with the same ``base``.
        base: the user's optimizer.
        axis_name: mesh axes whose names are in scope where the transformation runs
            (inside ``shard_map`` or ``vmap``) and over which gradients differ. None:
            the gradient is already the mean over all replicas.
        totals: gradients are those of totals whose weights are passed as ``weight``.

    Returns:
        An ``optax.GradientTransformationExtraArgs``. Its state has the same structure
        whatever ``axis_name``. Loss wrappers and placement are not part of it; see
        ``Resolution.loss_wrappers`` and ``Resolution.options("sharding")``.

    Raises:
        ConfigError: axes in scope that two features would reduce over.
    """
    scope = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name or ())
    context = resolution.context(base, scope=scope, totals=totals)
    reduced = _reduced_by_features(resolution, context)
    mean_axes = tuple(a for a in scope if a not in reduced)
    if resolution.mesh_shape:
        mean_axes = tuple(a for a in mean_axes if a in resolution.data_axes)
    merge = context.applied.get("gradient_merge")
    each = merge is not None and merge.sync == "each"
    tx = base
    for phase in reversed(NESTING):
        if phase == "reduce":
            tx = _scaled_by_replicas(tx, resolution, mean_axes)
            if mean_axes and not each:
                tx = reduce_mean(tx, mean_axes, _how(resolution))
        for rule in reversed(resolution.rules):
            if rule.wrap is not None and (rule.nests or rule.phase) == phase:
                tx = rule.wrap(resolution.options(rule.name), context, tx)
    if mean_axes and each:
        tx = reduce_mean(tx, mean_axes, _how(resolution))
    return optax.with_extra_args_support(tx)


def _reduced_by_features(resolution: Resolution, context: Context) -> set[str]:
    """Axes in scope that features reduce over themselves."""
    found: set[str] = set()
    for rule in resolution.rules:
        if not rule.replica_gradients:
            continue
        axes = context.axis_name(rule.name) or ()
        missing = set(context.axes.get(rule.name, ())) - set(axes)
        if axes and missing:
            raise ConfigError(
                f"{rule.name} works over {'+'.join(context.axes[rule.name])}, but "
                f"axis_name has {'+'.join(axes)} only; name all of its axes"
            )
        if found & set(axes):
            raise ConfigError(
                f"{rule.name} and another feature would both reduce over "
                f"{'+'.join(axes)}; resolve with mesh_shape, so that each has its own"
            )
        found |= set(axes)
    return found


def _how(resolution: Resolution) -> str:
    return "sum" if resolution.scale_strategy == "sum" else "mean"


def _scaled_by_replicas(tx: Any, resolution: Resolution, summed: tuple) -> Any:
    """Turn what is a mean over replicas into a sum, if that was asked for."""
    if resolution.scale_strategy != "sum":
        return tx
    rest = [a for a in resolution.data_axes if a not in summed]
    return times(tx, size(resolution.mesh_shape, rest))


def _check_arguments(strategy, base, mesh_shape, registry) -> None:
    if not isinstance(strategy, DistributedStrategy):
        raise SettingTypeError(
            f"strategy must be a DistributedStrategy, got {type(strategy).__name__}"
        )
    if not (hasattr(base, "init") and hasattr(base, "update")):
        raise SettingTypeError(
            f"base must be an optax transformation, got {base!r}; pass for example "
            "optax.adam(1e-3)"
        )
    if not isinstance(registry, Registry):
        raise SettingTypeError(f"registry must be a jfleet.Registry, got {registry!r}")
    if mesh_shape is not None and not isinstance(mesh_shape, Mapping):
        raise SettingTypeError(
            "mesh_shape must be a dict of axis names and sizes such as dict(mesh.shape)"
            f", got {mesh_shape!r}"
        )


@dataclasses.dataclass(frozen=True)
class _Draft:
    """A set of features on trial."""

    rules: tuple[Rule, ...]
    context: Context
    proposals: Mapping[str, _auto.Proposal]


def _draft(request: Request, refused: Mapping[str, str]) -> _Draft:
    """Put together what the user set and what auto proposes, less ``refused``."""
    open_names = [n for n in request.undecided if n not in refused]
    proposals = _auto.propose(request.problem(), open_names)
    chosen = {name for name, p in proposals.items() if p.on} | request.fixed_on
    rules = tuple(rule for rule in request.registry if rule.name in chosen)
    options = {
        rule.name: request.options(
            rule, proposals[rule.name].options if rule.name in proposals else {}
        )
        for rule in rules
    }
    context = Context(
        base=request.base,
        applied=options,
        axes=find_axes(rules, options, request.mesh_shape),
        mesh_shape=request.mesh_shape,
        scale_strategy=request.scale_strategy,
    )
    return _Draft(rules, context, proposals)


def _first_objection(draft: _Draft, request: Request) -> tuple[str, str] | None:
    """The first reason why the features cannot run, and the one to blame.

    Of two that clash, the one that auto proposed is to blame.
    """
    context = draft.context
    for number, rule in enumerate(draft.rules):
        for other in draft.rules[:number]:
            reason = _pair_objection(other, rule, context)
            if reason:
                blame = other if other.name not in request.fixed_on else rule
                return blame.name, reason
    for rule in draft.rules:
        reason = _base_objection(rule, context.base)
        reason = reason or rule.check(context.applied[rule.name], context)
        if reason:
            return rule.name, reason
    return None


def _pair_objection(one: Rule, two: Rule, context: Context) -> str | None:
    why = dict(one.excludes).get(two.name) or dict(two.excludes).get(one.name)
    if why is None and "base" in one.replaces and "base" in two.replaces:
        why = "both replace the optimizer"
    if why is not None:
        return (
            f"{one.name} and {two.name} cannot run together: {why}; switch one of them "
            "off"
        )
    return clash(one, two, context.axes, context.applied, context.mesh_shape)


def _base_objection(rule: Rule, base: Any) -> str | None:
    """Why a rule cannot work with the user's optimizer, or None."""
    if not (rule.bases or rule.reads):
        return None
    factory = f"optax.{rule.bases[0]}" if rule.bases else "optax.sgd"
    remedy = f"pass jfleet.optimizer({factory}, learning_rate=..) as the base"
    if not isinstance(base, Optimizer):
        return (
            f"it must read {', '.join(rule.reads)} of the base, which a plain optax "
            f"transformation does not tell; {remedy}"
        )
    if rule.bases and base.kind not in rule.bases:
        return f"it needs a base of kind {factory}, got {base!r}; {remedy}"
    missing = [n for n in rule.reads[:1] if n not in base.arguments]
    if missing:
        return f"the base {base!r} has no {missing[0]}; {remedy}"
    lost = [n for n in base.changed if rule.bases and n not in rule.reads]
    if lost:
        return (
            f"it replaces the base and would lose its {', '.join(lost)}; leave that "
            "out of jfleet.optimizer"
        )
    return None


def _check_degrees(draft: _Draft, request: Request) -> None:
    """Compare what the options say about the mesh with the mesh."""
    mesh_shape, applied = request.mesh_shape, draft.context.applied
    if request.scale_strategy == "sum" and mesh_shape is None:
        raise ConfigError(
            "gradient_scale_configs['scale_strategy'] 'sum' needs the number of "
            "replicas; pass mesh_shape (or mesh)"
        )
    request.check_hybrid(applied)
    for name in ("sharding", "tensor_parallel"):
        if mesh_shape is None or name not in applied:
            continue
        axes = draft.context.axes[name]
        degree, actual = applied[name].degree, size(mesh_shape, axes)
        if degree not in (None, -1, actual):
            raise ConfigError(
                f"{name}_configs['degree'] is {degree}, but the mesh "
                f"{dict(mesh_shape)} has {actual} devices along {'+'.join(axes)}; "
                "change one of them"
            )


def _small_notes(draft: _Draft, request: Request) -> list[str]:
    """Features that the user set and that one device makes pointless."""
    if request.mesh_shape is None:
        return []
    shape, notes = dict(request.mesh_shape), []
    for rule in draft.rules:
        axes = draft.context.axes.get(rule.name, ())
        pointless = rule.replica_gradients or rule.name in (
            "sharding",
            "tensor_parallel",
        )
        asked = pointless and rule.name in request.fixed_on
        if asked and size(shape, axes) == 1:
            notes.append(
                f"{rule.name} runs over {'+'.join(axes) or 'no axis'} with one device "
                f"(mesh {shape}): nothing is split or sent"
            )
    return notes


def _choice(rule: Rule, request: Request, draft: _Draft, refused) -> Choice:
    """Who decided about a feature, how, and why."""
    name = rule.name
    on = name in draft.context.applied
    wanted = request.wanted[name]
    numbers: Mapping[str, Any] = {}
    if isinstance(wanted, bool):
        source, reason = "user", "you set it" if wanted else "you set it to False"
    elif name in refused:
        source, reason = "auto", refused[name]
    elif name in draft.proposals:
        proposal = draft.proposals[name]
        source, reason, numbers = "auto", proposal.reason, proposal.numbers
    else:
        source, reason = "default", "not set"
    if on and "base" in rule.replaces:
        reason = f"{reason}; it takes the place of {request.base!r}"
    if on and name == "clip" and "dgc" in draft.context.applied:
        reason = f"{reason}; dgc clips every local gradient to max_norm / sqrt(N)"
    return Choice(
        name=name,
        on=on,
        source=source,
        reason=reason,
        numbers=FrozenDict(numbers, "numbers"),
        options=draft.context.applied.get(name),
        axes=draft.context.axes.get(name, ()),
    )
