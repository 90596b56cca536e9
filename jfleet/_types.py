"""Type aliases shared by all modules."""

from typing import Any, Literal, TypeAlias

Level: TypeAlias = Literal["os", "os_g", "p_g_os"]
PyTree: TypeAlias = Any
AxisName: TypeAlias = str | tuple[str, ...]

LEVELS: tuple[Level, ...] = ("os", "os_g", "p_g_os")
