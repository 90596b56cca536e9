"""Does a store of arrays hold all that it should: asked before a save counts.

Orbax joins the files of all processes by what a listing of their folder shows, and does
not mind if one is not listed, as happens on file systems over a network. So the
joined store is asked for every chunk of every array.
"""

import collections
import json
import math
import os
from collections.abc import Iterable
from typing import Any

import tensorstore as ts
from etils import epath

from jfleet._checkpoint.files import is_remote
from jfleet._errors import listing


def open_store(folder: epath.Path) -> dict[str, Any]:
    """Return the TensorStore spec of the key-value store that Orbax wrote."""
    base: Any = os.fspath(folder)
    if not is_remote(folder):
        base = {"driver": "file", "path": f"{base}/"}
    return {"driver": "ocdbt", "base": base}


def check_contents(folder: epath.Path, names: Iterable[str]) -> None:
    """Raise unless a store holds every chunk of every array.

    Raises:
        OSError: parts are missing.
    """
    store = ts.KvStore.open(open_store(folder)).result()
    chunks: collections.Counter[str] = collections.Counter()
    for key in store.list().result():
        name, _, last = key.decode().rpartition("/")
        chunks[name] += last != ".zarray"
    asked = {name: store.read(f"{name}/.zarray") for name in names}
    bad = []
    for name, reading in asked.items():
        found = reading.result()
        if found.state != "value":
            bad.append(name)
            continue
        array = json.loads(found.value)
        sizes = zip(array["shape"], array["chunks"], strict=True)
        if chunks[name] != math.prod(-(-size // chunk) for size, chunk in sizes):
            bad.append(name)
    if bad:
        raise OSError(
            f"parts of {len(bad)} arrays are not in {folder} ({listing(bad, 3)}); do"
            " all processes see the same files?"
        )
