"""What a run of ``train_lm.py`` leaves beside its checkpoint, for the next process."""

import dataclasses
import json
from pathlib import Path

FILE_NAME = "run.json"


class UsageError(ValueError):
    """Something the user asked for cannot be done; the text says what to change."""


class CheckFailed(RuntimeError):
    """Training or reloading did not do what it must."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """The settings of a finished run and what it reached."""

    level: str
    devices: int
    steps: int
    """Steps since the very beginning, earlier runs included."""
    width: int
    layers: int
    length: int
    optimizer: str
    strategy: str | None
    """JSON of the strategy that trained it, or None."""
    mesh: dict[str, int] | None
    """The mesh that was asked for, if any."""
    data: list[str]
    """Files; none means Python's standard library."""
    held_out_crc: int
    """Of the held-out bytes: losses on other bytes cannot be compared."""
    first_loss: float
    """Held-out loss before this run trained, in nats per byte."""
    last_loss: float
    """Held-out loss of the saved state."""
    reload_gap: float | None
    """Held-out loss after loading minus that when saved; None without a load."""
    fingerprint: int
    """Of every bit of the saved state."""

    @classmethod
    def read(cls, folder: Path) -> "RunRecord":
        """Read the record of a folder, or say why it is none."""
        try:
            return cls(**json.loads((folder / FILE_NAME).read_text()))
        except (OSError, TypeError, ValueError) as error:
            raise UsageError(
                f"--resume must name a run that this script saved, got {str(folder)!r}"
                f" ({error}); make one with --out {folder}"
            ) from error

    def write(self, folder: Path) -> None:
        """Write the record into the folder."""
        text = json.dumps(dataclasses.asdict(self), indent=1)
        (folder / FILE_NAME).write_text(text)

    @staticmethod
    def check_output(folder: Path) -> None:
        """Refuse a folder that holds something else; a run may be overwritten."""
        if folder.is_file():
            raise UsageError(f"--out must be a folder, got the file {str(folder)!r}")
        mine = (folder / FILE_NAME).exists()
        if folder.exists() and any(folder.iterdir()) and not mine:
            raise UsageError(
                f"--out must be a new folder or one this script made, got"
                f" {str(folder)!r}, which holds other files; choose another"
            )
        folder.mkdir(parents=True, exist_ok=True)
