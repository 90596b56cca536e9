"""Several processes: how they start, end together, and share what they know.

This is the only module that calls ``jax.distributed.initialize``.

Note [ending together]: JAX leaves two gaps. A process that is killed is missed after
100 seconds of silence; here after ``HEARTBEAT_SECS``. A process whose script raises an
error waits in its exit for the others, up to five minutes, while these wait for it in
the next collective; here it leaves after ``EXIT_SECS``, so that the others notice.
Between processes on CPU the survivors notice by a lost connection at once, on
accelerators by the missing heartbeat.
"""

import atexit
import os
import sys
import threading
import time
import urllib.request
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jfleet._errors import ConfigError, ConfigTypeError, DistributedError
from jfleet._tree import Path, is_prng_key, leaves_with_paths, path_str

HEARTBEAT_SECS = 30
"""A process that is silent for so long counts as dead."""
EXIT_SECS = 5
"""How long a process that failed may take to end."""
SAVE_SECS = 300
"""The same while threads of it, such as a save, still work."""
_METADATA_SECS = 5


def start(distributed: Any) -> None:
    """Connect the processes, once.

    Args:
        distributed: as in ``jfleet.init``.

    Raises:
        ConfigError: environment variables that contradict or are incomplete.
        ConfigTypeError: an argument of the wrong type.
        DistributedError: the processes could not be connected.
    """
    if distributed is False or jax.distributed.is_initialized():
        return
    mapping = isinstance(distributed, Mapping)
    if not mapping and distributed is not True and distributed != "auto":
        raise ConfigTypeError(
            "distributed must be 'auto', True, False or a mapping of arguments of"
            f" jax.distributed.initialize, got {distributed!r}"
        )
    if distributed == "auto" and not several():
        return
    given = dict(distributed) if mapping else {}
    known = {} if "coordinator_address" in given else from_environment()
    options: dict[str, Any] = {"heartbeat_timeout_seconds": HEARTBEAT_SECS}
    options |= {**known, **given}
    try:
        jax.distributed.initialize(**options)
    except Exception as error:
        raise DistributedError(
            f"jax.distributed.initialize({options}) failed: {error}. Call jfleet.init"
            " before any other use of JAX, or pass distributed={'coordinator_address':"
            " 'host:port', 'num_processes': N, 'process_id': i}, or distributed=False"
        ) from error
    _Ending(_name(options)).watch()


def several(env: Mapping[str, str] | None = None) -> bool:
    """Whether the environment names more than one process."""
    env = os.environ if env is None else env

    def above_one(name: str) -> bool:
        return env.get(name, "").isdigit() and int(env[name]) > 1

    workers = env.get("TPU_PROCESS_ADDRESSES", env.get("TPU_WORKER_HOSTNAMES", ""))
    # In a batch script outside of srun there is a job, but no step of several tasks.
    step = "SLURM_JOB_ID" in env and "SLURM_STEP_NODELIST" in env
    return (
        from_environment(env).get("num_processes", 1) > 1
        or (step and above_one("SLURM_NTASKS"))
        or above_one("OMPI_COMM_WORLD_SIZE")
        or above_one("MEGASCALE_NUM_SLICES")
        or len([h for h in workers.split(",") if h]) > 1
        or ("KUBERNETES_SERVICE_HOST" in env and "JOB_COMPLETION_INDEX" in env)
        or _num_tpu_hosts(env) > 1
    )


def from_environment(env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Arguments that JAX does not read from the environment itself.

    ``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES`` and ``JAX_PROCESS_ID`` name a
    process; without the second, JAX asks the cluster for the rest.

    Raises:
        ConfigError: a variable is missing or no number.
    """
    env = os.environ if env is None else env
    names = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    if "JAX_COORDINATOR_ADDRESS" not in env or names[0] not in env:
        return {}
    for name in names:
        if not env.get(name, "").isdigit():
            raise ConfigError(
                f"{name} must be a whole number where JAX_COORDINATOR_ADDRESS and"
                f" JAX_NUM_PROCESSES are set, got {env.get(name)!r}; set it for every"
                " process, or start them with python -m jfleet launch"
            )
    return {
        "coordinator_address": env["JAX_COORDINATOR_ADDRESS"],
        "num_processes": int(env[names[0]]),
        "process_id": int(env[names[1]]),
    }


def _num_tpu_hosts(env: Mapping[str, str]) -> int:
    """Hosts of a Cloud TPU slice; only the metadata server of the machine knows.

    Importing JAX sets ``TPU_SKIP_MDS_QUERY`` where the machine has no TPU.
    """
    if "TPU_SKIP_MDS_QUERY" in {**os.environ, **env}:
        return 1
    server = env.get("GCE_METADATA_IP", "metadata.google.internal")
    request = urllib.request.Request(
        f"http://{server}/computeMetadata/v1/instance/attributes/"
        "worker-network-endpoints",
        headers={"Metadata-Flavor": "Google"},
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=_METADATA_SECS) as answer:
            return len(answer.read().decode().split(","))
    except (OSError, ValueError):  # not on Google's cloud
        return 1


def _name(options: Mapping[str, Any]) -> str:
    if "process_id" in options and "num_processes" in options:
        return f"process {options['process_id']} of {options['num_processes']}"
    return f"process with pid {os.getpid()}"


class _Ending:
    """Sees to the end of this process; see Note [ending together]."""

    def __init__(self, name: str):
        self._name = name
        self._failed = False
        self._begun = threading.Event()
        self._show = sys.excepthook

    def watch(self) -> None:
        """Wait in the background for the end of the script."""
        # Started now: some versions of Python start no thread once they end.
        threading.Thread(target=self._run, daemon=True, name="jfleet-ending").start()
        sys.excepthook = self._hook
        atexit.register(self._begun.set)

    def _hook(self, kind: Any, error: Any, trace: Any) -> None:
        self._show(kind, error, trace)
        if not hasattr(sys, "ps1") and not sys.flags.interactive:
            self._failed = True  # at a prompt, Python would go on
            self._begun.set()

    def _run(self) -> None:
        self._begun.wait()
        time.sleep(EXIT_SECS)
        if not self._failed:
            self._say("has ended its script and waits for the others to end theirs")
            return
        deadline = time.monotonic() + SAVE_SECS
        while _works_on() and time.monotonic() < deadline:
            time.sleep(0.2)
        self._say(
            "ends because of the error above and does not wait for the others. If that"
            " error tells of a lost connection, another process died first: look at"
            " what that one wrote last"
        )
        os._exit(1)

    def _say(self, text: str) -> None:
        print(f"jfleet: {self._name} {text}", file=sys.stderr, flush=True)


def _works_on() -> bool:
    """Whether threads other than the main one keep Python from ending."""
    main = threading.main_thread()
    return any(t is not main and not t.daemon for t in threading.enumerate())


def to_host(tree: Any) -> Any:
    """Copy a tree to the host: every array whole, on every process.

    An array that is split over several processes cannot be read with ``np.asarray``;
    this gathers it, one array at a time. Call it from all processes of the mesh.

    Args:
        tree: any tree; its JAX arrays, sharded or not, are copied.

    Returns:
        The same tree with a NumPy array for every JAX array, of the same shape on any
        number of processes; random keys become their data. Other leaves are this
        process's own and stay as they are.

    Example:
        >>> import jax.numpy as jnp
        >>> to_host({"name": "x", "w": jnp.arange(3)})
        {'name': 'x', 'w': array([0, 1, 2], dtype=int32)}
    """
    return jax.tree.map(_to_host, tree)


def _to_host(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    if is_prng_key(leaf):
        leaf = jax.random.key_data(leaf)
    if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    # A copy: a view would keep the buffer from being donated.
    return np.array(leaf)


def process_mean(tree: Any) -> Any:
    """Average numbers that every process has of its own, such as a local metric.

    Args:
        tree: numbers and arrays, with equal structure and shapes on all processes,
            which all call this.

    Returns:
        The same tree on every process: NumPy values of the shapes given, the mean over
        the processes, taken in float64; of the dtype given, or float64 for integers.
        With one process, the values themselves.

    Raises:
        DistributedError: the processes passed different trees.

    Example:
        >>> print(process_mean({"loss": 0.5})["loss"])
        0.5
    """
    tree = jax.tree.map(np.asarray, to_host(tree))
    named = leaves_with_paths(tree)
    types = [(path_str(path), x.shape, str(x.dtype)) for path, x in named]
    _check_numeric(named)
    mark = np.uint32(zlib.crc32(repr(types).encode()))
    if len(np.unique(multihost_utils.process_allgather(mark))) > 1:
        raise DistributedError(
            "process_mean needs the same names, shapes and types on every process;"
            f" process {jax.process_index()} passed {types}"
        )
    means = [_mean(_from_all(x), x) for _, x in named]
    return jax.tree.unflatten(jax.tree.structure(tree), means)


def _check_numeric(named: list[tuple[Path, np.ndarray]]) -> None:
    for path, x in named:
        number = jnp.issubdtype(x.dtype, np.number) or x.dtype == bool
        if not number:
            raise ConfigTypeError(
                f"process_mean: {path_str(path)!r} must be a number or an array of"
                f" numbers, got {x.dtype}"
            )


def _from_all(x: np.ndarray) -> np.ndarray:
    """The arrays of all processes, in a new first dim, bit by bit."""
    if not x.size:
        return x[None]
    # As bytes: JAX would round float64 to float32.
    data = np.frombuffer(np.ascontiguousarray(x).tobytes(), np.uint8)
    rows = multihost_utils.process_allgather(data)
    return np.frombuffer(rows.tobytes(), x.dtype).reshape(len(rows), *x.shape)


def _mean(values: np.ndarray, like: np.ndarray) -> Any:
    wide = np.complex128 if np.iscomplexobj(values) else np.float64
    kept = like.dtype if jnp.issubdtype(like.dtype, np.inexact) else wide
    return values.astype(wide).mean(axis=0).astype(kept)
