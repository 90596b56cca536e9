"""Transformations of the wrapped function, and everything it can be called with."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jfleet._gather import gather_at_use, rewrite
from jfleet._hlo import collectives
from tests.gather import checks, constructs
from tests.helpers import count_compilations

loss = constructs.squares(constructs.two_layers)
params, x = constructs.inputs()


def placed(on=None):
    on = on or checks.auto()
    specs = checks.shardings(params, on)
    return (
        specs,
        jax.device_put(params, specs),
        jax.device_put(x, checks.batch_sharding(on)),
    )


shardings, ps, xs = placed()
wrapped = gather_at_use(loss, shardings)
gradient = jax.jit(jax.grad(loss))(params, x)


def ones(tree):
    return jax.tree.map(jnp.ones_like, tree)


TRANSFORMED = {
    "grad": lambda f, p, x: jax.grad(f)(p, x),
    "jvp": lambda f, p, x: jax.jvp(lambda p: f(p, x), (p,), (ones(p),)),
    "linearize": lambda f, p, x: jax.linearize(lambda p: f(p, x), p)[1](ones(p)),
    "vjp": lambda f, p, x: jax.vjp(f, p, x)[1](1.0),
    "hvp, forward over reverse": lambda f, p, x: jax.jvp(
        lambda p: jax.grad(f)(p, x), (p,), (ones(p),)
    ),
    "hvp, reverse over forward": lambda f, p, x: jax.grad(
        lambda p: jax.jvp(lambda p: f(p, x), (p,), (ones(p),))[1]
    )(p),
    "hvp, reverse over reverse": lambda f, p, x: jax.grad(
        lambda p: optax.tree.norm(jax.grad(f)(p, x))
    )(p),
    "one gradient per example": lambda f, p, x: jax.vmap(jax.grad(f), (None, 0))(
        p, x[:, None]
    ),
    "ensemble": lambda f, p, x: jax.vmap(jax.grad(f), (0, None))(
        jax.tree.map(lambda a: jnp.stack([a, 2 * a]), p), x
    ),
    "ensemble, last dim": lambda f, p, x: jax.vmap(jax.grad(f), (-1, None))(
        jax.tree.map(lambda a: jnp.stack([a, 2 * a], -1), p), x
    ),
    "gradient of the input": lambda f, p, x: jax.grad(f, 1)(p, x),
    "checkpoint": lambda f, p, x: jax.grad(jax.checkpoint(f))(p, x),
    "accumulated in a scan": lambda f, p, x: jax.lax.scan(
        lambda g, x: (jax.tree.map(jnp.add, g, jax.grad(f)(p, x)), None),
        jax.tree.map(jnp.zeros_like, p),
        x.reshape(4, 4, 32),
    )[0],
    "auxiliary output": lambda f, p, x: jax.grad(
        lambda p, x: (f(p, x), {"sum": x.sum(), "none": None}), has_aux=True
    )(p, x),
}


@pytest.mark.parametrize("mode", ["gather", "cotangent"])
@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformations(name, mode):
    transformed = TRANSFORMED[name]
    expected = jax.jit(functools.partial(transformed, loss))(params, x)
    function = gather_at_use(loss, shardings, mode=mode)
    actual = jax.jit(functools.partial(transformed, function))(ps, xs)
    checks.assert_close(actual, expected, 1e-5)


@pytest.mark.parametrize("name", ["grad", "linearize", "accumulated in a scan"])
def test_transformations_on_explicit_axes(name):
    _, ps, xs = placed(checks.explicit())
    on_explicit = gather_at_use(loss, ps)
    transformed = TRANSFORMED[name]
    if name == "accumulated in a scan":
        xs = jax.device_put(xs, NamedSharding(checks.explicit(), P()))
    expected = jax.jit(functools.partial(transformed, loss))(params, x)
    actual = jax.jit(functools.partial(transformed, on_explicit))(ps, xs)
    checks.assert_close(actual, expected, 1e-5)


def test_without_jit():
    checks.assert_close(jax.grad(wrapped)(ps, xs), gradient, 1e-5)


def test_donation():
    step = jax.jit(
        lambda p, x: jax.tree.map(lambda a, g: a - g, p, jax.grad(wrapped)(p, x)),
        donate_argnums=0,
        out_shardings=shardings,
    )
    mine = jax.tree.map(jnp.copy, ps)
    new = step(mine, xs)
    assert mine["a"].is_deleted()
    assert new["a"].sharding.is_equivalent_to(shardings["a"], 2)


# What it can be called with ----------------------------------------------------------


def test_everything_but_parameters_reaches_the_function_as_it_is():
    def fancy(p, x, kind, scale, *, train, key=None, mutable=(), act=None, rngs=None):
        assert kind == "mean"
        assert train is True
        assert key is None
        assert mutable == ["batch_stats"]
        assert isinstance(scale, int)
        noise = jax.random.normal(rngs["dropout"], x.shape) * 0
        return loss(p, act(x + noise)) * scale, {"n": 3, "name": "fancy", "no": None}

    call = functools.partial(
        gather_at_use(fancy, shardings),
        train=True,
        mutable=["batch_stats"],
        act=jnp.tanh,
        rngs={"dropout": jax.random.key(0)},
    )
    value, aux = call(ps, xs, "mean", 2)
    assert aux == {"n": 3, "name": "fancy", "no": None}
    assert value == pytest.approx(float(2 * loss(params, jnp.tanh(x))), rel=1e-5)
    gradient = jax.jit(jax.grad(lambda p: call(p, xs, "mean", 2)[0]))(ps)
    expected = jax.grad(lambda p: 2 * loss(p, jnp.tanh(x)))(params)
    checks.assert_close(gradient, expected, 1e-5)


def test_python_numbers_stay_weak():
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), ps)
    function = gather_at_use(lambda p, scale: p["a"] * scale, shardings)
    assert function(half, 2.0).dtype == jnp.bfloat16
    assert gather_at_use(lambda p: 1.0, shardings)(half) == 1.0


def test_closed_over_tracers_and_keyword_parameters():
    def step(p, x):
        inner = gather_at_use(lambda p: loss(p, x), shardings)
        return jax.grad(inner)(p)

    checks.assert_close(jax.jit(step)(ps, xs), gradient, 1e-5)

    def specs_for(args, kwargs):
        specs = jax.tree.map(lambda s: s.spec, shardings)
        return (None,), {"p": specs, "flag": None}

    def fn(x, *, p, flag):
        return loss(p, x) if flag else None

    by_name = rewrite(fn, specs_for, checks.auto(), ("data",))
    actual = jax.jit(jax.grad(lambda p: by_name(xs, p=p, flag=True)))(ps)
    checks.assert_close(actual, gradient, 1e-5)


def test_parameters_come_back_as_they_went_in():
    same, doubled = jax.jit(
        gather_at_use(lambda p: (p, jax.tree.map(lambda a: a * 2, p)), shardings)
    )(ps)
    checks.assert_close(same, params, 0)
    checks.assert_close(doubled, jax.tree.map(lambda a: a * 2, params), 0)
    assert same["a"].sharding.is_equivalent_to(shardings["a"], 2)


def test_integer_parameters():
    table = jnp.arange(64, dtype=jnp.int8).reshape(8, 8)
    sharding = NamedSharding(checks.auto(), P("data"))
    function = gather_at_use(lambda q, x: x @ q.astype(jnp.float32), sharding)
    placed = jax.device_put(table, sharding)
    lowered = jax.jit(function).lower(placed, jnp.ones((16, 8)))
    [moved] = collectives(lowered.compile())
    assert moved.dtype == "s8"
    actual = function(placed, jnp.ones((16, 8)))
    checks.assert_close(actual, jnp.ones((16, 8)) @ table, 1e-6)


# Values ------------------------------------------------------------------------------


def test_equal_wrappers_compile_once():
    step = jax.jit(lambda f, p, x: f(p, x), static_argnums=0)
    again = gather_at_use(loss, jax.tree.map(lambda s: s, shardings))
    other = gather_at_use(loss, shardings, hoist_bytes=0)
    assert again == wrapped
    assert hash(again) == hash(wrapped)
    assert other != wrapped
    step(wrapped, ps, xs)
    with count_compilations() as count:
        step(again, ps, xs)
        jax.jit(wrapped)(ps, xs)
        jax.jit(again)(ps, xs)
    assert count.compilations == 1  # the first jit(wrapped)


def test_wrapper_looks_like_the_function():
    assert wrapped.__wrapped__ is loss
    static = jax.jit(
        gather_at_use(lambda p, kind: p["a"].sum() if kind else 0, shardings),
        static_argnames="kind",
    )
    assert static(ps, kind="sum") == pytest.approx(float(params["a"].sum()), abs=1e-4)


def test_inputs_that_are_not_placed():
    host = jax.tree.map(np.asarray, params)
    checks.assert_close(jax.jit(jax.grad(wrapped))(host, x), gradient, 1e-5)


def test_wrapping_a_result_is_refused():
    with pytest.raises(TypeError, match="fn must be a function"):
        gather_at_use(jnp.ones(()), {"w": jnp.ones(())})


def test_wrapping_inside_jit_says_so():
    with pytest.raises(ValueError, match="inside jit"):
        jax.jit(lambda w: gather_at_use(jnp.sum, w)(w))(jnp.ones(8))
