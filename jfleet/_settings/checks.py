"""Checks for one setting: what it may be, and how to say that it is not.

A check is a small object: calling it with a value and the name of the setting returns
the value in its normal form, or raises with the name, the rule and the value.
"""

import dataclasses
import numbers
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jfleet._errors import ConfigError, ConfigTypeError, nearest


class SettingTypeError(ConfigTypeError, ConfigError):
    """A setting of the wrong type.

    Both a TypeError and a ConfigError, so that ``except ConfigError`` catches whatever
    is wrong with a setting.
    """


_SCALARS = (str, bytes, Mapping)


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """The rule of one setting, in words, and the function that applies it."""

    rule: str
    normal_form: Callable[[Any], Any]
    remedy: str = ""

    def __call__(self, value: Any, where: str) -> Any:
        """Return ``value`` in its normal form or raise, naming ``where``."""
        try:
            return self.normal_form(value)
        except (TypeError, ValueError) as error:
            wrong_type = isinstance(error, TypeError)
            kind = SettingTypeError if wrong_type else ConfigError
            hint = "".join(f"; {part}" for part in (str(error), self.remedy) if part)
            message = f"{where} must be {self.rule}, got {value!r}{hint}"
            raise kind(message) from None


def boolean() -> Check:
    """Exactly True or False: the string "False" is true in Python."""

    def normal_form(value):
        if not isinstance(value, bool):
            raise TypeError
        return value

    return Check("True or False", normal_form)


def integer(at_least: int) -> Check:
    """A whole number, not a bool, not a float."""

    def normal_form(value):
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError
        if value < at_least:
            raise ValueError
        return int(value)

    return Check(f"an integer of at least {at_least}", normal_form)


def degree() -> Check:
    """A number of devices along a mesh axis, -1 for the rest."""

    def normal_form(value):
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError
        if value < 1 and value != -1:
            raise ValueError
        return int(value)

    return Check("a positive integer, or -1 for all remaining devices", normal_form)


def real(rule: str, accepts: Callable[[float], bool]) -> Check:
    """A finite number for which ``accepts`` holds."""

    def normal_form(value):
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError
        number = float(value)
        # NaN fails every comparison, so it never slips through; infinity might.
        if abs(number) == float("inf") or not accepts(number):
            raise ValueError
        return number

    return Check(rule, normal_form)


def positive() -> Check:
    """A finite number above 0."""
    return real("a finite number above 0", lambda x: x > 0)


def non_negative() -> Check:
    """A finite number of at least 0."""
    return real("a finite number of at least 0", lambda x: x >= 0)


def choice(*allowed: str, hints: Mapping[Any, str] | None = None) -> Check:
    """One of a few words."""
    listed = " or ".join(repr(a) for a in allowed)
    hints = hints or {}

    def normal_form(value):
        if not isinstance(value, str):
            raise TypeError
        if value not in allowed:
            raise ValueError(hints.get(value) or nearest(value, allowed)[2:])
        return value

    return Check(listed, normal_form)


def dtype(*allowed: str) -> Check:
    """A floating dtype, by name or as any object that has that name."""
    short = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}

    def normal_form(value):
        name = value
        for attribute in ("dtype", "name", "__name__"):
            name = getattr(name, attribute, name)
        if not isinstance(name, str):
            raise TypeError
        name = short.get(name, name)
        if name not in allowed:
            raise ValueError(nearest(name, allowed)[2:])
        return name

    return Check(" or ".join(repr(a) for a in allowed), normal_form)


def text() -> Check:
    """A string that is not empty."""

    def normal_form(value):
        if not isinstance(value, str):
            raise TypeError
        if not value:
            raise ValueError
        return value

    return Check("a name", normal_form)


def names() -> Check:
    """One name or several, for instance mesh axes."""
    one = text()

    def normal_form(value):
        if isinstance(value, str):
            return (one(value, "a name"),)
        if isinstance(value, _SCALARS) or not isinstance(value, Iterable):
            raise TypeError
        found = tuple(one(item, "each name") for item in value)
        if not found or len(set(found)) != len(found):
            raise ValueError("each name once, and at least one")
        return found

    return Check("a name or a sequence of different names", normal_form)


def sequence(rule: str, item: Callable[[Any], Any], *, empty: bool = True) -> Check:
    """A list or tuple; it replaces the old one and becomes a tuple."""

    def normal_form(value):
        if isinstance(value, _SCALARS) or not isinstance(value, Iterable):
            raise TypeError("pass a list" if isinstance(value, str) else "")
        found = tuple(item(entry) for entry in value)
        if not found and not empty:
            raise ValueError
        return found

    return Check(rule, normal_form)


def patterns() -> Check:
    """Regular expressions that are searched for in parameter paths."""
    return sequence("a sequence of regular expressions on parameter paths", regex)


def regex(value: Any) -> str:
    """Return ``value`` if it is a regular expression, else raise."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"{value!r} does not compile: {error}") from None
    return value


def fraction(value: Any) -> float:
    """Return ``value`` if it is a number in [0, 1), else raise."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{value!r} is not a number")
    number = float(value)
    if not 0 <= number < 1:
        raise ValueError(f"{value!r} is not in [0, 1)")
    return number


def optional(check: Check) -> Check:
    """``check``, or None."""

    def normal_form(value):
        return None if value is None else check.normal_form(value)

    return Check(f"{check.rule}, or None", normal_form, check.remedy)


class FrozenDict(Mapping):
    """A read-only dict that can be compared, hashed and printed like one.

    >>> options = FrozenDict({"k_steps": 4}, "gradient_merge_configs")
    >>> options["k_steps"]
    4
    >>> options["k_steps"] = 8
    Traceback (most recent call last):
    ...
    jfleet._settings.checks.SettingTypeError: gradient_merge_configs is read-only; \
assign a dict to change it: strategy.gradient_merge_configs = {'k_steps': 8}
    """

    __slots__ = ("_items", "_name")

    def __init__(self, items: Mapping[str, Any], name: str = "this mapping"):
        self._items = dict(items)
        self._name = name

    def __getitem__(self, key):
        return self._items[key]

    def __setitem__(self, key, value):
        raise SettingTypeError(
            f"{self._name} is read-only; assign a dict to change it: "
            f"strategy.{self._name} = {{{key!r}: {value!r}}}"
        )

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)

    def __hash__(self):
        return hash(frozenset(self._items.items()))

    def __repr__(self):
        return repr(self._items)


def option(default: Any, check: Check) -> Any:
    """A field with a default and the check that its values must pass."""
    return dataclasses.field(default=default, metadata={"check": check})


def check_fields(options: Any) -> None:
    """Bring every field into its normal form, or raise naming block and field."""
    for field in dataclasses.fields(options):
        where = f"{options.BLOCK}[{field.name!r}]"
        value = field.metadata["check"](getattr(options, field.name), where)
        object.__setattr__(options, field.name, value)
