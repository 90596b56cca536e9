"""A user's own state through ``group_sharded_parallel`` and their own jitted step."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jfleet
from jfleet.optax_meta.sharding import sharding
from tests.helpers import count_compilations
from tests.models import (
    LEVELS,
    MLP,
    assert_trees_close,
    assert_trees_equal,
    device_bytes,
    make_batch,
    make_state,
    reference,
    shardings_of,
    train,
    train_step,
)


@pytest.fixture(scope="module")
def mesh():
    return jfleet.new_group(range(8))


def batches(steps, mesh, rows=64):
    return [jfleet.shard_batch(make_batch(i, rows), mesh=mesh) for i in range(steps)]


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("donate", [False, True], ids=["kept", "donated"])
@pytest.mark.parametrize("level", LEVELS)
def test_values_layout_and_compilations(level, donate, explicit):
    kind = AxisType.Explicit if explicit else AxisType.Auto
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    state = jfleet.group_sharded_parallel(make_state(), level, mesh=mesh)
    before = shardings_of(state)
    data = batches(5, mesh)
    step = jax.jit(train_step, donate_argnums=0 if donate else ())
    state, _ = step(state, data[0])
    with count_compilations() as count:
        for batch in data[1:]:
            state, loss = step(state, batch)
    assert count.compilations == 0
    assert shardings_of(state) == before
    want, want_loss = reference(5)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
    assert_trees_close(state.params, want.params)
    assert_trees_close(state.opt_state, want.opt_state)
    assert int(state.step) == 5


@pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
@pytest.mark.parametrize("level", LEVELS)
def test_adam_bytes_equal_the_closed_form(level, num_devices):
    mesh = jfleet.new_group(range(num_devices))
    state = make_state()
    size = sum(x.size for x in jax.tree.leaves(state.params))
    planned = jfleet.plan(state, level, mesh=mesh)
    state = jfleet.group_sharded_parallel(state, level, mesh=mesh)
    params = 4 * size // (num_devices if level == "p_g_os" else 1)
    moments = 8 * size // num_devices
    scalars = 4  # Adam's count
    assert planned.device_bytes("params") == params
    assert planned.device_bytes("opt_state") == moments + scalars
    for device in mesh.devices.flat:
        assert device_bytes(state.params, device) == params
        assert device_bytes(state.opt_state, device) == moments + scalars


@pytest.mark.parametrize("level", LEVELS)
def test_odd_shapes_take_the_planned_bytes(level, mesh):
    shapes = {"a": (17, 16), "b": (7,), "c": (), "d": (3, 5, 8), "e": (13, 11)}
    params = {k: jnp.ones(s) for k, s in shapes.items()}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
    planned = jfleet.plan(state, level, mesh=mesh)
    placed = jfleet.group_sharded_parallel(state, level, mesh=mesh)
    assert device_bytes(placed.params) == planned.device_bytes("params")
    assert device_bytes(placed.opt_state) == planned.device_bytes("opt_state")
    split = 17 * 16 + 3 * 5 * 8
    whole = 7 + 1 + 13 * 11
    assert planned.device_bytes("opt_state") == 8 * (split // 8 + whole) + 4
    assert {r.path for r in planned.whole()} == {
        f"0/{m}/{k}" for m in ("mu", "nu") for k in "be"
    }


@pytest.mark.parametrize("level", LEVELS)
def test_b01_no_leaf_is_whole_when_a_dim_divides(level, mesh):
    params = {
        "emb": jnp.ones((17, 16)),
        "head": jnp.ones((16, 24)),
        "bias": jnp.ones(7),
        "scale": jnp.ones(()),
    }
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
    state = jfleet.group_sharded_parallel(state, level, mesh=mesh)

    def shard_sizes(tree):
        return {k: v.addressable_shards[0].data.size for k, v in tree.items()}

    split = {"emb": 34, "head": 48, "bias": 7, "scale": 1}
    whole = {"emb": 272, "head": 384, "bias": 7, "scale": 1}
    for _ in range(2):
        adam = state.opt_state[0]
        assert shard_sizes(adam.mu) == split
        assert shard_sizes(adam.nu) == split
        assert shard_sizes(state.params) == (split if level == "p_g_os" else whole)
        grads = jax.tree.map(jnp.ones_like, state.params)
        state = jax.jit(lambda s, g: s.apply_gradients(grads=g))(state, grads)


@pytest.mark.parametrize("level", LEVELS)
def test_b02_state_is_never_on_one_device(level, mesh):
    params = {"up": jnp.ones((1024, 64)), "down": jnp.ones((64, 1024))}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
    state = jfleet.group_sharded_parallel(state, level, mesh=mesh)
    for leaf in jax.tree.leaves(state):
        assert len(leaf.sharding.device_set) == 8
    sizes = [device_bytes(state.opt_state, d) for d in mesh.devices.flat]
    assert set(sizes) == {2 * 2 * 1024 * 64 * 4 // 8 + 4}


def test_b02_init_of_the_wrapped_transformation_is_born_sharded(mesh):
    params = {"w": jnp.ones((64, 64))}
    policy = jfleet.plan({"params": params}, "os", mesh=mesh).policy
    for init in (sharding(optax.adam(1e-3), policy).init,):
        for run in (init, jax.jit(init)):
            adam = run(params)[0]
            assert adam.mu["w"].sharding.shard_shape((64, 64)) == (8, 64)
            assert len(adam.count.sharding.device_set) == 8


@pytest.mark.parametrize("level", LEVELS)
def test_b09_hybrid_mesh_shards_inside_and_replicates_outside(level):
    mesh = jax.make_mesh((2, 4), ("rep", "shard"), axis_types=(AxisType.Auto,) * 2)
    state = jfleet.group_sharded_parallel(make_state(), level, mesh=mesh, axis="shard")
    state, _ = train(state, batches(5, mesh))
    want, _ = reference(5)
    assert_trees_close(state.params, want.params)
    for leaf in jax.tree.leaves((state.params, state.opt_state)):
        copies = {}
        for shard in leaf.addressable_shards:
            copies.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        for first, *others in copies.values():
            for other in others:
                np.testing.assert_array_equal(first, other)
    kernel = state.opt_state[0].mu["Dense_0"]["kernel"]
    assert kernel.addressable_shards[0].data.size * 4 == kernel.size


@pytest.mark.parametrize("level", LEVELS)
def test_hybrid_mesh_with_optimizer_state_over_both_axes(level):
    mesh = jax.make_mesh((2, 4), ("replica", "shard"), axis_types=(AxisType.Auto,) * 2)
    state = jfleet.group_sharded_parallel(
        make_state(),
        level,
        mesh=mesh,
        axis="shard",
        optimizer_axis=("shard", "replica"),
    )
    before = shardings_of(state)
    state, _ = train(state, batches(5, mesh))
    assert shardings_of(state) == before
    want, _ = reference(5)
    assert_trees_close(state.params, want.params)
    for leaf in jax.tree.leaves((state.opt_state[0].mu, state.opt_state[0].nu)):
        assert leaf.addressable_shards[0].data.size * 8 == leaf.size
    if level == "p_g_os":
        for leaf in jax.tree.leaves(state.params):
            assert leaf.addressable_shards[0].data.size * 4 == leaf.size


@pytest.mark.parametrize("level", LEVELS)
def test_torus_mesh_splits_one_dim_per_axis(level):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    state = jfleet.group_sharded_parallel(
        make_state(), level, mesh=mesh, axis=("x", "y")
    )
    before = shardings_of(state)
    state, _ = train(state, batches(5, mesh))
    assert shardings_of(state) == before
    assert_trees_close(state.params, reference(5)[0].params)
    assert state.opt_state[0].mu["Dense_0"]["kernel"].sharding.spec == P("x", "y")


class TensorParallelMLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        def boxed(*names):
            return nn.with_partitioning(nn.initializers.lecun_normal(), names)

        x = nn.relu(nn.Dense(32, kernel_init=boxed(None, "model"))(x))
        return nn.Dense(8, kernel_init=boxed("model", None))(x)


@pytest.mark.parametrize("level", LEVELS)
def test_b08_tensor_parallel_specs_of_linen_boxes_survive(level):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    plain = make_state(model=TensorParallelMLP())
    state = jfleet.group_sharded_parallel(plain, level, mesh=mesh)
    before = shardings_of(state)
    state, _ = train(state, batches(3, mesh))
    assert shardings_of(state) == before
    want, _ = train(plain, [make_batch(i) for i in range(3)])
    assert_trees_close(state.params, want.params)
    kernel = state.params["Dense_0"]["kernel"].value
    moment = state.opt_state[0].mu["Dense_0"]["kernel"].value
    assert moment.sharding.spec == P("data", "model")
    split = level == "p_g_os"
    assert kernel.sharding.spec == (P("data", "model") if split else P(None, "model"))


@pytest.mark.parametrize("level", LEVELS)
def test_b08_specs_that_arrays_came_with_survive(level):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def put(shape, *spec):
        x = jnp.linspace(-1, 1, np.prod(shape)).reshape(shape)
        return jax.device_put(x, jax.sharding.NamedSharding(mesh, P(*spec)))

    params = {
        "kernel": put((16, 32), None, "model"),
        "emb": put((32, 16), "model"),
        "norm": put((16,)),
        "split": put((16, 3), "data"),
    }
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-2))
    state = jfleet.group_sharded_parallel(state, level, mesh=mesh)
    specs = jax.tree.map(lambda x: x.sharding.spec, state.opt_state[0].mu)
    assert specs == {
        "kernel": P("data", "model"),
        "emb": P("model", "data"),
        "norm": P("data"),
        "split": P("data"),
    }
    specs = jax.tree.map(lambda x: x.sharding.spec, state.params)
    if level == "p_g_os":
        assert specs["kernel"] == P("data", "model")
    else:
        assert specs == {
            "kernel": P(None, "model"),
            "emb": P("model"),
            "norm": P(),
            "split": P(),
        }


class AveragedState(TrainState):
    ema: Any = None
    batch_stats: Any = None
    key: Any = None


@pytest.mark.parametrize("level", LEVELS)
def test_subclass_with_extra_fields(level, mesh):
    plain = make_state(
        cls=AveragedState,
        batch_stats={"mean": jnp.zeros(8), "count": 0},
        key=jax.random.key(3),
    )
    plain = plain.replace(ema=plain.params)

    def step(state, batch):
        state, loss = train_step(state, batch)
        ema = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state.ema, state.params)
        stats = {
            "mean": 0.9 * state.batch_stats["mean"] + batch["y"].mean(0),
            "count": state.batch_stats["count"] + 1,
        }
        key = jax.random.split(state.key)[0]
        return state.replace(ema=ema, batch_stats=stats, key=key), loss

    state = jfleet.group_sharded_parallel(plain, level, mesh=mesh)
    assert isinstance(state, AveragedState)
    before = shardings_of(state)
    state, _ = train(state, batches(3, mesh), donate=True, step=step)
    assert shardings_of(state) == before
    want, _ = train(plain, [make_batch(i) for i in range(3)], step=step)
    assert_trees_close(state.ema, want.ema)
    assert_trees_close(state.batch_stats, want.batch_stats)
    assert jax.random.key_data(state.key).tolist() == (
        jax.random.key_data(want.key).tolist()
    )
    for average, param in zip(
        jax.tree.leaves(state.ema), jax.tree.leaves(state.params), strict=True
    ):
        assert average.sharding == param.sharding
    assert state.batch_stats["mean"].sharding.is_fully_replicated


@pytest.mark.parametrize("container", [dict, FrozenDict], ids=lambda c: c.__name__)
@pytest.mark.parametrize("level", LEVELS)
def test_b79_masks_work_for_dict_and_frozen_dict(level, container, mesh):
    plain = make_state()
    params = container(plain.params)
    mask = container(jax.tree.map(lambda x: x.ndim > 1, dict(plain.params)))
    for decay_mask in (mask, lambda p: jax.tree.map(lambda x: x.ndim > 1, p)):
        tx = optax.adamw(1e-2, weight_decay=0.1, mask=decay_mask)
        start = TrainState.create(apply_fn=plain.apply_fn, params=params, tx=tx)
        state = jfleet.group_sharded_parallel(start, level, mesh=mesh)
        state, _ = train(state, batches(2, mesh))
        want, _ = train(start, [make_batch(i) for i in range(2)])
        assert type(state.params) is container
        assert_trees_close(state.params, want.params)


@pytest.mark.parametrize("level", LEVELS)
class TestFrozen:
    """B78: frozen weights get no state and no decay, and are still laid out."""

    def run(self, level, mesh, tx):
        params = {
            "trunk": {"a": jnp.ones((64, 64)) / 9, "b": jnp.ones((64, 64)) / 7},
            "head": jnp.ones((64, 8)),
        }

        def apply_fn(variables, x):
            p = variables["params"]
            return x @ p["trunk"]["a"] @ p["trunk"]["b"] @ p["head"]

        def step(state, x):
            loss, grads = jax.value_and_grad(
                lambda p: jnp.mean(state.apply_fn({"params": p}, x) ** 2)
            )(state.params)
            return state.apply_gradients(grads=grads), loss

        plain = TrainState.create(apply_fn=apply_fn, params=params, tx=tx)
        state = jfleet.group_sharded_parallel(plain, level, mesh=mesh)
        x = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
        want, _ = train(plain, [x] * 3, step=step)
        rows = jfleet.shard_batch(x, mesh=mesh)
        state, _ = train(state, [rows] * 3, step=step)
        assert_trees_equal(state.params["trunk"], params["trunk"])
        assert_trees_close(state.params["head"], want.params["head"])
        big = [x.shape for x in jax.tree.leaves(state.opt_state) if x.ndim]
        assert big == [(64, 8)] * 2
        if level == "p_g_os":
            trunk = state.params["trunk"]["a"]
            assert trunk.sharding.shard_shape(trunk.shape) == (8, 64)

    def test_partition(self, level, mesh):
        labels = {"trunk": "frozen", "head": "trained"}
        tx = optax.partition(
            {
                "trained": optax.adamw(1e-2, weight_decay=0.1),
                "frozen": optax.set_to_zero(),
            },
            labels,
        )
        self.run(level, mesh, tx)

    def test_masked(self, level, mesh):
        trained = {"trunk": {"a": False, "b": False}, "head": True}
        frozen = jax.tree.map(lambda t: not t, trained)
        tx = optax.chain(
            optax.masked(optax.adamw(1e-2, weight_decay=0.1), trained),
            optax.masked(optax.set_to_zero(), frozen),
        )
        self.run(level, mesh, tx)


class TestClipping:
    """Global norms are global at every level."""

    @pytest.mark.parametrize("level", LEVELS)
    def test_b10_whole_and_split_leaves_count_once(self, level, mesh):
        params = {"w": jnp.zeros((16, 4)), "b": jnp.zeros(3)}
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
        state = TrainState.create(apply_fn=None, params=params, tx=tx)
        state = jfleet.group_sharded_parallel(state, level, mesh=mesh)
        grads = {"w": jnp.full((16, 4), 0.5), "b": jnp.ones(3)}
        state = jax.jit(lambda s, g: s.apply_gradients(grads=g))(state, grads)
        norm = np.sqrt(19.0)
        np.testing.assert_allclose(state.params["w"], -0.5 / norm, rtol=1e-6)
        np.testing.assert_allclose(state.params["b"], -1.0 / norm, rtol=1e-6)

    @pytest.mark.parametrize("level", LEVELS)
    def test_b12_frozen_leaves_do_not_count(self, level, mesh):
        params = {"w": jnp.zeros((16, 4)), "f": jnp.ones((8, 8))}
        trained = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
        tx = optax.partition(
            {"t": trained, "f": optax.set_to_zero()}, {"w": "t", "f": "f"}
        )
        state = TrainState.create(apply_fn=None, params=params, tx=tx)
        state = jfleet.group_sharded_parallel(state, level, mesh=mesh)
        grads = {"w": jnp.full((16, 4), 0.5), "f": jnp.full((8, 8), 10.0)}
        state = jax.jit(lambda s, g: s.apply_gradients(grads=g))(state, grads)
        np.testing.assert_array_equal(state.params["w"], np.full((16, 4), -0.125))
        np.testing.assert_array_equal(state.params["f"], np.ones((8, 8)))


@pytest.mark.parametrize("rate", ["float", "jax", "ml_dtypes", "numpy", "schedule"])
@pytest.mark.parametrize("level", LEVELS)
def test_b71_parameters_keep_their_dtype(level, rate, mesh):
    rates = {
        "float": 1e-3,
        "jax": jnp.bfloat16(1e-3),
        "ml_dtypes": np.asarray(1e-3, jnp.bfloat16)[()],
        "numpy": np.float32(1e-3),
        "schedule": optax.constant_schedule(1e-3),
    }
    params = {"w": jnp.ones((16, 4), jnp.bfloat16)}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(rates[rate]))
    state = jfleet.group_sharded_parallel(state, level, mesh=mesh)
    step = jax.jit(
        lambda s: s.apply_gradients(grads=jax.tree.map(jnp.ones_like, s.params))
    )
    state = step(state)
    dtypes = jax.tree.map(lambda x: x.dtype, state.opt_state)
    with count_compilations() as count:
        state = step(state)
    assert count.compilations == 0
    assert state.params["w"].dtype == jnp.bfloat16
    assert jax.tree.map(lambda x: x.dtype, state.opt_state) == dtypes
    np.testing.assert_allclose(
        np.asarray(state.params["w"], np.float32), 0.998, atol=2**-8
    )


class TestBuffers:
    """Nothing returned shares a buffer with the input or with itself."""

    @pytest.mark.parametrize("level", LEVELS)
    def test_b85_the_callers_arrays_survive_donated_steps(self, level, mesh):
        plain = make_state()
        values = jax.tree.map(np.asarray, plain)
        first = jfleet.group_sharded_parallel(plain, level, mesh=mesh)
        second = jfleet.group_sharded_parallel(first, level, mesh=mesh)
        train(second, batches(2, mesh), donate=True)
        assert_trees_equal(plain.params, values.params)
        assert_trees_equal(first.params, values.params)
        state, _ = train(plain, [make_batch(i) for i in range(2)])
        assert_trees_close(state.params, reference(2)[0].params)

    @pytest.mark.parametrize("level", LEVELS)
    @pytest.mark.parametrize("name", ["schedule_free", "average", "empty"])
    def test_b83_no_buffer_is_held_twice(self, name, level, mesh):
        if name == "schedule_free":
            plain = make_state(optax.contrib.schedule_free_adamw(1e-2))
        elif name == "average":
            plain = make_state(cls=AveragedState)
            plain = plain.replace(ema=plain.params)
        else:
            plain = make_state(cls=AveragedState, ema=jnp.zeros((0, 8)))
        state = jfleet.group_sharded_parallel(plain, level, mesh=mesh)
        held = [
            (s.device, s.data.unsafe_buffer_pointer())
            for leaf in jax.tree.leaves(state)
            for s in leaf.addressable_shards
            if s.data.size
        ]
        assert len(set(held)) == len(held)
        data = batches(2, mesh)
        kept, _ = train(state, data)
        donated, _ = train(state, data, donate=True)
        assert_trees_equal(donated.params, kept.params)

    @pytest.mark.parametrize("num_devices", [2, 8])
    @pytest.mark.parametrize("level", ["os", "os_g"])
    def test_b86_every_donated_buffer_is_used(self, level, num_devices):
        mesh = jfleet.new_group(range(num_devices))
        state = jfleet.group_sharded_parallel(make_state(), level, mesh=mesh)
        data = batches(5, mesh)
        step = jax.jit(train_step, donate_argnums=0)
        state, loss = step(state, data[0])
        live = sum(x.nbytes for x in jax.live_arrays())
        for batch in data[1:]:
            state, last = step(state, batch)
        assert last.nbytes == loss.nbytes
        del loss
        assert sum(x.nbytes for x in jax.live_arrays()) == live
        compiled = step.lower(state, data[0]).compile().memory_analysis()
        assert compiled.alias_size_in_bytes == device_bytes(state)

    def test_donated_states_are_refused_with_their_paths(self, mesh):
        state = jfleet.group_sharded_parallel(make_state(), "os", mesh=mesh)
        train(state, batches(1, mesh), donate=True)
        with pytest.raises(jfleet.DonatedBufferError, match="Dense_0/bias"):
            jfleet.group_sharded_parallel(state, "os_g", mesh=mesh)

    def test_b76_one_array_under_two_paths_is_named_and_split_up(self, mesh):
        w = jnp.ones((64, 16))
        state = TrainState.create(
            apply_fn=None, params={"embed": w, "lm_head": w}, tx=optax.adam(1e-3)
        )
        with pytest.warns(jfleet.JfleetWarning, match="'embed', 'lm_head'"):
            state = jfleet.group_sharded_parallel(state, "os", mesh=mesh)
        step = jax.jit(lambda s: s.apply_gradients(grads=s.params), donate_argnums=0)
        state = step(step(state))
        assert_trees_equal(state.params["embed"], state.params["lm_head"])


class TiedModel(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(64, 16)
        return embed.attend(nn.tanh(nn.Dense(16)(embed(tokens))))


@pytest.mark.parametrize("level", LEVELS)
def test_b76_a_tied_embedding_gets_the_sum_of_both_gradients(level, mesh):
    with jax.enable_x64(True):
        check_tied_embedding(level, mesh)


def check_tied_embedding(level, mesh):
    model = TiedModel()
    tokens = np.arange(64).reshape(16, 4) % 64
    params = model.init(jax.random.key(0), tokens)["params"]
    params = jax.tree.map(lambda x: x.astype(jnp.float64), params)
    plain = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))

    def step(state, tokens):
        def loss_fn(p):
            logits = state.apply_fn({"params": p}, tokens)
            losses = optax.softmax_cross_entropy_with_integer_labels
            return losses(logits, (tokens + 1) % 64).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    want, _ = train(plain, [tokens] * 5, step=step)
    state = jfleet.group_sharded_parallel(plain, level, mesh=mesh)
    state, _ = train(state, [jfleet.shard_batch(tokens, mesh=mesh)] * 5, step=step)
    assert_trees_close(state.params, want.params, rtol=1e-9)


class TestAgain:
    """B110: wrapping what is wrapped."""

    def test_same_level_changes_nothing(self, mesh):
        one = jfleet.group_sharded_parallel(make_state(), "os", mesh=mesh)
        two = jfleet.group_sharded_parallel(one, "os", mesh=mesh)
        assert jax.tree.structure(one) == jax.tree.structure(two)
        assert shardings_of(one) == shardings_of(two)
        assert_trees_equal(jax.tree.leaves(one), jax.tree.leaves(two))

    @pytest.mark.parametrize("before", LEVELS)
    @pytest.mark.parametrize("after", LEVELS)
    def test_another_level_lays_out_anew_and_keeps_values(self, before, after, mesh):
        state = jfleet.group_sharded_parallel(make_state(), before, mesh=mesh)
        data = batches(5, mesh)
        state, _ = train(state, data[:3])
        again = jfleet.group_sharded_parallel(state, after, mesh=mesh)
        fresh = jfleet.group_sharded_parallel(make_state(), after, mesh=mesh)
        assert shardings_of(again) == shardings_of(fresh)
        assert int(again.opt_state[0].count) == 3
        assert_trees_equal(again.params, state.params)
        final, _ = train(again, data[3:])
        assert_trees_close(final.params, reference(5)[0].params)

    def test_another_mesh(self, mesh):
        state = jfleet.group_sharded_parallel(make_state(), "p_g_os", mesh=mesh)
        state, _ = train(state, batches(3, mesh))
        small = jfleet.new_group(range(4))
        state = jfleet.group_sharded_parallel(state, "p_g_os", mesh=small)
        data = [jfleet.shard_batch(make_batch(i), mesh=small) for i in (3, 4)]
        state, _ = train(state, data)
        assert_trees_close(state.params, reference(5)[0].params)
        assert len(state.params["Dense_0"]["kernel"].sharding.device_set) == 4

    def test_the_step_is_not_compiled_again_for_an_equal_wrap(self, mesh):
        tx, model = optax.adam(1e-2), MLP()
        step = jax.jit(train_step)
        data = batches(2, mesh)
        for i in range(2):
            state = jfleet.group_sharded_parallel(
                make_state(tx, model=model), "p_g_os", mesh=mesh
            )
            with count_compilations() as count:
                step(state, data[0])
            assert count.compilations == (1 if i == 0 else 0)


class TestOtherStates:
    def test_pair_and_mapping(self, mesh):
        tx = optax.adam(1e-2)
        params = make_state().params
        pair = jfleet.group_sharded_parallel(
            (params, tx.init(params)), "p_g_os", mesh=mesh
        )
        assert isinstance(pair, tuple)
        mapping = {"params": params, "opt_state": tx.init(params), "step": 3}
        got = jfleet.group_sharded_parallel(mapping, "p_g_os", mesh=mesh)
        assert_trees_equal(got["params"], pair[0])
        assert shardings_of(got["opt_state"]) == shardings_of(pair[1])
        assert int(got["step"]) == 3

    def test_abstract_states_get_shardings(self, mesh):
        shapes = jax.eval_shape(make_state)
        state = jfleet.group_sharded_parallel(shapes, "p_g_os", mesh=mesh)
        placed = jfleet.group_sharded_parallel(make_state(), "p_g_os", mesh=mesh)
        assert shardings_of(state) == shardings_of(placed)
        assert isinstance(state.params["Dense_0"]["bias"], jax.ShapeDtypeStruct)

    @pytest.mark.parametrize("bad", [3, "state", [1, 2, 3], {"weights": 1}, None])
    def test_unknown_states_are_refused(self, bad, mesh):
        with pytest.raises(TypeError, match="TrainState"):
            jfleet.group_sharded_parallel(bad, "os", mesh=mesh)

    def test_leaves_that_are_not_arrays_are_refused(self, mesh):
        with pytest.raises(TypeError, match="'name'"):
            jfleet.group_sharded_parallel({"params": {"name": "x"}}, "os", mesh=mesh)

    @pytest.mark.parametrize("bad", [3, "mesh", jax.devices])
    def test_bad_meshes_are_refused(self, bad):
        with pytest.raises(TypeError, match="mesh must be"):
            jfleet.group_sharded_parallel(make_state(), "os", mesh=bad)

    def test_mixed_axis_types_are_refused(self):
        mesh = jax.make_mesh(
            (2, 4), ("a", "data"), axis_types=(AxisType.Auto, AxisType.Explicit)
        )
        with pytest.raises(jfleet.ConfigError, match="all Explicit"):
            jfleet.group_sharded_parallel(make_state(), "os", mesh=mesh)

    def test_abstract_meshes_are_refused(self):
        mesh = jax.sharding.AbstractMesh((8,), ("data",))
        with pytest.raises(jfleet.ConfigError, match="abstract"):
            jfleet.group_sharded_parallel(
                make_state(), "os", mesh=mesh.update_axis_types({"data": AxisType.Auto})
            )

    def test_the_mesh_of_the_state_is_the_default(self, mesh):
        half = Mesh(mesh.devices[:4], ("data",), axis_types=(AxisType.Auto,))
        state = jfleet.group_sharded_parallel(make_state(), "os", mesh=half)
        state = jfleet.group_sharded_parallel(state, "p_g_os")
        assert len(state.params["Dense_0"]["kernel"].sharding.device_set) == 4


@pytest.mark.parametrize("level", LEVELS)
def test_create_sharded_equals_placing(level, mesh):
    state = jfleet.create_sharded(make_state, level=level, mesh=mesh)
    placed = jfleet.group_sharded_parallel(make_state(), level, mesh=mesh)
    assert shardings_of(state) == shardings_of(placed)
    assert_trees_close(jax.tree.leaves(state), jax.tree.leaves(placed))
    state, _ = train(state, batches(5, mesh), donate=True)
    assert_trees_close(state.params, reference(5)[0].params)


def test_create_sharded_holds_no_whole_state(mesh):
    """The program that builds the state needs no more than its shards."""

    def init(key):
        params = {"w": jax.random.normal(key, (1024, 1024))}
        return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))

    before = {id(x) for x in jax.live_arrays()}
    state = jfleet.create_sharded(init, jax.random.key(0), level="p_g_os", mesh=mesh)
    new = [x for x in jax.live_arrays() if id(x) not in before]
    assert sum(device_bytes(x) for x in new) == device_bytes(state)
    assert device_bytes(state) == 3 * 4 * 1024 * 1024 // 8 + 8


@pytest.mark.parametrize("level", LEVELS)
def test_offload_keeps_the_optimizer_state_in_host_memory(level, mesh):
    state = jfleet.group_sharded_parallel(make_state(), level, mesh=mesh, offload=True)

    def kinds(state):
        return {
            leaf.sharding.memory_kind
            for leaf in jax.tree.leaves(state.opt_state)
            if leaf.ndim
        }

    assert kinds(state) == {"pinned_host"}
    step = jax.jit(train_step, donate_argnums=0)
    for batch in batches(5, mesh):
        state, _ = step(state, batch)
        assert kinds(state) == {"pinned_host"}
    assert_trees_close(state.params, reference(5)[0].params)
    assert state.params["Dense_0"]["kernel"].sharding.memory_kind == "device"


def test_planning_and_placing_do_not_change_the_callers_state(mesh):
    plain = make_state()
    tx, apply_fn = plain.tx, plain.apply_fn
    jfleet.group_sharded_parallel(plain, "p_g_os", mesh=mesh)
    assert plain.tx is tx
    assert plain.apply_fn is apply_fn
    assert isinstance(plain.step, int)
