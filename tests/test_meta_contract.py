"""What every meta optimizer promises, one table through the same guarantees.

C1 unknown extra arguments, C2 abstract init, C3 jit equals eager, C4 one compilation,
C5 dtype of updates, C6 state types are a fixed point, C7 neutral settings are the inner
optimizer bit for bit, C8 one device without an axis, C9 N equal replicas equal one,
C12 composition, C13 errors.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jfleet import optax_meta as meta
from jfleet._errors import ConfigError, ConfigTypeError

DTYPES = ("float32", "bfloat16")
AXIS = "replica"


def momentum():
    return optax.sgd(0.1, momentum=0.9)


TABLE = {
    "gradient_merge": lambda a: meta.gradient_merge(momentum(), 2, axis_name=a),
    "gradient_merge_each": lambda a: meta.gradient_merge(
        momentum(), 2, sync="each", axis_name=a
    ),
    "localsgd": lambda a: meta.localsgd(optax.adam(0.1), 2, axis_name=a),
    "localsgd_diloco": lambda a: meta.localsgd(
        momentum(), 2, outer=optax.sgd(0.7, 0.9, nesterov=True), axis_name=a
    ),
    "adaptive_localsgd": lambda a: meta.adaptive_localsgd(
        momentum(), 2, learning_rate=0.1, axis_name=a
    ),
    "dgc": lambda a: meta.dgc(0.1, sparsity=(0.5,), min_size=4, axis_name=a),
    "dgc_ramp": lambda a: meta.dgc(
        optax.linear_schedule(0.1, 0.2, 4),
        nesterov=True,
        sparsity=(0.5, 0.75),
        rampup_begin_step=1,
        rampup_step=2,
        min_size=4,
        weight_decay=0.01,
        weight_decay_mode="outside",
        axis_name=a,
    ),
    "lars": lambda a: meta.lars(0.1, exclude="b", stacked="w"),
    "lamb": lambda a: meta.lamb(0.1, exclude="b", stacked="w"),
    "loss_scaling": lambda a: meta.dynamic_loss_scaling(optax.adam(0.1), axis_name=a),
    "master_weights": lambda a: meta.master_weights(optax.adam(0.1)),
    "fp16_allreduce": lambda a: meta.fp16_allreduce(optax.adam(0.1), axis_name=a),
    "fp16_allreduce_all": lambda a: meta.fp16_allreduce(
        momentum(), scale=True, error_feedback=True, axis_name=a
    ),
    "replica_mean": lambda a: meta.replica_mean(axis_name=a),
    "clip": lambda a: meta.clip_by_global_norm(1.0),
}
NAMES = list(TABLE)
# A float32 difference is needed to hit every 16-bit target; see its docstring.
WIDER_UPDATES = {"master_weights"}


def params_of(dtype="float32"):
    return {
        "w": jnp.linspace(-1, 1, 16).reshape(4, 4).astype(dtype),
        "b": jnp.linspace(0.5, 2, 4).astype(dtype),
        "s": jnp.asarray(0.75, dtype),
    }


def grads_of(step, dtype="float32"):
    return jax.tree.map(
        lambda p: (jnp.sin(7.0 * p.astype(jnp.float32) + step)).astype(dtype),
        params_of(),
    )


def extra(name):
    return {"value": jnp.asarray(2.0)} if name.startswith("adaptive") else {}


# Compiling is nearly all the time these tests take.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
jit = functools.partial(jax.jit, compiler_options=QUICK)


def steps(tx, num=4, dtype="float32", eager=False, **kwargs):
    """Run a few steps; yield (params, updates, state)."""
    params = params_of(dtype)
    state = tx.init(params)

    def update(grads, state, params):
        return tx.update(grads, state, params, **kwargs)

    update = update if eager else jit(update)
    for t in range(num):
        updates, state = update(grads_of(t, dtype), state, params)
        params = optax.apply_updates(params, updates)
        yield params, updates, state


def types(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)


def assert_same(a, b):
    """Same structure, types and bits."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
        assert x.dtype == y.dtype


@pytest.mark.parametrize("name", NAMES)
def test_c1_unknown_extra_arguments(name):
    tx = TABLE[name](None)
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    with_more = steps(tx, 2, **extra(name), unheard_of=3)
    for a, b in zip(steps(tx, 2, **extra(name)), with_more, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_c2_abstract_init(name, dtype):
    tx = TABLE[name](None)
    params = params_of(dtype)
    abstract = jax.eval_shape(tx.init, params)
    shapes = [(x.shape, x.dtype) for x in jax.tree.leaves(abstract)]
    real = [(x.shape, x.dtype) for x in jax.tree.leaves(tx.init(params))]
    assert shapes == real


@pytest.mark.parametrize("name", NAMES)
def test_c3_jit_equals_eager(name):
    tx = TABLE[name](None)
    runs = [list(steps(tx, 3, eager=e, **extra(name))) for e in (True, False)]
    for eager, jitted in zip(*map(jax.tree.leaves, runs), strict=True):
        # Fusion may move the last digits; a 16-bit wire may round them apart.
        tolerance = 2e-3 if name.startswith("fp16") else 2e-6
        np.testing.assert_allclose(eager, jitted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_c4_one_compilation(name, dtype):
    tx = TABLE[name](None)

    @jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params, **extra(name))
        return optax.apply_updates(params, updates), state

    params = params_of(dtype)
    state = tx.init(params)
    for t in range(3):
        params, state = step(params, state, grads_of(t, dtype))
    assert step._cache_size() == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_c5_c6_types_stay(name, dtype):
    tx = TABLE[name](None)
    before = types(tx.init(params_of(dtype)))
    wanted = "float32" if name in WIDER_UPDATES else dtype
    for params, updates, state in steps(tx, 3, dtype, **extra(name)):
        assert types(state) == before
        assert {str(u.dtype) for u in jax.tree.leaves(updates)} == {wanted}
        assert {str(p.dtype) for p in jax.tree.leaves(params)} == {dtype}


def adam():
    return optax.adam(optax.linear_schedule(0.1, 0.2, 3))


NEUTRAL = {
    "gradient_merge": (meta.gradient_merge(adam(), 1), adam()),
    "gradient_merge_sum": (meta.gradient_merge(adam(), 1, avg=False), adam()),
    "localsgd": (meta.localsgd(adam(), 1), adam()),
    "localsgd_alone": (meta.localsgd(adam(), 3), adam()),
    "adaptive_alone": (
        meta.adaptive_localsgd(adam(), 3, learning_rate=0.1),
        adam(),
    ),
    "dgc": (meta.dgc(0.1, 0.9, sparsity=(0.0,), min_size=1), momentum()),
    "dgc_nesterov": (
        meta.dgc(0.1, 0.9, nesterov=True, sparsity=(0.0,), min_size=1),
        optax.sgd(0.1, 0.9, nesterov=True),
    ),
    "dgc_small_tensors": (meta.dgc(0.1, 0.9), momentum()),
    "lars": (meta.lars(0.1, 0.0, exclude=".", weight_decay=0.1), optax.sgd(0.1)),
    "loss_scaling": (
        meta.dynamic_loss_scaling(adam(), init_scale=1.0, dynamic=False),
        adam(),
    ),
    "master_weights": (meta.master_weights(adam()), adam()),
    "fp16_allreduce": (meta.fp16_allreduce(adam(), dtype="float32"), adam()),
    "replica_mean": (optax.chain(meta.replica_mean(), adam()), adam()),
    "clip": (optax.chain(meta.clip_by_global_norm(1e9), adam()), adam()),
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_c7_neutral_is_the_inner_optimizer(name):
    wrapped, inner = NEUTRAL[name]
    more = {"value": jnp.asarray(1.0)} if name.startswith("adaptive") else {}
    for a, b in zip(
        steps(wrapped, 4, eager=True, **more), steps(inner, 4, eager=True), strict=True
    ):
        assert_same(a[:2], b[:2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["gradient_merge", "localsgd", "replica_mean"])
def test_c7_neutral_keeps_the_inner_state(name, dtype):
    wrapped, inner = NEUTRAL[name]
    for a, b in zip(
        steps(wrapped, 3, dtype, True), steps(inner, 3, dtype, True), strict=True
    ):
        state = a[2][1] if name == "replica_mean" else a[2].inner
        assert_same((a[0], state), (b[0], b[2]))


@pytest.mark.parametrize("name", NAMES)
def test_c8_c9_equal_replicas_equal_one(name):
    num = 2  # a power of two, so that a mean of equal numbers is exact
    alone, many = TABLE[name](None), TABLE[name](AXIS)

    def run(tx, num):
        many = jax.vmap(tx.init, axis_size=num, in_axes=None)(params_of())

        def step(carry, t):
            params, state = carry
            grads = grads_of(t)
            updates, state = tx.update(grads, state, params, **extra(name))
            params = optax.apply_updates(params, updates)
            return (params, state), params

        def train(state):
            return jax.lax.scan(step, (params_of(), state), jnp.arange(4.0))

        return jit(jax.vmap(train, axis_name=AXIS, axis_size=num))(many)

    one, both = run(alone, 1), run(many, num)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(both), strict=True):
        np.testing.assert_array_equal(y[0], y[1])
        np.testing.assert_allclose(x[0], y[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_c12_chain(name):
    tx = TABLE[name](None)
    chained = optax.chain(optax.identity(), tx)
    for a, b in zip(
        steps(tx, 3, **extra(name)), steps(chained, 3, **extra(name)), strict=True
    ):
        assert_same(a, (*b[:2], b[2][1]))


STATIC = ("min_size", "rampup_begin_step", "rampup_step")
INJECTED = {
    "lars": (meta.lars, {"learning_rate": 0.1, "coeff": 0.01}, ()),
    "lamb": (meta.lamb, {"learning_rate": 0.1, "b1": 0.8}, ()),
    "dgc": (
        meta.dgc,
        {"learning_rate": 0.1, "min_size": 4, "sparsity": (0.5,), "weight_decay": 0.1},
        STATIC,
    ),
    "clip": (meta.clip_by_global_norm, {"max_norm": 0.5}, ()),
    "gradient_merge": (
        meta.gradient_merge,
        {"inner": optax.sgd(0.1), "k_steps": 2},
        (),
    ),
    "localsgd": (meta.localsgd, {"inner": optax.sgd(0.1), "k_steps": 2}, ()),
    "loss_scaling": (
        meta.dynamic_loss_scaling,
        {"inner": optax.sgd(0.1), "init_scale": 4.0, "incr_every": 2},
        (),
    ),
}


@pytest.mark.parametrize("name", INJECTED)
def test_c12_inject_hyperparams(name):
    factory, arguments, static = INJECTED[name]
    injected = optax.inject_hyperparams(factory, static_args=static)(**arguments)
    plain = steps(factory(**arguments), 4)
    for a, b in zip(plain, steps(injected, 4), strict=True):
        for x, y in zip(*map(jax.tree.leaves, (a[0], b[0])), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)


def test_c12_inject_hyperparams_names_what_must_be_static():
    injected = optax.inject_hyperparams(meta.dgc)(0.1, min_size=4)
    with pytest.raises(ConfigError, match="static_args"):
        list(steps(injected, 1))


@pytest.mark.parametrize("name", NAMES)
def test_c12_around_injected_hyperparams(name):
    if name in ("dgc", "dgc_ramp", "lars", "lamb", "clip", "replica_mean"):
        injected = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
        tx = optax.chain(TABLE[name](None), injected)
    else:
        wrappers = {
            "gradient_merge": functools.partial(meta.gradient_merge, k_steps=2),
            "localsgd": functools.partial(meta.localsgd, k_steps=2),
            "adaptive": functools.partial(meta.adaptive_localsgd, learning_rate=0.1),
            "loss": meta.dynamic_loss_scaling,
            "master": meta.master_weights,
            "fp16": meta.fp16_allreduce,
        }
        wrap = next(w for key, w in wrappers.items() if name.startswith(key))
        tx = wrap(optax.inject_hyperparams(optax.adam)(learning_rate=0.1))
    before = types(tx.init(params_of()))
    for _, _, state in steps(tx, 3, **extra(name)):
        assert types(state) == before


def merged(inner):
    return meta.gradient_merge(inner, 2)


def clipped(base):
    return optax.chain(meta.clip_by_global_norm(1.0), base)


def scaled(inner, axis=None):
    return meta.dynamic_loss_scaling(inner, axis_name=axis)


LEGAL = {
    "merge-master-fp16-scale-clip-lars": lambda: merged(
        meta.master_weights(
            meta.fp16_allreduce(
                scaled(clipped(meta.lars(0.1))), on_overflow="pass", axis_name=AXIS
            )
        )
    ),
    "merge-master-mean-scale-clip-lamb": lambda: merged(
        meta.master_weights(
            optax.chain(
                meta.replica_mean(axis_name=AXIS), scaled(clipped(meta.lamb(0.1)))
            )
        )
    ),
    "merge-master-scale-dgc": lambda: merged(
        meta.master_weights(
            scaled(meta.dgc(0.1, sparsity=(0.5,), min_size=4, axis_name=AXIS), AXIS)
        )
    ),
    "merge-master-localsgd-scale-clip-adam": lambda: merged(
        meta.master_weights(
            meta.localsgd(scaled(clipped(optax.adam(0.1))), 2, axis_name=AXIS)
        )
    ),
    "merge-master-localsgd-scale-clip-lamb": lambda: merged(
        meta.master_weights(
            meta.localsgd(scaled(clipped(meta.lamb(0.1))), 2, axis_name=AXIS)
        )
    ),
    "merge-master-adaptive-scale-clip-lars": lambda: merged(
        meta.master_weights(
            meta.adaptive_localsgd(
                scaled(clipped(meta.lars(0.1))), 2, learning_rate=0.1, axis_name=AXIS
            )
        )
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LEGAL)
def test_c12_nesting(name, dtype):
    tx = LEGAL[name]()

    def run(shift):
        def step(carry, t):
            params, state = carry
            scale = meta.loss_scale(state)
            grads = jax.tree.map(
                lambda g: (g * scale).astype(g.dtype), grads_of(t + shift, dtype)
            )
            loss = jnp.asarray(2.0) + shift
            updates, state = tx.update(grads, state, params, value=loss)
            return (optax.apply_updates(params, updates), state), None

        # The scan itself refuses a carry whose types change.
        params = params_of(dtype)
        return jax.lax.scan(step, (params, tx.init(params)), jnp.arange(8.0))[0]

    params, state = jit(jax.vmap(run, axis_name=AXIS))(jnp.arange(2.0))
    for leaf in jax.tree.leaves(params):
        assert np.isfinite(np.asarray(leaf, np.float32)).all()
        assert str(leaf.dtype) == dtype
    # Replicas agree after 8 micro steps = 4 steps; localsgd with k = 2 met at 1 and 3.
    if "local" not in name and "adaptive" not in name:
        for leaf in jax.tree.leaves(params):
            np.testing.assert_array_equal(leaf[0], leaf[1])
    if dtype == "bfloat16":
        masters = jax.tree.leaves(state.inner.master)
        for leaf, master in zip(jax.tree.leaves(params), masters, strict=True):
            np.testing.assert_array_equal(leaf, master.astype(leaf.dtype))


SGD = optax.sgd(0.1)
BAD = [
    (meta.gradient_merge, {"inner": SGD, "k_steps": 0}, "k_steps", "0"),
    (meta.gradient_merge, {"inner": SGD, "k_steps": 2.5}, "k_steps", "2.5"),
    (meta.gradient_merge, {"inner": SGD, "sync": "never"}, "sync", "never"),
    (meta.gradient_merge, {"inner": SGD, "reduce": "max"}, "reduce", "max"),
    (
        meta.gradient_merge,
        {"inner": SGD, "gradients": "total", "avg": False},
        "gradients",
        "total",
    ),
    (meta.localsgd, {"inner": SGD, "k_steps": -3}, "k_steps", "-3"),
    (meta.localsgd, {"inner": SGD, "begin_step": -1}, "begin_step", "-1"),
    (
        meta.adaptive_localsgd,
        {"inner": SGD, "learning_rate": 0.1, "init_k_steps": 0},
        "init_k_steps",
        "0",
    ),
    (
        meta.adaptive_localsgd,
        {"inner": SGD, "learning_rate": 0.1, "form": "papper"},
        "form",
        "did you mean 'paper'",
    ),
    (
        meta.adaptive_localsgd,
        {"inner": SGD, "learning_rate": 0.1, "max_k_steps": 0},
        "max_k_steps",
        "0",
    ),
    (meta.dgc, {"learning_rate": -0.1}, "learning_rate", "-0.1"),
    (meta.dgc, {"learning_rate": 0.1, "momentum": 1.0}, "momentum", "1.0"),
    (meta.dgc, {"learning_rate": 0.1, "sparsity": (0.5, 1.0)}, "sparsity", "1.0"),
    (meta.dgc, {"learning_rate": 0.1, "sparsity": ()}, "sparsity", r"\(\)"),
    (meta.dgc, {"learning_rate": 0.1, "rampup_step": 0}, "rampup_step", "0"),
    (meta.dgc, {"learning_rate": 0.1, "clip_norm": -1.0}, "clip_norm", "-1.0"),
    (meta.dgc, {"learning_rate": 0.1, "clip_scope": "all"}, "clip_scope", "all"),
    (meta.dgc, {"learning_rate": 0.1, "min_size": 0}, "min_size", "0"),
    (meta.lars, {"learning_rate": 0.1, "coeff": -1.0}, "coeff", "-1.0"),
    (meta.lars, {"learning_rate": 0.1, "exclude": "("}, "exclude", r"\("),
    (meta.lamb, {"learning_rate": 0.1, "b2": 1.5}, "b2", "1.5"),
    (meta.lamb, {"learning_rate": 0.1, "eps": float("nan")}, "eps", "nan"),
    (meta.dynamic_loss_scaling, {"inner": SGD, "init_scale": 0}, "init_scale", "0"),
    (meta.dynamic_loss_scaling, {"inner": SGD, "decr_ratio": 2}, "decr_ratio", "2"),
    (
        meta.dynamic_loss_scaling,
        {"inner": SGD, "on_overflow": "stop"},
        "on_overflow",
        "stop",
    ),
    (meta.master_weights, {"inner": SGD, "master_dtype": "int32"}, "master", "int32"),
    (meta.master_weights, {"inner": SGD, "master_dtype": "bfloat16"}, "master", "bf"),
    (meta.fp16_allreduce, {"inner": SGD, "dtype": "int8"}, "dtype", "int8"),
    (meta.fp16_allreduce, {"inner": SGD, "order": "cast"}, "order", "cast"),
    (meta.clip_by_global_norm, {"max_norm": -1.0}, "max_norm", "-1.0"),
    (meta.recompute, {"loss_fn": abs, "policy": "dots"}, "policy", "dots"),
    (meta.recompute, {"loss_fn": abs, "blocks": "some"}, "blocks", "some"),
]
WRONG_TYPE = [
    (meta.gradient_merge, {"inner": "sgd"}, "inner"),
    (meta.gradient_merge, {"inner": SGD, "k_steps": True}, "k_steps"),
    (meta.gradient_merge, {"inner": SGD, "avg": 1}, "avg"),
    (meta.localsgd, {"inner": SGD, "outer": 0.7}, "outer"),
    (meta.localsgd, {"inner": SGD, "axis_name": 3}, "axis_name"),
    (meta.lars, {"learning_rate": "0.1"}, "learning_rate"),
    (meta.dgc, {"learning_rate": 0.1, "nesterov": "yes"}, "nesterov"),
    (meta.recompute, {"loss_fn": 3}, "loss_fn"),
]


def identify(case):
    return "-".join([case[0].__name__, *(k for k in case[1] if k != "inner")])


@pytest.mark.parametrize("case", BAD, ids=identify)
def test_c13_bad_arguments_are_named(case):
    factory, arguments, name, value = case
    with pytest.raises(ConfigError, match=name) as error:
        factory(**arguments)
    assert error.match(value)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("case", WRONG_TYPE, ids=identify)
def test_c13_wrong_types_are_named(case):
    factory, arguments, name = case
    with pytest.raises(ConfigTypeError, match=name):
        factory(**arguments)


@pytest.mark.parametrize(
    "name", ["localsgd", "adaptive_localsgd", "dgc", "lars", "lamb", "master_weights"]
)
def test_c13_missing_parameters_are_named(name):
    tx = TABLE[name](None)
    with pytest.raises(ConfigError, match="params must be given"):
        tx.update(grads_of(0), tx.init(params_of()), **extra(name))
