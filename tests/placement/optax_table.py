"""Every optimizer and wrapper that optax exports, and how to build it.

``EXPORTED`` maps names of ``optax`` and ``optax.contrib`` to a factory; ``ELSEWHERE``
says why the remaining exports need no row of their own. A name that a newer optax adds
is in neither, and the test says so.
"""

import inspect

import jax
import jax.numpy as jnp
import optax
import optax.contrib as contrib

LR = 1e-2


def _labels(params):
    return {k: "a" if k in ("emb", "bias") else "b" for k in params}


def _mask(params):
    return {k: v.ndim > 1 for k, v in params.items()}


def with_lr(factory, **options):
    return lambda: factory(LR, **options)


def scaled(factory, *args, **options):
    return lambda: optax.chain(factory(*args, **options), optax.scale(-LR))


OPTIMIZERS = {
    name: with_lr(getattr(optax, name))
    for name in (
        "adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad"
        " fromage lamb lars lion nadam nadamw novograd optimistic_adam_v2"
        " optimistic_gradient_descent radam rmsprop rprop sgd sign_sgd signum sm3 yogi"
    ).split()
} | {
    "adafactor_factored": with_lr(optax.adafactor, min_dim_size_to_factor=4),
    "lbfgs": lambda: optax.lbfgs(LR, memory_size=3, linesearch=None),
    "lbfgs_linesearch": lambda: optax.lbfgs(memory_size=3),
    "noisy_sgd": with_lr(optax.noisy_sgd, eta=1e-3, key=0),
    "polyak_sgd": lambda: optax.polyak_sgd(max_learning_rate=LR),
    "sgd_momentum": with_lr(optax.sgd, momentum=0.9, nesterov=True),
    "adamw_schedule": lambda: optax.adamw(optax.cosine_decay_schedule(LR, 50)),
    "adam_mu_dtype": with_lr(optax.adam, mu_dtype=jnp.float32),
}

CONTRIB = {
    name: with_lr(getattr(contrib, name))
    for name in (
        "acprop ademamix adopt galore madgrad muon simplified_ademamix sophia"
    ).split()
} | {
    "cocob": contrib.cocob,
    "dadapt_adamw": contrib.dadapt_adamw,
    "dog": contrib.dog,
    "dowg": contrib.dowg,
    "momo": contrib.momo,
    "momo_adam": contrib.momo_adam,
    "prodigy": contrib.prodigy,
    "mechanize": lambda: contrib.mechanize(optax.adam(LR)),
    "normalize": scaled(contrib.normalize),
    "reduce_on_plateau": lambda: optax.chain(
        optax.adam(LR), contrib.reduce_on_plateau(patience=2, factor=0.5)
    ),
    "sam": lambda: contrib.sam(
        optax.sgd(LR), optax.chain(contrib.normalize(), optax.sgd(0.05)), sync_period=2
    ),
    "schedule_free": lambda: contrib.schedule_free(optax.sgd(LR), LR),
    "schedule_free_adamw": lambda: contrib.schedule_free_adamw(LR),
    "schedule_free_sgd": lambda: contrib.schedule_free_sgd(LR),
    "differentially_private_aggregate": scaled(
        contrib.differentially_private_aggregate, 1.0, 0.1, key=jax.random.key(0)
    ),
    "split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(
        optax.adam(LR)
    ),
}

TRANSFORMS = {
    name: scaled(getattr(optax, name))
    for name in (
        "centralize identity normalize_by_update_norm scale_by_distance_over_gradients"
        " scale_by_param_block_norm scale_by_param_block_rms scale_by_rss"
        " scale_by_stddev scale_by_trust_ratio scale_by_sign set_to_zero zero_nans"
    ).split()
} | {
    "adaptive_grad_clip": scaled(optax.adaptive_grad_clip, 0.1),
    "add_decayed_weights": scaled(optax.add_decayed_weights, 0.1),
    "add_noise": scaled(optax.add_noise, 1e-3, 0.55, 0),
    "apply_every": scaled(optax.apply_every, 2),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(LR), 3),
    "chain_clip_adam": lambda: optax.chain(
        optax.clip_by_global_norm(0.1), optax.adam(LR)
    ),
    "chain_clip_block_rms": scaled(optax.clip_by_block_rms, 0.01),
    "clip": scaled(optax.clip, 0.01),
    "conditionally_mask": lambda: optax.conditionally_mask(
        optax.adam(LR), lambda step: step % 2 == 0
    ),
    "conditionally_transform": lambda: optax.conditionally_transform(
        optax.adam(LR), lambda step: step % 2 == 0
    ),
    "ema": lambda: optax.chain(optax.adam(LR), optax.ema(0.9)),
    "flatten": lambda: optax.flatten(optax.adam(LR)),
    "freeze": lambda: optax.chain(optax.adam(LR), optax.freeze(_mask)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(LR),
    "inject_schedule": lambda: optax.inject_hyperparams(optax.sgd)(
        optax.linear_schedule(LR, 0.0, 30)
    ),
    "keep_params_nonnegative": lambda: optax.chain(
        optax.sgd(LR), optax.keep_params_nonnegative()
    ),
    "masked": lambda: optax.masked(optax.adam(LR), _mask),
    "multi_steps": lambda: optax.MultiSteps(
        optax.adam(LR), 2
    ).gradient_transformation(),
    "named_chain": lambda: optax.named_chain(
        ("clip", optax.clip(0.1)), ("adam", optax.adam(LR))
    ),
    "partition": lambda: optax.partition(
        {"a": optax.adam(LR), "b": optax.sgd(LR, momentum=0.9)}, _labels
    ),
    "partition_frozen": lambda: optax.partition(
        {"a": optax.adamw(LR), "b": optax.set_to_zero()}, _labels
    ),
    "selective_transform": lambda: optax.selective_transform(
        optax.adam(LR), freeze_mask=_mask
    ),
    "trace": scaled(optax.trace, 0.9),
    "backtracking": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(8)
    ),
    "zoom": lambda: optax.chain(optax.sgd(1.0), optax.scale_by_zoom_linesearch(8)),
}

TABLE = OPTIMIZERS | CONTRIB | TRANSFORMS

ELSEWHERE = {
    "dpsgd": "differentially_private_aggregate, with a deprecated argument",
    "lookahead": "takes paired parameters: test_lookahead",
    "measure_with_ema": "wraps a function that measures, holds no state by itself",
    "snapshot": "records a measure and has no update of its own",
    "multi_transform": "the former name of partition",
    "optimistic_adam": "deprecated by optax for optimistic_adam_v2",
    "inject_stateful_hyperparams": "the general form of inject_hyperparams",
    "stateless": "has no state",
    "stateless_with_tree_map": "has no state",
    "with_extra_args_support": "changes a signature only",
    "scale": "part of every `scaled` row",
    "scale_by_learning_rate": "part of every optimizer row",
    "scale_by_schedule": "part of adamw_schedule",
    "chain": "many rows are chains",
    "clip_by_global_norm": "chain_clip_adam",
    "clip_by_block_rms": "chain_clip_block_rms",
    "scale_by_backtracking_linesearch": "backtracking",
    "scale_by_zoom_linesearch": "zoom",
    "scale_by_belief": "adabelief",
    "scale_by_rms": "rmsprop",
    "scale_by_optimistic_gradient": "optimistic_gradient_descent",
    "scale_by_polyak": "polyak_sgd",
    "scale_by_sm3": "sm3",
}

# optax's sm3 fails on scalars; the two others turn them into shape (1,).
NO_SCALARS = {"sm3", "dog", "scale_by_distance_over_gradients"}
VALUE = {"momo", "momo_adam", "polyak_sgd", "reduce_on_plateau"}
VALUE_FN = {"backtracking", "lbfgs", "lbfgs_linesearch", "zoom"}
OBJECTIVE = {"sophia"}
PER_EXAMPLE = {"differentially_private_aggregate"}


def exported_names(module):
    """Names of a module's functions that make or wrap a transformation."""
    for name in sorted(dir(module)):
        value = getattr(module, name)
        if name.startswith("_") or inspect.isclass(value) or not callable(value):
            continue
        try:
            signature = inspect.signature(value)
        except (TypeError, ValueError):
            continue
        makes = "GradientTransformation" in str(signature.return_annotation)
        if makes or "learning_rate" in signature.parameters:
            yield name


def is_covered(name):
    if name in TABLE or name in ELSEWHERE:
        return True
    # scale_by_adam is the core of adam, and so on.
    return name.removeprefix("scale_by_") in TABLE
