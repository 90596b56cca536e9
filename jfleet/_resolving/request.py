"""What was asked of the resolver, read once."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jfleet._errors import ConfigError
from jfleet._resolving.auto import Problem
from jfleet._resolving.axes import data_axes, find_axes, size
from jfleet._resolving.rules import Axes, Registry, Rule
from jfleet._settings.options import SCALE_KEYS
from jfleet._tree import abstract, leaf_bytes
from jfleet.optimizer import Optimizer
from jfleet.strategy import OPTIONS, SWITCHES, DistributedStrategy

FEATURES = tuple(name for name in SWITCHES if name != "auto")


class Request:
    """A strategy, an optimizer and a mesh, and what follows from them at once."""

    def __init__(
        self,
        strategy: DistributedStrategy,
        base: Any,
        mesh_shape: Mapping[str, int] | None,
        params: Any,
        registry: Registry,
    ):
        self.strategy, self.base, self.params = strategy, base, params
        self.mesh_shape = None if mesh_shape is None else dict(mesh_shape)
        self.registry = registry
        self.given = strategy.to_dict()
        self.wanted = self._wanted()
        self.fixed_on = {name for name, v in self.wanted.items() if v is True}
        self.scale_strategy = strategy.options("gradient_scale_configs").scale_strategy
        auto = strategy.options("auto_configs")
        self._ignored = bool(self._blocking()) and auto.mode == "strict"
        self.strict = strategy.auto and auto.mode == "strict" and not self._ignored
        self._open = self.strict or (strategy.auto and auto.mode == "fill")
        self.undecided = [
            name
            for name, value in self.wanted.items()
            if value == "auto" or (self._open and value is None)
        ]

    def _wanted(self) -> dict[str, bool | str | None]:
        """What the user said about every rule; None: nothing."""
        wanted = {rule.name: self.given.get(rule.name) for rule in self.registry}
        extensions = self.strategy.extensions
        asked = [n for n, options in extensions.items() if options is not False]
        for name in (*asked, *(n for n in FEATURES if self.given.get(n))):
            rule = self.registry[name]  # raises for a name without a rule
            wanted[rule.name] = self.given.get(name, True)
        return wanted

    def _blocking(self) -> list[str]:
        """What was set that keeps strict auto from applying."""
        harmless = {"auto", "auto_configs", "hybrid_configs"}
        return [n for n, v in self.given.items() if n not in harmless and v != "auto"]

    def options(self, rule: Rule, proposed: Mapping[str, Any]) -> Any:
        """The complete options of a rule; what the user set wins."""
        block = f"{rule.name}_configs"
        if block not in OPTIONS:
            return rule.make_options(self.strategy.extensions.get(rule.name, {}))
        given = self.given.get(block, {})
        options = OPTIONS[block](**{**proposed, **given})
        narrow = getattr(options, "dtype", None) == "float16"
        if rule.name == "amp" and not narrow and not SCALE_KEYS & set(given):
            # bfloat16 has the range of float32: without a word from the user there
            # is nothing to scale.
            return dataclasses.replace(
                options, init_loss_scaling=1.0, use_dynamic_loss_scaling=False
            )
        return options

    def notes(self) -> list[str]:
        """Settings that have no effect, in words."""
        notes = []
        if self.strategy.auto and self._ignored:
            what = ", ".join(self._blocking())
            notes.append(
                f"strategy.auto is ignored because you set {what}; set auto_configs="
                "{'mode': 'fill'} to keep that and let auto choose the rest"
            )
        for name in FEATURES:
            block = f"{name}_configs"
            off = self.wanted.get(name) is None and not self.strategy.auto
            if block in self.given and off:
                notes.append(
                    f"strategy.{block} is set but {name} is off; set strategy.{name} = "
                    "True to use it, or False to silence this"
                )
        if "auto_configs" in self.given and not (self.strategy.auto or self.undecided):
            notes.append("strategy.auto_configs is set but nothing is left to auto")
        return notes

    def check_hybrid(self, applied: Mapping[str, Any]) -> None:
        """Compare ``hybrid_configs`` with the mesh and the switches.

        Raises:
            ConfigError: they do not agree.
        """
        if "hybrid_configs" not in self.given:
            return
        hybrid = self.strategy.options("hybrid_configs")
        for key, name in (
            ("sharding_degree", "sharding"),
            ("mp_degree", "tensor_parallel"),
        ):
            if getattr(hybrid, key) > 1 and name not in applied:
                raise ConfigError(
                    f"hybrid_configs[{key!r}] is {getattr(hybrid, key)}, but {name} is "
                    f"off; set strategy.{name} = True"
                )
        shape = self.strategy.mesh_shape()
        known = {a: n for a, n in (self.mesh_shape or {}).items() if n > 1}
        asked = {a: n for a, n in shape.items() if n != -1 and n > 1}
        more = [a for a in known if a not in shape]
        if self.mesh_shape is not None and (
            more or any(known.get(a, 1) != n for a, n in asked.items())
        ):
            raise ConfigError(
                f"hybrid_configs describes the mesh {shape}, but the mesh is "
                f"{self.mesh_shape}; make it by jfleet.init(strategy.mesh_shape())"
            )

    def problem(self) -> Problem:
        """The sizes that auto decides from."""
        params = None if self.params is None else abstract(self.params)
        sharded, own, replicas, hint = self._possible_axes()
        return Problem(
            allowed=self.strategy.options("auto_configs"),
            fixed={n: v for n, v in self.wanted.items() if isinstance(v, bool)},
            devices=size(self.mesh_shape, sharded) if sharded else None,
            why_no_devices=hint,
            replicas=replicas,
            shared_axes=bool(set(own) & set(sharded)),
            param_bytes=None if params is None else tree_bytes(params),
            state_bytes=None
            if params is None
            else tree_bytes(jax.eval_shape(self.base.init, params)),
            level=self.strategy.options("sharding_configs").level,
            sgd_base=isinstance(self.base, Optimizer) and self.base.kind == "sgd",
        )

    def _possible_axes(self) -> tuple[Axes, Axes, int | None, str]:
        """Axes that sharding and localsgd would get, replicas, why there are none."""
        mesh = self.mesh_shape
        if mesh is None:
            return (), (), None, "the mesh is unknown"
        names = ["sharding", "localsgd"]
        if self.wanted.get("tensor_parallel") is True:
            names.append("tensor_parallel")
        rules = [rule for rule in self.registry if rule.name in names]
        options = {rule.name: self.options(rule, {}) for rule in rules}
        replicas = size(mesh, data_axes(mesh, options))
        try:
            axes = find_axes(rules, options, mesh)
        except ConfigError as error:
            return (), (), replicas, str(error)
        return axes.get("sharding", ()), axes.get("localsgd", ()), replicas, ""


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays of a tree."""
    return sum(leaf_bytes(leaf) for leaf in jax.tree.leaves(tree))
