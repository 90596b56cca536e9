"""What HLO text alone tells of a program: what it sends."""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from jfleet._errors import ConfigError
from jfleet._hlo import collectives
from jfleet._plan_text import human
from jfleet._planning.explain import Sent, _AxisNames, _sent


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProgramText:
    """The collectives of a program that was saved as text."""

    name: str
    """The file."""
    mesh_shape: tuple[tuple[str, int], ...]
    sent: tuple[Sent, ...]
    """Largest first."""
    unknown_trips: int
    """Collectives in loops of unknown length, which were counted once."""

    @property
    def wire_bytes(self) -> float:
        """What one device sends in one execution."""
        return sum(s.wire_bytes for s in self.sent)

    def to_json(self) -> str:
        """Everything, as JSON."""
        plain: dict[str, Any] = dataclasses.asdict(self)
        return json.dumps(plain | {"wire_bytes": self.wire_bytes}, indent=1)

    def __str__(self) -> str:
        lines = [f"{self.name}: the collectives of one execution"]
        if not self.sent:
            lines.append("collectives: none")
        for s in self.sent:
            axes = "+".join(s.axes) or f"groups of {s.group_size}"
            where = " in a loop" if s.in_loop else ""
            where += " in a branch" if s.in_conditional else ""
            lines.append(
                f"{s.kind:<22}{axes:<18}{s.count:>6}{human(s.bytes):>12}"
                f"{human(s.wire_bytes):>12}{where}"
            )
        if self.sent:
            head = (
                f"{'collective':<22}{'axes':<18}{'runs':>6}{'arrays':>12}{'sent':>12}"
            )
            lines.insert(1, head)
            lines.append(f"each device sends {human(self.wire_bytes)}")
        if self.unknown_trips:
            lines.append(
                f"Note: {self.unknown_trips} collectives are in loops of unknown length"
                " and were counted once"
            )
        lines.append(
            "Note: memory and flags need the compiled step; give the script instead"
        )
        return "\n".join(lines)


def explain_hlo(name: str, text: str, sizes: Mapping[str, int]) -> ProgramText:
    """Read the collectives of a program.

    Args:
        name: the file.
        text: what ``compiled.as_text()`` returned.
        sizes: mesh axes and sizes, to name axes; may be empty.

    Raises:
        ConfigError: text that is no HLO, or a mesh of another size than the program's.
    """
    if not text.lstrip().startswith("HloModule"):
        raise ConfigError(
            f"{name} is no HLO text, which starts with HloModule; save what "
            "jax.jit(step).lower(...).compile().as_text() returns"
        )
    text = text.lstrip()
    found = collectives(text)
    num = max([0, *(d for c in found for g in c.groups for d in g)]) + 1
    if sizes and (-1 in sizes.values() or math.prod(sizes.values()) < num):
        raise ConfigError(
            f"--mesh has {math.prod(sizes.values())} devices, and the program uses "
            f"device number {num - 1}; give the mesh that it was compiled for"
        )
    return ProgramText(
        name=name,
        mesh_shape=tuple(sizes.items()),
        sent=_sent(found, _AxisNames(dict(sizes))),
        unknown_trips=sum(not c.known_trips for c in found),
    )
