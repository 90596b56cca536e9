"""What cannot be saved or loaded says so, and nothing is lost or half done."""

import json
import shutil
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jfleet._checkpoint import manifest, orbax_io
from jfleet._errors import (
    CheckpointError,
    ConfigTypeError,
    DonatedBufferError,
    JfleetWarning,
    PlacementError,
)
from jfleet.save import load_group_sharded_model, save_group_sharded_model
from tests.faults.damage import damage_cases, put
from tests.save_helpers import (
    ADAM,
    assert_same_bits,
    host,
    lay_out,
    make_mesh,
    mlp_state,
    train,
)


def layered(num_layers, shape=(24, 4), fill=1.0):
    params = {
        "layers": {i: {"kernel": jnp.full(shape, fill + i)} for i in range(num_layers)}
    }
    state = {"params": params, "opt_state": ADAM.init(params)}
    return lay_out(state, make_mesh(8))


@pytest.fixture(scope="module")
def four_layers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four") / "ckpt"
    save_group_sharded_model(layered(4), folder)
    return folder


def refuse(folder, target, **options):
    """Load, expect an error, check that the target is as it was; return the text."""
    before = host(target)
    with pytest.raises(CheckpointError) as caught:
        load_group_sharded_model(folder, target, **options)
    assert_same_bits(host(target), before)
    return str(caught.value)


def test_b58_fewer_layers(four_layers):
    text = refuse(four_layers, layered(2, fill=9.0))
    assert "does not fit this state, 6 leaves differ" in text
    line = "params/layers/2/kernel: stored as float32 (24, 4), not in this state"
    assert line in text
    assert "strict=False" in text


def test_b58_more_layers_lists_ten_leaves_by_path(four_layers):
    text = refuse(four_layers, layered(9, fill=9.0))
    lines = [line.strip() for line in text.splitlines()[1:11]]
    assert lines == sorted(lines)
    assert lines[0].startswith("opt_state/0/mu/layers/4/kernel: wanted as float32")
    assert "not in the checkpoint (missing)" in lines[0]
    assert "and 5 more" in text


def test_b58_a_renamed_leaf_an_added_leaf_and_a_missing_part(four_layers):
    target = layered(4)
    renamed = {**target["params"]["layers"], 3: {"weight": jnp.ones((24, 4))}}
    text = refuse(four_layers, {**target, "params": {"layers": renamed}})
    assert "params/layers/3/kernel: stored as float32 (24, 4), not in this" in text
    assert "params/layers/3/weight: wanted as float32 (24, 4), not in the" in text
    text = refuse(four_layers, {**target, "ema": jnp.ones(3)})
    assert "1 leaves differ:\n  ema: wanted as float32 (3,), not in the" in text
    text = refuse(four_layers, {"params": target["params"]})
    assert "opt_state/0/count: stored as int32 (), not in this state" in text


def test_b58_not_strict_loads_what_matches_and_says_what_does_not(four_layers):
    target = layered(6, fill=9.0)
    with pytest.warns(JfleetWarning, match="params/layers/5/kernel") as warned:
        loaded = load_group_sharded_model(four_layers, target, strict=False)
    assert warned[0].filename == __file__
    stored = layered(4)
    layers = loaded["params"]["layers"]
    for i in range(4):
        assert_same_bits(layers[i], stored["params"]["layers"][i])
    assert layers[5]["kernel"] is target["params"]["layers"][5]["kernel"]
    with pytest.warns(JfleetWarning, match=r"layers/3/kernel.*unexpected"):
        load_group_sharded_model(four_layers, layered(3), strict=False)


def test_not_strict_needs_values_for_what_is_kept(four_layers):
    target = {**layered(4), "ema": jax.ShapeDtypeStruct((3,), jnp.float32)}
    with pytest.raises(CheckpointError, match=r"nothing for 1 leaves.*'ema'"):
        load_group_sharded_model(four_layers, target, strict=False)


@pytest.mark.parametrize("shape", [(16, 4), (32, 4), (4, 24), (96,), (24, 4, 1)])
def test_b59_no_cut_pad_reshape_or_broadcast(four_layers, shape):
    text = refuse(four_layers, layered(4, shape))
    wanted = str(shape)
    line = (
        f"params/layers/0/kernel: stored as float32 (24, 4), wanted as float32 {wanted}"
    )
    assert line in refuse(
        four_layers, {**layered(4), **{"params": layered(4, shape)["params"]}}
    )
    assert "does not fit" in text


def test_b59_only_a_moment_has_another_shape(four_layers):
    target = layered(4)
    adam = target["opt_state"][0]
    mu = {"layers": {**adam.mu["layers"], 1: {"kernel": jnp.zeros((16, 4))}}}
    target["opt_state"] = (adam._replace(mu=mu), *target["opt_state"][1:])
    text = refuse(four_layers, target)
    assert "1 leaves differ:\n  opt_state/0/mu/layers/1/kernel: stored as" in text
    with pytest.warns(JfleetWarning, match="mu/layers/1/kernel"):
        loaded = load_group_sharded_model(four_layers, target, strict=False)
    assert loaded["opt_state"][0].mu["layers"][1]["kernel"].shape == (16, 4)


def test_another_element_type_is_converted_only_when_asked(tmp_path):
    mesh = make_mesh(8)
    state = lay_out({"w": jnp.linspace(0, 1, 16), "n": jnp.arange(8)}, mesh)
    save_group_sharded_model(state, tmp_path / "ckpt")
    target = lay_out({"w": jnp.zeros(16, jnp.bfloat16), "n": jnp.zeros(8, int)}, mesh)
    text = refuse(tmp_path / "ckpt", target)
    assert "w: stored as float32 (16,), wanted as bfloat16 (16,)" in text
    assert text.endswith("pass strict=False to convert them")
    with pytest.warns(JfleetWarning, match="bfloat16"):
        loaded = load_group_sharded_model(tmp_path / "ckpt", target, strict=False)
    assert_same_bits(loaded["w"], state["w"].astype(jnp.bfloat16))
    assert loaded["w"].sharding == target["w"].sharding


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (jax.random.key(0), jax.random.key(0, impl="rbg")),
        (jax.random.key(0), jax.random.key_data(jax.random.key(0))),
        (jnp.zeros((), int), 0.5),
        (jnp.zeros(()), 1),
        (jnp.zeros((1,), int), 1),
        (1, True),
        (1.5, jnp.zeros((), int)),
        (300, jnp.zeros((), jnp.uint8)),
        (0.1, jnp.zeros(())),
        ("a", 1),
        (jax.nn.relu, 1),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_other_kinds_never_match(tmp_path, stored, wanted, strict):
    save_group_sharded_model({"x": stored}, tmp_path / "ckpt")
    if strict:
        with pytest.raises(CheckpointError, match=r"x: stored as .*, wanted as "):
            load_group_sharded_model(tmp_path / "ckpt", {"x": wanted})
        return
    with pytest.warns(JfleetWarning, match="x: stored as"):
        loaded = load_group_sharded_model(
            tmp_path / "ckpt", {"x": wanted}, strict=False
        )
    assert loaded["x"] is wanted


def test_layouts_that_cannot_be(four_layers):
    abstract = NamedSharding(
        AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,)), PartitionSpec()
    )
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=abstract), layered(4)
    )
    with pytest.raises(
        PlacementError, match="opt_state/0/count' must be wanted on dev"
    ):
        load_group_sharded_model(four_layers, target)
    split = NamedSharding(make_mesh(5), PartitionSpec("data"))
    target = layered(4)
    kernel = jax.ShapeDtypeStruct((24, 4), jnp.float32, sharding=split)
    target["params"]["layers"][2]["kernel"] = kernel
    with pytest.raises(PlacementError, match=r"layers/2/kernel' of shape \(24, 4\)"):
        load_group_sharded_model(four_layers, target)


def test_existing_output(tmp_path):
    state = {"x": jnp.ones(3)}
    save_group_sharded_model(state, tmp_path / "ckpt")
    with pytest.raises(
        CheckpointError, match=r"holds a checkpoint; pass overwrite=True"
    ):
        save_group_sharded_model(state, tmp_path / "ckpt")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="is a file"):
        save_group_sharded_model(state, tmp_path / "file", overwrite=True)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        save_group_sharded_model(state, tmp_path / "folder", overwrite=True)
    assert (tmp_path / "folder" / "mine.txt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    save_group_sharded_model(state, tmp_path / "empty")


def test_overwrite_replaces_and_cleans_up(tmp_path):
    folder = tmp_path / "ckpt"
    for value in (1.0, 2.0, 3.0):
        save_group_sharded_model({"x": jnp.full(3, value)}, folder, overwrite=True)
        (folder / "note.txt").write_text("of the user")
        loaded = load_group_sharded_model(folder, {"x": jnp.zeros(3)})
        assert (loaded["x"] == value).all()
    names = sorted(p.name for p in folder.iterdir())
    assert names == ["arrays.2", "manifest.json", "note.txt"]


def test_what_is_no_checkpoint(tmp_path):
    target = {"x": jnp.zeros(3)}
    assert "does not exist" in refuse(tmp_path / "nothing", target)
    assert "holds no checkpoint" in refuse(tmp_path, target)
    (tmp_path / "file").write_text("")
    assert "is a file" in refuse(tmp_path / "file", target)
    for wrong in (None, 3, b"ckpt", ""):
        with pytest.raises(ConfigTypeError, match="output must be the path"):
            save_group_sharded_model(target, wrong)
        with pytest.raises(ConfigTypeError, match="output must be the path"):
            load_group_sharded_model(wrong, target)


class Stopped(BaseException):
    """Stands for the end of the process at some point of a save."""


STEPS = {
    "begin": "orbax_io.Writing.__init__",
    "join": "orbax_io.Writing.join",
    "merge": "orbax_io.Writing.merge",
    "digest": "commit.digest",
    "manifest": "commit.write_manifest",
    "cleaning": "commit.remove_own",
}


@pytest.mark.parametrize("step", STEPS)
def test_an_interrupted_save_is_named_and_the_previous_one_loads(
    tmp_path, monkeypatch, step
):
    old, new = {"x": jnp.ones(64)}, {"x": jnp.full(64, 2.0)}
    target = {"x": jnp.zeros(64)}

    def stop(*args, **kwargs):
        raise Stopped

    save_group_sharded_model(old, tmp_path / "over")
    with monkeypatch.context() as patch:
        patch.setattr(f"jfleet._checkpoint.{STEPS[step]}", stop)
        for name in ("first", "over"):
            with pytest.raises((CheckpointError, Stopped)):
                save_group_sharded_model(new, tmp_path / name, overwrite=True)
    complete = step == "cleaning"
    loaded = load_group_sharded_model(tmp_path / "over", target)
    assert_same_bits(loaded, new if complete else old)
    if complete:
        assert_same_bits(load_group_sharded_model(tmp_path / "first", target), new)
    else:
        text = refuse(tmp_path / "first", target)
        assert "is incomplete (interrupted save)" in text
        with pytest.raises(CheckpointError, match="an interrupted save; pass overwr"):
            save_group_sharded_model(new, tmp_path / "first")
    # The next save works and leaves nothing behind.
    for name in ("first", "over"):
        save_group_sharded_model(new, tmp_path / name, overwrite=True)
        assert_same_bits(load_group_sharded_model(tmp_path / name, target), new)
        assert len(list((tmp_path / name).iterdir())) == 2


def test_a_save_killed_while_orbax_writes(tmp_path):
    (tmp_path / "ckpt" / "arrays.0.orbax-checkpoint-tmp").mkdir(parents=True)
    text = refuse(tmp_path / "ckpt", {"x": jnp.zeros(3)})
    assert "is incomplete (interrupted save)" in text


def test_every_damaged_file_is_an_error_never_a_wrong_value(tmp_path):
    mesh = make_mesh(8)
    state = lay_out({"w": jnp.arange(256.0), "n": jnp.arange(7), "k": 3}, mesh)
    folder = tmp_path / "ckpt"
    save_group_sharded_model(state, folder)
    cases = list(damage_cases(folder))
    assert len(cases) > 30
    for path, data in cases:
        good = path.read_bytes()
        put(path, data)
        with pytest.raises(CheckpointError) as caught:
            load_group_sharded_model(folder, state)
        assert str(folder) in str(caught.value)
        path.write_bytes(good)
    assert_same_bits(load_group_sharded_model(folder, state), state)
    shutil.rmtree(folder / "arrays.0")
    assert "arrays.0 is missing" in refuse(folder, state)


def rewrite(folder, change):
    """Change the manifest as someone who knows its checksum would."""
    whole = json.loads((folder / "manifest.json").read_text())
    change(whole)
    body = {k: v for k, v in whole.items() if k not in ("format", "crc32")}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    whole["crc32"] = zlib.crc32(text.encode())
    (folder / "manifest.json").write_text(json.dumps(whole))


MALFORMED = {
    "arrays outside": lambda m: m.update(arrays="../../elsewhere"),
    "arrays absolute": lambda m: m.update(arrays="/etc"),
    "arrays missing": lambda m: m.pop("arrays"),
    "arrays number": lambda m: m.update(arrays=3),
    "another format": lambda m: m.update(format=99),
    "no entries": lambda m: m.update(entries=None),
    "entry list": lambda m: m.update(entries=[[]]),
    "entry unknown field": lambda m: m["entries"][0].update(evil=1),
    "kind": lambda m: m["entries"][0].update(kind="pickle"),
    "path": lambda m: m["entries"][0].update(path=[None]),
    "shape": lambda m: m["entries"][0].update(shape=[-1]),
    "shape text": lambda m: m["entries"][0].update(shape="12"),
    "bigger shape": lambda m: m["entries"][0].update(shape=[1 << 60]),
    "other shape": lambda m: m["entries"][0].update(shape=[8]),
    "dtype": lambda m: m["entries"][0].update(dtype="object"),
    "other dtype": lambda m: m["entries"][0].update(dtype="int32"),
    "alias": lambda m: m["entries"][0].update(same_as="nowhere"),
    "twice": lambda m: m["entries"].append(m["entries"][0]),
    "files": lambda m: m.update(files={"x": 3}),
    "files list": lambda m: m.update(files=[]),
    "scalar": lambda m: m["entries"][1].update(value={"a": 1}),
    "meshes": lambda m: m.update(meshes=[3]),
    "info": lambda m: m.update(info=3),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_manifests(tmp_path, name):
    state = {"a": jnp.arange(4.0), "b": 3}
    save_group_sharded_model(state, tmp_path / "ckpt")
    rewrite(tmp_path / "ckpt", MALFORMED[name])
    with pytest.raises(CheckpointError):
        load_group_sharded_model(tmp_path / "ckpt", state)
    target = {"a": jnp.arange(8.0), "b": 3}
    with pytest.raises(CheckpointError):
        load_group_sharded_model(tmp_path / "ckpt", target)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "null", "[" * 100_000, '{"format": 1}', "\0\xff"]
)
def test_manifests_that_are_no_manifests(tmp_path, text):
    state = {"a": jnp.arange(4.0)}
    save_group_sharded_model(state, tmp_path / "ckpt")
    (tmp_path / "ckpt" / "manifest.json").write_bytes(text.encode("latin-1"))
    assert "is damaged: manifest.json" in refuse(tmp_path / "ckpt", state)


def test_names_cannot_leave_the_folder(tmp_path):
    names = ["../../escape", "/etc/passwd", "..", ".", "", "a/../../b", "~", "a\0b"]
    state = {name: jnp.full(3, float(i)) for i, name in enumerate(names)}
    save_group_sharded_model(state, tmp_path / "deep" / "ckpt")
    assert [p.name for p in tmp_path.iterdir()] == ["deep"]
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["ckpt"]
    loaded = load_group_sharded_model(tmp_path / "deep" / "ckpt", state)
    assert_same_bits(loaded, state)


def test_donated_states_are_refused_before_anything_is_written(tmp_path):
    state = train(lay_out(mlp_state(), make_mesh(8)), 1)
    state.params["layer_1"]["kernel"].delete()
    with pytest.raises(DonatedBufferError, match="params/layer_1/kernel"):
        save_group_sharded_model(state, tmp_path / "ckpt")
    assert not (tmp_path / "ckpt").exists()


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        (object(), "got object"),
        (np.array(["text"]), "got ndarray of <U4"),
        (np.array([None]), "got ndarray of object"),
        (np.array([1], "M8[s]"), "got ndarray of datetime64"),
        (np.zeros(2, np.longdouble), "got ndarray of float128"),
        (np.ma.array([1, 2], mask=[0, 1]), "got MaskedArray"),
        (b"bytes", "got bytes"),
        (jax.ShapeDtypeStruct((2,), jnp.float32), "arrays without values"),
    ],
)
def test_leaves_that_cannot_be_stored(tmp_path, leaf, text):
    with pytest.raises(CheckpointError, match=text) as caught:
        save_group_sharded_model({"fine": jnp.ones(1), "odd": leaf}, tmp_path / "ckpt")
    assert "'odd'" in str(caught.value)
    assert not (tmp_path / "ckpt").exists()


def test_saving_inside_jit(tmp_path):
    @jax.jit
    def step(x):
        save_group_sharded_model({"x": x}, tmp_path / "ckpt")
        return x

    with pytest.raises(CheckpointError, match="leaf 'x' is being traced"):
        step(jnp.ones(2))


@jax.tree_util.register_pytree_with_keys_class
class Ambiguous:
    def __init__(self, a, b):
        self.children = a, b

    def tree_flatten_with_keys(self):
        keys = (jax.tree_util.SequenceKey(0), jax.tree_util.DictKey("0"))
        return tuple(zip(keys, self.children, strict=True)), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_two_leaves_of_one_name(tmp_path):
    with pytest.raises(CheckpointError, match="two leaves have the path '0'"):
        save_group_sharded_model(Ambiguous(jnp.ones(1), jnp.ones(1)), tmp_path / "c")


def test_a_disk_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"could not be written.*still there"):
        save_group_sharded_model({"x": jnp.ones(2)}, tmp_path / "file" / "ckpt")

    def full(*args):
        raise OSError(28, "No space left on device")

    state = {"x": jnp.ones(2)}
    save_group_sharded_model(state, tmp_path / "ckpt")
    monkeypatch.setattr(manifest.os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left"):
        save_group_sharded_model({"x": jnp.zeros(2)}, tmp_path / "ckpt", overwrite=True)
    loaded = load_group_sharded_model(tmp_path / "ckpt", {"x": jnp.zeros(2)})
    assert_same_bits(loaded, state)


def test_a_failing_read_is_a_checkpoint_error(four_layers, monkeypatch):
    def fail(*args):
        raise RuntimeError("lost the disk")

    monkeypatch.setattr(orbax_io, "read", fail)
    with pytest.raises(CheckpointError, match=r"cannot be read.*lost the disk"):
        load_group_sharded_model(four_layers, layered(4))


def test_optimizers_that_differ(tmp_path):
    params = {"w": jnp.ones((8, 4))}
    sgd = {"params": params, "opt_state": optax.sgd(1e-2, momentum=0.9).init(params)}
    adam = {"params": params, "opt_state": ADAM.init(params)}
    save_group_sharded_model(sgd, tmp_path / "ckpt")
    text = refuse(tmp_path / "ckpt", adam)
    assert "opt_state/0/mu/w: wanted as float32 (8, 4), not in the checkpoint" in text
    assert "opt_state/0/trace/w: stored as float32 (8, 4), not in this" in text
