"""An 8B decoder compiled for a TPU pod, without a TPU: memory and traffic per chip.

    python benchmarks/pod.py
    python benchmarks/pod.py --topology v6e:8x8 --level os_g --size 1b
    python benchmarks/pod.py --topology v5e:16x16 --mesh 256 --naive

The real TPU compiler (package libtpu) compiles one training step for the chips of the
topology. It says what each chip holds and sends; it says nothing about speed. With
``--naive`` the state lies where jfleet puts it and XLA is left alone with the rest.
"""

import argparse
import dataclasses
import functools
import importlib.util
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import _bench
import jax
import optax
import pod_model
from flax.training.train_state import TrainState
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jfleet
from jfleet._hlo import collectives

LEVELS = ("os", "os_g", "p_g_os")
AXES = ("x", "y", "z")
COMPILER_ONLY = {  # read by libtpu when it starts: look for no TPU, and stay quiet
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}


class PodError(ValueError):
    """The compiler is missing, or the request cannot be compiled."""


def pod_mesh(topology: str, mesh_shape: str | None) -> Mesh:
    """Return a mesh over the chips of a topology, by default shaped as its torus.

    Args:
        topology: a name such as ``v5e:16x16``.
        mesh_shape: sizes such as ``256`` or ``16x16``.

    Raises:
        PodError: no compiler, no such topology, or sizes that do not fit.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise PodError(
            "the TPU compiler (package libtpu) is not installed;"
            ' pip install "jfleet[tpu]", on Linux'
        )
    sizes = re.fullmatch(r"\d+(x\d+){0,2}", mesh_shape or topology.partition(":")[2])
    if not sizes:
        raise PodError(
            f"--topology must look like v5e:16x16 and --mesh like 16x16 or 256, got"
            f" {topology!r} and {mesh_shape!r}"
        )
    try:
        chips = topologies.get_topology_desc(topology, "tpu").devices
    except Exception as error:
        raise PodError(
            f"libtpu does not know the topology {topology!r}: {error}"
        ) from error
    shape = [int(size) for size in sizes[0].split("x")]
    try:
        grid = mesh_utils.create_device_mesh(
            shape, chips, allow_split_physical_axes=True
        )
    except ValueError as error:
        raise PodError(
            f"--mesh {sizes[0]} must have as many places as {topology} has chips,"
            f" {len(chips)}: {error}"
        ) from error
    return Mesh(grid, AXES[: len(shape)], axis_types=(AxisType.Auto,) * len(shape))


def measure(
    *,
    mesh: Mesh,
    level: str,
    size: str,
    naive: bool,
    layers: int | None = None,
    rows_per_chip: int = 1,
    length: int = 2048,
    min_shard_size: int = 100_000,
) -> dict[str, Any]:
    """Compile one step and read what each chip holds and sends.

    Raises:
        PodError: the step does not fit the chips.
    """
    shape = pod_model.SHAPES[size]
    if layers:
        shape = dataclasses.replace(shape, layers=layers)
    apply_fn = functools.partial(pod_model.apply, shape=shape)
    plain = jax.eval_shape(
        functools.partial(TrainState.create, apply_fn=apply_fn, tx=optax.adamw(1e-3)),
        params=shape.params(),
    )
    state = jfleet.group_sharded_parallel(
        plain, level, mesh=mesh, axis=mesh.axis_names, min_shard_size=min_shard_size
    )
    layout = jax.tree.map(lambda leaf: leaf.sharding, state)
    if naive:  # the same layout at rest, but the user's own apply_fn and tx
        state = state.replace(apply_fn=plain.apply_fn, tx=plain.tx)
        layout = layout.replace(apply_fn=plain.apply_fn, tx=plain.tx)
    tokens = jax.ShapeDtypeStruct(
        (rows_per_chip * mesh.size, length),
        "int32",
        sharding=NamedSharding(mesh, PartitionSpec(mesh.axis_names)),
    )
    step = jax.jit(
        pod_model.train_step,
        donate_argnums=0,
        out_shardings=(layout, None) if naive else None,
    )
    start = time.perf_counter()
    lowered = step.lower(state, tokens)
    traced = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        if "hbm" not in text.lower():
            raise
        raise PodError(f"the step does not fit: {text.splitlines()[0]}") from error
    memory = compiled.memory_analysis()
    return {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(plain.params)),
        "chips": mesh.size,
        "argument_gib": memory.argument_size_in_bytes / _bench.GIB,
        "temporary_gib": memory.temp_size_in_bytes / _bench.GIB,
        "wire_gib": _wire_gib(compiled),
        "trace_seconds": traced - start,
        "compile_seconds": time.perf_counter() - traced,
    }


def _wire_gib(compiled: Any) -> dict[str, float]:
    """Return the GiB that a chip sends in one step, by kind of collective."""
    wire: dict[str, float] = {}
    for item in collectives(compiled):
        wire[item.kind] = wire.get(item.kind, 0.0) + item.wire_bytes / _bench.GIB
    return wire


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--topology", default="v5e:16x16", help="default: %(default)s")
    add("--mesh", help="sizes such as 256 or 16x16; default: the topology's own")
    add("--level", choices=LEVELS, default="p_g_os", help="default: %(default)s")
    add("--size", choices=pod_model.SHAPES, default="8b", help="default: %(default)s")
    add("--layers", type=int, help="instead of the size's own")
    add("--length", type=int, default=2048, help="tokens per row; default: 2048")
    add("--rows-per-chip", type=int, default=1, help="default: %(default)s")
    add("--min-shard-size", type=int, default=100_000, help="default: %(default)s")
    add("--naive", action="store_true", help="leave all but the layout to XLA")
    add("--json", type=Path, help="write the result to this file")
    args = parser.parse_args()
    os.environ.update(COMPILER_ONLY)
    jax.config.update("jax_platforms", "cpu")
    try:
        result = measure(
            mesh=pod_mesh(args.topology, args.mesh),
            level=args.level,
            size=args.size,
            naive=args.naive,
            layers=args.layers,
            rows_per_chip=args.rows_per_chip,
            length=args.length,
            min_shard_size=args.min_shard_size,
        )
    except (PodError, jfleet.JfleetError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    how = "XLA left alone" if args.naive else "jfleet"
    print(report(f"{args.topology}, {args.level}, {how}", result))
    settings = {name: str(value) for name, value in vars(args).items()}
    _bench.write_json(args.json, {"settings": settings, "pod": result})
    return 0


def report(title: str, result: dict[str, Any]) -> str:
    """Return a table of GiB per chip and step."""
    wire = result["wire_gib"]
    header = ["per chip, GiB", "arguments", "temporaries", "on the wire", *wire]
    row = [
        title,
        *[f"{result[name]:.2f}" for name in ("argument_gib", "temporary_gib")],
        f"{sum(wire.values()):.1f}",
        *[f"{gib:.1f}" for gib in wire.values()],
    ]
    return (
        f"{result['parameters'] / 1e9:.2f} billion parameters on {result['chips']} "
        f"chips; traced in {result['trace_seconds']:.0f} s, compiled in "
        f"{result['compile_seconds']:.0f} s\n\n{_bench.markdown(header, [row])}"
    )


if __name__ == "__main__":
    sys.exit(main())
