"""What is saved comes back: every leaf, bit for bit, on any mesh, in any layout."""

import dataclasses
import json
import subprocess
import sys
import textwrap
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx, struct
from flax.core import FrozenDict
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jfleet._checkpoint.leaves import flatten
from jfleet._checkpoint.loading import _Shared
from jfleet._checkpoint.manifest import Entry, read_manifest
from jfleet.save import load_group_sharded_model, save_group_sharded_model
from tests.save_helpers import (
    ADAM,
    LEVELS,
    abstract_on,
    assert_laid_out_as,
    assert_same_bits,
    host,
    lay_out,
    make_mesh,
    mlp_batch,
    mlp_state,
    spec_for,
    train,
    train_step,
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A state after three steps on eight devices, and its checkpoint (B57)."""
    state = train(lay_out(mlp_state(), make_mesh(8)), 3)
    folder = tmp_path_factory.mktemp("saved") / "ckpt"
    save_group_sharded_model(state, folder)
    return state, folder


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 5, 6, 7, 8])
def test_b57_loads_on_any_device_count_and_level(trained, num_devices, level):
    state, folder = trained
    target = lay_out(mlp_state(seed=1), make_mesh(num_devices), level)
    loaded = load_group_sharded_model(folder, target)
    assert_same_bits(loaded.params, state.params)
    assert_same_bits(loaded.opt_state, state.opt_state)
    assert int(loaded.step) == 3
    assert_laid_out_as(loaded, target)


@pytest.mark.parametrize("num_devices", [1, 3, 8])
def test_b57_training_goes_on_as_it_would_have(trained, num_devices):
    state, folder = trained
    target = lay_out(mlp_state(seed=1), make_mesh(num_devices))
    loaded = train(load_group_sharded_model(folder, target), 3)
    ours, theirs = jax.tree.leaves(loaded), jax.tree.leaves(train(state, 3))
    for a, b in zip(host(ours), host(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_b57_another_process_with_fewer_devices(trained):
    _, folder = trained
    script = f"""
        import sys
        sys.path[:0] = {[p for p in sys.path if p]!r}
        import jax
        jax.config.update("jax_num_cpu_devices", 2)
        jax.config.update("jax_platforms", "cpu")
        from jfleet._checkpoint.manifest import Entry, read_manifest
        from jfleet.save import load_group_sharded_model
        from tests.save_helpers import lay_out, make_mesh, mlp_state
        assert jax.device_count() == 2
        assert read_manifest({str(folder)!r}).meshes == ({{"data": 8}},)
        target = lay_out(mlp_state(seed=1), make_mesh(2))
        state = load_group_sharded_model({str(folder)!r}, target)
        sums = [float(jax.numpy.abs(x).sum()) for x in jax.tree.leaves(state)]
        print(int(state.step), len(sums), all(sums))
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["3", "14", "True"]


@pytest.mark.parametrize("level", LEVELS)
def test_b62_a_resumed_run_equals_an_unbroken_one(tmp_path, level):
    mesh = make_mesh(8)

    def start(seed):
        return lay_out(mlp_state(sizes=(16, 32, 8), seed=seed), mesh, level)

    batch = mlp_batch(16)
    middle = train(start(0), 5, batch)
    save_group_sharded_model(middle, tmp_path / "ckpt")
    # The step may lay its result out differently; resume in the layout of the run.
    target = jax.tree.map(
        lambda new, old: jax.device_put(new, old.sharding), start(1), middle
    )
    loaded = load_group_sharded_model(tmp_path / "ckpt", target)
    adam = loaded.opt_state[0]
    assert all(np.any(x) for x in jax.tree.leaves(host((adam.mu, adam.nu))))
    assert int(adam.count) == int(loaded.step) == 5
    assert_same_bits(loaded, middle)
    assert_same_bits(train(loaded, 1, batch), train(middle, 1, batch))
    assert_same_bits(train(loaded, 5, batch), train(middle, 5, batch))


def test_b63_integer_keys_stay_integers(tmp_path):
    params = {"layers": {0: jnp.ones((16, 4)), 1: jnp.full((16, 4), 2.0)}}
    state = lay_out({"params": params}, make_mesh(8))
    save_group_sharded_model(state, tmp_path / "ckpt")
    loaded = load_group_sharded_model(tmp_path / "ckpt", state)
    assert_same_bits(loaded, state)
    assert list(loaded["params"]["layers"]) == [0, 1]
    paths = {entry.path for entry in read_manifest(tmp_path / "ckpt").entries}
    assert paths == {("params", "layers", 0), ("params", "layers", 1)}


class Stack(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def test_b63_nnx_pair_comes_back_as_new_objects(tmp_path):
    model = Stack(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    x = jnp.ones((4, 8))
    grads = nnx.grad(lambda m: m(x).sum())(model)
    optimizer.update(model, grads)
    save_group_sharded_model((model, optimizer), tmp_path / "ckpt")
    fresh = Stack(nnx.Rngs(1))
    fresh_optimizer = nnx.Optimizer(fresh, optax.adam(1e-2), wrt=nnx.Param)
    before = fresh(x)
    loaded, loaded_optimizer = load_group_sharded_model(
        tmp_path / "ckpt", (fresh, fresh_optimizer)
    )
    assert isinstance(loaded, Stack)
    assert isinstance(loaded_optimizer, nnx.Optimizer)
    assert (loaded(x) == model(x)).all()
    assert (fresh(x) == before).all()
    assert not (fresh(x) == loaded(x)).all()
    assert_same_bits(nnx.state(loaded_optimizer), nnx.state(optimizer))
    # The new pair trains on, like the old one.
    loaded_optimizer.update(loaded, nnx.grad(lambda m: m(x).sum())(loaded))
    optimizer.update(model, nnx.grad(lambda m: m(x).sum())(model))
    assert (loaded(x) == model(x)).all()


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
@pytest.mark.parametrize("num_devices", [8, 4])
def test_b64_random_keys(tmp_path, impl, num_devices):
    mesh = make_mesh(8)
    keys = jax.random.split(jax.random.key(1, impl=impl), 8)
    state = {
        "rng": jax.device_put(
            jax.random.key(0, impl=impl), NamedSharding(mesh, PartitionSpec())
        ),
        "per_device": jax.device_put(keys, NamedSharding(mesh, PartitionSpec("data"))),
        "alone": jax.random.key(5, impl=impl),
    }
    save_group_sharded_model(state, tmp_path / "ckpt")
    small = make_mesh(num_devices)
    target = {
        "rng": jax.device_put(
            jax.random.key(9, impl=impl), NamedSharding(small, PartitionSpec())
        ),
        "per_device": jax.ShapeDtypeStruct(
            (8,), keys.dtype, sharding=NamedSharding(small, PartitionSpec("data"))
        ),
        "alone": jax.random.key(9, impl=impl),
    }
    loaded = load_group_sharded_model(tmp_path / "ckpt", target)
    assert loaded["rng"].dtype == keys.dtype
    assert_same_bits(loaded, state)
    assert_laid_out_as(loaded, target)
    draw = [jax.random.bernoulli(s["rng"], 0.5, (64,)) for s in (state, loaded)]
    assert (np.array(draw[0]) == np.array(draw[1])).all()


def test_b64_dropout_masks_after_a_restart(tmp_path):
    class WithKey(TrainState):
        rng: jax.Array

    model = nn.Sequential([nn.Dense(32), nn.Dropout(0.5, deterministic=False)])
    x = jnp.ones((4, 8))

    def create_state(seed):
        keys = {"params": jax.random.key(seed), "dropout": jax.random.key(seed)}
        return WithKey.create(
            apply_fn=model.apply,
            params=model.init(keys, x),
            tx=ADAM,
            rng=jax.random.key(seed + 10),
        )

    @jax.jit
    def step(state):
        rng, used = jax.random.split(state.rng)

        def loss(p):
            return state.apply_fn(p, x, rngs={"dropout": used}).sum()

        grads = jax.grad(loss)(state.params)
        return state.apply_gradients(grads=grads, rng=rng)

    state = create_state(0)
    for _ in range(3):
        state = step(state)
    save_group_sharded_model(state, tmp_path / "ckpt")
    loaded = load_group_sharded_model(tmp_path / "ckpt", create_state(1))
    for _ in range(3):
        state, loaded = step(state), step(loaded)
    assert_same_bits(loaded.params, state.params)
    assert isinstance(loaded, WithKey)


def _frozen_first(params):
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "frozen" if "layer_0" in str(path) else "trained", params
    )


CHAIN = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
OPTIMIZERS = {
    "chain": CHAIN,
    "multi_steps": optax.MultiSteps(CHAIN, 2),
    "masked": optax.masked(CHAIN, lambda p: jax.tree.map(lambda x: x.ndim == 2, p)),
    "partition": optax.partition(
        {"frozen": optax.set_to_zero(), "trained": CHAIN}, _frozen_first
    ),
    "injected": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2),
    "if_finite": optax.apply_if_finite(CHAIN, 3),
    "adafactor": optax.adafactor(1e-2),
    "sgd": optax.sgd(1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_b65_optimizer_state_keeps_its_types(tmp_path, name):
    tx = OPTIMIZERS[name]
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    mesh = make_mesh(8)
    batch = mlp_batch(16)
    state = train(lay_out(mlp_state(tx, (16, 8, 8)), mesh), 2, batch)
    save_group_sharded_model(state, tmp_path / "ckpt")
    loaded = load_group_sharded_model(tmp_path / "ckpt", state)
    assert_same_bits(loaded, state)
    assert_laid_out_as(loaded, state)
    step = jax.jit(lambda s: jax.lax.cond(s.step >= 0, lambda: s, lambda: s))
    step(state)
    step(loaded)
    assert step._cache_size() == 1
    assert_same_bits(train(loaded, 1, batch), train(state, 1, batch))


def test_the_users_step_is_not_compiled_again_after_a_load(tmp_path):
    state = lay_out(mlp_state(), make_mesh(8))
    shardings = jax.tree.map(lambda x: x.sharding, state)
    step = jax.jit(train_step.__wrapped__, out_shardings=shardings)
    for _ in range(2):
        state = step(state, mlp_batch())
    before = step._cache_size()
    save_group_sharded_model(state, tmp_path / "ckpt")
    step(load_group_sharded_model(tmp_path / "ckpt", state), mlp_batch())
    assert step._cache_size() == before


@pytest.mark.parametrize("num_devices", [3, 5, 6, 7])
def test_b67_sizes_that_do_not_divide_the_new_mesh(tmp_path, num_devices):
    params = {
        "w": jnp.arange(96.0).reshape(16, 6),
        "emb": jnp.arange(320.0).reshape(40, 8),
        "b": jnp.arange(10.0),
    }
    state = {"params": params, "opt_state": optax.adam(1e-2).init(params)}
    state = lay_out(jax.tree.map(lambda x: x + 1, state), make_mesh(8))
    save_group_sharded_model(state, tmp_path / "ckpt")
    mesh = make_mesh(num_devices)
    target = lay_out(jax.tree.map(jnp.zeros_like, state), mesh)
    loaded = load_group_sharded_model(tmp_path / "ckpt", target)
    assert_same_bits(loaded, state)
    assert_laid_out_as(loaded, target)
    emb = loaded["params"]["emb"]
    split = {3: (40, 8), 5: (8, 8), 6: (40, 8), 7: (40, 8)}[num_devices]
    assert emb.sharding.shard_shape(emb.shape) == split
    assert spec_for((16, 6), 8) == PartitionSpec("data")


def test_b76_one_array_under_two_names_is_stored_once(tmp_path):
    mesh = make_mesh(8)
    table = jax.device_put(
        jnp.arange(1024.0).reshape(64, 16), NamedSharding(mesh, PartitionSpec("data"))
    )
    twin = jax.device_put(table, table.sharding)
    state = {"embed": table, "lm_head": table, "twin": twin, "other": table + 0}
    save_group_sharded_model(state, tmp_path / "ckpt")
    entries = {e.name: e.same_as for e in read_manifest(tmp_path / "ckpt").entries}
    assert entries == {
        "embed": None,
        "lm_head": "embed",
        "other": None,
        "twin": "embed",
    }
    tied = load_group_sharded_model(tmp_path / "ckpt", state)
    assert tied["embed"] is tied["lm_head"] is tied["twin"]
    assert tied["other"] is not tied["embed"]
    assert_same_bits(tied, state)


def test_b76_an_untied_state_gets_arrays_of_its_own(tmp_path):
    table = jnp.arange(float(1 << 18))
    save_group_sharded_model({"a": table, "b": table}, tmp_path / "ckpt")
    target = {"a": jnp.zeros(1 << 18), "b": jnp.ones(1 << 18)}
    loaded = load_group_sharded_model(tmp_path / "ckpt", target)
    assert loaded["a"] is not loaded["b"]
    pointers = {x.unsafe_buffer_pointer() for x in loaded.values()}
    assert len(pointers) == 2
    # Two arrays may be donated together, one array twice may not.
    out = jax.jit(lambda t: jax.tree.map(jnp.negative, t), donate_argnums=0)(loaded)
    assert (np.array(out["b"]) == -np.arange(float(1 << 18))).all()


def test_b76_numpy_memory_is_not_shared_between_untied_leaves():
    memory = np.zeros((1 << 16) + 16, np.float32)
    start = -memory.ctypes.data % 64 // 4
    aligned = memory[start : start + (1 << 16)]  # What JAX on CPU takes over as it is.
    state = {"a": jnp.zeros(1 << 16), "b": jnp.ones(1 << 16)}
    leaves, _ = flatten(lay_out(state, make_mesh(1)))
    entry = Entry(path=("a",), kind="array", shape=aligned.shape, dtype="float32")
    values = _Shared(leaves).put_all(entry, leaves, aligned)
    assert len({x.unsafe_buffer_pointer() for x in values.values()}) == 2


def test_b76_tied_in_the_state_but_stored_apart(tmp_path):
    save_group_sharded_model({"a": jnp.zeros(4), "b": jnp.ones(4)}, tmp_path / "ckpt")
    tied = jnp.full(4, 7.0)
    loaded = load_group_sharded_model(tmp_path / "ckpt", {"a": tied, "b": tied})
    assert (np.array(loaded["a"]) == 0).all()
    assert (np.array(loaded["b"]) == 1).all()


def test_b76_an_abstract_state_gets_what_was_tied(tmp_path):
    table = jnp.arange(64.0)
    save_group_sharded_model({"a": table, "b": table}, tmp_path / "ckpt")
    shape = jax.ShapeDtypeStruct((64,), jnp.float32)
    target = {"a": shape, "b": jax.ShapeDtypeStruct((64,), jnp.float32)}
    loaded = load_group_sharded_model(tmp_path / "ckpt", target)
    assert loaded["a"] is loaded["b"]


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Param(jax.random.normal(rngs.params(), (64, 16)))
        self.head = self.embed

    def __call__(self, ids):
        return self.embed[ids] @ self.head[...].T


def test_b76_a_shared_nnx_variable_is_still_shared(tmp_path):
    model = Tied(nnx.Rngs(0))
    save_group_sharded_model(model, tmp_path / "ckpt")
    assert len(read_manifest(tmp_path / "ckpt").entries) == 1
    loaded = load_group_sharded_model(tmp_path / "ckpt", Tied(nnx.Rngs(1)))
    assert loaded.embed is loaded.head
    ids = jnp.arange(4)
    assert (loaded(ids) == model(ids)).all()


def test_b76_linen_attend_is_one_leaf(tmp_path):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids):
            embed = nn.Embed(64, 16)
            return embed.attend(embed(ids))

    model, ids = Model(), jnp.arange(4)
    params = model.init(jax.random.key(0), ids)
    save_group_sharded_model(params, tmp_path / "ckpt")
    loaded = load_group_sharded_model(
        tmp_path / "ckpt", model.init(jax.random.key(1), ids)
    )
    assert len(jax.tree.leaves(loaded)) == 1
    assert (model.apply(loaded, ids) == model.apply(params, ids)).all()


DTYPES = [
    "bool", "int8", "int16", "int32", "uint8", "uint16", "uint32",
    "float16", "float32", "bfloat16", "complex64", "int4", "uint4", "int2", "uint2",
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e3m4", "float8_e4m3", "float8_e8m0fnu", "float4_e2m1fn",
]  # fmt: skip


def every_bit_pattern(name):
    """Sixteen elements that cover the odd ones: NaN payloads, -0.0, infinities."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    if name == "bool":
        return np.arange(16) % 3 == 0
    if name in ("int4", "uint4", "int2", "uint2", "float4_e2m1fn"):
        return np.arange(16).astype(np.int8).astype(dtype)
    raw = np.frombuffer(np.random.default_rng(0).bytes(16 * dtype.itemsize), dtype)
    raw = raw.copy()
    if name == "float32":
        nan = [0x7FC00001, 0xFFC12345, 0x7F800001]
        raw[:3] = np.array(nan, np.uint32).view(np.float32)
        raw[3:5] = -0.0, np.inf
    if name == "bfloat16":
        raw[:2] = np.array([0x7FC1, 0x8000], np.uint16).view(dtype)
    return raw


@pytest.mark.parametrize("where", ["jax", "numpy"])
@pytest.mark.parametrize("name", DTYPES)
def test_every_element_type_keeps_every_bit(tmp_path, name, where):
    value = every_bit_pattern(name)
    state = {"x": value, "scalar": value[:1].reshape(())}
    if where == "jax":
        state = lay_out(jax.tree.map(jnp.asarray, state), make_mesh(8))
    save_group_sharded_model(state, tmp_path / "ckpt")
    loaded = load_group_sharded_model(tmp_path / "ckpt", state)
    assert_same_bits(loaded, state)
    assert_laid_out_as(loaded, state)


def test_wide_types_of_numpy_and_of_x64(tmp_path):
    names = ("int64", "uint64", "float64", "complex128")
    state = {n: np.array([1, -2, 3]).astype(n) for n in names}
    state["big_endian"] = np.arange(3, dtype=">f4")
    with jax.enable_x64(True):
        state |= {f"jax_{n}": jnp.asarray(state[n]) for n in names}
        save_group_sharded_model(state, tmp_path / "ckpt")
        loaded = load_group_sharded_model(tmp_path / "ckpt", state)
        assert_same_bits(loaded, state)


class Pair(NamedTuple):
    left: object
    right: object


@struct.dataclass
class Config:
    value: object
    rate: float
    name: str = struct.field(pytree_node=False, default="static")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Plain:
    x: object
    y: object


def test_trees_of_every_kind(tmp_path):
    state = {
        "none": None,
        "empty": {},
        "empty_state": optax.EmptyState(),
        "masked": optax.MaskedNode(),
        "tuple": (jnp.ones(3), [jnp.zeros(2, int)], Pair(jnp.ones(1), None)),
        "frozen": FrozenDict({"a": {"b": jnp.arange(4)}}),
        "struct": Config(value=jnp.ones((2, 2)), rate=0.1),
        "dataclass": Plain(x=jnp.arange(2), y=(jnp.ones(()),)),
        "a/b": {"..": jnp.ones(2), "": jnp.ones(3), "c.d": jnp.ones(4)},
        "a": {"b": jnp.full(5, 2.0), "%2F": jnp.ones(6)},
        "a.b": jnp.full(5, 3.0),
        "zero": jnp.zeros((0, 4)),
        "zero_keys": jax.random.split(jax.random.key(0), 3)[:0],
        "numpy_zero": np.zeros((3, 0), np.int16),
        "numpy": np.arange(6, dtype=np.int16).reshape(2, 3),
        "numpy_scalar": np.float32(1.5),
        "int": 12345678901234567890123,
        "negative": -7,
        "float": 0.1,
        "bool": True,
        "complex": 1 + 2j,
        "str": "naïve \ud800",
        "function": jax.nn.relu,
    }
    save_group_sharded_model(state, tmp_path / "ckpt")
    target = {**state, "int": 0, "negative": 0, "float": 0.0, "bool": False}
    target |= {"complex": 0j, "str": "", "numpy": np.zeros((2, 3), np.int16)}
    loaded = load_group_sharded_model(tmp_path / "ckpt", target)
    for name in ("function", "str"):
        assert loaded.pop(name) == state.pop(name)
    assert_same_bits(loaded, state)


@pytest.mark.parametrize("bits", [0x7FF8000000000001, 0xFFF8000000000123, 1 << 63])
def test_python_floats_keep_their_bits(tmp_path, bits):
    value = float(np.array(bits, np.uint64).view(np.float64))
    save_group_sharded_model({"x": value}, tmp_path / "ckpt")
    loaded = load_group_sharded_model(tmp_path / "ckpt", {"x": 0.0})
    assert np.array(loaded["x"]).view(np.uint64) == bits


def test_a_counter_may_be_a_python_number_or_an_array(tmp_path):
    trained = train(mlp_state(), 2)
    save_group_sharded_model(trained, tmp_path / "array")
    fresh = mlp_state(seed=1)
    assert type(fresh.step) is int
    loaded = load_group_sharded_model(tmp_path / "array", fresh)
    assert type(loaded.step) is int
    assert loaded.step == 2
    save_group_sharded_model(fresh.replace(step=5), tmp_path / "python")
    placed = lay_out(mlp_state(), make_mesh(8))
    loaded = load_group_sharded_model(tmp_path / "python", placed)
    assert int(loaded.step) == 5
    assert_laid_out_as(loaded, placed)


@pytest.mark.parametrize("state", [jnp.arange(3), 4, [], None, {"x": {}}])
def test_small_states(tmp_path, state):
    save_group_sharded_model(state, tmp_path / "ckpt")
    loaded = load_group_sharded_model(tmp_path / "ckpt", state)
    assert_same_bits(loaded, state)


def test_an_abstract_state_is_enough(trained):
    state, folder = trained
    target = abstract_on(state)
    loaded = load_group_sharded_model(folder, target)
    assert_same_bits(loaded, state)
    assert_laid_out_as(loaded, target)


def test_a_donated_state_still_says_where_to_load(trained):
    state, folder = trained
    donated = jax.tree.map(lambda x: x + 0, state)
    shardings = jax.tree.map(lambda x: x.sharding, donated)
    for leaf in jax.tree.leaves(donated):
        leaf.delete()
    loaded = load_group_sharded_model(folder, donated)
    assert_same_bits(loaded, state)
    assert jax.tree.map(lambda x: x.sharding, loaded) == shardings


def test_loading_leaves_the_given_state_alone(trained):
    _, folder = trained
    target = lay_out(mlp_state(seed=1), make_mesh(4))
    before = host(target)
    load_group_sharded_model(folder, target)
    assert_same_bits(host(target), before)


def test_committed_stays_committed_and_free_stays_free(tmp_path):
    device = jax.devices()[3]
    state = {
        "free": jnp.ones(3),
        "committed": jax.device_put(jnp.ones(3), device),
        "free_key": jax.random.key(0),
        "committed_key": jax.device_put(jax.random.key(0), device),
    }
    save_group_sharded_model(state, tmp_path / "ckpt")
    loaded = load_group_sharded_model(tmp_path / "ckpt", state)
    for name, leaf in loaded.items():
        assert leaf.committed == name.startswith("committed"), name
        assert leaf.sharding == state[name].sharding, name


def test_host_memory_stays_host_memory(tmp_path):
    mesh = make_mesh(8)
    kinds = {"on_host": "pinned_host", "on_device": "device"}
    state = {
        name: jax.device_put(
            jnp.arange(16.0),
            NamedSharding(mesh, PartitionSpec("data"), memory_kind=kind),
        )
        for name, kind in kinds.items()
    }
    save_group_sharded_model(state, tmp_path / "ckpt")
    loaded = load_group_sharded_model(tmp_path / "ckpt", state)
    assert {n: x.sharding.memory_kind for n, x in loaded.items()} == kinds
    assert_same_bits(loaded, state)


def test_meshes_of_explicit_axes_and_of_two_axes(tmp_path):
    devices = np.array(jax.devices()).reshape(2, 4)
    mesh = Mesh(devices, ("replica", "shard"), axis_types=(AxisType.Explicit,) * 2)
    specs = {
        "both": PartitionSpec(("replica", "shard")),
        "each": PartitionSpec("replica", "shard"),
        "one": PartitionSpec(None, "shard"),
        "none": PartitionSpec(),
    }
    state = {
        name: jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, spec))
        for name, spec in specs.items()
    }
    save_group_sharded_model(state, tmp_path / "ckpt")
    loaded = load_group_sharded_model(tmp_path / "ckpt", state)
    assert_same_bits(loaded, state)
    assert_laid_out_as(loaded, state)
    manifest = read_manifest(tmp_path / "ckpt")
    assert manifest.meshes == ({"replica": 2, "shard": 4},)
    stored = {e.name: e.spec for e in manifest.entries}
    assert stored["both"] == (("replica", "shard"),)
    assert stored["one"] == (None, "shard")
    assert stored["none"] == ()


def test_many_reads_give_what_one_read_gives(trained, monkeypatch):
    from jfleet._checkpoint import orbax_io

    state, folder = trained
    calls = []
    real = orbax_io._handler
    monkeypatch.setattr(orbax_io, "_handler", lambda: calls.append(0) or real())
    monkeypatch.setattr(orbax_io, "STAGING_BYTES", 20_000)
    assert_same_bits(load_group_sharded_model(folder, abstract_on(state)), state)
    assert len(calls) > 3


class Policied(NamedTuple):
    init: object
    update: object
    policy: object


def test_the_manifest_can_be_read_by_people(tmp_path):
    @dataclasses.dataclass
    class Policy:
        level: str

    tx = Policied(*optax.adam(1e-2), policy=Policy("os_g"))
    state = train(lay_out(mlp_state(tx), make_mesh(8), "os_g"), 3)
    save_group_sharded_model(state, tmp_path / "ckpt")
    text = json.loads((tmp_path / "ckpt" / "manifest.json").read_text())
    assert text["info"]["level"] == "os_g"
    assert text["info"]["step"] == 3
    assert text["info"]["jax"] == jax.__version__
    assert text["info"]["state"] == "flax.training.train_state.TrainState"
    entries = {tuple(e["path"]): e for e in text["entries"]}
    mu = entries["opt_state", 0, "mu", "layer_0", "kernel"]
    assert mu["shape"] == [48, 96]
    assert mu["dtype"] == "float32"


def test_relative_paths_and_missing_parents(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_group_sharded_model({"x": jnp.ones(2)}, "runs/one/ckpt")
    loaded = load_group_sharded_model("runs/one/ckpt/", {"x": jnp.zeros(2)})
    assert (loaded["x"] == 1).all()
