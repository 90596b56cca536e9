"""The same steps on one process with eight devices, on two and on four processes."""

import jax
import numpy as np
import pytest

from jfleet.processes import to_host
from tests.processes import start
from tests.train_step import oracle

pytestmark = pytest.mark.multiprocess

DATA, GRID = {"data": 8}, {"replica": 2, "shard": 4}
# In float64, but for what works on 16 or 32 bits by its nature.
CASES = {
    "os": (("clip",), "os", DATA),
    "os_g": (("clip",), "os_g", DATA),
    "p_g_os": (("clip",), "p_g_os", DATA),
    "merged": (("gradient_merge", "clip"), "os_g", DATA),
    "fp16": (("fp16_allreduce",), "os_g", DATA),
    "localsgd": (("localsgd",), "os_g", GRID),
    "dgc": (("dgc",), "os_g", GRID),
}
SLOW_CASES = {
    "plain": ((), None, DATA),
    "each": (("gradient_merge",), "p_g_os", DATA),
    "hybrid": (("clip",), "p_g_os", GRID),
    "amp": (("amp", "gradient_merge"), "p_g_os", GRID),
    "localsgd_p_g_os": (("localsgd",), "p_g_os", GRID),
    "adaptive": (("adaptive_localsgd",), "os_g", GRID),
    "dgc_p_g_os": (("dgc",), "p_g_os", GRID),
}
SYNC = {"merged": "last", "each": "each"}
TOLERANCE = dict.fromkeys(("amp", "dgc", "dgc_p_g_os"), 1e-6)
TOLERANCE["fp16"] = float(np.finfo(np.float16).eps)
STEPS = 4  # localsgd has a step without and one with synchronisation
SCRIPT = """
from tests.train_step import test_processes as cases
found = cases.run_all({**cases.CASES, **(cases.SLOW_CASES if sys.argv[2] else {})})
if jax.process_index() == 0:
    np.savez(sys.argv[1], **found)
"""


def run_case(name, names, level, shape):
    dtype = np.float64 if TOLERANCE.get(name, 0) == 0 else np.float32
    with jax.enable_x64(dtype is np.float64):
        configs = {}
        if name in SYNC:
            configs["gradient_merge_configs"] = {"sync": SYNC[name]}
        opt = oracle.make_optimizer(names, level, oracle.mesh_of(**shape), **configs)
        step = opt.minimize(oracle.loss_fn)
        state = opt.create(oracle.params(dtype))
        rank, count = jax.process_index(), jax.process_count()
        losses, norms = [], []
        for number in range(STEPS):
            whole = oracle.batch(number, 64, dtype)
            rows = {k: np.split(x, count)[rank] for k, x in whole.items()}
            state, metrics = step(state, rows)
            losses.append(float(metrics.loss))
            norms.append(float(metrics.grad_norm))
        mean = to_host(opt.params(state))  # state.params are those of every replica
        found = {**to_host(state.params), "mean_w": mean["w"], "mean_b": mean["b"]}
        return {**found, "loss": losses, "norm": norms}


def run_all(cases):
    return {
        f"{name}/{key}": value
        for name, case in cases.items()
        for key, value in run_case(name, *case).items()
    }


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, 4), id="2x4"),
        pytest.param((4, 2), id="4x2", marks=pytest.mark.slow),
    ],
)
def several(request, tmp_path_factory):
    """What processes x devices compute, for the cases that are run."""
    slow = any("slow" in item.keywords for item in request.session.items)
    out = tmp_path_factory.mktemp("processes") / "found.npz"
    count, devices = request.param
    start.run(SCRIPT, out, "slow" if slow else "", count=count, devices=devices)
    return np.load(out)


@pytest.mark.parametrize(
    "name", [*CASES, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW_CASES)]
)
def test_several_processes_compute_what_one_does(several, name):
    tolerance = TOLERANCE.get(name, 1e-12)
    for key, value in run_case(name, *{**CASES, **SLOW_CASES}[name]).items():
        np.testing.assert_allclose(
            several[f"{name}/{key}"], value, 10 * tolerance, tolerance, err_msg=key
        )
