"""Saving and loading with several processes, over Gloo on this host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jfleet._checkpoint.manifest import read_manifest
from jfleet.save import load_group_sharded_model, save_group_sharded_model
from tests.processes import start
from tests.save_helpers import assert_same_bits, make_mesh

pytestmark = pytest.mark.multiprocess

IMPORTS = """
from jfleet.save import load_group_sharded_model, save_group_sharded_model
from tests.test_save_processes import example
folder, num_devices = sys.argv[1], jax.device_count()
"""
SAVE = """
save_group_sharded_model(example(num_devices, 0), folder)
handle = save_group_sharded_model(
    example(num_devices), folder, overwrite=True, wait=False
)
handle.wait()
print(sorted(__import__("os").listdir(folder)))
"""
LOAD = """
want, target = example(num_devices), example(num_devices, 0)
loaded = load_group_sharded_model(folder, target)
for name in want:
    a, b = loaded[name], want[name]
    if not isinstance(b, jax.Array):
        assert type(a) is type(b) and np.array_equal(a, b), name
        continue
    assert a.sharding == b.sharding and a.dtype == b.dtype, name
    if name.startswith("key"):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True):
        x, y = np.asarray(x.data), np.asarray(y.data)
        assert x.shape == y.shape and x.tobytes() == y.tobytes(), name
print("same")
"""

SPECS = {
    "split": PartitionSpec("data"),
    "whole": PartitionSpec(),
    "bf16": PartitionSpec(None, "data"),
    "float8": PartitionSpec("data"),
    "int4": PartitionSpec(),
    "zero": PartitionSpec(),
    "step": PartitionSpec(),
}


def example(num_devices, factor=1):
    """The same state on any mesh; built from host values in every process."""
    mesh = make_mesh(num_devices)
    values = {
        "split": np.arange(64, dtype=np.float32).reshape(16, 4) * factor,
        "whole": np.arange(12, dtype=np.int32).reshape(3, 4) * factor,
        "bf16": np.asarray(np.arange(32).reshape(4, 8) * factor, jnp.bfloat16),
        "float8": np.asarray(np.arange(16) * factor, jnp.float8_e4m3fn),
        "int4": np.asarray(np.arange(8) % 8 * factor, jnp.int4),
        "zero": np.zeros((0, 4), np.float32),
        "step": np.asarray(5 * factor, np.int32),
    }

    def place(value, spec):
        return jax.make_array_from_callback(
            value.shape, NamedSharding(mesh, spec), lambda index: value[index]
        )

    state = {name: place(value, SPECS[name]) for name, value in values.items()}
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    make_keys = jax.jit(
        lambda: jax.random.split(jax.random.key(7 * factor), 8), out_shardings=sharding
    )
    state["keys"] = make_keys()
    state["key"] = jax.jit(
        lambda: jax.random.key(3 * factor),
        out_shardings=NamedSharding(mesh, PartitionSpec()),
    )()
    state["local"] = jnp.full(3, 2.0 * factor)
    state["numpy"] = np.full(2, 4.0 * factor)
    state["count"] = 6 * factor
    return state


def run(script, folder, count=2):
    """Run a script on processes with two devices each."""
    return start.run(IMPORTS + script, folder, count=count)


def test_saved_by_two_processes_loaded_by_one(tmp_path):
    folder = tmp_path / "ckpt"
    for stdout in run(SAVE, folder):
        assert stdout == "['arrays.1', 'manifest.json']\n"
    want = example(8)
    loaded = load_group_sharded_model(folder, example(8, 0))
    assert_same_bits(loaded, want)
    assert read_manifest(folder).info["num_processes"] == 2
    for name in want:
        if isinstance(want[name], jax.Array):
            assert loaded[name].sharding == want[name].sharding


def test_saved_by_one_process_loaded_by_two(tmp_path):
    save_group_sharded_model(example(8), tmp_path / "ckpt")
    assert run(LOAD, tmp_path / "ckpt") == ["same\n"] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "loaded"), [(2, 4), (4, 2)])
def test_saved_and_loaded_by_different_numbers_of_processes(tmp_path, saved, loaded):
    folder = tmp_path / "ckpt"
    run(SAVE, folder, count=saved)
    info = read_manifest(folder).info
    assert (info["num_processes"], info["num_devices"]) == (saved, 2 * saved)
    assert run(LOAD, folder, count=loaded) == ["same\n"] * loaded


def test_an_error_in_one_process_is_an_error_in_both(tmp_path):
    save_group_sharded_model({"x": jnp.ones(2)}, tmp_path / "ckpt")
    script = """
from jfleet._errors import CheckpointError
good, bad = {"x": np.ones(2, np.float32)}, {"y": np.ones(2, np.float32)}
try:
    load_group_sharded_model(folder, bad if jax.process_index() == 1 else good)
except CheckpointError as error:
    print(" ".join(str(error).split()))
"""
    first, second = run(script, tmp_path / "ckpt")
    assert "process 1 of 2 raised an error" in first
    assert "y: wanted as" in second
