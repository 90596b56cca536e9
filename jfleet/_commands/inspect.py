"""``inspect``: what a checkpoint holds, read from its manifest alone."""

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from rich.table import Table
from rich.text import Text

from jfleet._checkpoint.commit import folder_of
from jfleet._checkpoint.manifest import (
    Entry,
    Manifest,
    damaged,
    decode_scalar,
    dtype_of,
    read_manifest,
)
from jfleet._commands._console import make_console
from jfleet._plan_text import human
from jfleet._tree import num_elements

_INFO = ("jfleet", "jax", "orbax", "state", "step", "level")
_INFO += ("num_devices", "num_processes")


def add_parser(subparsers: Any) -> None:
    """Add the parser of this command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "inspect",
        help="show what a checkpoint holds",
        description="Show what a checkpoint holds: the tree of its arrays with shapes"
        " and bytes, and the level, mesh and step it was saved at. No array is read.",
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of a save")
    parser.add_argument("--json", action="store_true", help="write JSON")


def run(args: argparse.Namespace) -> int:
    """Show a checkpoint."""
    found = describe(args.checkpoint)
    print(json.dumps(found, indent=1)) if args.json else _show(found)
    return 0


def describe(checkpoint: str) -> dict[str, Any]:
    """Everything that the command writes, as JSON has it.

    Raises:
        CheckpointError: there is no checkpoint, it is incomplete, or it is damaged.
    """
    folder = folder_of(checkpoint)
    manifest = read_manifest(folder)
    try:
        leaves = [_leaf(manifest, entry) for entry in manifest.entries]
        json.dumps(manifest.info)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise damaged(folder, f"an entry is not valid ({error})") from error
    return {
        "checkpoint": str(folder),
        **{name: manifest.info.get(name) for name in _INFO},
        "meshes": [dict(mesh) for mesh in manifest.meshes],
        "num_arrays": sum(leaf["bytes"] is not None for leaf in leaves),
        "array_bytes": sum(leaf["bytes"] or 0 for leaf in leaves),
        "file_bytes": sum(size for size, _ in manifest.files.values()),
        "leaves": leaves,
    }


def _leaf(manifest: Manifest, entry: Entry) -> dict[str, Any]:
    is_array = entry.kind in ("array", "key")
    mesh = None if entry.mesh is None else dict(manifest.meshes[entry.mesh])
    same_as = None
    if entry.same_as is not None:
        paths = {e.name: e.path for e in manifest.entries}
        same_as = "/".join(map(str, paths[entry.same_as]))
    return {
        "path": "/".join(map(str, entry.path)),
        "keys": list(entry.path),
        "kind": entry.kind,
        "shape": list(entry.shape) if is_array else None,
        "dtype": entry.dtype if is_array else None,
        "bytes": _num_bytes(entry) if is_array else None,
        "spec": _spec(entry),
        "mesh": mesh,
        "same_as": same_as,
        "value": _value(entry),
    }


def _num_bytes(entry: Entry) -> int:
    """Bytes of the whole array; none where another entry holds them."""
    if entry.same_as is not None:
        return 0
    if entry.kind == "array":
        return num_elements(entry.shape) * dtype_of(entry.dtype).itemsize
    data = jax.eval_shape(
        lambda: jax.random.key_data(jax.random.key(0, impl=entry.dtype))
    )
    return num_elements((*entry.shape, *data.shape)) * np.dtype(data.dtype).itemsize


def _spec(entry: Entry) -> list[Any] | None:
    if entry.spec is None:
        return None
    spec = [list(e) if isinstance(e, tuple) else e for e in entry.spec]
    for part in spec:
        names = part if isinstance(part, list) else [part]
        if part is not None and not all(isinstance(name, str) for name in names):
            raise ValueError(f"{part!r} is no entry of a spec")
    return spec


def _value(entry: Entry) -> Any:
    if entry.kind in ("array", "key", "static"):
        return None
    value = decode_scalar(entry.kind, entry.value)
    if isinstance(value, complex) or (isinstance(value, float) and value - value != 0):
        return repr(value)  # JSON has neither complex nor infinite numbers
    return value


def _show(found: Mapping[str, Any]) -> None:
    console = make_console()
    console.print(_heading(found), soft_wrap=True)
    table = Table()
    for name in ("leaf", "type", "shape", "bytes", "spec"):
        justify = "right" if name == "bytes" else "left"
        table.add_column(name, justify=justify, overflow="fold")
    for cells in _rows(found["leaves"]):
        table.add_row(*(Text(cell) for cell in cells))
    console.print(table)


def _heading(found: Mapping[str, Any]) -> str:
    def known(name: str) -> Any:
        return "unknown" if found[name] is None else found[name]

    meshes = [" x ".join(f"{a}={n}" for a, n in m.items()) for m in found["meshes"]]
    return "\n".join(
        [
            found["checkpoint"],
            f"step {known('step')}, level {known('level')}, {known('state')}",
            f"mesh {'; '.join(meshes) or 'none'}; saved by {known('num_processes')}"
            f" processes with {known('num_devices')} devices, jfleet"
            f" {known('jfleet')}, jax {known('jax')}",
            f"{found['num_arrays']} arrays, {human(found['array_bytes'])};"
            f" {human(found['file_bytes'])} in files",
        ]
    )


def _rows(leaves: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """The tree, depth first: a row with the sum for every branch, then its leaves."""
    rows = []
    open_at: tuple[Any, ...] = ()
    for leaf in leaves:
        keys = tuple(leaf["keys"]) or ("(root)",)
        for depth in range(len(keys) - 1):
            if open_at[: depth + 1] != keys[: depth + 1]:
                rows.append(_branch(keys[: depth + 1], leaves))
        open_at = keys[:-1]
        rows.append(_leaf_row(len(keys) - 1, str(keys[-1]), leaf))
    return rows


def _branch(
    keys: tuple[Any, ...], leaves: Sequence[Mapping[str, Any]]
) -> tuple[str, ...]:
    below = [x for x in leaves if tuple(x["keys"][: len(keys)]) == keys]
    size = sum(x["bytes"] or 0 for x in below)
    return ("  " * (len(keys) - 1) + str(keys[-1]), "", "", human(size), "")


def _leaf_row(depth: int, name: str, leaf: Mapping[str, Any]) -> tuple[str, ...]:
    name = "  " * depth + name
    if leaf["shape"] is None:
        what = "" if leaf["kind"] == "static" else repr(leaf["value"])
        return (name, leaf["kind"], what, "", "")
    key = "key " if leaf["kind"] == "key" else ""
    shape = str(tuple(leaf["shape"]))
    if leaf["same_as"] is not None:
        return (name, f"{key}{leaf['dtype']}", shape, "", f"same as {leaf['same_as']}")
    return (name, f"{key}{leaf['dtype']}", shape, human(leaf["bytes"]), _text(leaf))


def _text(leaf: Mapping[str, Any]) -> str:
    if leaf["spec"] is None:
        return ""
    entries = [tuple(e) if isinstance(e, list) else e for e in leaf["spec"]]
    return f"P({', '.join(map(repr, entries))})"
