"""The pure decision: from path, shape and mesh to a spec with a reason."""

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jfleet
from jfleet._layout import split

MESH = AbstractMesh((8,), ("data",))
TORUS = AbstractMesh((4, 2), ("x", "y"))
HYBRID = AbstractMesh((2, 4), ("replica", "shard"))
TENSOR = AbstractMesh((4, 2), ("data", "model"))


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((), P()),
        ((7,), P()),
        ((8,), P("data")),
        ((17, 16), P(None, "data")),
        ((16, 17), P("data")),
        ((16, 16), P("data")),  # a tie goes to the first dim
        ((16, 32), P(None, "data")),
        ((17, 33), P()),
        ((0, 8), P()),
        # B05: a short first dim
        ((2, 1024), P(None, "data")),
        ((8, 3), P("data")),
        ((3, 8), P(None, "data")),
        ((4, 6, 64), P(None, None, "data")),
        ((1, 16), P(None, "data")),
    ],
)
def test_one_axis(shape, spec):
    assert split(shape, ("data",), MESH).spec == spec


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((16, 16), P("x", "y")),
        ((3, 16, 8), P(None, "x", "y")),
        ((2, 16), P("y", "x")),  # 4 does not divide dim 0
        ((16,), P(("x", "y"))),
        ((3, 16), P(None, ("x", "y"))),
        ((4,), P("x")),
        ((2,), P("y")),
        ((6, 3), P("y")),
        ((3, 5), P()),
    ],
)
def test_two_axes_of_a_torus(shape, spec):
    assert split(shape, ("x", "y"), TORUS).spec == spec


@pytest.mark.parametrize(
    ("shape", "base", "spec"),
    [
        ((16, 32), P(None, "model"), P("data", "model")),
        ((32, 16), P("model"), P("model", "data")),
        ((16,), P(), P("data")),
        ((16,), P("model"), P(("model", "data"))),
        ((3, 16), P(None, "model"), P(None, ("model", "data"))),
        ((4, 16), P("data"), P("data")),
        ((3, 6), P(None, "model"), P(None, "model")),
    ],
)
def test_b08_existing_axes_are_kept(shape, base, spec):
    assert split(shape, ("data",), TENSOR, base=base).spec == spec


def test_min_shard_size_is_a_reason():
    decision = split((8, 8), ("data",), MESH, min_shard_size=65)
    assert decision.spec == P()
    assert decision.reason == "64 elements, below min_shard_size 65: whole"
    assert split((8, 8), ("data",), MESH, min_shard_size=64).spec == P("data")


def test_an_axis_of_size_one_splits_nothing():
    mesh = AbstractMesh((1, 4), ("data", "model"))
    assert split((8, 8), ("data",), mesh).spec == P()


def shapes_of(level, params, **options):
    leaves = {k: jax.ShapeDtypeStruct(v, "float32") for k, v in params.items()}
    planned = jfleet.plan({"params": leaves}, level, **options)
    return {row.path: row.spec for row in planned.of_kind("params")}


class TestRules:
    params = {"emb": (32, 16), "mlp/kernel": (16, 64), "norm": (16,)}

    def plan(self, **options):
        return shapes_of("p_g_os", self.params, mesh=MESH, **options)

    def test_first_match_decides(self):
        got = self.plan(rules=[("^emb$", P("data")), ("emb|norm", None)])
        assert got == {"emb": P("data"), "mlp/kernel": P(None, "data"), "norm": P()}

    def test_mapping_tuple_and_name_are_understood(self):
        got = self.plan(rules={"emb": (None, "data"), "norm": "data"})
        assert got["emb"] == P(None, "data")
        assert got["norm"] == P("data")

    def test_exclude(self):
        assert self.plan(exclude="kernel")["mlp/kernel"] == P()

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"rules": [("nothing", P())]}, "'nothing' matches no parameter.*'emb'"),
            ({"exclude": ["nothing"]}, "'nothing' matches no parameter"),
            ({"rules": [("emb", P("x"))]}, "no axis 'x'.*'data'"),
            ({"rules": [("emb", P("data", "data"))]}, "'data' twice"),
            ({"rules": [("norm", P(None, "data"))]}, "2 entries for 1 dims"),
            ({"rules": [("(", P())]}, "not a regular expression"),
            ({"min_shard_size": -1}, "at least 0, got -1"),
            ({"axis": "nope"}, "distinct axes of the mesh"),
            ({"axis": ("data", "data")}, "distinct axes"),
            ({"optimizer_axis": ()}, "distinct axes"),
        ],
    )
    def test_refused(self, options, match):
        with pytest.raises(ValueError, match=match):
            self.plan(**options)

    @pytest.mark.parametrize(
        "options",
        [
            {"rules": [("emb", 3)]},
            {"rules": ["emb"]},
            {"rules": [(3, P())]},
            {"exclude": [3]},
            {"min_shard_size": 1.5},
            {"min_shard_size": True},
        ],
    )
    def test_refused_by_type(self, options):
        with pytest.raises(TypeError):
            self.plan(**options)

    def test_b105_a_spec_that_does_not_divide_names_everything(self):
        leaves = {"block_1": {"mlp": {"kernel": jax.ShapeDtypeStruct((17, 4), "f4")}}}
        with pytest.raises(jfleet.PlacementError) as error:
            jfleet.plan(
                {"params": leaves}, "p_g_os", mesh=MESH, rules=[("kernel", P("data"))]
            )
        for text in ("block_1/mlp/kernel", "(17, 4)", "P('data'", "8"):
            assert text in str(error.value)


@pytest.mark.parametrize("level", ["p_g", "zero3", "", None, 3, "OS"])
def test_unknown_levels_list_the_known_ones(level):
    with pytest.raises(ValueError, match="'os', 'os_g', 'p_g_os'"):
        shapes_of(level, {"w": (8, 8)}, mesh=MESH)


def test_default_axis():
    assert shapes_of("p_g_os", {"w": (8, 8)}, mesh=HYBRID) == {"w": P("shard")}
    assert shapes_of("p_g_os", {"w": (8, 8)}, mesh=TENSOR) == {"w": P("data")}
    with pytest.raises(jfleet.ConfigError, match="axis must be given"):
        shapes_of("p_g_os", {"w": (8, 8)}, mesh=TORUS)


def test_optimizer_state_over_both_axes_of_a_hybrid_mesh():
    planned = jfleet.plan(
        {
            "params": {"w": jax.ShapeDtypeStruct((8, 16), "f4")},
            "opt_state": {"mu": {"w": jax.ShapeDtypeStruct((8, 16), "f4")}},
        },
        "p_g_os",
        mesh=HYBRID,
        axis="shard",
        optimizer_axis=("shard", "replica"),
    )
    [param], [moment] = planned.of_kind("params"), planned.of_kind("opt_state")
    assert param.spec == P(None, "shard")
    assert moment.spec == P("replica", "shard")
    with pytest.raises(jfleet.ConfigError, match="must contain"):
        shapes_of(
            "os", {"w": (8, 8)}, mesh=HYBRID, axis="shard", optimizer_axis="replica"
        )


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    shape=st.lists(st.integers(0, 48), max_size=4),
    sizes=st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=3),
    small=st.integers(0, 100),
    kept=st.integers(0, 3),
)
def test_every_spec_is_valid(shape, sizes, small, kept):
    """Divides, uses no axis twice, is canonical, never grows an array."""
    names = (*(f"axis{i}" for i in range(len(sizes))), "model")
    mesh = AbstractMesh((*sizes, 2), names)
    base = P()
    if kept < len(shape) and shape[kept] % 2 == 0:
        base = P(*[None] * kept, "model")
    spec = split(shape, names[:-1], mesh, base=base, min_shard_size=small).spec
    shard = NamedSharding(mesh, spec).shard_shape(tuple(shape))  # raises if invalid
    assert len(shard) == len(shape)
    assert not spec or spec[-1] is not None
    used = [a for e in spec if e for a in ((e,) if isinstance(e, str) else e)]
    assert len(set(used)) == len(used)
    if base:
        assert "model" in used
