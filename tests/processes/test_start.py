"""When processes are connected, and what one of them can know of the others."""

import contextlib
import http.server
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jfleet
from jfleet import processes
from jfleet.processes import process_mean, to_host

SLURM = {
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
ADDRESS = {"JAX_COORDINATOR_ADDRESS": "h:1"}


@pytest.mark.parametrize(
    ("env", "several"),
    [
        ({}, False),
        ({**SLURM, "SLURM_NTASKS": "4"}, True),
        ({**SLURM, "SLURM_NTASKS": "1"}, False),
        # A job of four tasks, outside of srun: this process is alone.
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, False),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ({"TPU_PROCESS_ADDRESSES": "a:1,b:1"}, True),
        ({"MEGASCALE_NUM_SLICES": "2"}, True),
        ({"MEGASCALE_NUM_SLICES": "1"}, False),
        ({"KUBERNETES_SERVICE_HOST": "h", "JOB_COMPLETION_INDEX": "0"}, True),
        ({"KUBERNETES_SERVICE_HOST": "h"}, False),
        ({**ADDRESS, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}, True),
        ({**ADDRESS, "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, False),
        (ADDRESS, False),
    ],
)
def test_processes_are_started_only_where_the_environment_names_several(env, several):
    assert processes.several({"TPU_SKIP_MDS_QUERY": "1", **env}) is several


def test_what_jax_does_not_read_itself():
    env = {**ADDRESS, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    want = {"coordinator_address": "h:1", "num_processes": 2, "process_id": 1}
    assert processes.from_environment(env) == want
    assert processes.from_environment({"JAX_NUM_PROCESSES": "2"}) == {}


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0"}, "JAX_NUM_PROCESSES"),
        ({"JAX_NUM_PROCESSES": "2"}, "JAX_PROCESS_ID must be .* got None"),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "-1"}, "JAX_PROCESS_ID"),
    ],
)
def test_half_a_description_is_an_error(more, name):
    with pytest.raises(jfleet.ConfigError, match=name):
        processes.several({**ADDRESS, **more})


@pytest.mark.parametrize(
    ("distributed", "change"),
    [
        ("auto", {}),
        (True, {}),
        ({"heartbeat_timeout_seconds": 90}, {"heartbeat_timeout_seconds": 90}),
        ({"process_id": 0}, {"process_id": 0}),
    ],
)
def test_what_jax_is_told(monkeypatch, distributed, change):
    seen = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **o: seen.append(o))
    monkeypatch.setattr(processes._Ending, "watch", lambda self: None)
    for name, value in {"NUM_PROCESSES": "2", "PROCESS_ID": "1"}.items():
        monkeypatch.setenv(f"JAX_{name}", value)
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "h:1")
    processes.start(distributed)
    want = {"coordinator_address": "h:1", "num_processes": 2, "process_id": 1}
    assert seen == [{**want, "heartbeat_timeout_seconds": 30, **change}]


def test_what_is_given_in_full_is_not_mixed_with_the_environment(monkeypatch):
    seen = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **o: seen.append(o))
    monkeypatch.setattr(processes._Ending, "watch", lambda self: None)
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "h:1")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "broken")
    given = {"coordinator_address": "g:1", "num_processes": 3, "process_id": 2}
    processes.start(given)
    assert seen == [{**given, "heartbeat_timeout_seconds": 30}]


@contextlib.contextmanager
def metadata_server(text, code=200):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            known = self.path.endswith("/attributes/worker-network-endpoints")
            known = known and self.headers["Metadata-Flavor"] == "Google"
            self.send_response(code if known else 404)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("text", "code", "several"),
    [
        ("w0:1:10.0.0.1,w1:2:10.0.0.2", 200, True),
        ("w0:1:10.0.0.1", 200, False),
        ("no,such,key", 404, False),
    ],
)
def test_hosts_of_a_tpu_slice_are_asked_for(monkeypatch, text, code, several):
    with metadata_server(text, code) as address:
        env = {"GCE_METADATA_IP": address}
        assert processes.several(env) is False  # importing JAX found no TPU
        monkeypatch.delenv("TPU_SKIP_MDS_QUERY")
        assert processes.several(env) is several
        assert processes.several({**env, "TPU_SKIP_MDS_QUERY": "1"}) is False
    assert processes.several(env) is False  # nobody answers


def test_to_host_copies_arrays_and_nothing_else():
    mesh = jfleet.new_group(range(8))
    where = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.device_put(jnp.arange(16.0).reshape(8, 2), where)
    key = jax.random.key(3)
    own = np.arange(3)
    got = to_host({"x": x, "key": key, "n": 5, "own": own, "f": len})
    assert type(got["x"]) is np.ndarray
    np.testing.assert_array_equal(got["x"], np.arange(16.0).reshape(8, 2))
    np.testing.assert_array_equal(got["key"], jax.random.key_data(key))
    assert (got["n"], got["own"] is own, got["f"]) == (5, True, len)
    got["x"][:] = 0  # a copy, which may be changed
    assert float(x[1, 1]) == 3.0


def test_b89_the_mean_of_one_process_is_the_value():
    """Shapes do not depend on the number of processes; tests/test_cases_processes.py
    has the same with two."""
    host = np.linspace(0, 1, 10)
    got = process_mean(
        {"host": host, "n": 3, "f": np.float32(0.1), "b": jnp.bfloat16(2)}
    )
    np.testing.assert_array_equal(got["host"], host)
    assert (got["n"], got["n"].dtype, got["n"].shape) == (3.0, np.float64, ())
    assert (got["f"], got["f"].dtype) == (np.float32(0.1), np.float32)
    assert got["b"].dtype == jnp.bfloat16
    assert process_mean({}) == {}
    assert process_mean(np.zeros((0, 2))).shape == (0, 2)
    with pytest.raises(jfleet.ConfigTypeError, match="'a/b' must be a number"):
        process_mean({"a": {"b": "text"}})
