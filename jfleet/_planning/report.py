"""Plans of steps as text for people."""

from collections.abc import Iterable
from typing import Any

from jfleet._plan_text import human

MAX_TRANSFERS = 8
MAX_SENT = 12


def plan_text(plan: Any) -> str:
    """Title, memory by class, traffic, time."""
    lines = [_title(plan), "", *_memory(plan), "", *_traffic(plan)]
    if plan.time is not None:
        lines += ["", *_time(plan.time)]
    lines += [f"Note: {note}" for note in plan.notes]
    return "\n".join(lines)


def _title(plan: Any) -> str:
    mesh = " x ".join(f"{axis}={size}" for axis, size in plan.mesh_shape)
    names = [n for n in plan.applied if n != "sharding"]
    also = f" with {', '.join(names)}" if names else ""
    return (
        f"Step: level {plan.level or 'none'}{also}, mesh {mesh}, {plan.num_devices} "
        f"devices, as the {plan.compiler} compiler lays it out"
    )


def _memory(plan: Any) -> Iterable[str]:
    memory = plan.memory
    yield f"{'memory per device':<24}{'at the peak':>12}{'at most':>12}  from"
    for row in memory.classes:
        yield (
            f"{row.kind:<24}{human(row.bytes):>12}{human(row.most_bytes):>12}  "
            f"{row.formula}"
        )
    gaps = memory.temporary_bytes - memory.live_bytes
    if gaps:
        yield f"{'gaps between buffers':<24}{human(gaps):>12}"
    least = "" if memory.complete else "  (at least: activations are not counted)"
    yield (
        f"{'peak':<24}{human(memory.peak_bytes):>12}{'':>12}  arguments "
        f"{human(memory.arguments_bytes)} + temporaries "
        f"{human(memory.temporary_bytes)}{_own_outputs(memory)}{least}"
    )
    if plan.hardware is not None:
        verdict = "fits" if plan.fits else "does NOT fit"
        yield (
            f"{verdict} {plan.hardware.name}, which has "
            f"{human(plan.hardware.memory_bytes)}"
        )


def _own_outputs(memory: Any) -> str:
    own = memory.output_bytes - memory.donated_bytes
    return f" + results {human(own)}" if own else ""


def _traffic(plan: Any) -> Iterable[str]:
    transfers = plan.traffic.transfers
    if not transfers:
        yield "traffic: none"
        return
    yield (
        f"{'traffic per step':<20}{'axes':<16}{'of':<22}{'runs':>6}{'arrays':>12}"
        f"{'sent':>12}"
    )
    for t in transfers[:MAX_TRANSFERS]:
        where = " in a loop" if t.in_loop else ""
        where += " in a branch" if t.in_conditional else ""
        often = "" if t.share == 1 else f", one step in {1 / t.share:.0f}"
        yield (
            f"{t.kind:<20}{'+'.join(t.axes):<16}{t.what:<22}{t.count:>6.0f}"
            f"{human(t.bytes):>12}{human(t.wire_bytes):>12}{where}{often}"
        )
    rest = transfers[MAX_TRANSFERS:]
    if rest:
        total = human(sum(t.wire_bytes for t in rest))
        yield f"... and {len(rest)} smaller kinds, {total} sent"
    yield f"each device sends {human(plan.traffic.wire_bytes)} per step"


def _time(time: Any) -> Iterable[str]:
    yield (
        f"{'time on ' + time.hardware.name:<24}{'compute':>12}{'memory':>12}"
        f"{'traffic':>12}  estimate, not measured"
    )
    for phase in time.phases:
        cells = "".join(f"{seconds(s):>12}" for s in phase.terms.values())
        yield f"{phase.name:<24}{cells}  {phase.binds} binds"
    low, high = seconds(time.low_seconds), seconds(time.high_seconds)
    yield f"estimate per step: {low} (all overlapped) to {high} (nothing overlapped)"
    yield from (f"Note: {note}" for note in time.notes[1:])


def explain_text(report: Any) -> str:
    """What a compiled step sends and holds, and its flags."""
    mesh = " x ".join(f"{axis}={size}" for axis, size in report.mesh_shape)
    lines = [
        f"Compiled step: level {report.level or 'unknown'}, mesh {mesh or 'unknown'}",
        "",
        f"{'memory per device':<24}{'bytes':>12}{'whole':>12}",
    ]
    for kind, local, whole in report.classes:
        lines.append(f"{kind:<24}{human(local):>12}{human(whole):>12}")
    for name, size in (
        ("arguments", report.arguments_bytes),
        ("temporaries", report.temporary_bytes),
        ("results", report.output_bytes),
        ("of them donated", report.donated_bytes),
        ("peak", report.peak_bytes),
    ):
        lines.append(f"{name:<24}{human(size):>12}")
    lines += ["", *_sent(report)]
    if not report.flags:
        lines.append("Nothing that should not be there.")
    lines += [f"FLAG {flag.name}: {flag.text}" for flag in report.flags]
    return "\n".join(lines)


def _sent(report: Any) -> Iterable[str]:
    if not report.sent:
        yield "collectives: none"
        return
    yield f"{'collective':<22}{'axes':<18}{'runs':>6}{'arrays':>12}{'sent':>12}"
    for s in report.sent[:MAX_SENT]:
        axes = "+".join(s.axes) or f"groups of {s.group_size}"
        where = " in a loop" if s.in_loop else ""
        where += " in a branch" if s.in_conditional else ""
        yield (
            f"{s.kind:<22}{axes:<18}{s.count:>6}{human(s.bytes):>12}"
            f"{human(s.wire_bytes):>12}{where}"
        )
    yield f"each device sends {human(report.wire_bytes)}"


def seconds(value: float) -> str:
    """Format seconds with three significant digits.

    >>> seconds(0.00123), seconds(2.5), seconds(0)
    ('1.23 ms', '2.50 s', '0 s')
    """
    if not value:
        return "0 s"
    units = ((1, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
    scale, unit = next((u for u in units if value >= u[0]), units[-1])
    number = value / scale
    decimals = 2 if number < 10 else 1 if number < 100 else 0
    return f"{number:.{decimals}f} {unit}"
