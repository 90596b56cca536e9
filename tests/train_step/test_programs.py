"""What compiled steps send, by counting: once a window, 16 bits, values and indices."""

import functools

import jax
import numpy as np
import pytest

from jfleet._hlo import collectives
from jfleet._step import reduce
from tests.train_step import oracle
from tests.train_step.oracle import mesh_of

PARAM_BYTES = 4 * (32 + 4)
SMALL = 16
"""Bytes of a reduction of a few scalars: loss, norms, flags."""
NUM_MICRO = 2


@functools.cache
def program(names, level, mesh, sync=None):
    configs = {} if sync is None else {"gradient_merge_configs": {"sync": sync}}
    opt = oracle.make_optimizer(names, level, mesh_of(**dict(mesh)), **configs)
    step = opt.minimize(oracle.loss_fn)
    state = opt.create(oracle.params(np.float32))
    rows = oracle.ROWS * opt.mesh.size * NUM_MICRO
    batch = oracle.batch(0, rows, np.float32)
    return collectives(step.lower(state, batch).compile())


def run(names, level, sync=None, **mesh):
    return program(names, level, tuple(mesh.items()), sync)


def of_kind(found, *kinds):
    return [c for c in found if c.kind in kinds]


REDUCTIONS = ("all-reduce", "reduce-scatter")


@pytest.mark.parametrize("level", [None, "os", "os_g", "p_g_os"])
def test_last_reduces_once_a_window(level):
    found = run(("gradient_merge",), level, "last", data=4)
    assert not [c for c in found if c.in_loop]
    gradients = [c for c in of_kind(found, *REDUCTIONS) if c.bytes >= SMALL]
    assert PARAM_BYTES <= sum(c.bytes * c.count for c in gradients) <= PARAM_BYTES + 12


@pytest.mark.parametrize("level", [None, "os", "os_g", "p_g_os"])
def test_each_reduces_once_a_micro_batch(level):
    found = run(("gradient_merge",), level, "each", data=4)
    inside = [c for c in of_kind(found, *REDUCTIONS) if c.in_loop]
    assert {c.count for c in inside} == {NUM_MICRO}
    total = sum(c.bytes for c in inside)
    assert PARAM_BYTES <= total <= PARAM_BYTES + 12
    outside = [c for c in of_kind(found, *REDUCTIONS) if not c.in_loop]
    assert all(c.bytes <= SMALL for c in outside)


def test_no_row_leaves_its_device():
    for sync in ("last", "each"):
        found = run(("gradient_merge",), None, sync, data=4)
        assert {c.kind for c in found} == {"all-reduce"}


@pytest.mark.parametrize("names", [(), ("clip",), ("gradient_merge",)])
def test_os_g_reduce_scatters_on_any_backend(names):
    found = run(names, "os_g", "last" if names == ("gradient_merge",) else None, data=4)
    scattered = of_kind(found, "reduce-scatter")
    assert sum(c.bytes for c in scattered) == PARAM_BYTES
    assert all(c.bytes <= SMALL for c in of_kind(found, "all-reduce"))
    assert sum(c.bytes for c in of_kind(found, "all-gather")) == PARAM_BYTES


@pytest.mark.parametrize("level", [None, "os", "os_g", "p_g_os"])
def test_p_g_os_gathers_parameters_only(level):
    found = run((), level, data=4)
    assert not of_kind(found, "all-to-all", "collective-permute")
    gathered = sum(c.bytes for c in of_kind(found, "all-gather"))
    assert gathered == (0 if level is None else PARAM_BYTES)


@pytest.mark.parametrize(
    ("names", "mesh", "level", "wanted"),
    [
        ((), {"data": 4}, "p_g_os", True),
        (("gradient_merge",), {"data": 4}, "p_g_os", True),
        (("recompute", "amp"), {"data": 4}, "p_g_os", True),
        (("localsgd",), {"replica": 2, "shard": 2}, "p_g_os", True),
        (("dgc",), {"replica": 2, "shard": 2}, "p_g_os", True),
        ((), {"data": 4}, "os_g", False),
    ],
)
def test_parameters_are_gathered_where_they_are_used(names, mesh, level, wanted):
    opt = oracle.make_optimizer(names, level, mesh_of(**mesh))
    step = opt.minimize(oracle.loss_fn)
    state = opt.create(oracle.params(np.float32))
    batch = oracle.batch(0, 32, np.float32)
    jaxpr = jax.make_jaxpr(lambda s, b: step.jitted(s, b, None))(state, batch)
    assert ("jfleet_gather" in str(jaxpr)) is wanted


@pytest.mark.parametrize("names", [("localsgd",), ("localsgd", "clip")])
def test_localsgd_is_silent_between_syncs(names):
    found = run(names, None, data=4)
    assert found
    assert all(c.in_conditional for c in found)


@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
def test_localsgd_sends_over_replica_in_a_conditional_only(level):
    """A mesh of 2 x 3 tells the axes apart by the size of their groups."""
    opt = oracle.make_optimizer(("localsgd",), level, mesh_of(replica=2, shard=3))
    step = opt.minimize(oracle.loss_fn)
    params = {"w": np.ones((8, 6), np.float32), "b": np.ones(6, np.float32)}
    state = opt.create(params)
    batch = {"x": np.ones((24, 8), np.float32), "y": np.ones((24, 6), np.float32)}
    found = collectives(step.lower(state, batch).compile())
    sizes = {c.group_size for c in found}
    assert sizes <= {2, 3}
    over_replica = [c for c in found if c.group_size == 2]
    assert over_replica
    assert all(c.in_conditional for c in over_replica)
    assert not any(c.kind == "collective-permute" for c in found)


def test_dgc_sends_values_and_indices():
    found = run(("dgc",), None, data=4)
    gathered = of_kind(found, "all-gather")
    kept = 4 * (16 + 2)  # half of each tensor, from 4 devices
    assert sum(c.bytes for c in gathered if c.dtype == "f32") == 4 * kept
    assert sum(c.bytes for c in gathered if c.dtype == "s32") == 4 * kept
    others = [c for c in found if c.kind != "all-gather"]
    assert all(c.bytes <= SMALL for c in others)


@pytest.mark.parametrize("level", [None, "os_g", "p_g_os"])
def test_fp16_allreduce_is_16_bits_wide(level):
    found = run(("fp16_allreduce",), level, data=4)
    reductions = of_kind(found, *REDUCTIONS)
    gradients = [c for c in reductions if c.dtype == "f16"]
    assert all(c.bytes <= SMALL for c in reductions if c.dtype != "f16")
    assert sum(c.bytes for c in gradients) == PARAM_BYTES // 2
    kind = "all-reduce" if level is None else "reduce-scatter"
    assert {c.kind for c in gradients} == {kind}


def test_between_old_processes_nothing_is_scattered(monkeypatch):
    """Reduce-scatter over Gloo is wrong there; the values are the same without."""
    monkeypatch.setattr(reduce, "scatter_is_safe", lambda: False)
    mesh = mesh_of(data=4)
    oracle.check(("clip",), "os_g", mesh)
    step = oracle.make_optimizer((), "os_g", mesh).minimize(oracle.loss_fn)
    opt = oracle.make_optimizer((), "os_g", mesh)
    state = opt.create(oracle.params(np.float32))
    batch = oracle.batch(0, 32, np.float32)
    found = collectives(step.lower(state, batch).compile())
    assert not of_kind(found, "reduce-scatter")


@pytest.mark.parametrize(
    ("processes", "version", "backend", "safe"),
    [
        (1, "0.10.2", "cpu", True),
        (2, "0.10.2", "cpu", False),
        (2, "0.11.9", "cpu", False),
        (2, "0.12.0.1", "cpu", True),
        (2, "0.10.2", "tpu", True),
    ],
)
def test_where_scattering_is_safe(monkeypatch, processes, version, backend, safe):
    monkeypatch.setattr(reduce.jax, "process_count", lambda: processes)
    monkeypatch.setattr(reduce.jax, "__version__", version)
    monkeypatch.setattr(reduce.jax, "default_backend", lambda: backend)
    assert reduce.scatter_is_safe() is safe
