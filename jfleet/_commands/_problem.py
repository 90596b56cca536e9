"""What to plan: a script with a function that describes the training, or shapes."""

import dataclasses
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jfleet._commands._user_code import user_code
from jfleet._errors import ConfigError, ConfigTypeError, listing, nearest
from jfleet.strategy import DistributedStrategy

FUNCTION = "problem"
TARGET_HELP = (
    "script.py or script.py:NAME, where NAME (default: problem) is a function without"
    " arguments that returns a mapping, or a dataclass, with: params (arrays, shapes,"
    " or a function that makes them, which is only traced), tx (the optax optimizer),"
    " and if there are any loss_fn, batch (arrays, shapes or a function that makes"
    " them), model_state, has_aux, rng (as for opt.minimize) and strategy. Giving a"
    " script runs its module, with __name__ other than '__main__'."
)
SHAPES_HELP = (
    ' Or shapes.json, {"layers/0/kernel": {"shape": [512, 256], "dtype": "float32"}},'
    " for a plan without a loss."
)
_MODULE = "_jfleet_target"
_SCRIPT = re.compile(r"(.+\.py)(?::([A-Za-z_]\w*))?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A training to plan."""

    name: str
    """What the user called it."""
    params: Any
    tx: Any
    loss_fn: Callable[..., Any] | None = None
    batch: Any = None
    model_state: Any = None
    has_aux: bool = False
    rng: bool = False
    strategy: DistributedStrategy | None = None
    script: Path | None = None
    """The file whose code the loss is; None for shapes."""

    @property
    def options(self) -> dict[str, Any]:
        """What else the loss takes and returns, as ``plan_step`` wants it."""
        names = ("model_state", "has_aux", "rng")
        return {name: getattr(self, name) for name in names}


FIELDS = tuple(
    f.name for f in dataclasses.fields(Problem) if f.name not in ("name", "script")
)
_MAKERS = ("params", "batch", "model_state")
"""What may also be a function that makes it."""


def load_problem(target: str, optimizer: str | None = None) -> Problem:
    """Read the target of a command.

    Args:
        target: see ``TARGET_HELP``.
        optimizer: name of an optax optimizer, for a target of shapes.

    Raises:
        ConfigError: no such file or function, or it describes nothing to plan.
        UserCodeError: the user's code raised an error.
    """
    if target.endswith(".json"):
        tx = _named_optimizer(optimizer or "adam")
        return Problem(name=target, params=_read_shapes(Path(target)), tx=tx)
    if optimizer is not None:
        raise ConfigError(
            f"--optimizer is for a target of shapes; {target} names its own as tx"
        )
    match = _SCRIPT.fullmatch(target)
    if match is None or not Path(match[1]).is_file():
        raise ConfigError(
            f"TARGET must be a Python file, such as script.py or script.py:{FUNCTION}, "
            f"or a .json file of shapes, and there is none named {target!r}"
        )
    script = Path(match[1])
    return _problem(target, script, _described(script, match[2] or FUNCTION))


def is_script(target: str) -> bool:
    """Whether a target names a script, by its form."""
    return _SCRIPT.fullmatch(target) is not None


def _described(script: Path, name: str) -> Mapping[str, Any]:
    """Run the module and the function, and check what came back."""
    function = _function(script, name)
    with user_code(script, all_errors=True):
        found = function()
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        fields = dataclasses.fields(found)
        found = {f.name: getattr(found, f.name) for f in fields}
    if not isinstance(found, Mapping):
        raise ConfigTypeError(
            f"{name}() must return a mapping or a dataclass with params, tx and so on, "
            f"got {type(found).__name__}"
        )
    for key in found:
        if key not in FIELDS:
            hint = nearest(str(key), FIELDS) or f"; known are {listing(FIELDS)}"
            raise ConfigError(f"{name}() returns {key!r}, which means nothing{hint}")
    missing = [key for key in ("params", "tx") if found.get(key) is None]
    if missing:
        raise ConfigError(f"{name}() must return {' and '.join(missing)} too")
    return found


def _function(script: Path, name: str) -> Callable[[], Any]:
    folder = str(script.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as if it were run
    spec = importlib.util.spec_from_file_location(_MODULE, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module  # dataclasses look up their module
    with user_code(script, all_errors=True):
        spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if function is None:
        functions = [n for n, v in vars(module).items() if inspect.isfunction(v)]
        hint = nearest(name, functions)
        raise ConfigError(
            f"{script} has no function {name!r}{hint}; write one that returns a mapping"
            ' such as {"params": params, "tx": tx, "loss_fn": loss_fn, "batch": batch},'
            f" or name another: {script}:NAME"
        )
    if not callable(function):
        raise ConfigTypeError(
            f"{script}:{name} must be a function, got {type(function).__name__}"
        )
    return function


def _problem(target: str, script: Path, found: Mapping[str, Any]) -> Problem:
    values = dict(found)
    for key in _MAKERS:
        value = values.get(key)
        # A model that is a tree of arrays may be callable; it makes no parameters.
        if callable(value) and jax.tree.leaves(value) == [value]:
            with user_code(script, all_errors=True):
                values[key] = jax.eval_shape(value)
    strategy, loss_fn = values.get("strategy"), values.get("loss_fn")
    if strategy is not None and not isinstance(strategy, DistributedStrategy):
        raise ConfigTypeError(
            "strategy must be a jfleet.DistributedStrategy, got "
            f"{type(strategy).__name__}"
        )
    if not all(callable(getattr(values["tx"], n, None)) for n in ("init", "update")):
        raise ConfigTypeError(
            f"tx must be an optax optimizer, got {type(values['tx']).__name__}"
        )
    if loss_fn is not None and not callable(loss_fn):
        raise ConfigTypeError(f"loss_fn must be a function, got {loss_fn!r}")
    if loss_fn is not None and values.get("batch") is None:
        raise ConfigError(
            "loss_fn needs the batch too; shapes are enough: "
            "jax.ShapeDtypeStruct((256, 1024), 'int32')"
        )
    return Problem(name=target, script=script, **values)


def _named_optimizer(name: str) -> Any:
    """An optax optimizer; its rate does not matter to a plan."""
    factory = getattr(optax, name, None)
    parameters = inspect.signature(factory).parameters if callable(factory) else ()
    if "learning_rate" not in parameters:
        known = [n for n in dir(optax) if n.islower() and not n.startswith("_")]
        raise ConfigError(
            f"--optimizer must be an optimizer of optax such as adam, got {name!r}"
            f"{nearest(name, known)}"
        )
    assert callable(factory)
    return factory(learning_rate=1e-3)


def _read_shapes(path: Path) -> Any:
    """Shapes as a tree: slashes in a path open branches."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict) or not found:
        raise ConfigError(
            f"{path} must hold an object of paths and shapes, such as "
            '{"layers/0/kernel": {"shape": [512, 256], "dtype": "float32"}}'
        )
    tree: dict[str, Any] = {}
    for name, entry in found.items():
        *branches, last = name.split("/")
        at: Any = tree
        for branch in branches:
            at = at.setdefault(branch, {}) if isinstance(at, dict) else at
        if not isinstance(at, dict) or last in at:
            raise ConfigError(
                f"{path}: {name!r} is both an array and a branch that holds others; "
                "rename one"
            )
        at[last] = _shape(path, name, entry)
    return tree


def _shape(path: Path, name: str, entry: Any) -> jax.ShapeDtypeStruct:
    keys = set(entry) if isinstance(entry, dict) else set()
    shape = entry.get("shape") if keys else None
    sizes = shape if isinstance(shape, list) else [None]
    if keys != {"shape", "dtype"} or not all(
        isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in sizes
    ):
        raise ConfigError(
            f'{path}: {name!r} must be like {{"shape": [512, 256], "dtype": '
            f'"float32"}}, got {json.dumps(entry)}'
        )
    return jax.ShapeDtypeStruct(tuple(sizes), _dtype(path, name, entry["dtype"]))


def _dtype(path: Path, name: str, text: Any) -> Any:
    try:
        dtype = jnp.dtype(text) if isinstance(text, str) else None
    except TypeError:
        dtype = None
    if dtype is None or not any(
        jnp.issubdtype(dtype, kind) for kind in (jnp.number, jnp.bool_)
    ):
        raise ConfigError(
            f"{path}: {name!r} has the dtype {text!r}, which no array of JAX has; "
            "write one such as float32 or bfloat16"
        )
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ConfigError(
            f"{path}: {name!r} is {dtype}, which JAX keeps in half the bits unless the "
            "environment says JAX_ENABLE_X64=1"
        )
    return dtype
