"""What the user wants: switches, their options, and which of them the user set.

Nothing is decided here. A setting is checked by itself when it is set; whether
settings go together depends on the optimizer and the mesh, and is the resolver's
business.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from jfleet._errors import ConfigError, listing, nearest
from jfleet._settings import options as _options
from jfleet._settings import placement_options as _placement_options
from jfleet._settings.checks import FrozenDict, SettingTypeError
from jfleet._settings.fleet_names import ELSEWHERE, KEYS_ELSEWHERE, UnknownSettingError

JSON_VERSION = 1

OPTIONS: dict[str, type] = {
    cls.BLOCK: cls
    for module in (_options, _placement_options)
    for cls in vars(module).values()
    if isinstance(cls, type) and hasattr(cls, "BLOCK")
}
"""The dataclass of every ``*_configs`` block."""

ALIASES = {
    "sharding_configs": {"stage": "level", "sharding_degree": "degree"},
    "tensor_parallel_configs": {"tensor_parallel_degree": "degree"},
}
"""Keys of fleet that mean exactly what a key of jfleet means."""


class Switch:
    """A feature that is on (True), off (False), or for the resolver to choose."""

    def __init__(self, doc: str):
        self.__doc__ = doc

    def __set_name__(self, owner, name):
        self._name = name

    def __get__(self, strategy: Any, owner: Any = None) -> Any:
        if strategy is None:
            return self
        return strategy._switches.get(self._name, False)

    def __set__(self, strategy, value):
        if value == "auto" and self._name != "auto":
            strategy._switches[self._name] = "auto"
        elif isinstance(value, bool):
            strategy._switches[self._name] = value
        else:
            allowed = "True or False" if self._name == "auto" else "True, False, 'auto'"
            kind = ConfigError if isinstance(value, str) else SettingTypeError
            remedy = "the options go into"
            raise kind(
                f"strategy.{self._name} must be {allowed}, got {value!r}; {remedy} "
                f"strategy.{self._name}_configs"
            )


class Configs:
    """The options of a feature; assigning a dict changes the keys that it names."""

    def __init__(self, block: type):
        self._block = block
        self.__doc__ = f"Options as in :class:`{block.__name__}`."

    def __get__(self, strategy: Any, owner: Any = None) -> Any:
        if strategy is None:
            return self
        name = self._block.BLOCK
        return FrozenDict(_as_dict(strategy.options(name)), name)

    def __set__(self, strategy, value):
        name = self._block.BLOCK
        given = _canonical_keys(name, value, self._block)
        merged = {**strategy._options.get(name, {}), **given}
        options = _as_dict(self._block(**merged))
        if given:
            strategy._options[name] = {key: options[key] for key in merged}


class DistributedStrategy:
    """What to do to a training step, in fleet's form or as keyword arguments.

    A switch is True, False or ``"auto"``. Assigning a dict to ``*_configs`` changes
    the keys that it names and keeps the others; lists replace. Every value is checked
    when it is set. The object remembers what was set, and two objects are equal if the
    same things were set to the same values.

    Args:
        **settings: any attribute below, such as ``amp=True`` or
            ``amp_configs={"dtype": "float16"}``.

    Raises:
        UnknownSettingError: a setting that does not exist; the text names the nearest
            one, or what to use instead of a setting of fleet. A ConfigError and an
            AttributeError.
        ConfigError: a value out of range (a ValueError).
        SettingTypeError: a value of the wrong type (a ConfigError and a TypeError).

    Example:
        >>> strategy = DistributedStrategy(amp=True)
        >>> strategy.gradient_merge = True
        >>> strategy.gradient_merge_configs = {"k_steps": 4}
        >>> strategy.gradient_merge_configs["avg"]
        True
        >>> strategy
        DistributedStrategy(
            amp=True,
            gradient_merge=True,
            gradient_merge_configs={'k_steps': 4},
        )
        >>> strategy.gradient_merg = True
        Traceback (most recent call last):
        ...
        jfleet._settings.fleet_names.UnknownSettingError: DistributedStrategy has no \
setting 'gradient_merg'; did you mean 'gradient_merge'?
    """

    __slots__ = ("_extensions", "_options", "_switches")
    __hash__ = None

    auto = Switch("Let the resolver choose; see ``auto_configs``.")
    amp = Switch("Mixed precision with float32 master parameters.")
    recompute = Switch("Recompute activations in the backward pass.")
    gradient_merge = Switch("Accumulate gradients over several calls.")
    localsgd = Switch("Train replicas alone, average parameters now and then.")
    adaptive_localsgd = Switch("LocalSGD with an interval that adapts.")
    dgc = Switch("Send only the largest entries of the gradient.")
    lars = Switch("Layer-wise rates on an SGD or momentum base.")
    lamb = Switch("Layer-wise trust ratios on an Adam base.")
    fp16_allreduce = Switch("Average gradients in 16 bits.")
    sharding = Switch("Split optimizer state, gradients, parameters (ZeRO 1-3).")
    sync_batch_norm = Switch("Batch statistics over all replicas.")
    tensor_parallel = Switch("Split single layers over a mesh axis.")
    clip = Switch("Limit the global norm of the gradient.")

    auto_configs = Configs(_placement_options.AutoConfigs)
    amp_configs = Configs(_options.AmpConfigs)
    recompute_configs = Configs(_options.RecomputeConfigs)
    gradient_merge_configs = Configs(_options.GradientMergeConfigs)
    localsgd_configs = Configs(_options.LocalsgdConfigs)
    adaptive_localsgd_configs = Configs(_options.AdaptiveLocalsgdConfigs)
    dgc_configs = Configs(_options.DgcConfigs)
    lars_configs = Configs(_options.LarsConfigs)
    lamb_configs = Configs(_options.LambConfigs)
    fp16_allreduce_configs = Configs(_options.Fp16AllreduceConfigs)
    sharding_configs = Configs(_placement_options.ShardingConfigs)
    sync_batch_norm_configs = Configs(_placement_options.SyncBatchNormConfigs)
    tensor_parallel_configs = Configs(_placement_options.TensorParallelConfigs)
    clip_configs = Configs(_options.ClipConfigs)
    hybrid_configs = Configs(_placement_options.HybridConfigs)
    gradient_scale_configs = Configs(_placement_options.GradientScaleConfigs)

    def __init__(self, **settings: Any):
        self._switches: dict[str, bool | str] = {}
        self._options: dict[str, dict[str, Any]] = {}
        self._extensions: dict[str, FrozenDict | bool] = {}
        for name, value in settings.items():
            setattr(self, name, value)

    def __setattr__(self, name, value):
        if name not in SETTINGS and name not in type(self).__slots__:
            raise _unknown(name)
        object.__setattr__(self, name, value)

    def __getattr__(self, name):
        # Reached only for names that do not exist; dunders are looked up by copy etc.
        if name.startswith("__") or name in type(self).__slots__:
            raise AttributeError(name)
        raise _unknown(name)

    @property
    def extensions(self) -> FrozenDict:
        """Meta optimizers of third parties: ``{"name": {options}}``.

        The name is that of a rule in the registry that the resolver is given; True
        stands for no options and False turns it off. Like ``*_configs``, assigning
        changes the names it mentions.
        """
        return FrozenDict(self._extensions, "extensions")

    @extensions.setter
    def extensions(self, value: Mapping[str, Any]) -> None:
        if not isinstance(value, Mapping):
            raise SettingTypeError(
                f"strategy.extensions must be a dict of dicts, got {value!r}"
            )
        checked = {name: _extension(name, entry) for name, entry in value.items()}
        self._extensions = {**self._extensions, **checked}

    def options(self, block: str) -> Any:
        """Return the options of a block as its frozen dataclass."""
        return OPTIONS[block](**self._options.get(block, {}))

    def is_set(self, name: str, key: str | None = None) -> bool:
        """Whether the user set a switch, a block, or one ``key`` of a block."""
        if key is not None:
            return key in self._options.get(name, {})
        return name in self._switches or name in self._options

    @property
    def user_set(self) -> tuple[str, ...]:
        """The names of everything that was set.

        >>> DistributedStrategy(amp=True, clip_configs={"max_norm": 2}).user_set
        ('amp', 'clip_configs.max_norm')
        """
        keys = (f"{block}.{k}" for block, o in self._options.items() for k in o)
        return (*self._switches, *keys, *(f"extensions.{n}" for n in self._extensions))

    def unset(self, *names: str) -> None:
        """Forget that these switches or blocks were set; their defaults return."""
        for name in names:
            if name not in SETTINGS:
                raise _unknown(name)
            self._switches.pop(name, None)
            self._options.pop(name, None)
            if name == "extensions":
                self._extensions = {}

    def mesh_shape(self) -> dict[str, int]:
        """The mesh that ``hybrid_configs`` describes, for ``jfleet.init``.

        Axes of size 1 are left out. The data-parallel axis is called ``replica`` next
        to an axis ``shard`` and ``data`` without one.

        >>> s = DistributedStrategy(hybrid_configs={"dp_degree": 2})
        >>> s.hybrid_configs = {"sharding_degree": 4}
        >>> s.mesh_shape()
        {'replica': 2, 'shard': 4}
        """
        hybrid = self.options("hybrid_configs")
        sizes = {
            "dp": ("replica" if hybrid.sharding_degree > 1 else "data", "dp_degree"),
            "sharding": ("shard", "sharding_degree"),
            "mp": (self.options("tensor_parallel_configs").axis, "mp_degree"),
        }
        axes = [sizes[name] for name in hybrid.order if name in sizes]
        shape = {axis: getattr(hybrid, field) for axis, field in axes}
        return {a: n for a, n in shape.items() if n != 1} or {"data": 1}

    def copy(self) -> "DistributedStrategy":
        """Return an independent strategy with the same settings."""
        other = DistributedStrategy()
        other._switches = dict(self._switches)
        other._options = {block: dict(o) for block, o in self._options.items()}
        other._extensions = dict(self._extensions)
        return other

    __copy__ = copy

    def __deepcopy__(self, memo):
        return self.copy()

    def __eq__(self, other):
        if not isinstance(other, DistributedStrategy):
            return NotImplemented
        return self.to_dict() == other.to_dict()

    def to_dict(self) -> dict[str, Any]:
        """Return what was set, as keyword arguments."""
        blocks = {name: dict(o) for name, o in self._options.items()}
        extra = {"extensions": dict(self._extensions)} if self._extensions else {}
        return {**self._switches, **blocks, **extra}

    def to_json(self, *, indent: int | None = None) -> str:
        """Return what was set, and the version of the format, as JSON."""
        content = {"jfleet_strategy": JSON_VERSION, "settings": self.to_dict()}
        return json.dumps(content, indent=indent, default=dict)

    @classmethod
    def from_json(cls, text: str) -> "DistributedStrategy":
        """Read what ``to_json`` wrote.

        Raises:
            ConfigError: text that is not JSON, was not written by ``to_json``, has a
                version that this jfleet does not know, or settings that it refuses.
            SettingTypeError: an argument that is not text.

        Example:
            >>> strategy = DistributedStrategy(dgc=True, dgc_configs={"min_size": 1})
            >>> DistributedStrategy.from_json(strategy.to_json()) == strategy
            True
        """
        return cls(**_read_json(text))

    def __repr__(self):
        settings = self.to_dict()
        if not settings:
            return "DistributedStrategy()"
        lines = "".join(f"    {name}={v!r},\n" for name, v in settings.items())
        return f"DistributedStrategy(\n{lines})"


SWITCHES = tuple(n for n, v in vars(DistributedStrategy).items() if type(v) is Switch)
"""Every switch, in the order of the class."""
SETTINGS = (*SWITCHES, *OPTIONS, "extensions")
"""Every attribute that can be set."""


def _as_dict(options: Any) -> dict[str, Any]:
    return {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}


def _unknown(name: str) -> UnknownSettingError:
    if name in ELSEWHERE:
        text = f"{name!r} is a setting of fleet that jfleet lacks: {ELSEWHERE[name]}"
        return UnknownSettingError(text)
    hint = nearest(name, SETTINGS) or f"; the settings are {listing(SETTINGS, 40)}"
    return UnknownSettingError(f"DistributedStrategy has no setting {name!r}{hint}")


def _canonical_keys(name: str, value: Any, block: type) -> dict[str, Any]:
    """Check the keys of a dict for a block and translate those of fleet."""
    if not isinstance(value, Mapping):
        hint = " (a switch is set without '_configs')" if value is True else ""
        raise SettingTypeError(f"strategy.{name} must be a dict, got {value!r}{hint}")
    fields = [f.name for f in dataclasses.fields(block)]
    aliases = ALIASES.get(name, {})
    found: dict[str, Any] = {}
    for key, entry in value.items():
        target = aliases.get(key, key)
        if target not in fields:
            raise _unknown_key(name, key, [*fields, *aliases])
        if target in found:
            raise ConfigError(
                f"strategy.{name} has {key!r} and another name of the same option; "
                f"keep {target!r} only"
            )
        found[target] = entry
    return found


def _unknown_key(name: str, key: Any, known: list[str]) -> ConfigError:
    instead = KEYS_ELSEWHERE.get(name, {}).get(key)
    if instead:
        text = f"{name}[{key!r}] is a key of fleet that jfleet lacks: {instead}"
        return UnknownSettingError(text)
    hint = nearest(key, known) or f"; the keys are {listing(known, 20)}"
    return UnknownSettingError(f"{name} has no key {key!r}{hint}")


def _extension(name: Any, options: Any) -> FrozenDict | bool:
    if not isinstance(name, str) or name in SETTINGS:
        raise ConfigError(
            f"strategy.extensions[{name!r}] must be the name of a rule of a third "
            "party; built-in switches are attributes of the strategy"
        )
    if isinstance(options, bool):
        return options
    try:
        plain = json.loads(json.dumps(options, default=dict))
        return _frozen(dict(plain), f"extensions[{name!r}]")
    except (TypeError, ValueError):
        raise SettingTypeError(
            f"strategy.extensions[{name!r}] must be True, False or a dict of plain "
            f"values (numbers, strings, lists), got {options!r}"
        ) from None


def _frozen(value: Any, name: str) -> Any:
    """Lists become tuples and dicts FrozenDicts, so that options can be hashed."""
    if isinstance(value, dict):
        return FrozenDict({k: _frozen(v, name) for k, v in value.items()}, name)
    return tuple(_frozen(v, name) for v in value) if isinstance(value, list) else value


def _read_json(text: Any) -> dict[str, Any]:
    if not isinstance(text, str | bytes | bytearray):
        raise SettingTypeError(f"from_json needs text, got {type(text).__name__}")
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"this is not JSON ({error}); pass what to_json wrote"
        ) from None
    if not isinstance(content, dict) or "jfleet_strategy" not in content:
        raise ConfigError("this JSON is no strategy; pass what to_json wrote")
    version = content["jfleet_strategy"]
    if version != JSON_VERSION:
        raise ConfigError(
            f"the strategy has format version {version!r} and this jfleet reads "
            f"{JSON_VERSION}; write it again, or use the jfleet that wrote it"
        )
    settings = content.get("settings")
    if not isinstance(settings, dict):
        raise ConfigError(
            "the strategy has no dict 'settings'; pass what to_json wrote"
        )
    return settings
