"""Find the safetensors files of a model, and the array for each parameter."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jfleet._checkpoint.exporting import FORMAT, INDEX_NAME
from jfleet._checkpoint.params import Param
from jfleet._checkpoint.tensor_file import Tensor, read_header
from jfleet._errors import CheckpointError, listing
from jfleet._tree import path_str


def read_all(path: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of all files, and the names that stand for another.

    Raises:
        CheckpointError: no files, damaged ones, or ones that do not belong together.
    """
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for file, names in _files(path).items():
        found, metadata = read_header(file)
        if names is not None and {t.name for t in found} != names:
            raise CheckpointError(
                f"{file} holds other arrays than {INDEX_NAME} says; get both again"
            )
        for tensor in found:
            if tensor.name in tensors:
                raise CheckpointError(
                    f"{tensor.name!r} is in {tensors[tensor.name].file} and in {file};"
                    " give a folder with one model"
                )
            tensors[tensor.name] = tensor
        aliases |= {k: v for k, v in metadata.items() if k != FORMAT}
    return tensors, aliases


def _files(path: str) -> dict[str, set[str] | None]:
    """The files to read, and where there is an index, the names in each."""
    if os.path.isfile(path):
        return {path: None}
    if not os.path.isdir(path):
        raise CheckpointError(f"{path} does not exist; give a folder or a file")
    index = os.path.join(path, INDEX_NAME)
    if not os.path.exists(index):
        names = sorted(n for n in os.listdir(path) if n.endswith(".safetensors"))
        if not names:
            raise CheckpointError(f"{path} holds no safetensors files")
        return {os.path.join(path, name): None for name in names}
    try:
        with open(index) as file:
            places = json.load(file)["weight_map"].items()
        found: dict[str, set[str] | None] = {}
        for name, file in places:
            if os.path.basename(file) != file or file in ("", ".", ".."):
                raise ValueError(f"{file!r} is no name of a file beside it")
            names = found.setdefault(os.path.join(path, file), set())
            assert names is not None
            names.add(name)
        return found
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{index} cannot be read: {error}") from error
    except RecursionError:
        raise CheckpointError(f"{index} cannot be read: too deep") from None


def match(
    path: str,
    params: Sequence[Param],
    tensors: Mapping[str, Tensor],
    aliases: Mapping[str, str],
) -> dict[str, Tensor]:
    """Find the tensor of each parameter, or say what does not fit."""
    found, problems = {}, []
    for param in params:
        tensor = tensors.get(param.name, tensors.get(aliases.get(param.name, "")))
        where = path_str(param.path)
        if tensor is None:
            problems.append(f"{where}: {param.name!r} is not in the files (missing)")
        elif tensor.shape != param.shape:
            problems.append(
                f"{where}: stored as {list(tensor.shape)}, wanted as"
                f" {list(param.shape)}"
            )
        elif not _converts(tensor.dtype, param.value.dtype):
            problems.append(
                f"{where}: stored as {tensor.dtype.name}, wanted as"
                f" {np.dtype(param.value.dtype).name}"
            )
        else:
            found[param.name] = tensor
    used = {t.name for t in found.values()} | {p.name for p in params}
    extra = sorted(set(tensors) - used)
    if extra:
        problems.append(f"not in this state (unexpected): {listing(extra)}")
    if problems:
        shown = "".join(f"\n  {text}" for text in problems[:10])
        more = f"\n  and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise CheckpointError(
            f"{path} does not fit the parameters of this state:{shown}{more}\nbuild the"
            " model that was exported, or rename the arrays in the files"
        )
    return found


def _converts(stored: np.dtype, wanted: Any) -> bool:
    floats = all(jnp.issubdtype(d, np.floating) for d in (stored, wanted))
    return floats or stored == wanted
