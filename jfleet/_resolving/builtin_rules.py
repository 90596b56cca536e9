"""The table: one row per feature, in the order in which a step applies them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax

from jfleet import optax_meta as meta
from jfleet._errors import ConfigError, nearest
from jfleet._resolving.rules import Context, Registry, Rule
from jfleet._settings import options as o
from jfleet._settings import placement_options as p
from jfleet.optax_meta import amp


def before(change: Callable[[Any], Any], inner: Any) -> Any:
    """Change the gradients ahead of ``inner`` without any state of its own."""
    inner = optax.with_extra_args_support(inner)

    def update(updates, state, params=None, **extra):
        return inner.update(change(updates), state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def reduce_mean(inner: Any, axes: tuple[str, ...], how: str) -> Any:
    """Put the plain reduction over ``axes`` ahead of ``inner``."""
    reducer = meta.replica_mean(axis_name=axes, reduce=how)
    return before(lambda g: reducer.update(g, reducer.init(g))[0], inner)


def times(inner: Any, factor: int) -> Any:
    """Multiply the gradients ahead of ``inner``."""
    return before(lambda g: jax.tree.map(lambda x: x * factor, g), inner)


def arguments(context: Context, *names: str) -> dict[str, Any]:
    """Hyperparameters of the base, those that it has."""
    known = context.base.arguments
    return {name: known[name] for name in names if known.get(name) is not None}


def _momentum_arguments(context: Context) -> dict[str, Any]:
    """What dgc and lars take from SGD, whose momentum None is no momentum."""
    hyper = arguments(context, "learning_rate", "momentum", "nesterov")
    return {"momentum": 0.0, **hyper}


def fixed_scale(options: o.AmpConfigs) -> bool:
    """Whether the loss scale is 1 for ever."""
    return not options.use_dynamic_loss_scaling and options.init_loss_scaling == 1.0


def _amp(options: o.AmpConfigs, context: Context, inner: Any) -> Any:
    # Behind a reducer the gradient is the same everywhere; without one, every replica
    # must hear of the infinities of the others.
    alone = {"dgc", "localsgd", "adaptive_localsgd"} & set(context.applied)
    axes = [a for name in sorted(alone) for a in context.axis_name(name) or ()]
    return meta.dynamic_loss_scaling(
        meta.master_weights(inner),
        init_scale=options.init_loss_scaling,
        incr_every=options.incr_every_n_steps,
        decr_every=options.decr_every_n_nan_or_inf,
        incr_ratio=options.incr_ratio,
        decr_ratio=options.decr_ratio,
        floor=options.min_loss_scaling,
        dynamic=options.use_dynamic_loss_scaling,
        on_overflow=options.on_overflow,
        axis_name=tuple(axes) or None,
    )


def _check_amp(options: o.AmpConfigs, context: Context) -> str | None:
    if options.min_loss_scaling > options.init_loss_scaling:
        return (
            f"amp_configs['min_loss_scaling'] ({options.min_loss_scaling}) is above "
            f"init_loss_scaling ({options.init_loss_scaling}); lower it"
        )
    return None


def _amp_loss(options: o.AmpConfigs, context: Context) -> Callable:
    return lambda loss: amp.cast_loss(loss, options.dtype, keep_fp32=options.keep_fp32)


def _recompute_loss(options: o.RecomputeConfigs, context: Context) -> Callable:
    return lambda loss: meta.recompute(
        loss, policy=options.policy, blocks=options.blocks
    )


def _gradient_merge(
    options: o.GradientMergeConfigs, context: Context, inner: Any
) -> Any:
    gradients = "total" if context.totals else "mean"
    return meta.gradient_merge(inner, options.k_steps, options.avg, gradients=gradients)


def _check_gradient_merge(
    options: o.GradientMergeConfigs, context: Context
) -> str | None:
    if options.sync != "each":
        return None
    for name in ("dgc", "fp16_allreduce", "localsgd", "adaptive_localsgd"):
        if name in context.applied:
            return (
                f"sync='each' reduces every micro batch, but {name} works once per "
                "window; set gradient_merge_configs={'sync': 'last'}"
            )
    return None


def outer_optimizer(options: Any) -> Any:
    """The outer optimizer that the options name, or None."""
    if options.outer is None:
        return None
    arguments = dict(options.outer)
    name = arguments.pop("name")
    where = f"{options.BLOCK}['outer']"
    factory = getattr(optax, name, None)
    if factory is None or not callable(factory):
        hint = nearest(name, dir(optax))
        raise ConfigError(f"{where}: optax has no optimizer {name!r}{hint}")
    try:
        outer = factory(**arguments)
    except TypeError as error:
        raise ConfigError(f"{where}: optax.{name}: {error}") from None
    if not (hasattr(outer, "init") and hasattr(outer, "update")):
        raise ConfigError(f"{where}: optax.{name} makes no optax transformation")
    return outer


def _check_local(options: Any, context: Context) -> str | None:
    outer_optimizer(options)
    return _check_scale_strategy(options, context)


def _check_scale_strategy(options: Any, context: Context) -> str | None:
    if context.scale_strategy == "sum":
        return (
            "gradient_scale_configs['scale_strategy'] is 'sum', but no mean gradient "
            "exists that could be scaled; set 'avg' and change the learning rate"
        )
    return None


def _localsgd(options: o.LocalsgdConfigs, context: Context, inner: Any) -> Any:
    return meta.localsgd(
        inner,
        options.k_steps,
        options.begin_step,
        average_state=options.average_state,
        outer=outer_optimizer(options),
        axis_name=context.axis_name("localsgd"),
    )


def _adaptive_localsgd(
    options: o.AdaptiveLocalsgdConfigs, context: Context, inner: Any
) -> Any:
    return meta.adaptive_localsgd(
        inner,
        options.init_k_steps,
        options.begin_step,
        max_k_steps=options.max_k_steps,
        form=options.form,
        average_state=options.average_state,
        outer=outer_optimizer(options),
        axis_name=context.axis_name("adaptive_localsgd"),
        **arguments(context, "learning_rate"),
    )


def _dgc(options: o.DgcConfigs, context: Context, inner: Any) -> Any:
    known: dict[str, Any] = {
        f.name: getattr(options, f.name)
        for f in dataclasses.fields(options)
        if f.name != "axis"
    }
    if "clip" in context.applied:
        known["clip_norm"] = context.applied["clip"].max_norm
    hyper = _momentum_arguments(context)
    return meta.dgc(**hyper, **known, axis_name=context.axis_name("dgc"))


def _check_dgc(options: o.DgcConfigs, context: Context) -> str | None:
    clip = context.applied.get("clip")
    if clip is not None:
        if options.clip_norm not in (None, clip.max_norm):
            return (
                f"dgc_configs['clip_norm'] is {options.clip_norm} and "
                f"clip_configs['max_norm'] is {clip.max_norm}; set one of them"
            )
        if clip.exclude or not clip.max_norm:
            return (
                "dgc clips the whole local gradient to a positive norm; leave "
                "clip_configs['exclude'] empty and max_norm above 0"
            )
    return _check_scale_strategy(options, context)


def _fp16_allreduce(
    options: o.Fp16AllreduceConfigs, context: Context, inner: Any
) -> Any:
    return meta.fp16_allreduce(
        inner,
        dtype=options.dtype,
        order=options.order,
        scale=options.scale,
        error_feedback=options.error_feedback,
        # amp sees the infinity in the reduced gradient and handles it.
        on_overflow="pass" if "amp" in context.applied else "skip",
        axis_name=context.axis_name("fp16_allreduce"),
    )


def _clip(options: o.ClipConfigs, context: Context, inner: Any) -> Any:
    if "dgc" in context.applied:
        return inner
    clip = meta.clip_by_global_norm(options.max_norm, exclude=options.exclude)
    return optax.chain(clip, inner)


def _lars(options: o.LarsConfigs, context: Context, inner: Any) -> Any:
    return meta.lars(
        **_momentum_arguments(context),
        coeff=options.lars_coeff,
        weight_decay=options.lars_weight_decay,
        eps=options.epsilon,
        exclude=options.exclude_from_weight_decay,
        trust_on_excluded=options.trust_on_excluded,
        stacked=options.stacked,
    )


def _lamb(options: o.LambConfigs, context: Context, inner: Any) -> Any:
    return meta.lamb(
        **arguments(context, "learning_rate", "b1", "b2", "eps"),
        weight_decay=options.lamb_weight_decay,
        exclude=options.exclude_from_weight_decay,
        trust_on_excluded=options.trust_on_excluded,
        stacked=options.stacked,
    )


_NO_GRADIENTS = "localsgd sends parameters, never the gradients that dgc compresses"
_ONE_REDUCER = "both decide how gradients are reduced"
_MOMENTUM = "dgc is momentum SGD itself and {} would replace it"
_ONE_LOCALSGD = "both decide when parameters are averaged"
_ONE_BASE = "both replace the optimizer"
TABLE = (
    Rule(
        name="recompute",
        phase="loss",
        summary="recompute activations in the backward pass",
        changes="rounding",
        options=o.RecomputeConfigs,
        wrap_loss=_recompute_loss,
    ),
    Rule(
        name="amp",
        phase="loss",
        nests="scale",
        summary="low-precision compute, loss scale, float32 masters",
        changes="precision",
        options=o.AmpConfigs,
        check=_check_amp,
        wrap=_amp,
        wrap_loss=_amp_loss,
    ),
    Rule(
        name="gradient_merge",
        phase="merge",
        summary="accumulate gradients, update once per window",
        options=o.GradientMergeConfigs,
        check=_check_gradient_merge,
        wrap=_gradient_merge,
    ),
    Rule(
        name="dgc",
        phase="reduce",
        nests="base",
        summary="send only the largest gradient entries",
        replica_gradients=True,
        own_parameters=True,
        bases=("sgd",),
        reads=("learning_rate", "momentum", "nesterov"),
        excludes=(
            ("fp16_allreduce", _ONE_REDUCER),
            ("localsgd", _NO_GRADIENTS),
            ("adaptive_localsgd", _NO_GRADIENTS),
            ("lars", _MOMENTUM.format("lars")),
            ("lamb", _MOMENTUM.format("lamb")),
        ),
        replaces=("base", "reducer"),
        options=o.DgcConfigs,
        check=_check_dgc,
        wrap=_dgc,
    ),
    Rule(
        name="fp16_allreduce",
        phase="reduce",
        summary="average gradients in 16 bits",
        replica_gradients=True,
        replaces=("reducer",),
        options=o.Fp16AllreduceConfigs,
        wrap=_fp16_allreduce,
    ),
    Rule(
        name="clip",
        phase="clip",
        summary="limit the global norm of the gradient",
        options=o.ClipConfigs,
        wrap=_clip,
    ),
    Rule(
        name="lars",
        phase="base",
        summary="layer-wise rates instead of the SGD base",
        bases=("sgd",),
        reads=("learning_rate", "momentum", "nesterov"),
        excludes=(("lamb", _ONE_BASE),),
        replaces=("base",),
        options=o.LarsConfigs,
        wrap=_lars,
    ),
    Rule(
        name="lamb",
        phase="base",
        summary="layer-wise trust ratios instead of the Adam base",
        bases=("adam",),
        reads=("learning_rate", "b1", "b2", "eps"),
        replaces=("base",),
        options=o.LambConfigs,
        wrap=_lamb,
    ),
    Rule(
        name="localsgd",
        phase="parameter",
        summary="train replicas alone, average parameters now and then",
        replica_gradients=True,
        own_parameters=True,
        excludes=(("adaptive_localsgd", _ONE_LOCALSGD),),
        replaces=("reducer",),
        options=o.LocalsgdConfigs,
        check=_check_local,
        wrap=_localsgd,
    ),
    Rule(
        name="adaptive_localsgd",
        phase="parameter",
        summary="LocalSGD with an interval that adapts",
        replica_gradients=True,
        own_parameters=True,
        reads=("learning_rate",),
        replaces=("reducer",),
        options=o.AdaptiveLocalsgdConfigs,
        check=_check_local,
        wrap=_adaptive_localsgd,
    ),
    Rule(
        name="sharding",
        phase="placement",
        summary="split optimizer state, gradients, parameters",
        changes="rounding",
        options=p.ShardingConfigs,
    ),
    Rule(
        name="tensor_parallel",
        phase="placement",
        summary="split single layers",
        changes="rounding",
        options=p.TensorParallelConfigs,
    ),
    Rule(
        name="sync_batch_norm",
        phase="placement",
        summary="batch statistics over all replicas",
        options=p.SyncBatchNormConfigs,
    ),
)

default_registry = Registry(TABLE)
"""The registry that is used when none is given; ``register`` extends it."""
