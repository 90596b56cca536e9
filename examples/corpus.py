"""Text to train on, as bytes: files of the user's, or Python's own library.

The order of the files and of the batches never changes, so that two runs with
the same arguments see the same bytes, whatever the number of devices.
"""

import dataclasses
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np

HELD_OUT_PART = 10  # one file, or one part of a file, in ten is never trained on


class CorpusError(ValueError):
    """The text cannot be read, or there is not enough of it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Bytes to train on and bytes to judge by."""

    train: np.ndarray
    held_out: np.ndarray
    num_files: int
    source: str
    length: int  # bytes that a row predicts

    def batch(self, step: int, num_rows: int) -> np.ndarray:
        """Return the (num_rows, length + 1) int32 training batch of one step."""
        num_starts = len(self.train) - self.length
        starts = np.random.default_rng(step).integers(0, num_starts, num_rows)
        return self._rows(self.train, starts)

    def held_out_rows(self, num_rows: int) -> np.ndarray:
        """Return evenly spaced rows of the held-out text; the same ones every time."""
        last = len(self.held_out) - self.length - 1
        return self._rows(self.held_out, np.linspace(0, last, num_rows).astype(int))

    def _rows(self, text: np.ndarray, starts: np.ndarray) -> np.ndarray:
        columns = np.arange(self.length + 1)
        return text[starts[:, None] + columns[None, :]].astype(np.int32)


def load(paths: Sequence[str | Path] | None, *, length: int) -> Corpus:
    """Read the files, or Python's standard library when there are none.

    Args:
        paths: files to read in the given order.
        length: bytes per training row.

    Raises:
        CorpusError: a file is missing or unreadable, or the text is too short.
    """
    files = [Path(path) for path in paths] if paths else _standard_library()
    texts = [_read(file) for file in files]
    if len(texts) >= 2 * HELD_OUT_PART:
        held_out = texts[HELD_OUT_PART - 1 :: HELD_OUT_PART]
        train = [t for i, t in enumerate(texts, start=1) if i % HELD_OUT_PART]
    else:
        cuts = [len(text) - len(text) // HELD_OUT_PART for text in texts]
        train = [text[:cut] for text, cut in zip(texts, cuts, strict=True)]
        held_out = [text[cut:] for text, cut in zip(texts, cuts, strict=True)]
    corpus = Corpus(
        train=np.frombuffer(b"".join(train), np.uint8),
        held_out=np.frombuffer(b"".join(held_out), np.uint8),
        num_files=len(files),
        length=length,
        source="your text" if paths else "Python's standard library",
    )
    if min(len(corpus.train), len(corpus.held_out)) < length + 1:
        total = len(corpus.train) + len(corpus.held_out)
        raise CorpusError(
            f"the text must have at least {HELD_OUT_PART * (length + 1):,} bytes "
            f"for rows of {length} bytes, got {total:,} in {len(files)} file(s); "
            f"name more files after --data or choose a shorter --length"
        )
    return corpus


def _standard_library() -> list[Path]:
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise CorpusError(
            f"cannot read {str(path)!r}: {reason}; --data takes readable text files"
        ) from error
