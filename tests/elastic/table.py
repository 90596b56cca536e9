"""Strategies whose states can become one another, and what must come of each pair.

The expected values are worked out on the host from what was saved, by the meaning of
each leaf, with none of the code that loads.
"""

import functools
import math
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

import jfleet
from jfleet._tree import leaves_with_paths
from tests.save_helpers import make_mesh

ADAM = {"mu", "nu", "adam count"}
SCALE = {"scale", "good", "bad", "found_inf", "num_skipped"}
LOCAL = {"local count", "last_sync", "synced", "num_syncs"}
SHOWN = {"shown"}
STRATEGIES = {
    "plain": ({}, ADAM),
    "os": ({"sharding": {"level": "os"}}, ADAM),
    "os_g": ({"sharding": {"level": "os_g"}}, ADAM),
    "p_g_os": ({"sharding": {"level": "p_g_os"}}, ADAM),
    "clip": ({"clip": {}}, ADAM | {"clip count", "norm", "factor"}),
    "merge": ({"gradient_merge": {"k_steps": 2}}, ADAM),
    "amp": ({"amp": {"dtype": "bfloat16"}}, ADAM | SCALE | {"master"}),
    "amp_os_g": (
        {"amp": {"dtype": "float16"}, "sharding": {"level": "os_g"}},
        ADAM | SCALE | {"master"},
    ),
    "fp16": (
        {"fp16_allreduce": {"error_feedback": True}},
        ADAM | {"reducer found_inf", "reducer num_skipped", "residual"},
    ),
    "local": ({"localsgd": {"k_steps": 4}}, ADAM | LOCAL | SHOWN),
    "local_amp": (
        {"localsgd": {"k_steps": 4}, "amp": {"dtype": "bfloat16"}},
        ADAM | LOCAL | SHOWN | SCALE | {"master"},
    ),
    "adaptive": (
        {"adaptive_localsgd": {"init_k_steps": 2}},
        ADAM
        | SHOWN
        | {f"adaptive {x}" for x in ("count", "last_sync", "synced", "num_syncs")}
        | {"k_steps", "start_loss", "start_rate", "reason"},
    ),
    "dgc": (
        {"dgc": {"min_size": 1}},
        {"dgc count", "sparsity", "num_sent", "u", "v"},
    ),
}
"""Switches, and what the state holds beside step and parameters."""
SHAPES = {"w": (24, 16), "deep": {"b": (16,), "n": (8, 3)}}


@functools.cache
def optimizer(name, num_devices):
    switches, _ = STRATEGIES[name]
    strategy = jfleet.DistributedStrategy(**dict.fromkeys(switches, True))
    for switch, options in switches.items():
        if options:
            setattr(strategy, f"{switch}_configs", options)
    if "dgc" in switches:
        base = jfleet.optimizer(optax.sgd, learning_rate=0.01, momentum=0.9)
    else:
        base = jfleet.optimizer(optax.adam, learning_rate=0.01)
    return jfleet.distributed_optimizer(base, strategy, mesh=make_mesh(num_devices))


def has_masters(name):
    return "master" in STRATEGIES[name][1]


def created(name, num_devices, seed):
    """A state of a strategy; on one device some of them say that they do nothing."""
    dtype = jnp.bfloat16 if has_masters(name) else jnp.float32
    rng = np.random.default_rng(seed)
    params = jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape), dtype),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if num_devices == 1 else "error")
        state = optimizer(name, num_devices).create(params)
    kinds = {kind for kind, _ in kinds_of(state).values()} - {"step", "params"}
    assert kinds == STRATEGIES[name][1] or num_devices == 1
    return state


def scrambled(state, seed):
    """The state with other values in every leaf, which differ between replicas."""
    rng = np.random.default_rng(seed)

    def scramble(x):
        values = np.asarray(rng.uniform(0.5, 4.0, x.shape))
        if x.dtype == bool:
            values = values > 2
        return jax.device_put(values.astype(x.dtype), x.sharding)

    return jax.tree.map(scramble, state)


def kinds_of(state):
    """What each leaf means: (kind, parameter or "") by path."""
    paths = ["/".join(p) for p, _ in leaves_with_paths(state)]
    params = [p.removeprefix("params/") for p in paths if p.startswith("params/")]
    return {path: _kind(path, params, set(paths)) for path in paths}


def _kind(path, params, paths):
    if path.startswith("params/"):
        return "params", path.removeprefix("params/")
    for param in params:
        if path.endswith(f"/{param}"):
            field = path.removesuffix(f"/{param}").split("/")[-1]
            return field, param
    head, _, field = path.rpartition("/")
    if head.split("/")[0] == "shown":
        return "shown", field
    if head == "replica_state":
        return f"reducer {field}", ""
    if f"{head}/sparsity" in paths and field == "count":
        return "dgc count", ""
    if f"{head}/start_loss" in paths and f"{head}/last_sync" in paths:
        four = ("count", "last_sync", "synced", "num_syncs")
        return (f"adaptive {field}" if field in four else field), ""
    if field == "count":
        near = {"last_sync": "local", "norm": "clip"}
        kind = [k for f, k in near.items() if f"{head}/{f}" in paths]
        return f"{kind[0] if kind else 'adam'} count", ""
    return field, ""


def values_of(state):
    """Values on the host by meaning."""
    kinds = kinds_of(state)
    found = {
        kinds["/".join(path)]: np.asarray(x) for path, x in leaves_with_paths(state)
    }
    assert len(found) == len(kinds)
    return found


def one(kind, param, value):
    """The value of one replica: the mean, or the first of what has none."""
    shape = _shape(param) if param in _PARAMS else ()
    if value.ndim == len(shape) or kind == "num_sent":
        return value
    if (
        not np.issubdtype(value.dtype, np.floating)
        and value.dtype != ml_dtypes.bfloat16
    ):
        return value[0]
    return value.astype(np.float64).mean(axis=0)


_PARAMS = ("w", "deep/b", "deep/n")


def _shape(param):
    found = SHAPES
    for step in param.split("/"):
        found = found[step]
    return found


def expected(source, target, new):
    """What every leaf must be after a load: by meaning, or None for "as it was".

    Args:
        source: values of the saved state, by meaning.
        target: values of the state that is loaded into.
        new: name of the strategy that is loaded into.
    """
    exact = {
        p: source.get(("master", p), source["params", p]) for p in _PARAMS
    }  # The most exact values there are.
    out = {}
    for (kind, param), old in target.items():
        if kind in ("params", "master"):
            same = source.get((kind, param))
            fits = same is not None and same.dtype == old.dtype
            value = same if fits else exact[param]
        else:
            value = source.get((kind, param))
        if value is not None:
            if value.shape != old.shape:
                value = one(kind, param, value)
            value = np.broadcast_to(value, old.shape).astype(old.dtype)
        out[kind, param] = value
    return out


def loss(params, rows):
    y = jnp.tanh(rows @ params["w"]) + params["deep"]["b"]
    y = y[:, :8] @ params["deep"]["n"]
    return jnp.mean(jnp.square(y.astype(jnp.float32)))


@functools.cache
def step_of(name, num_devices):
    return optimizer(name, num_devices).minimize(loss, donate=False)


def rows_for(num_devices):
    num = 2 * math.lcm(num_devices, 8)
    return np.random.default_rng(5).normal(size=(num, 24)).astype(np.float32)
