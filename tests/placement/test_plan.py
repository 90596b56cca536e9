"""Plans: pure, exact to the byte, readable, and fast for the largest models."""

import json
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import jfleet
from tests.models import LEVELS, device_bytes, make_state

MESH = AbstractMesh((8,), ("data",))


@pytest.mark.parametrize("level", LEVELS)
def test_a_plan_needs_no_devices_and_equals_the_placement(level):
    shapes = jax.eval_shape(make_state)
    planned = jfleet.plan(shapes, level, mesh=MESH)
    mesh = jfleet.new_group(range(8))
    placed = jfleet.group_sharded_parallel(make_state(), level, mesh=mesh)
    assert planned == jfleet.plan(make_state(), level, mesh=mesh)
    for kind in ("params", "opt_state"):
        assert planned.device_bytes(kind) == device_bytes(getattr(placed, kind))
    specs = [r.spec for r in planned.of_kind("params")]
    assert specs == [x.sharding.spec for x in jax.tree.leaves(placed.params)]


def test_gradients_follow_the_level():
    rows = {
        level: jfleet.plan(make_state(), level, mesh=MESH).device_bytes("grads")
        for level in LEVELS
    }
    size = sum(x.size for x in jax.tree.leaves(make_state().params))
    assert rows == {"os": 4 * size, "os_g": size // 2, "p_g_os": size // 2}


def test_json_round_trip():
    planned = jfleet.plan(make_state(), "p_g_os", mesh=MESH, rules={"bias": None})
    text = planned.to_json()
    assert jfleet.Plan.from_json(text) == planned
    assert json.loads(text)["level"] == "p_g_os"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "3",
        '{"format": 99}',
        '{"format": 1, "level": "os", "mesh": 3, "axes": [], "rows": []}',
        '{"format": 1, "level": "os", "mesh": [], "axes": [], "rows": [[1]]}',
        '{"format": 1, "level": "os", "mesh": [["a", 2]], "axes": [],'
        ' "rows": [["x", "p", [], "f", [], 1, 1, "r"]]}',
    ],
)
def test_bad_json_is_a_typed_error(text):
    with pytest.raises(jfleet.ConfigError, match=r"plan"):
        jfleet.Plan.from_json(text)


def test_diff():
    one = jfleet.plan(make_state(), "os", mesh=MESH)
    two = jfleet.plan(make_state(), "p_g_os", mesh=MESH)
    assert one.diff(one) == []
    lines = one.diff(two)
    assert "level: os -> p_g_os" in lines
    assert any(
        line.startswith("params:Dense_0/kernel: spec") and "'data'" in line
        for line in lines
    )
    missing = jfleet.plan({"params": {"w": jnp.ones((8, 8))}}, "os", mesh=MESH)
    assert "params:w: only in the second plan" in one.diff(missing)
    assert "params:w: only in the first plan" in missing.diff(one)


def test_the_text_has_what_a_reader_needs():
    text = str(jfleet.plan(make_state(), "p_g_os", mesh=MESH, min_shard_size=16))
    for part in (
        "level p_g_os over data, mesh data=8, 8 devices",
        "Dense_0/kernel",
        "dim 1 is the largest that 8 divides",
        "8 elements, below min_shard_size 16: whole",
        "at rest",
    ):
        assert part in text
    assert "the program can then equal that of os_g" in str(
        jfleet.plan(make_state(), "os", mesh=MESH)
    )


def test_a_mapping_without_optimizer_state_is_planned_with_tx():
    params = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    planned = jfleet.plan({"params": params}, "os", mesh=MESH, tx=optax.adam(1e-3))
    assert planned.device_bytes("opt_state") == 2 * 4 * 64 * 64 // 8 + 4


@pytest.mark.parametrize(
    ("tx", "path", "spec"),
    [
        (optax.adafactor(1e-2, min_dim_size_to_factor=4), "v_row/w", P("data")),
        (optax.lbfgs(memory_size=3), "diff_params_memory/w", P(None, "data")),
        (optax.contrib.muon(1e-2), "inner_states/muon/inner_state/0/mu/w", P("data")),
        (optax.masked(optax.adam(1e-2), {"w": True}), "inner_state/0/mu/w", P("data")),
    ],
    ids=["adafactor", "lbfgs", "muon", "masked"],
)
def test_states_that_tree_map_params_cannot_follow(tx, path, spec):
    params = {"w": jax.ShapeDtypeStruct((64, 16), jnp.float32)}
    planned = jfleet.plan({"params": params}, "os", mesh=MESH, tx=tx)
    [row] = [r for r in planned.of_kind("opt_state") if r.path.endswith(path)]
    assert row.spec == spec


def test_the_largest_model_is_planned_in_seconds_without_devices():
    """671 billion parameters in 100,000 leaves over 4,096 devices."""
    program = textwrap.dedent(
        """
        import time
        import jax, optax, jfleet
        layers, per_layer = 1000, 100
        leaf = jax.ShapeDtypeStruct((2048, 3328), "float32")
        params = {
            f"layer_{i}": {f"w{j}": leaf for j in range(per_layer)}
            for i in range(layers)
        }
        mesh = jax.sharding.AbstractMesh((64, 64), ("x", "y"))
        start = time.process_time()
        plan = jfleet.plan(
            {"params": params}, "p_g_os", mesh=mesh, axis=("x", "y"),
            tx=optax.adam(1e-3),
        )
        seconds = time.process_time() - start
        total = plan.total_bytes("params") // 4
        # Not ru_maxrss: a child inherits that of the process that starts it.
        status = open("/proc/self/status").read()
        peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
        assert total > 670e9, total
        assert plan.device_bytes("params") < total * 4 / 1000
        assert peak < 2 * 2**30, peak
        assert seconds < 60, seconds
        print(len(str(plan)), seconds, peak)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
