"""The same steps on one process with four devices and on two with two each."""

import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from tests.train_step import oracle

pytestmark = pytest.mark.multiprocess

DATA, GRID = {"data": 4}, {"replica": 2, "shard": 2}
CASES = {
    "plain": ((), None, DATA),
    "os_g": (("clip",), "os_g", DATA),
    "p_g_os": (("clip",), "p_g_os", DATA),
    "merged": (("gradient_merge",), "os_g", DATA),
    "fp16": (("fp16_allreduce",), "os_g", DATA),
    "localsgd": (("localsgd",), "p_g_os", GRID),
    "dgc": (("dgc",), "os_g", GRID),
}
STEPS = 3
SCRIPT = f"""
import sys
sys.path[:0] = {[p for p in sys.path if p]!r}
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
port, rank, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
jax.distributed.initialize(f"127.0.0.1:{{port}}", 2, rank)
from tests.train_step.test_processes import run_all
run_all(out if rank == 0 else None)
"""


def run_case(names, level, mesh):
    sync = {"gradient_merge_configs": {"sync": "last"}}
    configs = sync if "gradient_merge" in names else {}
    opt = oracle.make_optimizer(names, level, oracle.mesh_of(**mesh), **configs)
    step = opt.minimize(oracle.loss_fn)
    state = opt.create(oracle.params(np.float32))
    rank, count = jax.process_index(), jax.process_count()
    for number in range(STEPS):
        whole = oracle.batch(number, 32, np.float32)
        rows = {k: np.split(x, count)[rank] for k, x in whole.items()}
        state, metrics = step(state, rows)
    params = opt.params(state)
    if count > 1:
        params = multihost_utils.process_allgather(params, tiled=True)
    return {
        "w": np.asarray(params["w"]),
        "b": np.asarray(params["b"]),
        "loss": np.asarray(metrics.loss),
        "norm": np.asarray(metrics.grad_norm),
    }


def run_all(out):
    found = {
        f"{name}/{key}": value
        for name, case in CASES.items()
        for key, value in run_case(*case).items()
    }
    if out is not None:
        np.savez(out, **found)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    out = tmp_path_factory.mktemp("processes") / "found.npz"
    port = free_port()
    env = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(port), str(rank), str(out)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        texts = [p.communicate(timeout=300)[0] for p in running]
    finally:
        for p in running:
            p.kill()
    assert [p.returncode for p in running] == [0, 0], "\n".join(texts)
    return np.load(out)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_compute_what_one_does(two_processes, name):
    # The order of a 16-bit sum of four numbers is open.
    unit = float(np.finfo(np.float16).eps) if name == "fp16" else 1e-6
    for key, value in run_case(*CASES[name]).items():
        np.testing.assert_allclose(
            two_processes[f"{name}/{key}"], value, 10 * unit, unit, err_msg=key
        )
