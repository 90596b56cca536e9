"""Plans as text for people."""

import collections
from typing import Any

MAX_ROWS = 12


def human(num_bytes: float) -> str:
    """Format bytes with three significant digits.

    >>> human(0), human(1536), human(3 * 2**30)
    ('0 B', '1.50 KiB', '3.00 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(num_bytes) < 1024 or unit == "PiB":
            break
        num_bytes /= 1024
    decimals = 0 if unit == "B" else _decimals(num_bytes)
    return f"{num_bytes:.{decimals}f} {unit}"


def _decimals(value: float) -> int:
    return 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0


def table(plan: Any) -> str:
    """Summary by kind, then the largest arrays with spec and reason."""
    mesh = " x ".join(f"{axis}={size}" for axis, size in plan.mesh_shape)
    lines = [
        f"Plan: level {plan.level} over {'+'.join(plan.axes)}, mesh {mesh},"
        f" {plan.num_devices} devices",
        "",
        f"{'':<12}{'arrays':>8}{'whole':>12}{'per device':>12}{'split':>8}",
    ]
    for kind in ("params", "opt_state", "extra", "grads"):
        rows = plan.of_kind(kind)
        if not rows:
            continue
        total, device = plan.total_bytes(kind), plan.device_bytes(kind)
        ratio = f"{total / device:.3g}x" if device else "-"
        note = "  (during a step)" if kind == "grads" else ""
        lines.append(
            f"{kind:<12}{len(rows):>8}{human(total):>12}{human(device):>12}"
            f"{ratio:>8}{note}"
        )
    lines.append(
        f"{'at rest':<12}{'':>8}{human(plan.total_bytes()):>12}"
        f"{human(plan.device_bytes()):>12}"
    )
    lines += ["", *_row_lines(plan), *_notes(plan)]
    return "\n".join(lines)


def _row_lines(plan: Any) -> list[str]:
    """The largest parameters: where each and its optimizer state lie, and why."""
    rows = sorted(plan.of_kind("params"), key=lambda row: -row.total_bytes)
    states = _states_by_param(plan)
    cells = [("parameter", "shape", "spec", "state", "why")]
    for row in rows[:MAX_ROWS]:
        state = states.get(row.path)
        why = row.reason if state is None else state.reason.partition(": ")[2]
        cells.append(
            (
                row.path,
                f"{row.dtype}{list(row.shape)}",
                _text(row.spec),
                "-" if state is None else _text(state.spec),
                why or row.reason,
            )
        )
    widths = [max(len(c[i]) for c in cells) for i in range(4)]
    lines = [
        "  ".join([*(t.ljust(w) for t, w in zip(c, widths, strict=False)), c[4]])
        for c in cells
    ]
    if len(rows) > MAX_ROWS:
        lines.append(f"... and {len(rows) - MAX_ROWS} smaller parameters")
    return lines


def _states_by_param(plan: Any) -> dict[str, Any]:
    """The first optimizer-state row that was laid out as each parameter."""
    found: dict[str, Any] = {}
    for row in plan.of_kind("opt_state"):
        if row.reason.startswith("as '"):
            found.setdefault(row.reason[4:].partition("':")[0], row)
    return found


def _text(spec: Any) -> str:
    return str(spec).removeprefix("PartitionSpec")


def _notes(plan: Any) -> list[str]:
    """Warn of what stays whole although the level would split it."""
    kinds = ("params", "opt_state") if plan.level == "p_g_os" else ("opt_state",)
    whole = [row for kind in kinds for row in plan.whole(kind)]
    notes = []
    if whole:
        counted = collections.Counter(row.reason for row in whole)
        size = human(sum(row.device_bytes for row in whole))
        notes.append(f"{len(whole)} arrays stay whole on every device ({size}):")
        notes += [f"  {count} x {reason}" for reason, count in counted.most_common(5)]
    if plan.level == "os":
        notes.append(
            "At level os the gradients are left to XLA, which may reduce-scatter them:"
            " the program can then equal that of os_g."
        )
    return ["", *notes] if notes else []


def diff(one: Any, other: Any) -> list[str]:
    """Differences between two plans, a line each."""
    lines = []
    for name in ("level", "mesh_shape", "axes"):
        a, b = getattr(one, name), getattr(other, name)
        if a != b:
            lines.append(f"{name}: {a} -> {b}")
    before = {(r.kind, r.path): r for r in one.rows}
    after = {(r.kind, r.path): r for r in other.rows}
    for key in [*before, *(k for k in after if k not in before)]:
        name = ":".join(key)
        a, b = before.get(key), after.get(key)
        if b is None:
            lines.append(f"{name}: only in the first plan")
        elif a is None:
            lines.append(f"{name}: only in the second plan")
        else:
            lines += [
                f"{name}: {field} {getattr(a, field)} -> {getattr(b, field)}"
                for field in ("shape", "dtype", "spec", "device_bytes")
                if getattr(a, field) != getattr(b, field)
            ]
    return lines
