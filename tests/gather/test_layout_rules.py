"""Rules say where a shard may go without moving a byte; programs say what is moved."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jfleet._gather import gather_at_use
from jfleet._gather._layout_rules import RULES, Shard, passes
from jfleet._gather._specs import Options, dims_of, fabric_of, spec_of
from tests.gather import checks, constructs

ON = checks.two_axes()
FABRIC = fabric_of(ON, Options(axes=("x", "y")))


def equation(function, *shapes):
    jaxpr = jax.make_jaxpr(function)(*[jnp.zeros(s) for s in shapes]).jaxpr
    return jaxpr.eqns[-1]


def reshaped(new, dimensions=None):
    return lambda a: lax.reshape(a, new, dimensions)


PASSING = [
    (lambda a: a.astype(jnp.bfloat16), (8, 4), P("x", "y"), P("x", "y")),
    (lambda a: a.T, (8, 4), P("x", "y"), P("y", "x")),
    (lambda a: lax.squeeze(a, [0]), (1, 8), P(None, "x"), P("x")),
    (lambda a: a[2:3], (4, 8), P(None, "y"), P(None, "y")),
    (
        lambda a: lax.dynamic_slice(a, [1, 0], [2, 8]),
        (4, 8),
        P(None, "y"),
        P(None, "y"),
    ),
    (lambda a: lax.rev(a, [0]), (4, 8), P(None, "y"), P(None, "y")),
    (lambda a: lax.split(a, [2, 2], 0), (4, 8), P(None, "y"), P(None, "y")),
    (lambda a: lax.expand_dims(a, [0]), (8, 4), P("x", "y"), P(None, "x", "y")),
    (reshaped((8, 2, 4)), (8, 8), P("x"), P("x")),
    (reshaped((8, 4, 2)), (8, 8), P(None, "y"), P(None, "y")),
    (reshaped((8, 4, 2)), (8, 8), P("x", "y"), P("x", "y")),
    (reshaped((4, 2, 8)), (8, 8), P("x", "y"), P("x", None, "y")),
    (reshaped((32, 2)), (8, 8), P("x"), P("x")),
    (reshaped((64,)), (8, 8), P(("x", "y")), P(("x", "y"))),
    (reshaped((2, 32)), (8, 8), P("x"), P("x")),
    (reshaped((1, 8, 1, 8)), (8, 8), P("x", "y"), P(None, "x", None, "y")),
]
REFUSED = [
    (lambda a: a.astype(jnp.complex64), (8, 4), P("x")),
    (lambda a: a[:4], (8, 4), P("x")),
    (lambda a: lax.dynamic_slice(a, [0, 0], [4, 4]), (8, 4), P("x")),
    (lambda a: lax.rev(a, [0]), (8, 4), P("x")),
    (lambda a: lax.split(a, [4, 4], 0), (8, 4), P("x")),
    (lambda a: lax.broadcast(a, [3]), (8, 4), P("x")),
    (reshaped((2, 4, 8)), (8, 8), P("y")),
    (reshaped((64,)), (8, 8), P(None, "y")),
    (reshaped((64,)), (8, 8), P("x", "y")),
    (reshaped((2, 32)), (8, 8), P(("x", "y"))),
    (reshaped((8, 8), (1, 0)), (8, 8), P("x")),
]


@pytest.mark.parametrize(("function", "shape", "spec", "out"), PASSING)
def test_rules_that_pass(function, shape, spec, out):
    """No device needs an element that it does not hold already."""
    eqn = equation(function, shape)
    found = RULES[eqn.primitive.name](eqn, dims_of(spec, len(shape)), FABRIC)
    assert [spec_of(d) for d in found] == [out] * len(eqn.outvars)
    whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    before = jax.device_put(whole, NamedSharding(ON, spec))
    for result, dims in zip(jax.tree.leaves(function(whole)), found, strict=True):
        after = jax.device_put(result, NamedSharding(ON, spec_of(dims)))
        for old, new in zip(
            before.addressable_shards, after.addressable_shards, strict=True
        ):
            assert old.device == new.device
            assert set(np.ravel(new.data)) <= set(np.ravel(old.data))


@pytest.mark.parametrize(("function", "shape", "spec"), REFUSED)
def test_rules_that_refuse(function, shape, spec):
    eqn = equation(function, shape)
    assert RULES[eqn.primitive.name](eqn, dims_of(spec, len(shape)), FABRIC) is None


def answer(function, specs, *, uniform=False, gathers=True):
    """What the rules say; ``None`` in ``specs`` marks an ordinary operand."""
    eqn = equation(function, *[(8, 8)] * len(specs))
    operands = [s and Shard(None, dims_of(s, 2), "w") for s in specs]
    found = passes(eqn, operands, lambda atom: uniform, FABRIC, gathers)
    return None if found is None else [spec_of(dims) for dims in found]


def test_arithmetic_needs_equal_layouts():
    split, other = P("x", "y"), P("y", "x")
    assert answer(jnp.multiply, [split, split]) == [split]
    assert answer(jnp.multiply, [split, other]) is None
    # Activations may have the shape of a weight; they must not be gathered with it.
    assert answer(jnp.multiply, [split, None]) is None
    assert answer(jnp.multiply, [split, None], uniform=True) == [split]
    assert answer(jnp.matmul, [split, split]) is None


def test_concatenation_along_a_dim_that_is_whole():
    def joined(dim):
        return lambda a, b: lax.concatenate([a, b], dim)

    assert answer(joined(1), [P("x"), P("x")]) == [P("x")]
    assert answer(joined(0), [P("x"), P("x")]) is None
    assert answer(joined(1), [P("x"), None]) is None


def test_reductions_to_one_number():
    assert answer(jnp.sum, [P("x")]) == [P()]
    assert answer(lambda a: a.sum(1), [P("x")]) is None
    assert answer(jnp.sum, [P("x")], gathers=False) is None


# Programs ----------------------------------------------------------------------------

params, x = constructs.inputs()
loss = constructs.squares(constructs.two_layers)


def equations(jaxpr, inside=()):
    """(Primitive, its path of specs, the primitives around it), recursively."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        yield name, [s.spec for s in eqn.params.get("path", ())], inside
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner, (*inside, name))


def program(function, specs, on=ON, args=(params, x), **options):
    shardings = {k: NamedSharding(on, s) for k, s in specs.items()}
    wrapped = gather_at_use(function, shardings, **options)
    return list(equations(jax.make_jaxpr(jax.grad(wrapped))(*args).jaxpr))


def paths(found, name):
    return [path for n, path, _ in found if n == name and len(path) > 1]


def test_way_there_and_back():
    found = program(loss, {"a": P("x", "y"), "b": P()})
    way = [P("x", "y"), P("x"), P()]
    assert set(map(tuple, paths(found, "jfleet_gather"))) == {tuple(way)}
    assert paths(found, "jfleet_scatter") == [[P("x"), P("x", "y")]]
    found = program(loss, {"a": P("x", "y"), "b": P()}, stepwise=False)
    assert set(map(tuple, paths(found, "jfleet_gather"))) == {(way[0], way[-1])}
    assert paths(found, "jfleet_scatter") == []
    found = program(loss, {"a": P("x", "y"), "b": P()}, axes=("y",))
    assert set(map(tuple, paths(found, "jfleet_gather"))) == {(P("x", "y"), P("x"))}


def test_scatters_stand_where_the_gradient_arises():
    layers = constructs.STACKED["scan, checkpoint"]
    args = constructs.stacked_inputs()
    specs = {"a": P(None, "x", "y"), "b": P(None, "x", "y")}
    for mode in ("gather", "cotangent"):
        found = program(layers, specs, args=args, mode=mode)
        inside = [
            path
            for name, path, around in found
            if name == "jfleet_scatter" and "scan" in around
        ]
        assert inside.count([P("x"), P("x", "y")]) == 2
    assert paths(found, "jfleet_gather") == []  # mode="cotangent" moves no weight


@pytest.mark.parametrize("axis", ["y", None])
def test_mapped_dim_keeps_its_axis(axis):
    sharding = {"a": NamedSharding(ON, P(None, "x"))}
    wrapped = gather_at_use(loss, sharding)
    mapped = jax.vmap(wrapped, (0, None), spmd_axis_name=axis)
    stacked = jax.tree.map(lambda a: jnp.stack([a] * 4), params)
    found = list(equations(jax.make_jaxpr(mapped)(stacked, x).jaxpr))
    [path] = paths(found, "jfleet_gather")
    entry = axis or P.UNCONSTRAINED
    assert path == [P(entry, None, "x"), P(entry, None, None)]


@pytest.mark.parametrize(
    ("wanted", "left"), [(P(None, "y"), 0), (P("x", "y"), 0), (P(), 1), (P("y"), 1)]
)
def test_constraint_of_the_model_is_left_out_if_it_holds(wanted, left):
    def constrained(p, x):
        sharding = NamedSharding(ON, wanted)
        return loss({**p, "a": lax.with_sharding_constraint(p["a"], sharding)}, x)

    shardings = {"a": NamedSharding(ON, P("x", "y"))}
    wrapped = gather_at_use(constrained, shardings, axes=("x",))
    found = list(equations(jax.make_jaxpr(wrapped)(params, x).jaxpr))
    assert [name for name, _, _ in found].count("sharding_constraint") == left


def test_scan_gives_back_layers_as_shards():
    """Layers that come along, changed or not, are not gathered to be returned."""
    args = constructs.stacked_inputs()
    specs = {"a": P(None, "x", "y"), "b": P(None, "x", "y")}
    shardings = {k: NamedSharding(ON, s) for k, s in specs.items()}

    def layers(p, x):
        def layer(h, w):
            return constructs.two_layers(w, h), (w["a"], w["b"] * 2)

        return lax.scan(layer, x, p)

    wrapped = gather_at_use(layers, shardings)
    placed = jax.device_put(args[0], shardings)
    h, (same, doubled) = jax.jit(wrapped)(placed, args[1])
    expected = layers(*args)
    checks.assert_close((h, (same, doubled)), expected, 1e-5)
    found = list(equations(jax.make_jaxpr(wrapped)(*args).jaxpr))
    assert len(paths(found, "jfleet_gather")) == 2  # one for each product
    assert same.sharding.is_equivalent_to(shardings["a"], 3)


def test_wrapping_a_partial():
    half = functools.partial(lambda s, p, x: loss(p, x) * s, 0.5)
    wrapped = gather_at_use(half, {"a": NamedSharding(ON, P("x", "y"))})
    actual = jax.jit(jax.grad(wrapped))(params, x)
    checks.assert_close(actual, jax.grad(half)(params, x), 1e-5)
