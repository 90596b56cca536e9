"""What the resolver knows about a meta optimizer, and the registry of them.

A rule says where a feature stands in the order of a step, what it needs, what it
excludes and how it is built. Nothing about a feature is known anywhere else, so that a
third party adds one by registering a rule.

The phases are the order in which a step applies things:

=========== ============================================================
loss        wraps the loss function: recompute, the casts of amp
merge       collects gradients of several calls
reduce      turns the gradients of the replicas into one
scale       unscales, checks for infinities, keeps float32 masters
clip        limits the gradient
base        the optimizer itself, the user's or one that replaces it
parameter   acts on the updated parameters
placement   where things live and who talks to whom; never values
=========== ============================================================
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jfleet._errors import ConfigError, listing, nearest
from jfleet._settings.checks import FrozenDict, SettingTypeError

PHASES = (
    "loss",
    "merge",
    "reduce",
    "scale",
    "clip",
    "base",
    "parameter",
    "placement",
)

NESTING = ("merge", "reduce", "scale", "parameter", "clip", "base")
"""Phases of the transformation from the outermost wrapper to the innermost.

``parameter`` acts after the base and must therefore wrap it; the scale machine wraps
both, so that a skipped step is skipped for the averaging of parameters too.
"""

CHANGES = ("nothing", "rounding", "precision", "training")
"""What a feature does to the result, from harmless to not."""

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """What a rule may look at when it is checked or built."""

    base: Any
    """The user's optimizer."""
    applied: Mapping[str, Any]
    """Options of every feature that runs, by name."""
    axes: Mapping[str, Axes]
    """Mesh axes that every feature works over, by name."""
    mesh_shape: Mapping[str, int] | None
    """Sizes of the mesh axes, or None where the mesh is unknown."""
    scope: Axes = ()
    """Mesh axes whose names are in scope where the transformation will run."""
    scale_strategy: str = "avg"
    """``gradient_scale_configs["scale_strategy"]``."""
    totals: bool = False
    """Whether gradients are of totals whose weights come along."""

    def axis_name(self, name: str) -> Axes | None:
        """The axes of a feature that are in scope, for its ``axis_name``."""
        if self.mesh_shape is None:
            axes = getattr(self.applied.get(name), "axis", None) or self.scope
        else:
            axes = self.axes.get(name, ())
        return tuple(a for a in axes if a in self.scope) or None


def no_objection(options: Any, context: Context) -> str | None:
    """The check of a rule without conditions of its own."""
    return None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One row of the resolver's table."""

    name: str
    """Name of the switch; for a third party, the name in ``strategy.extensions``."""
    phase: str
    """Where it stands in a step; see the module's table."""
    nests: str = ""
    """Phase of its ``wrap``, where that is another one than ``phase``."""
    summary: str
    """What it does, in a few words."""
    changes: str = "training"
    """What it does to the result; see ``CHANGES``."""
    replica_gradients: bool = False
    """Whether it needs the gradient of every replica, not their mean."""
    own_parameters: bool = False
    """Whether every replica must hold whole parameters or residuals of its own; such
    features cannot share an axis with sharding."""
    bases: Axes = ()
    """Kinds of ``jfleet.optimizer`` that it can replace; empty: any optimizer."""
    reads: Axes = ()
    """Hyperparameters that it takes from the base."""
    excludes: tuple[tuple[str, str], ...] = ()
    """(name, why) of features that cannot run with it, in either direction."""
    replaces: Axes = ()
    """``"base"``, ``"reducer"`` or both: what it takes the place of."""
    options: type | None = None
    """Dataclass of its options; None accepts any dict."""
    check: Callable[[Any, Context], str | None] = no_objection
    """Returns why it cannot run as asked, or None."""
    wrap: Callable[[Any, Context, Any], Any] | None = None
    """``wrap(options, context, inner)`` returns an optax transformation."""
    wrap_loss: Callable[[Any, Context], Callable] | None = None
    """``wrap_loss(options, context)`` returns a function from loss to loss."""

    def __post_init__(self):
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise ConfigError(f"the name of a rule must be a word, got {self.name!r}")
        for field, value in (("phase", self.phase), ("nests", self.nests)):
            known = NESTING if field == "nests" else PHASES
            if value not in known and not (field == "nests" and value == ""):
                raise ConfigError(
                    f"rule {self.name!r}: {field} must be one of {listing(known)}, got "
                    f"{value!r}{nearest(value, known)}"
                )
        if self.wrap is not None and (self.nests or self.phase) not in NESTING:
            raise ConfigError(
                f"rule {self.name!r}: a rule of phase {self.phase!r} that wraps the "
                f"optimizer needs nests, one of {listing(NESTING)}"
            )
        if self.changes not in CHANGES:
            raise ConfigError(
                f"rule {self.name!r}: changes must be one of {listing(CHANGES)}, got "
                f"{self.changes!r}"
            )
        unknown = set(self.replaces) - {"base", "reducer"}
        if unknown:
            raise ConfigError(
                f"rule {self.name!r}: replaces must hold 'base' or 'reducer', got "
                f"{sorted(unknown)}"
            )

    def make_options(self, options: Any) -> Any:
        """Turn the dict that the user gave into options, checking its keys."""
        options = {} if options is True else dict(options)
        if self.options is None:
            return FrozenDict(options, f"extensions[{self.name!r}]")
        known = [f.name for f in dataclasses.fields(self.options)]
        for key in options:
            if key not in known:
                hint = nearest(key, known) or f"; the keys are {listing(known)}"
                where = f"extensions[{self.name!r}]"
                raise ConfigError(f"{where} has no key {key!r}{hint}")
        return self.options(**options)


class Registry:
    """Rules in the order of application; the resolver reads, never writes it.

    Example:
        >>> import jfleet, optax
        >>> rules = jfleet.default_registry.copy()
        >>> rules.register(jfleet.Rule(
        ...     name="noise", phase="clip", summary="adds noise",
        ...     wrap=lambda options, context, inner: optax.chain(
        ...         optax.add_noise(options["eta"], 0.55, 0), inner)))
        >>> strategy = jfleet.DistributedStrategy(extensions={"noise": {"eta": 0.1}})
        >>> jfleet.resolve(strategy, base=optax.sgd(0.1), registry=rules).applied
        ('noise',)
    """

    def __init__(self, rules: Iterable[Rule] = ()):
        self._rules: tuple[Rule, ...] = ()
        for rule in rules:
            self.register(rule)

    def register(self, rule: Rule) -> None:
        """Add a rule behind those of its phase.

        Raises:
            ConfigError: a name that is taken.
            SettingTypeError: an argument that is no Rule.
        """
        if not isinstance(rule, Rule):
            raise SettingTypeError(f"register needs a jfleet.Rule, got {rule!r}")
        if rule.name in self:
            raise ConfigError(
                f"there is a rule {rule.name!r} already; unregister it first or choose "
                "another name"
            )
        before = [r for r in self._rules if _rank(r) <= _rank(rule)]
        after = [r for r in self._rules if _rank(r) > _rank(rule)]
        self._rules = (*before, rule, *after)

    def unregister(self, name: str) -> Rule:
        """Remove a rule and return it."""
        rule = self[name]
        self._rules = tuple(r for r in self._rules if r is not rule)
        return rule

    def copy(self) -> "Registry":
        """Return a registry of its own with the same rules."""
        return Registry(self._rules)

    def __getitem__(self, name: str) -> Rule:
        for rule in self._rules:
            if rule.name == name:
                return rule
        names = [r.name for r in self._rules]
        hint = nearest(name, names) or f"; the rules are {listing(names, 20)}"
        raise ConfigError(f"there is no rule {name!r}{hint}")

    def __contains__(self, name: object) -> bool:
        return any(rule.name == name for rule in self._rules)

    def __iter__(self) -> Iterator[Rule]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)


def _rank(rule: Rule) -> int:
    return PHASES.index(rule.phase)
