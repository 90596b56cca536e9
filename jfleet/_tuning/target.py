"""Compile a step for devices that are here, or for a pod that is not.

The compiler of the target says what the step will hold and send, before anything runs.
"""

import importlib.util
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jfleet._errors import ConfigError, DistributedError
from jfleet._planning.tracing import abstract_state
from jfleet._step.setup import setup_of
from jfleet._tree import abstract
from jfleet.train_step import minimize

COMPILER_ONLY = {  # read by libtpu when it starts: look for no TPU, and stay quiet
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}
_TOPOLOGY = re.compile(r"(v\w+):(\d+(?:x\d+){0,2})")


def topology_devices(topology: str) -> list[Any]:
    """The chips of a TPU topology such as ``v5e:16x16``, none of which need exist.

    Raises:
        ConfigError: not the name of a topology, or one that the compiler does not know.
        DistributedError: the TPU compiler is not installed.
    """
    if not _TOPOLOGY.fullmatch(topology):
        raise ConfigError(
            f"topology must look like 'v5e:16x16', got {topology!r}: the chip, and its "
            "sizes as numbers with x between"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise DistributedError(
            "to compile for a TPU topology without TPUs, the TPU compiler must be "
            'installed: pip install "jfleet[tpu]", on Linux'
        )
    for name, value in COMPILER_ONLY.items():
        os.environ.setdefault(name, value)
    try:
        return list(topologies.get_topology_desc(topology, "tpu").devices)
    except Exception as error:
        raise ConfigError(
            f"the TPU compiler does not know the topology {topology!r}: {error}"
        ) from error


def mesh_over(devices: Any, shape: Mapping[str, int]) -> Mesh:
    """A mesh with Auto axes over devices, laid along their torus where they have one.

    Raises:
        ConfigError: another number of devices than the mesh has places.
    """
    sizes = tuple(shape.values())
    try:
        grid = mesh_utils.create_device_mesh(
            sizes, devices, allow_split_physical_axes=True
        )
    except ValueError as error:
        raise ConfigError(
            f"a mesh {dict(shape)} does not fit {len(devices)} devices: {error}"
        ) from error
    return Mesh(grid, tuple(shape), axis_types=(AxisType.Auto,) * len(sizes))


def compile_step(
    opt: Any,
    mesh: Mesh,
    params: Any,
    loss_fn: Callable[..., Any],
    batch: Any,
    *,
    model_state: Any = None,
    has_aux: bool = False,
    rng: bool = False,
    donate: bool = True,
) -> Any:
    """Compile the step of ``opt.minimize(loss_fn)`` for a mesh, on shapes alone.

    Args:
        opt: from ``jfleet.distributed_optimizer``, resolved for this mesh shape.
        mesh: over real devices or those of a topology.
        params: arrays or shapes.
        loss_fn: as for ``opt.minimize``.
        batch: the rows of all devices, arrays or shapes.
        model_state: what the model keeps beside its parameters.
        has_aux: as for ``opt.minimize``.
        rng: as for ``opt.minimize``.
        donate: as for ``opt.minimize``.

    Returns:
        What ``.lower(..).compile()`` returns.
    """
    setup = setup_of(opt.base, opt.resolution, mesh)
    state, _ = abstract_state(setup, params, model_state)
    rows = NamedSharding(setup.mesh, PartitionSpec(setup.data_axes))
    whole = NamedSharding(setup.mesh, PartitionSpec())

    def laid_out(leaf: Any) -> jax.ShapeDtypeStruct:
        where = rows if leaf.shape else whole
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    step = minimize(
        opt.base,
        opt.resolution,
        mesh,
        loss_fn,
        has_aux=has_aux,
        model_state=model_state is not None,
        rng=rng,
        donate=donate,
    )
    key = jax.eval_shape(lambda: jax.random.key(0)) if rng else None
    return step.lower(state, jax.tree.map(laid_out, abstract(batch)), key).compile()
