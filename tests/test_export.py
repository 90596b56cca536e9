"""Safetensors files: what others read is what was trained, and the reverse."""

import itertools
import json
import os
import struct
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import safetensors
import safetensors.numpy
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jfleet
from jfleet._checkpoint import blocks, tensor_file
from jfleet._errors import (
    CheckpointError,
    ConfigError,
    ConfigTypeError,
    DonatedBufferError,
)
from jfleet.export import export_safetensors, import_safetensors
from tests.processes import start
from tests.save_helpers import (
    assert_laid_out_as,
    assert_same_bits,
    host,
    lay_out,
    make_mesh,
    mlp_state,
)

SPECIAL = {
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "BF16": ml_dtypes.bfloat16,
}


def read_by_library(folder):
    """All arrays in a folder as the library of the format finds them, and metadata."""
    arrays, metadata = {}, {}
    for path in sorted(folder.glob("*.safetensors")):
        with safetensors.safe_open(path, "numpy") as file:
            metadata |= file.metadata() or {}
        for name, found in safetensors.deserialize(path.read_bytes()):
            code = found["dtype"]
            dtype = SPECIAL.get(code) or safetensors.numpy._getdtype(code)
            values = np.frombuffer(found["data"], dtype).reshape(found["shape"])
            assert name not in arrays
            arrays[name] = values
    return arrays, metadata


def assert_same(got, want):
    assert sorted(got) == sorted(want)
    for name, values in want.items():
        values = np.asarray(values)
        assert got[name].dtype == values.dtype, name
        assert got[name].shape == values.shape, name
        assert got[name].tobytes() == values.tobytes(), name


@pytest.fixture
def tiny_blocks(monkeypatch):
    """Blocks of a few rows, so that every array takes many."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 200)
    monkeypatch.setattr(tensor_file, "BLOCK_BYTES", 200)


def by_name(params):
    return {
        ".".join(str(getattr(k, "key", k)) for k in path): host(value)
        for path, value in jax.tree_util.tree_leaves_with_path(params)
    }


# What is written.


@pytest.mark.parametrize(
    ("level", "num_devices"), [("os", 8), ("p_g_os", 8), ("os", 1)]
)
def test_others_read_what_was_trained(tmp_path, level, num_devices, tiny_blocks):
    state = lay_out(mlp_state(), make_mesh(num_devices), level)
    export_safetensors(state, tmp_path / "model")
    arrays, metadata = read_by_library(tmp_path / "model")
    assert_same(arrays, by_name(state.params))
    assert metadata == {"format": "flax"}
    assert [p.name for p in (tmp_path / "model").iterdir()] == ["model.safetensors"]
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_shards_and_their_index(tmp_path):
    state = {"params": {"a": jnp.arange(10.0), "b": jnp.ones(4), "c": jnp.zeros(3)}}
    export_safetensors(state, tmp_path, max_shard_bytes=30)
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert sorted(os.listdir(tmp_path)) == [*names, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": 68},
        "weight_map": {"a": names[0], "b": names[1], "c": names[1]},
    }
    assert_same(read_by_library(tmp_path)[0], by_name(state["params"]))
    assert_same_bits(import_safetensors(tmp_path, state), state)


MESH = {"one": 8, "two": (2, 4)}
LAYOUTS = [
    PartitionSpec("x"),
    PartitionSpec("y"),
    PartitionSpec(("x", "y")),
    PartitionSpec(None, "x"),
    PartitionSpec("x", "y"),
    PartitionSpec("y", "x"),
    PartitionSpec(None, ("y", "x")),
    PartitionSpec(),
]


@pytest.mark.parametrize("spec", LAYOUTS, ids=str)
def test_blocks_of_any_layout(tmp_path, spec, tiny_blocks):
    mesh = Mesh(
        np.array(jax.devices()).reshape(2, 4),
        ("x", "y"),
        axis_types=(AxisType.Auto,) * 2,
    )
    value = jnp.arange(24.0 * 16).reshape(24, 16)
    for kind in ("device", "pinned_host"):
        sharding = NamedSharding(mesh, spec, memory_kind=kind)
        params = {"w": jax.device_put(value, sharding)}
        found = list(blocks.rows_of(params["w"], 0))
        assert len(found) > 3
        assert max(rows.nbytes for _, rows in found) <= 24 * 64
        export_safetensors({"params": params}, tmp_path / kind)
        assert_same(read_by_library(tmp_path / kind)[0], {"w": value})


def test_every_type_that_the_format_knows(tmp_path, tiny_blocks):
    names = [n for n in tensor_file._CODES if n not in ("int64", "uint64", "float64")]
    params = {
        name: jnp.asarray(np.arange(40).reshape(8, 5) % 3, jnp.dtype(name))
        for name in names
    }
    params |= {n: np.arange(3).astype(n) for n in ("int64", "uint64", "float64")}
    params["big_endian"] = np.arange(3, dtype=">f4")
    params |= {
        "scalar": jnp.asarray(2.5),
        "empty": jnp.zeros((0, 3)),
        "thin": np.ones((3, 0)),
    }
    state = {"params": params}
    export_safetensors(state, tmp_path)
    found, _ = tensor_file.read_header(str(tmp_path / "model.safetensors"))
    assert {t.name: t.shape for t in found} == {n: x.shape for n, x in params.items()}
    loaded = import_safetensors(tmp_path, state)["params"]
    for name, value in params.items():
        got, value = np.asarray(loaded[name]), np.asarray(value)
        assert got.dtype == value.dtype, name
        assert got.tobytes() == value.tobytes(), name
    with safetensors.safe_open(tmp_path / "model.safetensors", "numpy") as file:
        for name in ("bool", "int16", "complex64", "bfloat16", "float64", "scalar"):
            assert_same({name: file.get_tensor(name)}, {name: params[name]})


def test_an_asked_type_is_for_floats_only(tmp_path):
    params = {
        "w": jnp.linspace(0, 1, 7),
        "h": jnp.linspace(0, 1, 7).astype(jnp.float16),
        "n": jnp.arange(3),
    }
    export_safetensors({"params": params}, tmp_path, dtype=jnp.bfloat16)
    want = {k: params[k].astype(jnp.bfloat16) for k in ("w", "h")} | {"n": params["n"]}
    assert_same(read_by_library(tmp_path)[0], by_name(want))


def created(num_devices=4, **switches):
    """A state of opt.create after two steps with rows that differ by replica."""
    strategy = jfleet.DistributedStrategy(**{name: True for name in switches})
    for name, options in switches.items():
        if options:
            setattr(strategy, f"{name}_configs", options)
    opt = jfleet.distributed_optimizer(
        optax.adam(0.1), strategy, mesh=make_mesh(num_devices)
    )
    dtype = jnp.bfloat16 if "amp" in switches else jnp.float32
    params = {"w": jnp.ones((8, 4), dtype), "deep": {"b": jnp.zeros(4, dtype)}}

    def loss(params, x):
        y = x @ params["w"].astype(jnp.float32) + params["deep"]["b"]
        return jnp.mean((y - x[:, :4]) ** 2)

    state, step = opt.create(params), opt.minimize(loss)
    rows = np.random.default_rng(0).normal(size=(2, 16, 8)).astype(np.float32)
    for row in rows:
        state, _ = step(state, row)
    return opt, jax.block_until_ready(state)


def test_masters_are_what_is_exported(tmp_path):
    _, state = created(
        amp={"dtype": "bfloat16"},
        sharding={"level": "os_g"},
    )
    master = state.opt_state.inner.master
    assert master["w"].dtype == jnp.float32
    assert (master["w"] != state.params["w"].astype(jnp.float32)).any()
    export_safetensors(state, tmp_path / "exact")
    assert_same(read_by_library(tmp_path / "exact")[0], by_name(master))
    export_safetensors(state, tmp_path / "half", dtype="bfloat16")
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), master)
    assert_same(read_by_library(tmp_path / "half")[0], by_name(half))
    # And imported into both, or the next step would undo it.
    values = {"w": jnp.full((8, 4), 1 / 3), "deep": {"b": jnp.full(4, -1 / 3)}}
    export_safetensors({"params": values}, tmp_path / "other")
    new = import_safetensors(tmp_path / "other", state)
    assert_laid_out_as(new, state)
    assert_same_bits(host(new.opt_state.inner.master), host(values))
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), values)
    assert_same_bits(host(new.params), host(half))
    assert_same_bits(new.opt_state.inner.inner, state.opt_state.inner.inner)


def test_replicas_are_averaged_and_all_get_what_is_imported(tmp_path, tiny_blocks):
    opt, state = created(localsgd={"k_steps": 5})
    assert state.params["w"].shape == (4, 8, 4)
    assert np.ptp(host(state.params["w"]), axis=0).max() > 0
    export_safetensors(state, tmp_path / "mean")
    mean = jax.tree.map(
        lambda x: np.asarray(x, np.float64).mean(0).astype(np.float32), state.params
    )
    assert_same(read_by_library(tmp_path / "mean")[0], by_name(mean))
    for ours, theirs in zip(
        jax.tree.leaves(mean), jax.tree.leaves(opt.params(state)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)
    new = import_safetensors(tmp_path / "mean", state)
    assert_laid_out_as(new, state)
    for got, want in zip(
        jax.tree.leaves(host(new.params)), jax.tree.leaves(mean), strict=True
    ):
        assert (got == want[None]).all()
    assert_same_bits(new.opt_state, state.opt_state)


def test_a_tied_array_is_stored_once(tmp_path):
    table = jnp.arange(12.0).reshape(4, 3)
    state = {"params": {"embed": table, "head": {"kernel": table}, "b": jnp.ones(3)}}
    export_safetensors(state, tmp_path)
    arrays, metadata = read_by_library(tmp_path)
    assert_same(arrays, {"embed": table, "b": jnp.ones(3)})
    assert metadata == {"format": "flax", "head.kernel": "embed"}
    apart = jax.tree.map(jnp.zeros_like, state)
    loaded = import_safetensors(tmp_path, apart)["params"]
    assert_same_bits(loaded, state["params"])
    assert loaded["embed"] is not loaded["head"]["kernel"]
    tied = import_safetensors(tmp_path, state)["params"]
    assert tied["embed"] is tied["head"]["kernel"]


def test_padding_is_not_part_of_a_model(tmp_path, tiny_blocks):
    params = {"w": jnp.arange(15.0 * 3).reshape(15, 3), "v": jnp.arange(16.0)}
    tree = mlp_state(optax.adam(1e-2)).replace(params=params)
    tree = tree.replace(opt_state=tree.tx.init(params))
    state = jfleet.group_sharded_parallel(
        tree, level="p_g_os", mesh=make_mesh(8), pad=True
    )
    assert state.params["w"].shape == (16, 3)
    export_safetensors(state, tmp_path)
    assert_same(read_by_library(tmp_path)[0], by_name(params))
    zeros = jax.tree.map(lambda x: x * 0, state)
    new = import_safetensors(tmp_path, zeros)
    assert_laid_out_as(new, zeros)
    assert_same_bits(new.params, state.params)


def test_nnx_pairs(tmp_path):
    def pair(seed):
        model = nnx.Sequential(
            nnx.Linear(4, 6, rngs=nnx.Rngs(seed)), nnx.BatchNorm(6, rngs=nnx.Rngs(0))
        )
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    model, optimizer = pair(0)
    export_safetensors((model, optimizer), tmp_path)
    arrays, _ = read_by_library(tmp_path)
    assert sorted(arrays) == [
        "layers.0.bias",
        "layers.0.kernel",
        "layers.1.bias",
        "layers.1.scale",
    ]
    fresh = pair(1)
    loaded, loaded_optimizer = import_safetensors(tmp_path, fresh)
    assert isinstance(loaded_optimizer, nnx.Optimizer)
    assert loaded is not fresh[0]
    assert_same_bits(nnx.state(loaded, nnx.Param), nnx.state(model, nnx.Param))


# What is read.


@pytest.mark.parametrize("level", ["os", "p_g_os"])
@pytest.mark.parametrize("num_devices", [3, 8])
def test_files_of_others_go_where_the_state_is(
    tmp_path, level, num_devices, tiny_blocks
):
    want = by_name(mlp_state().params)
    names = sorted(want)
    for number, group in enumerate((names[:2], names[2:])):
        arrays = {n: want[n].astype(ml_dtypes.bfloat16) for n in group}
        safetensors.numpy.save_file(arrays, tmp_path / f"part{number}.safetensors")
    state = lay_out(mlp_state(seed=1), make_mesh(num_devices), level)
    before = host(state)
    new = import_safetensors(tmp_path, state)
    assert_laid_out_as(new, state)
    for name, values in by_name(new.params).items():
        assert (values == want[name].astype(ml_dtypes.bfloat16).astype("f4")).all()
    assert_same_bits(new.opt_state, state.opt_state)
    assert_same_bits(host(state), before)
    pointers = [
        (shard.device, shard.data.unsafe_buffer_pointer())
        for x in jax.tree.leaves(new)
        for shard in x.addressable_shards
        if x.size
    ]
    assert len(set(pointers)) == len(pointers)


def test_one_file_and_free_and_numpy_arrays(tmp_path):
    safetensors.numpy.save_file({"w": np.arange(3.0)}, tmp_path / "some.safetensors")
    for like in (jnp.zeros(3), np.zeros(3), np.zeros(3, np.float16)):
        new = import_safetensors(tmp_path / "some.safetensors", {"params": {"w": like}})
        assert type(new["params"]["w"]) is type(like)
        assert new["params"]["w"].dtype == like.dtype
        assert np.array_equal(new["params"]["w"], [0, 1, 2])
        assert getattr(new["params"]["w"], "committed", False) is False


# What does not fit says so.


def error_of(function, *args, kind=CheckpointError, **options):
    with pytest.raises(kind) as caught:
        function(*args, **options)
    return str(caught.value)


def test_what_does_not_fit_is_listed_by_path(tmp_path):
    stored = {"a": np.ones(3), "c": np.ones((2, 2)), "d": np.ones(2), "n": np.ones(2)}
    safetensors.numpy.save_file(stored, tmp_path / "model.safetensors")
    params = {
        "a": jnp.ones(3),
        "b": {"x": jnp.ones(1)},
        "c": jnp.ones(4),
        "n": jnp.ones(2, int),
    }
    text = error_of(import_safetensors, tmp_path, {"params": params})
    assert "b/x: 'b.x' is not in the files (missing)" in text
    assert "c: stored as [2, 2], wanted as [4]" in text
    assert "n: stored as float64, wanted as int32" in text
    assert "not in this state (unexpected): 'd'" in text
    many = {"params": {f"p{i}": jnp.ones(1) for i in range(20)}}
    assert "and 11 more" in error_of(import_safetensors, tmp_path, many)


def test_arguments(tmp_path):
    state = {"params": {"w": jnp.ones(2)}}
    for dtype in ("int8", "float8_e3m4", jnp.complex64):
        text = error_of(export_safetensors, state, "x", dtype=dtype, kind=ConfigError)
        assert "dtype must be a floating-point type" in text
    for options in (
        {"dtype": "no"},
        {"max_shard_bytes": 1.5},
        {"max_shard_bytes": True},
    ):
        error_of(export_safetensors, state, "x", kind=ConfigTypeError, **options)
    error_of(export_safetensors, state, "x", max_shard_bytes=0, kind=ConfigError)
    text = error_of(export_safetensors, state, "gs://bucket/x", kind=ConfigError)
    assert "on a file system" in text
    error_of(export_safetensors, [1, 2, 3], tmp_path / "x", kind=ConfigTypeError)
    error_of(export_safetensors, tmp_path, state, kind=ConfigTypeError)
    assert "no parameters" in error_of(export_safetensors, {"params": {}}, tmp_path)
    for path in (tmp_path / "nothing", tmp_path):
        error_of(import_safetensors, path, state)
    assert os.listdir(tmp_path) == []


UNFIT = {
    "two paths": ({"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}}, "would both be 'a.b'"),
    "reserved": ({"__metadata__": jnp.ones(1)}, "cannot be called '__metadata__'"),
    "type": ({"w": jnp.ones(2, jnp.int4)}, "'w' is int4, which safetensors"),
    "key": ({"w": jax.random.key(0)}, "'w' is no array but a key"),
    "number": ({"w": 2.5}, "'w' is no array but a float"),
    "abstract": ({"w": jax.ShapeDtypeStruct((2,), "f4")}, "arrays without values"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_parameters_that_no_file_can_hold(tmp_path, case):
    params, text = UNFIT[case]
    assert text in error_of(export_safetensors, {"params": params}, tmp_path / "model")
    assert os.listdir(tmp_path) == []


def test_donated_parameters(tmp_path):
    state = {"params": {"w": jnp.ones(2)}}
    state["params"]["w"].delete()
    error_of(export_safetensors, state, tmp_path / "x", kind=DonatedBufferError)
    assert os.listdir(tmp_path) == []


def test_what_is_there_stays(tmp_path):
    state = {"params": {"w": jnp.ones(2)}}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").write_text("")
    assert "exists; give a new" in error_of(
        export_safetensors, state, tmp_path / "model"
    )
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "empty").mkdir()
    assert "exists; give a new" in error_of(
        export_safetensors, state, tmp_path / "link"
    )
    (tmp_path / "new.incomplete").mkdir()
    (tmp_path / "new.incomplete" / "mine").write_text("")
    assert "is in the way" in error_of(export_safetensors, state, tmp_path / "new")
    assert os.listdir(tmp_path / "empty") == []
    export_safetensors(state, tmp_path / "empty")
    assert os.listdir(tmp_path / "empty") == ["model.safetensors"]


@pytest.mark.parametrize("when", ["write", "fsync", "rename"])
def test_a_full_disk_leaves_nothing_that_looks_whole(tmp_path, monkeypatch, when):
    state = {"params": {"w": jnp.arange(5.0), "v": jnp.ones(3)}}

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if when == "write":
            patch.setattr(
                "jfleet._checkpoint.exporting.memoryview", full, raising=False
            )
        else:
            patch.setattr(f"jfleet._checkpoint.exporting.os.{when}", full)
        text = error_of(export_safetensors, state, tmp_path / "model")
    assert "No space left" in text
    assert os.listdir(tmp_path) == ["model.incomplete"]
    error_of(import_safetensors, tmp_path / "model", state)
    export_safetensors(state, tmp_path / "model")
    assert os.listdir(tmp_path) == ["model"]
    assert_same_bits(import_safetensors(tmp_path / "model", state), state)


# Damaged files, and files that mean harm.


def test_every_damaged_byte_of_the_header_is_an_error_or_no_matter(tmp_path):
    state = {"params": {"w": jnp.arange(5.0), "v": jnp.ones((2, 2))}}
    export_safetensors(state, tmp_path)
    path = tmp_path / "model.safetensors"
    good = path.read_bytes()
    length = 8 + struct.unpack("<Q", good[:8])[0]
    errors = 0
    for place, bit in itertools.product(range(length), (1, 64)):
        data = bytearray(good)
        data[place] ^= bit
        path.write_bytes(bytes(data))
        try:
            loaded = import_safetensors(tmp_path, state)
        except CheckpointError:
            errors += 1
        else:  # Only names in the metadata, or blanks, may have changed.
            assert_same_bits(loaded, state)
    assert errors > length
    for cut in (0, 7, 8, length - 1, length, len(good) - 1):
        path.write_bytes(good[:cut])
        error_of(import_safetensors, tmp_path, state)
    path.write_bytes(good + b"\0")
    assert "bytes, where the header says" in error_of(
        import_safetensors, tmp_path, state
    )


def entry(**change):
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **change}


HEADERS = {
    "list": [],
    "text": "no",
    "deep": "[" * 50_000,
    "metadata": {"__metadata__": [], "w": entry()},
    "metadata values": {"__metadata__": {"a": 1}, "w": entry()},
    "no offsets": {"w": {"dtype": "F32", "shape": [2]}},
    "gap": {"w": entry(data_offsets=[4, 12])},
    "overlap": {"w": entry(), "v": entry()},
    "negative": {"w": entry(shape=[-2])},
    "huge": {"w": entry(shape=[1 << 62, 1 << 62], data_offsets=[0, 1 << 126])},
    "bool": {"w": entry(shape=[True, 2])},
    "type": {"w": entry(dtype="PICKLE")},
    "bytes": {"w": entry(shape=[3])},
    "float": {"w": entry(shape=[2.0])},
    "twice": '{"w": {}, "w": {}}',
}


@pytest.mark.parametrize("case", HEADERS)
def test_malformed_headers(tmp_path, case):
    text = HEADERS[case]
    text = (text if isinstance(text, str) else json.dumps(text)).encode()
    (tmp_path / "model.safetensors").write_bytes(
        struct.pack("<Q", len(text)) + text + b"\0" * 8
    )
    state = {"params": {"w": jnp.ones(2)}}
    assert "no safetensors file" in error_of(import_safetensors, tmp_path, state)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + text)
    error_of(import_safetensors, tmp_path, state)


@pytest.mark.parametrize(
    "index",
    [
        {},
        [],
        {"weight_map": []},
        {"weight_map": {"w": "../outside.safetensors"}},
        {"weight_map": {"w": "/etc/passwd"}},
        {"weight_map": {"w": ".."}},
        {"weight_map": {"w": 3}},
        {"weight_map": {"w": "missing.safetensors"}},
        {"weight_map": {"v": "model.safetensors"}},
        {"weight_map": {"w": "model.safetensors", "v": "model.safetensors"}},
    ],
)
def test_indices_that_are_wrong_or_lead_out(tmp_path, index):
    folder = tmp_path / "model"
    folder.mkdir()
    for path in (folder / "model.safetensors", tmp_path / "outside.safetensors"):
        safetensors.numpy.save_file({"w": np.ones(2, np.float32)}, path)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    error_of(import_safetensors, folder, {"params": {"w": jnp.ones(2)}})


def test_two_files_with_one_name(tmp_path):
    for name in "ab":
        safetensors.numpy.save_file({"w": np.ones(2)}, tmp_path / f"{name}.safetensors")
    text = error_of(import_safetensors, tmp_path, {"params": {"w": jnp.ones(2)}})
    assert "give a folder with one model" in text


# Memory.


def test_host_memory_is_a_few_blocks_whatever_the_size(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1 << 20)
    monkeypatch.setattr(tensor_file, "BLOCK_BYTES", 1 << 20)
    mesh = make_mesh(8)
    whole = jax.jit(
        lambda: jnp.arange(8.0 * (1 << 20)).reshape(8192, 1024),
        out_shardings=NamedSharding(mesh, PartitionSpec(None, "data")),
    )()
    state = {"params": {"w": whole}}
    export_safetensors({"params": {"w": whole[:64]}}, tmp_path / "warm")
    tracemalloc.start()
    try:
        export_safetensors(state, tmp_path / "model", dtype="bfloat16")
        _, peak = tracemalloc.get_traced_memory()
        assert peak < 4 << 20
        tracemalloc.reset_peak()
        new = import_safetensors(tmp_path / "model", state)
        _, peak = tracemalloc.get_traced_memory()
        # One shard of the result at a time (JAX may keep it), and blocks.
        assert peak < (32 << 20) + (6 << 20)
    finally:
        tracemalloc.stop()
    assert (new["params"]["w"] == whole.astype(jnp.bfloat16)).all()


# Several processes.

EXPORT = """
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec as P
    from jfleet.export import export_safetensors, import_safetensors
    from jfleet._checkpoint import blocks
    from jfleet._errors import CheckpointError
    from tests.test_export import created
    blocks.BLOCK_BYTES = 200
    folder = sys.argv[1]
    specs = {"rows": P("data"), "columns": P(None, "data"), "whole": P()}
    value = np.arange(24 * 8, dtype=np.float32).reshape(24, 8)
    axis, = MESH.axis_names
    def put(spec, scale=1):
        spec = P(*[axis if e else None for e in spec])
        where = NamedSharding(MESH, spec)
        rows = scale * value
        return jax.make_array_from_callback(value.shape, where, lambda i: rows[i])
    state = {"params": {n: put(s) for n, s in specs.items()}}
    state["params"]["local"] = np.arange(3.0)
    export_safetensors(state, folder + "/model")
    zeros = {"params": {n: put(s, 0) for n, s in specs.items()}}
    zeros["params"]["local"] = np.zeros(3)
    new = import_safetensors(folder + "/model", zeros)["params"]
    for name in specs:
        old = state["params"][name]
        assert new[name].sharding == old.sharding
        for a, b in zip(new[name].addressable_shards, old.addressable_shards):
            assert np.array_equal(a.data, b.data), name
    strategy = jfleet.DistributedStrategy(localsgd=True)
    import optax
    opt = jfleet.distributed_optimizer(optax.sgd(0.1), strategy, mesh=MESH)
    local = opt.create({"w": jnp.arange(12.0).reshape(4, 3), "s": jnp.asarray(3.0)})
    export_safetensors(local, folder + "/local")
    try:
        export_safetensors(state, folder + "/model")
    except CheckpointError as error:
        print("exists" in str(error))
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_write_what_one_does(tmp_path):
    said = start.run(EXPORT, tmp_path)
    assert [text.splitlines()[-1] for text in said] == ["True"] * 2
    value = np.arange(24 * 8, dtype=np.float32).reshape(24, 8)
    arrays, _ = read_by_library(tmp_path / "model")
    want = {n: value for n in ("rows", "columns", "whole")}
    assert_same(arrays, want | {"local": np.arange(3.0)})
    arrays, _ = read_by_library(tmp_path / "local")
    assert_same(
        arrays,
        {"w": np.arange(12, dtype=np.float32).reshape(4, 3), "s": np.float32(3.0)},
    )
