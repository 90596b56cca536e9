"""The contract of minimize and create: arguments, metrics, buffers, errors."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jfleet
from jfleet import mesh as meshes
from jfleet import train_step
from jfleet._errors import (
    ConfigError,
    ConfigTypeError,
    DonatedBufferError,
    JfleetWarning,
)
from jfleet.distributed import distributed_optimizer
from jfleet.optimizer import optimizer
from jfleet.strategy import DistributedStrategy
from jfleet.train_step import TrainState
from tests.helpers import count_compilations
from tests.train_step import oracle
from tests.train_step.oracle import loss_fn, make_optimizer, mesh_of

F32 = np.float32
SGD = optimizer(optax.sgd, learning_rate=0.1, momentum=0.9)
LEVELS = (None, "os", "os_g", "p_g_os")
KINDS = [
    ((), {"data": 4}),
    (("gradient_merge", "clip"), {"data": 4}),
    (("fp16_allreduce", "amp"), {"data": 4}),
    (("localsgd", "amp"), {"replica": 2, "shard": 2}),
    (("dgc",), {"replica": 2, "shard": 2}),
]


def batch(step=0, rows=32):
    return oracle.batch(step, rows, F32)


def start(names=(), level=None, loss=loss_fn, mesh=None, create=None, **options):
    mesh = mesh_of(**(mesh or {"data": 4}))
    opt = make_optimizer(names, level, mesh)
    state = opt.create(oracle.params(F32), **(create or {}))
    return opt, opt.minimize(loss, **options), state


# The snippet of the design.


def test_the_documented_snippet(monkeypatch):
    monkeypatch.setattr(meshes, "_current", None)
    params, rows = oracle.params(F32), batch(0, 64)
    strategy = jfleet.DistributedStrategy()
    strategy.amp = True
    strategy.gradient_merge = True
    strategy.gradient_merge_configs = {"k_steps": 4, "avg": True}
    opt = jfleet.distributed_optimizer(optax.sgd(0.01, momentum=0.9), strategy)
    assert "gradient_merge" in opt.explain()
    step = opt.minimize(loss_fn)
    state = opt.create(params)
    first, losses = state.params["w"], []
    for _ in range(5):
        state, metrics = step(state, rows)
        losses.append(float(metrics.loss))
    assert state.params["w"].sharding.mesh.size == 8
    assert losses == sorted(losses, reverse=True)
    assert first.is_deleted()
    born = opt.create(lambda key: jax.random.normal(key, (8, 4)), jax.random.key(0))
    assert born.params.sharding.is_fully_replicated


# Buffers, compilations, layouts.


@pytest.mark.parametrize("level", ["os_g", "p_g_os"])
@pytest.mark.parametrize(("names", "mesh"), KINDS)
def test_step_two_compiles_nothing_and_nothing_moves(names, mesh, level):
    opt, step, state = start(names, level, mesh=mesh)
    before = jax.tree.map(lambda x: (x.sharding, x.shape, x.dtype), state)
    batches = [batch(i, 64) for i in range(3)]
    state, metrics = step(state, batches[0])
    with count_compilations() as count:
        for rows in batches[1:]:
            state, metrics = step(state, rows)
    assert count.compilations == 0
    assert jax.tree.map(lambda x: (x.sharding, x.shape, x.dtype), state) == before
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(metrics))
    assert int(state.step) == 3
    assert isinstance(opt.params(state)["w"], jax.Array)


def test_two_equal_steps_share_one_program():
    _, step, state = start(("clip",), donate=False)
    _, twin, _ = start(("clip",), donate=False)
    step(state, batch())
    with count_compilations() as count:
        twin(state, batch())
    assert twin == step
    assert count.compilations == 0


def test_donation_and_the_callers_arrays():
    mesh = mesh_of(data=4)
    opt = make_optimizer((), None, mesh)
    mine = jax.device_put(oracle.params(F32), NamedSharding(mesh, P()))
    state = opt.create(mine)
    step = opt.minimize(loss_fn)
    step(state, batch())
    assert not mine["w"].is_deleted()
    with pytest.raises(DonatedBufferError, match="donate=False"):
        step(state, batch())
    state = opt.create(mine)
    keep = opt.minimize(loss_fn, donate=False)
    one, _ = keep(state, batch())
    two, _ = keep(state, batch())
    np.testing.assert_array_equal(one.params["w"], two.params["w"])


def test_level_of_the_state_can_be_changed():
    _, step, state = start(("clip",), "os", donate=False)
    planned = jfleet.plan(state, "p_g_os", mesh=step.setup.mesh)
    again = jfleet.group_sharded_parallel(state, "p_g_os", mesh=step.setup.mesh)
    assert isinstance(again, TrainState)
    assert planned.device_bytes("params") == 4 * 36 // 4
    ours, _ = step(state, batch())
    other, _ = step(again, batch())
    assert other.params["w"].sharding.spec == P("data")
    assert ours.params["w"].sharding.spec == P()
    np.testing.assert_allclose(ours.params["w"], other.params["w"], 1e-6)


@pytest.mark.parametrize(("names", "mesh"), KINDS)
def test_save_and_load_continue_bit_equal(names, mesh, tmp_path):
    opt, step, state = start(names, "os", mesh=mesh, donate=False)
    state, _ = step(state, batch(0, 64))
    jfleet.save_group_sharded_model(state, tmp_path / "saved")
    fresh = opt.create(jax.tree.map(np.zeros_like, oracle.params(F32)))
    loaded = jfleet.load_group_sharded_model(tmp_path / "saved", fresh)
    one, _ = step(state, batch(1, 64))
    two, _ = step(loaded, batch(1, 64))
    jax.tree.map(np.testing.assert_array_equal, one, two)


def test_offloaded_state_stays_on_the_host():
    mesh = mesh_of(data=4)
    s = DistributedStrategy(sharding=True, sharding_configs={"offload": True})
    opt = distributed_optimizer(SGD, s, mesh=mesh)
    step, state = opt.minimize(loss_fn), opt.create(oracle.params(F32))
    for number in range(2):
        assert state.opt_state[0].trace["w"].sharding.memory_kind == "pinned_host"
        state, _ = step(state, batch(number))
    _, plain_step, plain_state = start(())
    for number in range(2):
        plain_state, _ = plain_step(plain_state, batch(number))
    np.testing.assert_allclose(state.params["w"], plain_state.params["w"], 1e-6)


def test_another_rate_counts_and_another_strategy_is_refused():
    mesh = mesh_of(data=4)
    _, step, state = start((), "os", donate=False)
    slow = distributed_optimizer(
        optimizer(optax.sgd, learning_rate=1e-3, momentum=0.9),
        oracle.strategy_of((), "os"),
        mesh=mesh,
    )
    fast, _ = step(state, batch())
    after, _ = slow.minimize(loss_fn, donate=False)(state, batch())
    moved = [np.abs(s.params["w"] - state.params["w"]).max() for s in (fast, after)]
    np.testing.assert_allclose(moved[0] / moved[1], 100, 1e-2)
    other = make_optimizer(("clip",), None, mesh).minimize(loss_fn)
    with pytest.raises(ConfigError, match="same distributed_optimizer"):
        other(state, batch())
    narrow = make_optimizer(("fp16_allreduce",), None, mesh)
    with pytest.raises(ConfigError, match="and the state has none"):
        narrow.minimize(loss_fn)(state, batch())
    with pytest.raises(ConfigError, match="but it is off"):
        step(narrow.create(oracle.params(F32)), batch())
    apart = make_optimizer(("localsgd",), None, mesh_of(data=2))
    with pytest.raises(ConfigError, match="each of 4 replicas"):
        make_optimizer(("localsgd",), None, mesh).minimize(loss_fn)(
            apart.create(oracle.params(F32)), batch()
        )


# What a loss may take and return.


def weighted(params, rows):
    out = jnp.tanh(rows["x"] @ params["w"]) + params["b"]
    error = jnp.sum((out - rows["y"]) ** 2, axis=1)
    return jnp.sum(error * rows["mask"]), jnp.sum(rows["mask"])


@pytest.mark.parametrize("level", [None, "os_g", "p_g_os"])
@pytest.mark.parametrize(
    "names",
    [(), ("gradient_merge",), ("gradient_merge", "last"), ("fp16_allreduce",)],
)
def test_total_and_weight_are_exact(names, level):
    """Any number of valid rows per replica and micro batch, none included."""
    configs = {}
    if "last" in names:
        names, configs = names[:1], {"gradient_merge_configs": {"sync": "last"}}
    if names == ("fp16_allreduce",):
        configs = {"fp16_allreduce_configs": {"dtype": "float32"}}
    mask = np.ones(32)
    mask[:9], mask[12], mask[25:] = 0, 0, 0
    with jax.enable_x64(True):
        opt = make_optimizer(names, level, mesh_of(data=4), **configs)
        step, state = opt.minimize(weighted), opt.create(oracle.params())
        w = oracle.params()
        trace = jax.tree.map(np.zeros_like, w)
        for number in range(10):
            rows = oracle.batch(number, 32)
            state, metrics = step(state, {**rows, "mask": mask})
            valid = {k: x[mask == 1] for k, x in rows.items()}
            loss, grads = oracle.loss_and_grads(w, valid)
            trace = {k: 0.9 * trace[k] + grads[k] for k in w}
            w = {k: w[k] - 0.1 * trace[k] for k in w}
            np.testing.assert_allclose(metrics.loss, loss, 1e-9)
            for key in w:
                np.testing.assert_allclose(state.params[key], w[key], 1e-9, 1e-9)


def test_total_and_weight_per_replica():
    """A replica of localsgd divides by its own weight; those of dgc by the common."""
    mask = np.ones(32, F32)
    mask[:12] = 0
    rows = {**batch(), "mask": mask}
    parts = [{k: x[i * 16 : i * 16 + 16] for k, x in rows.items()} for i in range(2)]
    valid = [{k: p[k][p["mask"] == 1] for k in ("x", "y")} for p in parts]
    grads = [oracle.loss_and_grads(oracle.params(), v)[1] for v in valid]
    mesh = {"replica": 2, "shard": 2}
    for name in ("localsgd", "dgc"):
        configs = {"dgc": {"sparsity": [0.0], "min_size": 1}, "localsgd": {}}[name]
        opt = make_optimizer(
            (name,), None, mesh_of(**mesh), **{f"{name}_configs": configs}
        )
        state, _ = opt.minimize(weighted)(opt.create(oracle.params(F32)), rows)
        counts = [len(v["x"]) for v in valid]
        share = [0.5, 0.5] if name == "localsgd" else np.divide(counts, sum(counts))
        step = sum(s * g["w"] for s, g in zip(share, grads, strict=True))
        expected = oracle.params()["w"] - 0.1 * step
        got = opt.params(state)["w"]
        np.testing.assert_allclose(got, expected, 1e-5, 1e-6)


@pytest.mark.parametrize("names", [(), ("gradient_merge",), ("fp16_allreduce",)])
def test_auxiliary_results(names):
    def with_aux(params, rows):
        out = rows["x"] @ params["w"]
        close = jnp.sum(jnp.abs(out - rows["y"]) < 1)
        return loss_fn(params, rows), {"mean": jnp.mean(out), "close": close}

    _, step, state = start(names, loss=with_aux, has_aux=True)
    rows = batch()
    _, metrics = step(state, rows)
    out = rows["x"] @ oracle.params(F32)["w"]
    np.testing.assert_allclose(metrics.aux["mean"], out.mean(), 1e-4, 1e-6)
    assert metrics.aux["close"] == np.sum(np.abs(out - rows["y"]) < 1)
    if names:
        _, step, state = start(
            names, loss=lambda p, b: (loss_fn(p, b), {"out": b["x"]}), has_aux=True
        )
        with pytest.raises(ConfigError, match="aux 'out' must be a scalar"):
            step(state, rows)


def test_auxiliary_results_of_localsgd_come_at_a_sync():
    def with_aux(params, rows):
        return loss_fn(params, rows), jnp.mean(rows["x"])

    _, step, state = start(("localsgd",), loss=with_aux, has_aux=True)
    for number in range(3):
        state, metrics = step(state, batch(number))
        if metrics.synchronised:
            np.testing.assert_allclose(
                metrics.aux, batch(number)["x"].mean(), 1e-4, 1e-6
            )
        else:
            assert np.isnan(metrics.aux)


class Normed(nn.Module):
    """Batch norm, then a layer."""

    axis: tuple | None = None

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(not train, momentum=0.5, axis_name=self.axis)(x)
        return nn.Dense(4)(x)


def normed_loss(axis=None):
    def loss(params, stats, rows):
        out, new = Normed(axis).apply(
            {"params": params, "batch_stats": stats}, rows["x"], mutable=["batch_stats"]
        )
        return jnp.mean((out - rows["y"]) ** 2), new["batch_stats"]

    return loss


def normed_state(opt):
    variables = Normed().init(jax.random.key(0), jnp.ones((1, 8)))
    return opt.create(variables["params"], model_state=variables["batch_stats"])


def normed_run(names, level, mesh, loss=None, steps=3, **configs):
    opt = make_optimizer(names, level, mesh_of(**mesh), **configs)
    step, state = opt.minimize(loss or normed_loss(), model_state=True), None
    state = normed_state(opt)
    for number in range(steps):
        state, metrics = step(state, batch(number))
    return opt, state, metrics


@pytest.mark.parametrize("level", [None, "os_g", "p_g_os"])
def test_statistics_of_the_global_batch_at_every_level(level):
    opt, state, _ = normed_run((), level, {"data": 4})
    alone, expected, _ = normed_run((), None, {"data": 1})
    for got, want in (
        (opt.params(state), alone.params(expected)),
        (opt.model_state(state), alone.model_state(expected)),
    ):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-6), got, want
        )


@pytest.mark.parametrize("name", ["fp16_allreduce", "dgc"])
def test_synchronised_statistics_in_a_local_region(name):
    """With the axis names bound, replicas share statistics and gradients."""
    configs = {
        "fp16_allreduce": {"dtype": "float32"},
        "dgc": {"sparsity": [0.0], "min_size": 1},
    }
    opt, state, _ = normed_run(
        (name, "sync_batch_norm"),
        None,
        {"data": 4},
        normed_loss(("data",)),
        **{f"{name}_configs": configs[name]},
    )
    alone, expected, _ = normed_run((), None, {"data": 1})
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-5),
        (opt.params(state), opt.model_state(state)),
        (alone.params(expected), alone.model_state(expected)),
    )


def test_statistics_under_localsgd_are_averaged_at_a_sync():
    opt, state, metrics = normed_run(("localsgd",), None, {"data": 2}, steps=2)
    mean = state.model_state["BatchNorm_0"]["mean"]
    assert mean.shape == (2, 8)
    assert not metrics.synchronised
    assert np.abs(mean[0] - mean[1]).max() > 1e-4
    np.testing.assert_allclose(
        opt.model_state(state)["BatchNorm_0"]["mean"], mean.mean(0), 1e-6
    )
    _, state, metrics = normed_run(("localsgd",), None, {"data": 2}, steps=3)
    mean = state.model_state["BatchNorm_0"]["mean"]
    assert metrics.synchronised
    np.testing.assert_array_equal(mean[0], mean[1])


def test_amp_leaves_statistics_in_float32():
    _, state, _ = normed_run(
        ("amp",), None, {"data": 1}, amp_configs={"dtype": "bfloat16"}
    )
    mean = np.asarray(state.model_state["BatchNorm_0"]["mean"])
    assert mean.dtype == F32
    low = mean.astype(jnp.bfloat16).astype(F32)
    assert np.any(low != mean)


def dropped(params, rows, key):
    keep = jax.random.bernoulli(key, 0.5, rows["x"].shape)
    return loss_fn(params, {**rows, "x": rows["x"] * keep})


def test_random_keys():
    """Recompute replays masks; steps, micro batches and replicas have their own."""
    key = jax.random.key(3)
    results = {}
    for names in ((), ("recompute",), ("gradient_merge",), ("fp16_allreduce",)):
        _, step, state = start(names, loss=dropped, rng=True)
        found = []
        for _ in range(2):
            state, metrics = step(state, batch(), key)
            found.append(float(metrics.loss))
        results[names] = found
    assert results[()] == results["recompute",]
    assert len({round(r[0], 5) for r in results.values()}) == 3

    def same(params, rows, key):
        return jnp.sum(params["b"]) * 0 + jax.random.uniform(key)

    _, step, state = start((), loss=same, rng=True, per_replica=True)
    draws = [
        float(step(start()[2], batch(), k)[1].loss) for k in (key, jax.random.key(4))
    ]
    one = jax.random.fold_in(jax.random.fold_in(key, 0), 0)
    assert draws[0] != draws[1]
    assert draws[0] != float(jax.random.uniform(one))
    with pytest.raises(ConfigTypeError, match="takes a random key"):
        step(state, batch())
    with pytest.raises(ConfigTypeError, match="takes no random key"):
        start()[1](state, batch(), key)


# Overflow.


def explosive(params, rows):
    """Overflows in rows that say so."""
    return loss_fn(params, rows) * jnp.max(rows["boom"])


@pytest.mark.parametrize(
    ("names", "mesh"),
    [
        (("amp",), {"data": 4}),
        (("amp", "gradient_merge"), {"data": 4}),
        (("amp", "localsgd"), {"replica": 2, "shard": 2}),
        (("amp", "dgc"), {"replica": 2, "shard": 2}),
        (("fp16_allreduce",), {"data": 4}),
        (("fp16_allreduce", "amp"), {"data": 4}),
        (("fp16_allreduce", "localsgd"), {"replica": 2, "shard": 2}),
    ],
)
def test_an_overflow_anywhere_is_skipped_everywhere(names, mesh):
    opt, step, state = start(names, loss=explosive, mesh=mesh, donate=False)
    boom = np.ones(64, F32)
    state, metrics = step(state, {**batch(0, 64), "boom": boom})
    assert metrics.skipped_steps == 0
    boom[63] = np.inf
    after, metrics = step(state, {**batch(1, 64), "boom": boom})
    assert metrics.skipped_steps == 1
    assert metrics.grad_norm == np.inf
    jax.tree.map(np.testing.assert_array_equal, after.params, state.params)
    moving = ("good", "bad", "found_inf", "num_skipped", "scale")
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(after.opt_state),
        jax.tree.leaves(state.opt_state),
        strict=True,
    )
    for (path, new), old in pairs:
        if not jax.tree_util.keystr(path).endswith(moving):
            np.testing.assert_array_equal(new, old)
    boom[63] = 1
    again, metrics = step(after, {**batch(1, 64), "boom": boom})
    assert metrics.skipped_steps == 1
    assert np.isfinite(jax.tree.leaves(opt.params(again))[0]).all()
    assert np.abs(again.params["w"] - after.params["w"]).max() > 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("level", [None, "p_g_os"])
def test_low_precision_masters(dtype, level):
    """Against float32: within the rounding of the format. Masters stay float32."""
    opt = make_optimizer(("amp",), level, mesh_of(data=4), amp_configs={"dtype": dtype})
    step, state = opt.minimize(loss_fn), opt.create(oracle.params(F32))
    _, exact_step, exact = start()
    for number in range(5):
        state, metrics = step(state, batch(number))
        exact, _ = exact_step(exact, batch(number))
    assert state.params["w"].dtype == F32
    unit = float(jnp.finfo(dtype).eps)
    error = np.abs(np.asarray(state.params["w"]) - np.asarray(exact.params["w"])).max()
    assert 0 < error < 8 * unit
    assert metrics.loss_scale == oracle.SCALE


def test_metrics_of_a_clipped_step():
    _, step, state = start(("clip",))
    rows = batch()
    _, metrics = step(state, rows)
    _, grads = oracle.loss_and_grads(oracle.params(), oracle.batch(0, 32))
    norm = np.sqrt(sum(np.sum(g**2) for g in grads.values()))
    np.testing.assert_allclose(metrics.grad_norm, norm, 1e-5)
    np.testing.assert_allclose(metrics.clip_factor, 0.5 / norm, 1e-5)
    _, step, state = start(())
    _, plain = step(state, rows)
    np.testing.assert_allclose(plain.grad_norm, norm, 1e-5)
    assert plain.clip_factor == 1
    assert plain.synchronised
    _, step, state = start(("dgc", "clip"))
    assert np.isnan(step(state, rows)[1].clip_factor)


# Models and layouts.


def test_tensor_parallel_with_sharding():
    mesh = mesh_of(data=2, model=2)
    s = DistributedStrategy(tensor_parallel=True, sharding=True)
    s.tensor_parallel_configs = {"rules": [("w$", (None, "model"))]}
    s.sharding_configs = {"level": "p_g_os"}
    params = oracle.params(F32)
    with pytest.warns(JfleetWarning, match="pass params="):
        opt = distributed_optimizer(SGD, s, mesh=mesh)
    step, state = opt.minimize(loss_fn), opt.create(params)
    _, plain_step, plain = start(())
    for number in range(3):
        assert state.params["w"].sharding.spec == P("data", "model")
        state, _ = step(state, batch(number))
        plain, _ = plain_step(plain, batch(number))
    np.testing.assert_allclose(state.params["w"], plain.params["w"], 1e-5, 1e-6)


def test_explicit_axes():
    explicit = jax.make_mesh(
        (4,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4]
    )
    opt = make_optimizer(("clip",), "os_g", explicit)
    step, state = opt.minimize(loss_fn), opt.create(oracle.params(F32))
    _, plain_step, plain = start(("clip",))
    state, _ = step(state, jfleet.shard_batch(batch(), mesh=explicit))
    plain, _ = plain_step(plain, batch())
    np.testing.assert_allclose(state.params["w"], plain.params["w"], 1e-5)


def test_nnx_state():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(jnp.asarray(oracle.params(F32)["w"]))
            self.b = nnx.Param(jnp.asarray(oracle.params(F32)["b"]))

    graph, params = nnx.split(Model(nnx.Rngs(0)), nnx.Param)

    def loss(params, rows):
        model = nnx.merge(graph, params)
        return loss_fn({"w": model.w[...], "b": model.b[...]}, rows)

    opt = make_optimizer(("clip",), "p_g_os", mesh_of(data=4))
    step, state = opt.minimize(loss), opt.create(params)
    state, _ = step(state, batch())
    _, plain_step, plain = start(("clip",))
    plain, _ = plain_step(plain, batch())
    np.testing.assert_allclose(state.params["w"][...], plain.params["w"], 1e-5)
    assert state.params["w"][...].sharding.spec == P("data")


@pytest.mark.parametrize("level", [None, "os_g", "p_g_os"])
def test_frozen_and_integer_parameters(level):
    base = optax.multi_transform(
        {"train": optax.adam(0.1), "frozen": optax.set_to_zero()},
        lambda tree: {k: "train" if k == "w" else "frozen" for k in tree},
    )
    s = DistributedStrategy(sharding=level is not None)
    if level:
        s.sharding_configs = {"level": level}
    opt = distributed_optimizer(base, s, mesh=mesh_of(data=4))
    params = {**oracle.params(F32), "table": np.arange(4, dtype=np.int32)}
    step, state = opt.minimize(loss_fn), opt.create(params)
    for number in range(2):
        state, _ = step(state, batch(number))
    np.testing.assert_array_equal(state.params["b"], params["b"])
    np.testing.assert_array_equal(state.params["table"], params["table"])
    assert np.abs(state.params["w"] - params["w"]).max() > 0.05


def test_bfloat16_parameters_keep_their_types():
    for names in ((), ("gradient_merge",), ("amp",), ("fp16_allreduce",)):
        opt = (
            make_optimizer(names, "os_g", mesh_of(data=4))
            if not names
            else (make_optimizer(names, None, mesh_of(data=4)))
        )
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), oracle.params())
        step, state = opt.minimize(loss_fn), opt.create(params)
        types = jax.tree.map(lambda x: x.dtype, state)
        state, _ = step(state, batch())
        assert jax.tree.map(lambda x: x.dtype, state) == types


def test_tied_parameters_are_named():
    w = jnp.ones((8, 4))
    opt = make_optimizer((), None, mesh_of(data=4))
    with pytest.warns(JfleetWarning, match="'one', 'two'"):
        state = opt.create({"one": w, "two": w})
    step = opt.minimize(lambda p, b: jnp.mean((p["one"] + p["two"]) * b["x"][:8, :4]))
    step(state, batch())


def test_a_state_can_be_born_from_a_function():
    def init(key):
        return {"w": jax.random.normal(key, (8, 4)), "b": jnp.zeros(4)}

    key = jax.random.key(1)
    opt = make_optimizer((), "p_g_os", mesh_of(data=4))
    state = opt.create(init, key)
    # Compiled and eager random numbers may differ in the last digit.
    np.testing.assert_allclose(state.params["w"], init(key)["w"], 1e-6)
    assert state.params["w"].sharding.spec == P("data")
    assert state.opt_state[0].trace["w"].sharding.spec == P("data")
    local = make_optimizer(("localsgd",), None, mesh_of(data=4)).create(init, key)
    assert local.params["w"].sharding.spec == P("data")
    assert local.params["w"].shape == (4, 8, 4)
    pair = opt.create(lambda k: (init(k), {"m": jnp.ones(2)}), key, model_state=True)
    assert pair.model_state["m"].sharding.is_fully_replicated


# Refusals.


@pytest.mark.parametrize(
    ("names", "configs", "text"),
    [
        (("localsgd", "sync_batch_norm"), {}, "switch sync_batch_norm off"),
        (("adaptive_localsgd", "sync_batch_norm"), {}, "switch sync_batch_norm off"),
        (
            ("localsgd", "sharding"),
            {"sharding_configs": {"offload": True}},
            "set offload to False",
        ),
    ],
)
def test_combinations_that_no_step_can_run(names, configs, text):
    opt = make_optimizer(names, None, mesh_of(replica=2, shard=2), **configs)
    for call in (lambda: opt.minimize(loss_fn), lambda: opt.create(oracle.params(F32))):
        with pytest.raises(ConfigError, match=text):
            call()


def test_extensions_on_single_replicas_are_refused():
    rules = jfleet.default_registry.copy()
    rules.register(
        jfleet.Rule(name="mine", phase="reduce", replica_gradients=True, summary="x")
    )
    s = DistributedStrategy(extensions={"mine": {}})
    found = jfleet.resolve(s, base=SGD, mesh_shape={"data": 4}, registry=rules)
    with pytest.raises(ConfigError, match="'mine'"):
        train_step.minimize(SGD, found, mesh_of(data=4), loss_fn)


def test_sums_of_windows_need_mean_losses():
    for sync in ("last", "each"):
        opt = make_optimizer(
            ("gradient_merge",),
            None,
            mesh_of(data=4),
            gradient_merge_configs={"avg": False, "sync": sync},
        )
        state = opt.create(oracle.params(F32))
        rows = {**batch(), "mask": np.ones(32, F32)}
        with pytest.raises(ConfigError, match="set avg=True"):
            opt.minimize(weighted)(state, rows)


@pytest.mark.parametrize("sync", ["last", "each"])
@pytest.mark.parametrize("scale", ["avg", "sum"])
def test_sums_of_windows_and_of_replicas(sync, scale):
    opt = make_optimizer(
        ("gradient_merge",),
        None,
        mesh_of(data=4),
        gradient_merge_configs={"avg": False, "sync": sync},
        gradient_scale_configs={"scale_strategy": scale},
    )
    step, state = opt.minimize(loss_fn), opt.create(oracle.params(F32))
    state, metrics = step(state, batch())
    loss, grads = oracle.loss_and_grads(oracle.params(), oracle.batch(0, 32))
    factor = 2 * (4 if scale == "sum" else 1)
    expected = oracle.params()["w"] - 0.1 * factor * grads["w"]
    np.testing.assert_allclose(state.params["w"], expected, 1e-4, 1e-5)
    np.testing.assert_allclose(metrics.loss, loss, 1e-5)
    norm = factor * np.sqrt(sum(np.sum(g**2) for g in grads.values()))
    np.testing.assert_allclose(metrics.grad_norm, norm, 1e-5)


def test_bad_arguments():
    opt, step, state = start(("gradient_merge",), donate=False)
    with pytest.raises(ConfigTypeError, match="loss_fn must be a function"):
        opt.minimize(None)
    with pytest.raises(ConfigTypeError, match="has_aux must be True or False"):
        opt.minimize(loss_fn, has_aux=1)
    with pytest.raises(ConfigTypeError, match=r"TrainState of opt\.create"):
        step({"params": 1}, batch())
    with pytest.raises(ConfigError, match=r"'x' of shape .* multiple of 8"):
        step(state, batch(0, 28))
    with pytest.raises(ConfigError, match="which 4 replicas x 1 micro batches"):
        start()[1](start()[2], batch(0, 30))
    with pytest.raises(ConfigTypeError, match="scalar loss, got shape"):
        start(loss=lambda p, b: b["x"] @ p["w"])[1](state, batch())
    for result in ({"x": 1.0}, "text"):
        pair = lambda p, b, result=result: (loss_fn(p, b), result)  # noqa: E731
        with pytest.raises(ConfigTypeError, match="pass has_aux=True"):
            start(loss=pair)[1](state, batch())
    with pytest.raises(ConfigTypeError, match=r"3 values.*has_aux=True"):
        start(loss=lambda p, b: (loss_fn(p, b), 1, 2))[1](state, batch())
    with pytest.raises(ConfigTypeError, match=r"\(loss, aux\)"):
        start(has_aux=True)[1](state, batch())
    with pytest.raises(ConfigError, match=r"model_state= to opt\.create"):
        start(loss=normed_loss(), model_state=True)[1](state, batch())
    with pytest.raises(ConfigError, match="per_replica is False"):
        start(("dgc",), per_replica=False)
    with pytest.raises(ConfigError, match="empty tree"):
        opt.create({})
    with pytest.raises(ConfigTypeError, match="more arguments"):
        opt.create(oracle.params(F32), 1)
    with pytest.raises(ConfigTypeError, match="leaf of type str"):
        opt.create({"w": "no"})
    split = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh_of(data=4), P("data")))
    with pytest.raises(ConfigError, match="comes split"):
        opt.create({"w": split})
    far = AbstractMesh((256,), ("data",))
    with pytest.raises(ConfigError, match="is abstract"):
        distributed_optimizer(SGD, DistributedStrategy(clip=True), mesh=far).create(
            oracle.params(F32)
        )


@pytest.mark.parametrize("level", LEVELS)
def test_per_replica_or_global_is_the_same_for_a_mean(level):
    found = []
    for per_replica in (True, False):
        _, step, state = start(("clip",), level, per_replica=per_replica)
        state, metrics = step(state, batch())
        found.append((np.asarray(state.params["w"]), float(metrics.grad_norm)))
    np.testing.assert_allclose(found[0][0], found[1][0], 1e-6, 1e-7)
    np.testing.assert_allclose(found[0][1], found[1][1], 1e-6)


@pytest.mark.parametrize("names", [(), ("gradient_merge",), ("fp16_allreduce",)])
@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
def test_optimizer_state_over_both_axes(names, level):
    """Parameters over one axis of the mesh, optimizer state over two."""
    mesh = mesh_of(replica=2, shard=4)
    configs = {"sharding_configs": {"optimizer_axis": ["shard", "replica"]}}
    if names == ("gradient_merge",):
        configs["gradient_merge_configs"] = {"sync": "last"}
    if names == ("fp16_allreduce",):
        configs["fp16_allreduce_configs"] = {"dtype": "float32"}
    opt = make_optimizer(names, level, mesh, **configs)
    step, state = opt.minimize(loss_fn), opt.create(oracle.params(F32))
    _, plain_step, plain = start()
    for number in range(2):
        state, _ = step(state, batch(number))
        plain, _ = plain_step(plain, batch(number))
    np.testing.assert_allclose(state.params["w"], plain.params["w"], 1e-5, 1e-6)
    trace = state.opt_state
    while not hasattr(trace, "trace"):
        trace = trace[0]
    assert trace.trace["w"].sharding.num_devices == 8
    assert not trace.trace["w"].sharding.is_fully_replicated
    assert trace.trace["w"].addressable_shards[0].data.size == 4


def test_explain_says_what_update_cannot_do():
    opt = make_optimizer(("amp", "recompute"), None, mesh_of(data=4))
    assert "opt.wrap_loss(loss_fn)" in opt.explain()
    assert "wrap_loss" not in make_optimizer(("clip",), None, mesh_of(data=4)).explain()
