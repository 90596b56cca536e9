"""How each algorithm of the golden vectors is expressed with optax and jfleet.

A runner gives the transformation and reads the pinned state back out of it. Replicas
are simulated: ``vmap`` over a leading axis named "replica".
"""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jfleet import optax_meta as meta

AXIS = "replica"
WIRE = {"fp16": "float16", "bf16": "bfloat16"}


class Run(NamedTuple):
    tx: Any
    read: Any  # (state of one replica, updates, hyper) -> dict of pinned values
    extra: Any = lambda step, replica: {}
    local_grads: bool = False  # grads are scaled by the loss scale in the state


def names(exclude):
    return [f"^{re.escape(name)}$" for name in exclude]


def schedule(vector, every=1, shift=0):
    """Rates by step count; ``every`` > 1 where the count moves once per window."""
    rates = jnp.asarray(np.array(vector.rates(), np.float64))
    last = len(rates) - 1
    return lambda count: rates[jnp.minimum(count * every + shift, last)]


def mask_out(exclude):
    return lambda params: {name: name not in exclude for name in params}


def base_of(config, rate):
    """The inner optimizer that a vector describes."""
    parts = []
    if "clip_global_norm" in config:
        parts.append(meta.clip_by_global_norm(config["clip_global_norm"]))
    kind, decay = config.get("name", "sgd"), config.get("weight_decay", 0.0)
    mask = mask_out(config.get("exclude", ()))
    adam_args = {k: config[k] for k in ("b1", "b2", "eps") if k in config}
    if decay and kind != "adamw":
        parts.append(optax.add_decayed_weights(decay, mask=mask))
    if kind == "momentum":
        parts.append(optax.trace(config["momentum"], config.get("nesterov", False)))
    elif kind in ("adam", "adamw"):
        parts.append(optax.scale_by_adam(**adam_args))
    elif kind != "sgd":
        raise NotImplementedError(kind)
    if decay and kind == "adamw":
        parts.append(optax.add_decayed_weights(decay, mask=mask))
    parts.append(optax.scale_by_learning_rate(rate))
    return optax.chain(*parts)


def find(state, kind):
    """The one node of a state tree that is of this type."""
    leaves = jax.tree.leaves(state, is_leaf=lambda s: isinstance(s, kind))
    (found,) = [s for s in leaves if isinstance(s, kind)]
    return found


def plain(vector, kind):
    tx = base_of({"name": kind, **vector.hyper, **vector.options}, schedule(vector))
    if kind == "momentum":
        return Run(tx, lambda s, u: {"trace": find(s, optax.TraceState).trace})
    return Run(tx, lambda s, u: find(s, optax.ScaleByAdamState)._asdict())


def clip(vector):
    tx = optax.chain(
        meta.clip_by_global_norm(vector.hyper["max_norm"]),
        base_of(vector.hyper["base"], schedule(vector)),
    )

    def read(state, updates):
        clipped = jax.tree.map(lambda u: -u / vector.rates()[0], updates)
        pinned = {"norm": find(state, meta.ClipState).norm}
        rate_is_one = vector.hyper["base"] == {"name": "sgd", "lr": 1.0}
        return {**pinned, "clipped": clipped} if rate_is_one else pinned

    return Run(tx, read)


def gradient_merge(vector, sync="each"):
    k = vector.hyper["k_steps"]
    # The rate of the call that closes the window counts.
    base = base_of(vector.hyper["base"], schedule(vector, every=k, shift=k - 1))
    axis = AXIS if vector.replicas > 1 else None
    tx = meta.gradient_merge(base, k, vector.hyper["avg"], sync=sync, axis_name=axis)
    if sync == "last":  # every replica has its own accumulator
        return Run(tx, lambda s, u: {"count": s.count})
    return Run(tx, lambda s, u: {"count": s.count, "acc": s.acc})


def localsgd(vector):
    base = base_of(vector.hyper["base"], schedule(vector))
    hyper = {k: v for k, v in vector.hyper.items() if k != "base"}
    return Run(
        meta.localsgd(base, axis_name=AXIS, **hyper),
        lambda s, u: {"last_sync": s.last_sync, "synced": s.synced},
    )


def adaptive_localsgd(vector):
    rate = schedule(vector)
    hyper = {k: v for k, v in vector.hyper.items() if k != "base"}
    tx = meta.adaptive_localsgd(
        base_of(vector.hyper["base"], rate),
        learning_rate=rate,
        axis_name=AXIS,
        **hyper,
        **vector.options,
    )

    def read(s, u):
        return {"last_sync": s.last_sync, "synced": s.synced, "k": s.k_steps}

    return Run(tx, read, lambda step, r: {"value": step["loss"][r]})


def dgc(vector):
    hyper = {k: v for k, v in vector.hyper.items() if k != "lr"}
    hyper["sparsity"] = tuple(hyper["sparsity"])
    tx = meta.dgc(schedule(vector), axis_name=AXIS, **hyper, **vector.options)

    def read(s, u):
        v = {n: jnp.zeros_like(s.u[n]) if x is None else x for n, x in s.v.items()}
        sent = {n: k for n, k in s.num_sent.items()}
        return {"u": s.u, "v": v, "k": sent, "sparsity": s.sparsity}

    return Run(tx, read)


def layerwise(factory, fields):
    def runner(vector):
        hyper = {k: v for k, v in vector.hyper.items() if k not in ("lr", "exclude")}
        exclude = names(vector.hyper.get("exclude", ()))
        tx = factory(schedule(vector), **hyper, exclude=exclude, **vector.options)
        return Run(tx, lambda s, u: {name: getattr(s, name) for name in fields})

    return runner


def loss_scaling(vector):
    hyper = dict(vector.hyper)
    base = hyper.pop("base")
    k = hyper.pop("merge_k", 1) * 1
    k = vector.options.get("merge_k", k)
    options = {n: v for n, v in vector.options.items() if n != "merge_k"}
    hyper["init_scale"] = hyper.pop("init")
    inner = base_of(base, schedule(vector, every=k, shift=k - 1))
    tx = meta.dynamic_loss_scaling(
        optax.chain(meta.replica_mean(axis_name=AXIS), inner),
        axis_name=AXIS,
        **hyper,
        **options,
    )
    tx = meta.gradient_merge(tx, k) if k > 1 else tx

    def read(state, updates):
        s = find(state, meta.LossScaleState)
        pinned = {n: getattr(s, n) for n in ("scale", "good", "bad", "found_inf")}
        inner_state = {}
        if base["name"] == "momentum":
            inner_state = {"trace": find(s.inner, optax.TraceState).trace}
        elif base["name"] == "adam":
            inner_state = find(s.inner, optax.ScaleByAdamState)._asdict()
        return {**pinned, "base": inner_state}

    return Run(tx, read, local_grads=True)


def lowp_allreduce(vector):
    tx = meta.fp16_allreduce(
        optax.chain(keep(), base_of(vector.hyper["base"], schedule(vector))),
        dtype=WIRE[vector.options["wire"]],
        order=vector.options.get("order", "scale_then_cast"),
        on_overflow="pass",
        axis_name=AXIS,
    )
    return Run(tx, lambda s, u: {"reduced": find(s, Kept).value})


class Kept(NamedTuple):
    value: Any


def keep():
    """Remember what passed through."""
    return optax.GradientTransformation(
        lambda params: Kept(params), lambda u, s, p=None: (u, Kept(u))
    )


RUNNERS = {
    **{k: lambda v, k=k: plain(v, k) for k in ("momentum", "adam", "adamw")},
    "clip_global_norm": clip,
    "gradient_merge": gradient_merge,
    "localsgd": localsgd,
    "adaptive_localsgd": adaptive_localsgd,
    "dgc": dgc,
    "lars": layerwise(meta.lars, ("velocity", "local_lr")),
    "lamb": layerwise(meta.lamb, ("mu", "nu", "count", "trust")),
    "loss_scaling": loss_scaling,
    "lowp_allreduce": lowp_allreduce,
}
