"""An optax optimizer that remembers how it was made.

An optax transformation is a pair of closures: nobody can read its momentum or its
rate. ``lars``, ``lamb`` and ``dgc`` replace the user's optimizer by one of the same
hyperparameters and therefore need to know them.
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import optax

from jfleet._errors import ConfigError, nearest
from jfleet._settings.checks import SettingTypeError

KINDS = {
    optax.sgd: "sgd",
    optax.noisy_sgd: "noisy_sgd",
    optax.adam: "adam",
    optax.adamw: "adamw",
    optax.nadam: "nadam",
    optax.lamb: "lamb",
    optax.lars: "lars",
}
"""The factories that strategies know by name."""


@dataclasses.dataclass(frozen=True)
class _Recipe:
    """How the optimizer was made; also its ``init``."""

    factory: Callable[..., Any]
    hyperparameters: tuple[tuple[str, Any], ...]
    inner: Any = dataclasses.field(compare=False, repr=False)

    def __call__(self, params: Any) -> Any:
        return self.inner.init(params)


@dataclasses.dataclass(frozen=True)
class _Update:
    recipe: _Recipe

    def __call__(
        self, updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, Any]:
        update = optax.with_extra_args_support(self.recipe.inner).update
        return update(updates, state, params, **extra)


class Optimizer(optax.GradientTransformationExtraArgs):
    """An optax transformation with its factory and its hyperparameters."""

    __slots__ = ()

    @property
    def _recipe(self) -> _Recipe:
        recipe = self.init
        assert isinstance(recipe, _Recipe)
        return recipe

    @property
    def factory(self) -> Callable[..., Any]:
        """The function that made it, such as ``optax.sgd``."""
        return self._recipe.factory

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """The hyperparameters that the user gave."""
        return dict(self._recipe.hyperparameters)

    @property
    def arguments(self) -> dict[str, Any]:
        """All hyperparameters, the factory's defaults included."""
        bound = inspect.signature(self.factory).bind(**self.hyperparameters)
        bound.apply_defaults()
        return dict(bound.arguments)

    @property
    def changed(self) -> dict[str, Any]:
        """The hyperparameters whose values are not the factory's defaults."""
        parameters = inspect.signature(self.factory).parameters
        defaults = {name: p.default for name, p in parameters.items()}
        return {
            name: value
            for name, value in self.hyperparameters.items()
            if value is not defaults[name] and value != defaults[name]
        }

    @property
    def kind(self) -> str:
        """``sgd``, ``adam``, ... or the name of a factory that jfleet does not know."""
        name = getattr(self.factory, "__name__", repr(self.factory))
        return KINDS.get(self.factory, f"other ({name})")

    @property
    def inner(self) -> Any:
        """The plain optax transformation."""
        return self._recipe.inner

    def __repr__(self):
        name = getattr(self.factory, "__name__", repr(self.factory))
        items = ", ".join(f"{k}={v!r}" for k, v in self.hyperparameters.items())
        return f"jfleet.optimizer({name}, {items})"


def optimizer(factory: Callable[..., Any], /, **hyperparameters: Any) -> Optimizer:
    """Make an optax optimizer that strategies can read.

    Args:
        factory: a function that returns an optax transformation, such as
            ``optax.adam``.
        **hyperparameters: its arguments by name; rates may be schedules.

    Returns:
        The transformation of ``factory(**hyperparameters)``, usable wherever optax is,
        with ``factory`` and ``hyperparameters`` attached. Two made alike are equal.

    Raises:
        ConfigError: a hyperparameter that ``factory`` does not have, or a missing one.
        SettingTypeError: a factory that is not callable (such as a transformation that
            is made already) or does not return an optax transformation.

    Example:
        >>> import jfleet, optax
        >>> base = jfleet.optimizer(optax.sgd, learning_rate=0.1, momentum=0.9)
        >>> base.hyperparameters["momentum"]
        0.9
    """
    if isinstance(factory, tuple) or not callable(factory):
        raise SettingTypeError(
            f"factory must be a function such as optax.adam, got {factory!r}; pass the "
            "function and its arguments apart: jfleet.optimizer(optax.adam, "
            "learning_rate=1e-3)"
        )
    try:
        signature = inspect.signature(factory)
    except ValueError:
        raise SettingTypeError(
            f"factory must name its arguments, got {factory!r}"
        ) from (None)
    try:
        signature.bind(**hyperparameters)
    except TypeError as error:
        known = signature.parameters
        unknown = [name for name in hyperparameters if name not in known]
        hint = nearest(unknown[0], known) if unknown else ""
        name = getattr(factory, "__name__", repr(factory))
        raise ConfigError(f"jfleet.optimizer({name}, ...): {error}{hint}") from None
    inner = factory(**hyperparameters)
    if not (hasattr(inner, "init") and hasattr(inner, "update")):
        raise SettingTypeError(
            f"factory must return an optax transformation, got {type(inner).__name__}"
        )
    recipe = _Recipe(factory, tuple(hyperparameters.items()), inner)
    return Optimizer(recipe, _Update(recipe))
