"""What is kept, in which dtype it travels, how often it is traced."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Literal, jaxprs_in_params
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jfleet._gather import early_gathers, gather_at_use
from jfleet._gather._rewrite import Rewriter
from jfleet._hlo import collectives
from tests.gather import checks, constructs

bf16 = jnp.bfloat16


def inputs(stacked):
    params, x = constructs.stacked_inputs() if stacked else constructs.inputs()
    shardings = checks.shardings(params, checks.auto(), lambda path: stacked)
    placed = jax.device_put(params, shardings)
    return placed, jax.device_put(x, checks.batch_sharding(checks.auto())), shardings


def kept_whole(loss, stacked=False, **options):
    """Shapes of gathered weights that autodiff keeps for the backward pass."""
    params, x, shardings = inputs(stacked)
    wrapped = gather_at_use(loss, shardings, **options)
    jaxpr = jax.make_jaxpr(lambda p, x: jax.vjp(wrapped, p, x)[1])(params, x).jaxpr
    whole = made_whole(jaxpr, [False] * len(jaxpr.invars))
    pairs = zip(jaxpr.outvars, whole, strict=True)
    kept = [v.aval.shape for v, is_whole in pairs if is_whole]
    return [shape for shape in kept if shape[-2:] in ((32, 64), (64, 32))]


def made_whole(jaxpr, whole):
    """Which outputs come from a gather by anything but a product."""
    known = {v for v, is_whole in zip(jaxpr.invars, whole, strict=True) if is_whole}

    def is_known(atom):
        return not isinstance(atom, Literal) and atom in known

    for eqn in jaxpr.eqns:
        name, ins = eqn.primitive.name, [is_known(v) for v in eqn.invars]
        outs = [any(ins) and name not in ("dot_general", "while")] * len(eqn.outvars)
        if name == "jfleet_gather":
            outs = [len(eqn.params["path"]) > 1]
        for inner in jaxprs_in_params(eqn.params):
            if len(inner.invars) in (len(ins), len(ins) - 1) and name != "while":
                found = made_whole(inner, ins[-len(inner.invars) :])
                outs = [a or b for a, b in zip(outs, found, strict=True)]
                if name in ("jit", "remat2", "scan", "cond"):
                    outs = found
        known.update(v for v, out in zip(eqn.outvars, outs, strict=True) if out)
    return [is_known(v) for v in jaxpr.outvars]


KEEPERS = {
    **{
        name: (constructs.GATHERED[name], False)
        for name in (
            "two layers",
            "bf16 product",
            "split dim",
            "cast up and move",
            "custom_vjp",
            "custom_vjp in bf16",
            "jit",
            "checkpoint with policy",
            "cond, operand",
            "scan, captured",
            "scan, captured in bf16",
            "scan, captured and rematerialised",
            "where",
        )
    },
    **{
        name: (constructs.STACKED[name], True)
        for name in (
            "scan",
            "scan, checkpoint, bf16",
            "scan in two levels",
            "python loop",
            "scan over layer numbers",
        )
    },
}


@pytest.mark.parametrize("name", KEEPERS)
def test_gathered_weights_are_not_kept(name):
    loss, stacked = KEEPERS[name]
    assert kept_whole(loss, stacked) == []


def test_gathered_weights_are_kept_on_request():
    two_layers = constructs.GATHERED["two layers"]
    assert (64, 32) in kept_whole(two_layers, regather=False)
    everything = jax.checkpoint_policies.everything_saveable
    policy = jax.checkpoint(two_layers, policy=everything)
    assert (64, 32) in kept_whole(policy)


# Dtypes ------------------------------------------------------------------------------


def constrained(loss, stacked=False):
    """Element types of weights that sharding constraints speak of."""
    params, x, shardings = inputs(stacked)
    function = jax.jit(jax.grad(gather_at_use(loss, shardings)))
    text = function.lower(params, x).as_text()
    types = re.findall(r"sdy.sharding_constraint.*: tensor<([^>]*)>", text)
    return {t for t in types if t.startswith(("32x64", "64x32"))}


def gathered_dtypes(jaxpr):
    """Element types of what is gathered anywhere in a jaxpr."""
    found = {
        eqn.outvars[0].aval.dtype
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "jfleet_gather" and len(eqn.params["path"]) > 1
    }
    for eqn in jaxpr.eqns:
        for inner in jaxprs_in_params(eqn.params):
            found |= gathered_dtypes(inner)
    return found


@pytest.mark.parametrize(
    ("loss", "stacked"),
    [
        (constructs.GATHERED["whole tree to bf16"], False),
        (constructs.GATHERED["scan, captured in bf16"], False),
        (constructs.GATHERED["custom_vjp in bf16"], False),
        (constructs.STACKED["scan, checkpoint, bf16"], True),
        (constructs.STACKED["scan, bf16"], True),
    ],
)
def test_casts_down_come_before_the_gather(loss, stacked):
    pinned = {"32x64xf32", "64x32xf32"}  # gradients, at the end
    travelling = constrained(loss, stacked) - pinned
    assert travelling
    assert all(t.endswith("bf16") for t in travelling)
    params, x, shardings = inputs(stacked)
    jaxpr = jax.make_jaxpr(gather_at_use(loss, shardings))(params, x).jaxpr
    assert gathered_dtypes(jaxpr) == {jnp.dtype(bf16)}


def test_casts_up_come_after_the_gather():
    params, x, shardings = inputs(False)
    half = jax.tree.map(lambda a: a.astype(bf16), params)

    def loss(p, x):
        return (x @ p["a"].astype(jnp.float32)).sum()

    jaxpr = jax.make_jaxpr(gather_at_use(loss, shardings))(half, x).jaxpr
    assert gathered_dtypes(jaxpr) == {jnp.dtype(bf16)}


# Loops -------------------------------------------------------------------------------


def loop(p, x):
    return lax.scan(lambda h, _: (constructs.two_layers(p, h), None), x, length=4)[
        0
    ].sum()


def forever(p, x):
    return lax.while_loop(
        lambda h: h.sum() > 1e9, lambda h: constructs.two_layers(p, h), x
    ).sum()


@pytest.mark.parametrize("function", [loop, forever])
def test_large_weights_are_gathered_inside_loops(function):
    params, x, shardings = inputs(False)
    for limit, inside in ((8192, False), (8191, True)):
        wrapped = gather_at_use(function, shardings, hoist_bytes=limit)
        compiled = jax.jit(wrapped).lower(params, x).compile()
        gathers = [c for c in collectives(compiled) if c.kind == "all-gather"]
        assert {c.in_loop for c in gathers if c.shape != (16, 32)} == {inside}
        assert bool(early_gathers(wrapped, params, x)) is not inside
        expected = function(jax.device_get(params), jax.device_get(x))
        checks.assert_close(compiled(params, x), expected, 1e-5)


def test_loop_constant_that_is_only_picked_from_stays_a_shard():
    params, x, shardings = inputs(True)

    def decode(p, x):
        def token(h, _):
            def layer(i, h):
                return constructs.two_layers({k: w[i] for k, w in p.items()}, h)

            return lax.fori_loop(0, 4, layer, h), None

        return lax.scan(token, x, length=3)[0].sum()

    wrapped = gather_at_use(decode, shardings)
    assert early_gathers(wrapped, params, x) == []
    compiled = jax.jit(wrapped).lower(params, x).compile()
    gathers = [c for c in collectives(compiled) if c.kind == "all-gather"]
    assert all(c.in_loop for c in gathers)
    expected = decode(*constructs.stacked_inputs())
    checks.assert_close(compiled(params, x), expected, 1e-5)


def test_split_layer_dim_is_reported():
    params = {"w": jnp.ones((8, 32, 32)) * 0.01}
    x = constructs.rows((16, 32))
    wrapped = gather_at_use(
        lambda p, x: lax.scan(lambda h, w: (h @ w, None), x, p["w"])[0].sum(),
        {"w": NamedSharding(checks.auto(), P("data"))},
    )
    note = "w: scan: stack gathered whole: its layer dim is split"
    assert early_gathers(wrapped, params, x) == [note]
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), params)
    assert early_gathers(wrapped, abstract, x) == [note]


def test_unknown_higher_order_primitive_is_reported():
    params, x, shardings = inputs(False)

    def solve(p, x):
        square = p["a"] @ p["b"] + 10 * jnp.eye(32)
        return lax.custom_linear_solve(
            lambda v: p["a"] @ (p["b"] @ v) + 10 * v,
            x[0],
            lambda _, b: jnp.linalg.solve(square, b),
            symmetric=False,
            transpose_solve=lambda _, b: jnp.linalg.solve(square.T, b),
        ).sum()

    wrapped = gather_at_use(solve, shardings)
    notes = early_gathers(wrapped, params, x)
    assert notes
    assert all("which cannot be followed" in note for note in notes)
    expected = jax.grad(solve)(jax.device_get(params), jax.device_get(x))
    actual = jax.jit(jax.grad(wrapped))(params, x)
    checks.assert_close(actual, expected, 1e-4)


# Embedding ---------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [("data",), ("x", "y")])
def test_table_is_looked_up_in_its_shard(axes):
    on = checks.auto() if len(axes) == 1 else checks.two_axes()
    table = constructs.rows((50, 16))
    tokens = jnp.arange(16 * 4).reshape(16, 4) % 50
    sharding = NamedSharding(on, P(None, axes))

    def loss(table, tokens):
        return (table[tokens] ** 2).sum()

    expected = jax.value_and_grad(loss)(table, tokens)
    inputs = (
        jax.device_put(table, sharding),
        jax.device_put(tokens, NamedSharding(on, P(axes))),
    )
    sizes = {}
    for embedding in (None, axes):
        function = gather_at_use(loss, sharding, embedding=embedding)
        compiled = jax.jit(jax.value_and_grad(function)).lower(*inputs).compile()
        checks.assert_close(compiled(*inputs), expected, 1e-5)
        gathers = [c for c in collectives(compiled) if c.kind == "all-gather"]
        sizes[embedding] = {c.bytes for c in gathers}
    assert table.nbytes in sizes[None]
    assert max(sizes[axes]) <= tokens.nbytes  # token numbers, at most


# Cost of tracing ---------------------------------------------------------------------


def test_each_jaxpr_is_visited_once(monkeypatch):
    params, x, shardings = inputs(False)
    visits = []
    run = Rewriter.run
    monkeypatch.setattr(Rewriter, "run", lambda *args: visits.append(1) or run(*args))

    def deep(depth):
        if depth == 0:
            return jax.jit(lambda p, x: x @ p["a"] @ p["b"])
        below = deep(depth - 1)
        return jax.jit(lambda p, x: below(p, x) + below(p, x))

    jax.make_jaxpr(
        jax.grad(gather_at_use(lambda p, x: deep(8)(p, x).sum(), shardings))
    )(params, x)
    assert len(visits) == 10  # the function itself and nine levels


def test_user_function_is_traced_once():
    params, x, shardings = inputs(False)
    traces = []

    def loss(p, x):
        traces.append(1)
        return constructs.two_layers(p, x).sum()

    step = jax.jit(jax.grad(gather_at_use(loss, shardings)))
    step(params, x)
    step(params, x)
    assert len(traces) == 1


def test_scopes_of_the_user_are_kept():
    params, x, shardings = inputs(False)

    def loss(p, x):
        with jax.named_scope("my_layer"):
            return jnp.tanh(x @ p["a"]).sum()

    compiled = jax.jit(gather_at_use(loss, shardings)).lower(params, x).compile()
    [gather] = [c for c in collectives(compiled) if c.kind == "all-gather"]
    assert "my_layer" in gather.op_name
