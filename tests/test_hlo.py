"""Reading collectives out of HLO text: the forms of every back end, trips, branches."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jfleet._hlo import collectives

HEADER = "HloModule step, is_scheduled=true, num_partitions=8\n\n"


def program(*lines, before=""):
    body = "\n".join(f"  {line}" for line in lines)
    main = f"ENTRY %main (p: f32[4,8]) -> f32[4,8] {{\n{body}\n}}\n"
    return HEADER + before + main


def only(text):
    [found] = collectives(text)
    return found


P0 = "%p = f32[4,8]{1,0} parameter(0)"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "%g = f32[32,8]{1,0} all-gather(%p), replica_groups=[1,8]<=[8], dims={0}",
            ("all-gather", (32, 8), 1024, 8, 896),
        ),
        (
            "%r = f32[4,8]{1,0} all-reduce(%p), replica_groups={{0,1,2,3},{4,5,6,7}}",
            ("all-reduce", (4, 8), 128, 4, 192),
        ),
        (
            "%r = f32[4,8]{1,0} all-reduce(%p), replica_groups={}, to_apply=%add",
            ("all-reduce", (4, 8), 128, 8, 224),
        ),
        (
            "%s = f32[2,8]{1,0} reduce-scatter(%p), replica_groups=[4,2]<=[8]",
            ("reduce-scatter", (2, 8), 128, 2, 64),
        ),
        (
            "%s = f32[4,8]{1,0} all-to-all(%p), "
            "replica_groups=mesh['x'=2,'y'=4] {'y'}, dimensions={0}",
            ("all-to-all", (4, 8), 128, 4, 96),
        ),
        (
            "%c = f32[4,8]{1,0} collective-permute(%p), source_target_pairs={{0,1}}",
            ("collective-permute", (4, 8), 128, 2, 128),
        ),
        (
            "%g = (f32[4,8]{1,0:T(8,128)}, bf16[32,8]{1,0:T(8,128)(2,1)S(1)}) "
            "all-gather-start(%p), replica_groups=[1,8]<=[8]",
            ("all-gather", (32, 8), 1024, 8, 896),
        ),
        (
            "%all-reduce-scatter.3 = f32[4,8]{1,0} all-reduce(%p), "
            "replica_groups=[1,8]<=[8], to_apply=%add",
            ("reduce-scatter", (4, 8), 128, 8, 112),
        ),
        (
            "%s = (f32[4,8]{1,0}, u32[], token[]) send(%p, %t), channel_id=2",
            ("send", (4, 8), 128, 2, 128),
        ),
    ],
)
def test_forms(line, expected):
    found = only(program(P0, line))
    assert (found.kind, found.shape, found.bytes) == expected[:3]
    assert (found.group_size, found.wire_bytes) == expected[3:]
    assert not found.in_loop
    assert found.count == 1


def test_done_and_host_transfers_do_not_count():
    text = program(
        P0,
        "%s = f32[4,8]{1,0} all-reduce-start(%p), replica_groups=[1,8]<=[8]",
        "%d = f32[4,8]{1,0} all-reduce-done(%s)",
        "%h = (f32[4,8]{1,0}, u32[], token[]) send(%d, %t), is_host_transfer=true",
        "%e = token[] send-done(%h), channel_id=2",
    )
    assert only(text).kind == "all-reduce"


def test_tuple_of_arrays():
    text = program(
        P0,
        "%q = bf16[16]{0} parameter(1)",
        "%r = (f32[4,8]{1,0}, bf16[16]{0}) all-reduce(%p, %q), replica_groups={}, "
        'to_apply=%add, metadata={op_name="jit(step)/mean"}',
    )
    found = only(text)
    assert found.bytes == 4 * 8 * 4 + 16 * 2
    assert found.op_name == "jit(step)/mean"


LOOP = """%body (c: f32[4,8]) -> f32[4,8] {
  %c = f32[4,8]{1,0} parameter(0)
  ROOT %r = f32[4,8]{1,0} all-reduce(%c), replica_groups={}, to_apply=%add
}

%test (c: f32[4,8]) -> pred[] {
  %n = s32[] constant(12)
  ROOT %t = pred[] compare(%i, %n), direction=LT
}

"""
WHILE = "%w = f32[4,8]{1,0} while(%p), condition=%test, body=%body"


def test_trips_multiply():
    trips = ', backend_config={"known_trip_count":{"n":"7"}}'
    found = only(program(P0, WHILE + trips, before=LOOP))
    assert (found.count, found.in_loop, found.known_trips) == (7, True, True)
    assert found.wire_bytes == 7 * 224
    found = only(program(P0, WHILE, before=LOOP))
    assert found.count == 12
    unknown = LOOP.replace("constant(12)", "parameter(0)")
    found = only(program(P0, WHILE, before=unknown))
    assert (found.count, found.in_loop, found.known_trips) == (1, True, False)


@pytest.mark.parametrize(
    "branches",
    [
        "branch_computations={%body, %empty}",
        "true_computation=%body, false_computation=%empty",
    ],
)
def test_branches_are_marked(branches):
    line = f"%c = f32[4,8]{{1,0}} conditional(%i, %p, %p), {branches}"
    found = only(program(P0, line, before=LOOP))
    assert found.in_conditional
    assert found.count == 1


def test_async_wrappers_count_once():
    text = program(
        P0,
        "%s = (f32[4,8]{1,0}) async-start(%p), calls=%body",
        "%async-collective-done = f32[4,8]{1,0} fusion(%s), calls=%body",
        "%f = f32[4,8]{1,0} fusion(%p), calls=%async_collective_fusion.1",
        before=LOOP + LOOP.replace("%body", "%async_collective_fusion.1"),
    )
    assert only(text).kind == "all-reduce"


def test_compiled_program():
    on = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    split, whole = NamedSharding(on, P("data")), NamedSharding(on, P())

    def step(w, x):
        def layer(h, w):
            return jnp.tanh(h @ lax.with_sharding_constraint(w, whole)), None

        h, _ = lax.scan(layer, x, w)
        return h.sum()

    w = jax.device_put(jnp.ones((12, 16, 16)), NamedSharding(on, P(None, "data")))
    x = jax.device_put(jnp.ones((16, 16)), split)
    found = collectives(jax.jit(step).lower(w, x).compile())
    [gather] = [c for c in found if c.kind == "all-gather"]
    assert (gather.count, gather.in_loop, gather.group_size) == (12, True, 8)
    assert gather.bytes == 16 * 16 * 4
    assert [c.kind for c in found if c is not gather] == ["all-reduce"]
