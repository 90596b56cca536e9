"""Tensor-parallel axes, shared dims, replicas in shard_map, and what is refused."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jfleet._errors import ConfigError, ConfigTypeError, PlacementError
from jfleet._gather import early_gathers, gather_at_use, rewrite
from jfleet._hlo import collectives
from tests.gather import checks, constructs

loss = constructs.squares(constructs.two_layers)
params, x = constructs.inputs()
gradient = jax.jit(jax.grad(loss))(params, x)


def run(specs, on, batch, **options):
    shardings = {k: NamedSharding(on, s) for k, s in specs.items()}
    wrapped = gather_at_use(loss, shardings, **options)
    placed = jax.device_put(params, shardings)
    xs = jax.device_put(x, NamedSharding(on, batch))
    compiled = jax.jit(jax.grad(wrapped)).lower(placed, xs).compile()
    actual = compiled(placed, xs)
    checks.assert_close(actual, gradient, 1e-5)
    for key, g in actual.items():
        assert g.sharding.is_equivalent_to(shardings[key], g.ndim)
    return collectives(compiled)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "specs",
    [
        {"a": P("x", "y"), "b": P("y", "x")},
        {"a": P(("x", "y")), "b": P(None, ("y", "x"))},
        {"a": P(None, "y"), "b": P()},
    ],
)
def test_two_gathered_axes(specs, kind):
    run(specs, checks.two_axes(kind), P(("x", "y")))


@pytest.mark.parametrize("stepwise", [True, False])
def test_one_axis_at_a_time(stepwise):
    """Each step of a gather has the group size of its own axis."""
    found = run(
        {"a": P("x", "y"), "b": P("x", "y")},
        checks.two_axes(),
        P(("x", "y")),
        stepwise=stepwise,
    )
    shapes = {c.shape for c in found if c.kind == "all-gather"}
    assert (16, 64) in shapes or (32, 16) in shapes or not stepwise


@pytest.mark.parametrize("order", [("data", "model"), ("model", "data")])
def test_tensor_parallel_axes_stay(order):
    on = checks.mesh((4, 2), ("data", "model"))
    specs = {"a": P("data", "model"), "b": P(order)}
    found = run(specs, on, P("data"), axes=("data",))
    gathers = [c.shape for c in found if c.kind == "all-gather"]
    assert (32, 32) in gathers  # whole over data, half over model
    assert (32, 64) not in gathers


@pytest.mark.parametrize("wanted", [P(), P(None, "model"), P("data", "model")])
def test_constraints_of_the_model(wanted):
    on = checks.mesh((4, 2), ("data", "model"))

    def constrained(p, x):
        w = jax.lax.with_sharding_constraint(p["a"], NamedSharding(on, wanted))
        return loss({**p, "a": w}, x)

    specs = {"a": NamedSharding(on, P("data", "model")), "b": NamedSharding(on, P())}
    wrapped = gather_at_use(constrained, specs, axes=("data",))
    actual = jax.jit(jax.grad(wrapped))(jax.device_put(params, specs), x)
    checks.assert_close(actual, gradient, 1e-5)


def test_shard_map_takes_shards():
    on = checks.auto()

    def local(w, x):
        return x @ jax.lax.all_gather(w, "data", axis=1, tiled=True)

    def manual(p, x):
        y = jax.shard_map(
            local, mesh=on, in_specs=(P(None, "data"), P("data")), out_specs=P("data")
        )(p["a"], x)
        return (jnp.tanh(y) @ p["b"]) ** 2

    def total(p, x):
        return manual(p, x).mean()

    found = checks.Run(total, params, x, on)
    checks.assert_close(found.gradients, gradient, 1e-5)
    found.assert_gradients_are_shards()
    assert early_gathers(found.wrapped, *found.inputs) == []


@pytest.mark.parametrize("abstract", [True, False])
@pytest.mark.parametrize("check_vma", [True, False])
def test_replicas_in_shard_map(abstract, check_vma):
    """As for local SGD: each replica has parameters of its own, split in itself."""
    on = checks.mesh((2, 4), ("replica", "shard"))
    specs = {"a": P(None, "shard"), "b": P("shard")}

    def local(p, x):
        here = jax.sharding.get_abstract_mesh() if abstract else on
        shardings = {k: NamedSharding(here, s) for k, s in specs.items()}
        wrapped = gather_at_use(loss, shardings, axes=("shard",))
        mine = jax.tree.map(lambda a: a[0], p)
        return jax.tree.map(lambda a: a[None], jax.grad(wrapped)(mine, x))

    step = jax.jit(
        jax.shard_map(
            local,
            mesh=on,
            in_specs=(P("replica"), P("replica")),
            out_specs=P("replica"),
            axis_names={"replica"},
            check_vma=check_vma,
        )
    )
    stacked = {
        k: jax.device_put(jnp.stack([a, a]), NamedSharding(on, P("replica", *specs[k])))
        for k, a in params.items()
    }
    xs = jax.device_put(x, NamedSharding(on, P(("replica", "shard"))))
    compiled = step.lower(stacked, xs).compile()
    mean = jax.tree.map(lambda a: a.mean(0), compiled(stacked, xs))
    checks.assert_close(mean, gradient, 1e-5)
    assert {c.group_size for c in collectives(compiled)} == {4}


def test_vmap_over_a_mesh_axis():
    """A mapped axis of the mesh is not gathered along with the parameters."""
    on = checks.mesh((2, 4), ("replica", "shard"))
    specs = {"a": P(None, "shard"), "b": P("shard")}
    shardings = {k: NamedSharding(on, s) for k, s in specs.items()}
    wrapped = gather_at_use(loss, shardings, axes=("shard",))
    stacked = {
        k: jax.device_put(
            jnp.stack([a, 2 * a]), NamedSharding(on, P("replica", *specs[k]))
        )
        for k, a in params.items()
    }
    expected = jax.vmap(jax.grad(loss), (0, None))(jax.device_get(stacked), x)
    for name in ("replica", None):
        mapped = jax.vmap(jax.grad(wrapped), (0, None), spmd_axis_name=name)
        compiled = jax.jit(mapped).lower(stacked, x).compile()
        checks.assert_close(compiled(stacked, x), expected, 1e-5)
        assert {c.group_size for c in collectives(compiled)} == {4}


# Refused -----------------------------------------------------------------------------


def refused(error, text, specs=None, on=None, **options):
    on = on or checks.auto()
    specs = specs or {"a": P("data"), "b": P()}
    shardings = {k: NamedSharding(on, s) for k, s in specs.items()}
    with pytest.raises(error, match=text):
        jax.eval_shape(gather_at_use(loss, shardings, **options), params, x)


def test_refused_options():
    refused(ConfigError, "axes must name axes of the mesh.*'data'", axes=("dat",))
    refused(ConfigError, "mode must be 'gather' or 'cotangent'", mode="scatter")
    explicit = checks.explicit()
    refused(ConfigError, "mode='cotangent' needs", on=explicit, mode="cotangent")
    refused(ConfigError, "embedding= needs", on=explicit, embedding=("data",))
    with pytest.raises(ConfigError, match=r"options must be among .*'stepwise'"):
        rewrite(loss, lambda a, k: [], checks.auto(), ("data",), step=1)


def test_refused_meshes():
    mixed = jax.make_mesh(
        (2, 4), ("data", "y"), axis_types=(AxisType.Auto, AxisType.Explicit)
    )
    refused(ConfigError, "must all be Auto or all be Explicit", on=mixed)
    wrapped = gather_at_use(loss, {"a": NamedSharding(checks.auto(), P("data"))})
    inside = jax.shard_map(
        lambda p, x: wrapped(p, x)[None],
        mesh=checks.auto(),
        in_specs=P(),
        out_specs=P("data"),
        check_vma=False,
    )
    with pytest.raises(ConfigError, match="axes must not be manual"):
        jax.eval_shape(inside, params, x)


def test_refused_shardings():
    on = checks.auto()
    three = {"a": NamedSharding(on, P(None, None, "data"))}
    with pytest.raises(PlacementError, match="spec of 'a' must have at most 2 entries"):
        jax.eval_shape(gather_at_use(loss, three), params, x)
    odd = {"w": NamedSharding(on, P("data"))}
    with pytest.raises(PlacementError, match=r"'w' must divide its shape \(9, 2\)"):
        gather_at_use(lambda p: p["w"], odd)({"w": jnp.ones((9, 2))})
    with pytest.raises(ConfigTypeError, match="must be NamedSharding, got P"):
        gather_at_use(loss, {"a": P("data")})
    with pytest.raises(ConfigError, match="at least one NamedSharding"):
        gather_at_use(loss, params)
    missing = gather_at_use(loss, {"c": {"w": NamedSharding(on, P("data"))}})
    with pytest.raises(ConfigError, match="has no 'c/w'"):
        jax.eval_shape(missing, params, x)
    elsewhere = NamedSharding(checks.two_axes(), P("x"))
    with pytest.raises(ConfigError, match="all shardings must be on one mesh"):
        gather_at_use(loss, {**odd, "v": elsewhere})
    wrong = rewrite(loss, lambda a, k: [None], on, ("data",))
    with pytest.raises(ConfigError, match="specs_for must return"):
        jax.eval_shape(wrong, params, x)
