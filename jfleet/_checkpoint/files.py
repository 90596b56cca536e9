"""The files of a checkpoint: their checksums, and that they are really there.

Links are refused: a checkpoint has none, and one could lead out of its folder.
"""

import os
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from etils import epath

from jfleet._errors import CheckpointError, listing

_BLOCK_BYTES = 4 << 20

Digests = Mapping[str, tuple[int, int]]
"""Size in bytes and CRC-32 of files, by path below their folder."""


def damaged(output: epath.Path, what: str) -> CheckpointError:
    """Return the error for a checkpoint whose files changed after the save."""
    return CheckpointError(
        f"checkpoint {output} is damaged: {what}; restore the folder from a copy or"
        " load another checkpoint"
    )


def is_remote(path: epath.Path) -> bool:
    """True for object stores, where there are no links and nothing to synchronise."""
    return "://" in os.fspath(path)


def is_link(path: epath.Path) -> bool:
    """True for a symbolic link."""
    return not is_remote(path) and os.path.islink(os.fspath(path))


def sync_folder(folder: epath.Path) -> None:
    """Make what was created or renamed in a folder survive a power cut."""
    if is_remote(folder):
        return
    descriptor = os.open(os.fspath(folder), os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folders(folder: epath.Path) -> None:
    """The same for a folder and all folders below it."""
    sync_folder(folder)
    for entry in folder.iterdir():
        if entry.is_dir():
            sync_folders(entry)


def digest(folder: epath.Path, part: int, parts: int) -> dict[str, tuple[int, int]]:
    """Return size and CRC-32 of every ``parts``-th file below a folder."""
    names = _names(folder, folder)[part::parts]
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda name: _crc(folder / name), names)
        return dict(zip(names, found, strict=True))


def _names(folder: epath.Path, root: epath.Path) -> list[str]:
    """Paths of all files below a folder, sorted."""
    found = []
    for entry in folder.iterdir():
        name = entry.relative_to(root).as_posix()
        if is_link(entry):
            raise OSError(f"{name} is a link")
        found += _names(entry, root) if entry.is_dir() else [name]
    return sorted(found)


def _crc(path: epath.Path) -> tuple[int, int]:
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return size, crc


def check_files(
    output: epath.Path, arrays: str | None, files: Digests, part: int, parts: int
) -> None:
    """Compare the files of the arrays with what the manifest says.

    Every one of ``parts`` processes checks its share of the bytes; all check names.

    Raises:
        CheckpointError: files are missing or have other bytes than were written.
    """
    if arrays is None:
        return
    folder = _folder(output, arrays)
    try:
        missing = sorted(set(files) - set(_names(folder, folder)))
        if missing:
            raise damaged(output, f"files are missing: {listing(missing, 5)}")
        found = digest(folder, part, parts)
    except OSError as error:
        raise damaged(output, f"a file cannot be read ({error})") from error
    _refuse_changed(output, [n for n, d in found.items() if files.get(n, d) != d])


def check_sizes(output: epath.Path, arrays: str | None, files: Digests) -> None:
    """Compare only the sizes, which reads none of the bytes.

    Raises:
        CheckpointError: files are missing or have another size.
    """
    if arrays is None:
        return
    folder = _folder(output, arrays)
    try:
        found = {name: (folder / name).stat().length for name in files}
    except OSError as error:
        raise damaged(output, f"a file cannot be read ({error})") from error
    _refuse_changed(output, [n for n, size in found.items() if files[n][0] != size])


def _folder(output: epath.Path, arrays: str) -> epath.Path:
    folder = output / arrays
    if is_link(folder):
        raise damaged(output, f"folder {arrays} is a link")
    if not folder.is_dir():
        raise damaged(output, f"folder {arrays} is missing")
    return folder


def _refuse_changed(output: epath.Path, names: list[str]) -> None:
    if names:
        raise damaged(output, f"files have changed since the save: {listing(names, 5)}")
