"""The demonstration: each level trains, saves, and goes on elsewhere at another level.

Every phase is a process of its own, with a command that can be typed by hand.
"""

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from run_record import CheckFailed, RunRecord

NEXT_LEVEL = {"os": "p_g_os", "os_g": "os", "p_g_os": "os_g"}
SCRIPT = Path(__file__).with_name("train_lm.py")
PASSED_ON = (
    "data",
    "batch",
    "length",
    "width",
    "layers",
    "learning_rate",
    "optimizer",
)
console = Console(highlight=False)


def run_demo(args: argparse.Namespace) -> None:
    """Run all phases, then print what was checked.

    Raises:
        CheckFailed: a phase failed.
    """
    start = time.perf_counter()
    runs = [
        _one_level(args, level, args.out or Path("demo_out")) for level in NEXT_LEVEL
    ]
    _summary(runs)
    console.print(f"everything as it must be, in {time.perf_counter() - start:.0f} s")


def _one_level(
    args: argparse.Namespace, level: str, out: Path
) -> tuple[RunRecord, RunRecord]:
    """Train and save, then resume in a new process on half of the devices."""
    console.print()
    console.rule(f"[bold]level {level}")
    first, second = out / level, out / f"{level}-then-{NEXT_LEVEL[level]}"
    devices = ["--devices", args.devices] if args.devices else []
    steps = ["--steps", args.steps, "--sample", 0]
    _phase(args, "--level", level, *devices, *steps, "--out", first)
    trained = RunRecord.read(first)

    console.print("\nIn a new process, on half of the devices, at another level:")
    devices = ["--devices", max(1, trained.devices // 2)]
    steps = ["--steps", max(1, args.steps // 2), "--sample", args.sample]
    resume = ["--resume", first, "--level", NEXT_LEVEL[level]]
    _phase(args, *resume, *devices, *steps, "--out", second)
    return trained, RunRecord.read(second)


def _phase(args: argparse.Namespace, *words: object) -> None:
    words = [str(word) for word in words]
    for name in PASSED_ON:
        value = getattr(args, name)
        if value is not None and value != args.defaults[name]:
            values = value if isinstance(value, list) else [value]
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
    console.print(f"[dim]$ python {SCRIPT.name} {shlex.join(words)}", soft_wrap=True)
    code = subprocess.run([sys.executable, str(SCRIPT), *words], check=False).returncode
    if code:
        raise CheckFailed(f"this command ended with exit status {code}")


def _summary(runs: list[tuple[RunRecord, RunRecord]]) -> None:
    table = Table(title="held-out loss, in nats per byte", title_justify="left")
    for name in ("trained at", "before", "after", "reloaded at", "the same", "later"):
        table.add_column(name)
    for trained, resumed in runs:
        gap = resumed.reload_gap
        table.add_row(
            f"{trained.level}, {trained.devices} devices",
            f"{trained.first_loss:.4f}",
            f"{trained.last_loss:.4f}",
            f"{resumed.level}, {resumed.devices} devices",
            "exactly" if gap == 0 else f"to {abs(gap or 0):.0e}",
            f"{resumed.last_loss:.4f}",
        )
    console.print()
    console.print(table)
