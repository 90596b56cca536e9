"""Every strategy at every level against replicas and steps in NumPy float64."""

import numpy as np
import pytest

from tests.train_step.oracle import check, mesh_of

LEVELS = (None, "os", "os_g", "p_g_os")
DATA, PAIR = {"data": 4}, {"data": 2}
GRID = {"replica": 2, "shard": 2}
SIMPLE = [
    ((), DATA),
    (("clip",), DATA),
    (("amp",), DATA),
    (("recompute",), DATA),
    (("lars",), DATA),
    (("lamb",), DATA),
    # Two replicas: the order of a 16-bit sum of more is open.
    (("fp16_allreduce",), PAIR),
    (("localsgd",), GRID),
    (("adaptive_localsgd",), GRID),
    (("localsgd", "outer"), GRID),
    (("dgc",), GRID),
]
MERGED = [
    (("gradient_merge",), DATA, ("last", "each")),
    (("gradient_merge",), GRID, ("last", "each")),
    (("gradient_merge", "clip", "amp"), DATA, ("last", "each")),
    (("gradient_merge", "lars", "recompute"), GRID, ("last", "each")),
    (("gradient_merge", "fp16_allreduce"), PAIR, ("last", "auto")),
    (("gradient_merge", "localsgd"), GRID, ("last", "auto")),
    (("gradient_merge", "localsgd", "clip", "amp"), GRID, ("last", "auto")),
    (("gradient_merge", "adaptive_localsgd"), GRID, ("last", "auto")),
    (("gradient_merge", "dgc", "clip"), GRID, ("last", "auto")),
]
PAIRED = [
    (("localsgd", "fp16_allreduce"), GRID),
    (("localsgd", "lamb", "clip"), GRID),
    (("adaptive_localsgd", "outer"), GRID),
    (("gradient_merge", "localsgd", "outer", "clip"), GRID),
    (("adaptive_localsgd", "lars", "amp"), GRID),
    (("amp", "fp16_allreduce"), PAIR),
    (("amp", "dgc"), GRID),
    (("recompute", "amp", "clip"), GRID),
    (("recompute", "dgc"), GRID),
    (("recompute", "localsgd"), GRID),
]
QUICK = (None, "p_g_os")
"""Levels of the everyday run for combinations; all of them run in the slow one."""


def tolerance(names):
    """The amp of these runs computes in float32; then 16-bit sums may round apart."""
    if {"amp", "fp16_allreduce"} <= set(names):
        return float(np.finfo(np.float16).eps)
    return 5e-6 if "amp" in names else 1e-9


def name_of(value):
    if isinstance(value, tuple):
        return "+".join(value) or "plain"
    if isinstance(value, dict):
        return "x".join(value)
    return str(value)


def levels(quick=QUICK):
    return [
        pytest.param(x, marks=() if x in quick else pytest.mark.slow) for x in LEVELS
    ]


@pytest.mark.parametrize("level", LEVELS, ids=name_of)
@pytest.mark.parametrize(("names", "mesh"), SIMPLE, ids=name_of)
def test_single(names, mesh, level):
    check(names, level, mesh_of(**mesh), rtol=tolerance(names))


@pytest.mark.parametrize("level", levels(("os_g", "p_g_os")), ids=name_of)
@pytest.mark.parametrize(
    ("names", "mesh", "sync"),
    [(names, mesh, sync) for names, mesh, syncs in MERGED for sync in syncs],
    ids=name_of,
)
def test_merged(names, mesh, sync, level):
    check(names, level, mesh_of(**mesh), rtol=tolerance(names), sync=sync)


@pytest.mark.parametrize("level", levels(), ids=name_of)
@pytest.mark.parametrize(("names", "mesh"), PAIRED, ids=name_of)
def test_paired(names, mesh, level):
    check(names, level, mesh_of(**mesh), rtol=tolerance(names))


@pytest.mark.parametrize("names", [("localsgd",), ("dgc",), ("adaptive_localsgd",)])
def test_every_device_a_replica(names):
    check(names, None, mesh_of(data=4))


@pytest.mark.parametrize("names", [(), ("localsgd",), ("gradient_merge",)])
def test_one_device(names):
    mesh = mesh_of(data=1)
    if names == ("localsgd",):
        with pytest.warns(UserWarning, match="one device"):
            check(names, None, mesh)
    else:
        check(names, None, mesh)


@pytest.mark.parametrize("names", [("localsgd",), ("adaptive_localsgd",)])
def test_replicas_really_part(names):
    """The oracle would also be met by replicas that never differ, if it were wrong."""
    _, state, metrics = check(names, "p_g_os", mesh_of(**GRID), num_steps=10)
    flags = [bool(m.synchronised) for m in metrics]
    assert flags[0]
    assert not all(flags)
    if not flags[-1]:
        w = np.asarray(state.params["w"])
        assert np.abs(w[0] - w[1]).max() > 1e-3
