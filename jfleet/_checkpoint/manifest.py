"""The manifest of a checkpoint: what is stored, under which names, with which bytes.

A checkpoint is a folder::

    output/manifest.json    what is in it; replacing this file completes a save
    output/arrays.<n>/      the arrays, written by Orbax

The manifest is the only authority. It is put in place last, by one atomic rename, so
a folder without it is an interrupted save, and during an overwrite the old manifest
keeps naming the old arrays. It lists the size and checksum of every file of the
arrays and carries a checksum of itself.
"""

import dataclasses
import json
import os
import re
import struct
import urllib.parse
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from etils import epath

from jfleet._checkpoint.files import damaged, is_link, is_remote, sync_folder
from jfleet._errors import CheckpointError

FORMAT = 1
FILE_NAME = "manifest.json"
ARRAYS_NAME = re.compile(r"arrays\.(0|[1-9][0-9]{0,18})")
KINDS = ("array", "key", "bool", "int", "float", "complex", "str", "static")
_COMPLEX = ("complex64", "complex128")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One leaf of a stored state."""

    path: tuple[str | int, ...]
    """Steps from the root; integers for list indices and integer dict keys."""
    kind: str
    """One of ``KINDS``; the Python types are stored in the manifest itself."""
    shape: tuple[int, ...] = ()
    """Logical shape; that of the keys, not of their data, for random keys."""
    dtype: str = ""
    """Name of the element type; the implementation for random keys."""
    spec: tuple[Any, ...] | None = None
    """PartitionSpec at the time of the save, None where there was no mesh."""
    mesh: int | None = None
    """Index into ``Manifest.meshes``."""
    same_as: str | None = None
    """Name of the entry that holds this buffer, for tied arrays."""
    value: Any = None
    """The value, for the Python types."""
    replicas: int = 0
    """Size of the first dim, where each replica has a value of its own; else 0."""
    owner: str = ""
    """Name of the innermost NamedTuple that the leaf is in, such as an optax state."""

    @property
    def one_shape(self) -> tuple[int, ...]:
        """Shape of one replica's value."""
        return self.shape[1:] if self.replicas else self.shape

    @property
    def name(self) -> str:
        """Name of the leaf in the array store."""
        return entry_name([str(step) for step in self.path])

    @property
    def stored(self) -> bool:
        """True if the leaf has bytes of its own in the array store."""
        return (
            self.kind in ("array", "key")
            and self.same_as is None
            and 0 not in self.shape
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything about a checkpoint but the numbers."""

    arrays: str | None
    """Folder of the arrays; None if no leaf has any bytes."""
    entries: tuple[Entry, ...]
    """The leaves, in the order of ``jax.tree.leaves``."""
    files: Mapping[str, tuple[int, int]]
    """Size in bytes and CRC-32 of every file below ``arrays``."""
    meshes: tuple[Mapping[str, int], ...] = ()
    """Axis sizes of the meshes that the arrays lived on."""
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Versions, level, step, type of the state; for people, never read back."""
    run: Mapping[str, Any] | None = None
    """Of a checkpoint in a run's directory: its ``step``, and the ``extra`` values."""


def entry_name(path: Sequence[str]) -> str:
    """Turn a path into a name that is unique and cannot leave its folder.

    >>> entry_name(["params", "a/b", "..", ""])
    'params.a%2Fb.%2E%2E.%empty'
    """
    steps = [
        urllib.parse.quote(step, safe="", errors="surrogatepass").replace(".", "%2E")
        for step in path
    ]
    return ".".join(step or "%empty" for step in steps) if steps else "%root"


def encode_scalar(value: bool | int | float | complex | str) -> Any:
    """Turn a Python value into JSON that gives back every bit.

    >>> encode_scalar(7), encode_scalar(True), encode_scalar(0.5)
    ('7', True, '3fe0000000000000')
    """
    if isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return struct.pack(">d", value).hex()
    return struct.pack(">dd", value.real, value.imag).hex()


def decode_scalar(kind: str, value: Any) -> Any:
    """Undo ``encode_scalar``."""
    if kind == "float":
        return struct.unpack(">d", bytes.fromhex(value))[0]
    if kind == "complex":
        return complex(*struct.unpack(">dd", bytes.fromhex(value)))
    if kind == "int" and isinstance(value, str):
        return int(value)
    if (kind, type(value)) in (("bool", bool), ("str", str)):
        return value
    raise ValueError(f"{value!r} is no {kind}")


def supported(dtype: Any) -> bool:
    """True for element types that can be stored."""
    dtype = np.dtype(dtype)
    if hasattr(ml_dtypes, dtype.name):
        return dtype.itemsize == 1 or dtype.name == "bfloat16"
    return (dtype.kind in "biuf" and dtype.itemsize <= 8) or dtype.name in _COMPLEX


def dtype_of(name: str) -> np.dtype:
    """Return the element type of that name.

    >>> dtype_of("bfloat16").itemsize
    2
    """
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    if not supported(dtype):
        raise ValueError(f"element type {name!r} cannot be stored")
    return dtype


def write_manifest(output: epath.Path, manifest: Manifest) -> None:
    """Put the manifest in place in one step, which completes the save."""
    body = dataclasses.asdict(manifest)
    text = _canonical(body)
    whole = {"format": FORMAT, "crc32": zlib.crc32(text.encode()), **body}
    temporary = output / f"{FILE_NAME}.tmp"
    with temporary.open("w") as file:
        file.write(json.dumps(whole, indent=1))
        file.flush()
        if not is_remote(output):
            os.fsync(file.fileno())
    temporary.replace(output / FILE_NAME)
    for folder in (output, output.parent):
        sync_folder(folder)


def _canonical(body: Any) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"))


def read_manifest(output: Any) -> Manifest:
    """Read what a checkpoint holds; needs none of the devices it was saved from.

    Args:
        output: the folder given to ``save_group_sharded_model``.

    Returns:
        The manifest.

    Raises:
        CheckpointError: there is no checkpoint, it is incomplete, or it is damaged.
    """
    output = epath.Path(output)
    if is_link(output / FILE_NAME):
        raise damaged(output, f"{FILE_NAME} is a link")
    try:
        text = (output / FILE_NAME).read_text()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(_why_no_manifest(output)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise damaged(output, f"{FILE_NAME} cannot be read ({error})") from error
    try:
        return _parse(json.loads(text))
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise damaged(output, f"{FILE_NAME} is not valid ({error})") from error


def _why_no_manifest(output: epath.Path) -> str:
    if not output.exists():
        return f"checkpoint {output} does not exist; give the folder of a save"
    if not output.is_dir():
        return f"{output} is a file, not a checkpoint; give the folder of a save"
    if is_interrupted(output):
        return (
            f"checkpoint {output} is incomplete (interrupted save): it has no"
            f" {FILE_NAME}; load another one, or save again with overwrite=True"
        )
    return f"{output} holds no checkpoint (no {FILE_NAME}); give the folder of a save"


def is_interrupted(output: epath.Path) -> bool:
    """True if everything in a folder without a manifest is the rest of a save."""
    names = [entry.name for entry in output.iterdir()]
    return bool(names) and all(is_own(name) for name in names)


def is_own(name: str) -> bool:
    """True for the names that a save makes inside ``output``."""
    stem = name.partition(".orbax-checkpoint-tmp")[0]
    return name == f"{FILE_NAME}.tmp" or ARRAYS_NAME.fullmatch(stem) is not None


def _parse(whole: dict[str, Any]) -> Manifest:
    if whole["format"] != FORMAT:
        raise CheckpointError(
            f"the checkpoint has format {whole['format']!r}, this jfleet reads"
            f" {FORMAT}; update jfleet"
        )
    body = {k: v for k, v in whole.items() if k not in ("format", "crc32")}
    if zlib.crc32(_canonical(body).encode()) != whole["crc32"]:
        raise ValueError("its checksum does not match its text")
    if body["arrays"] is not None and not ARRAYS_NAME.fullmatch(body["arrays"]):
        raise ValueError(f"{body['arrays']!r} is no name of an arrays folder")
    manifest = Manifest(
        arrays=body["arrays"],
        entries=tuple(_parse_entry(entry) for entry in body["entries"]),
        files={_inside(k): (int(n), int(crc)) for k, (n, crc) in body["files"].items()},
        meshes=tuple(dict(mesh) for mesh in body["meshes"]),
        info=dict(body["info"]),
        run=_parse_run(body.get("run")),
    )
    _check_names(manifest)
    return manifest


def _inside(name: str) -> str:
    """Return the path of a file, if it stays in its folder."""
    if any(step in ("", ".", "..") for step in name.split("/")) or "\\" in name:
        raise ValueError(f"{name!r} is no path below a folder")
    return name


def _parse_run(raw: Any) -> dict[str, Any] | None:
    if raw is None:
        return None
    run = {"step": raw["step"], "extra": raw["extra"]}
    if type(run["step"]) is not int or run["step"] < 0:
        raise ValueError(f"{run['step']!r} is no step")
    return run


def _parse_entry(raw: dict[str, Any]) -> Entry:
    fields = dict(raw)
    fields["path"] = tuple(fields["path"])
    fields["shape"] = tuple(fields["shape"])
    if fields["spec"] is not None:
        fields["spec"] = tuple(
            tuple(e) if isinstance(e, list) else e for e in fields["spec"]
        )
    entry = Entry(**fields)
    if entry.kind not in KINDS:
        raise ValueError(f"unknown kind {entry.kind!r}")
    if not all(type(step) in (str, int) for step in entry.path):
        raise ValueError(f"{entry.path!r} is no path")
    if not all(type(size) is int and size >= 0 for size in entry.shape):
        raise ValueError(f"{entry.shape!r} is no shape")
    if type(entry.owner) is not str:
        raise ValueError(f"{entry.owner!r} is no name of a type")
    if type(entry.replicas) is not int or entry.replicas < 0:
        raise ValueError(f"{entry.replicas!r} is no number of replicas")
    if entry.replicas and entry.shape[:1] != (entry.replicas,):
        raise ValueError(f"{entry.shape} has no dim for {entry.replicas} replicas")
    if entry.kind == "array":
        dtype_of(entry.dtype)
    if entry.kind in ("bool", "int", "float", "complex", "str"):
        decode_scalar(entry.kind, entry.value)
    return entry


def _check_names(manifest: Manifest) -> None:
    types = {
        e.name: (e.kind, e.shape, e.dtype)
        for e in manifest.entries
        if e.same_as is None
    }
    for e in manifest.entries:
        if e.same_as is not None and types.get(e.same_as) != (e.kind, e.shape, e.dtype):
            raise ValueError(f"{e.name!r} cannot be the same as {e.same_as!r}")
    if len({e.name for e in manifest.entries}) < len(manifest.entries):
        raise ValueError("two leaves have one name")
