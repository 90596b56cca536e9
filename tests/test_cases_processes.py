"""Reports about several hosts, replayed with two processes and with other meshes."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jfleet
from jfleet.processes import process_mean, to_host
from tests.models import assert_trees_close
from tests.processes import start

FAST, ALL = ("p_g_os",), ("os", "os_g", "p_g_os")
SCRIPT = """
import json
from tests import test_cases_processes as cases
levels = sys.argv[2:]
found = {"b87": cases.b87(levels), "b91": cases.b91([*levels, "localsgd"])}
found |= {"b89": cases.b89(), "b92": cases.b92()}
json.dump(found, open(f"{sys.argv[1]}.{jax.process_index()}", "w"))
"""


def mlp_params():
    rng = np.random.default_rng(0)
    sizes = {"w0": (16, 32), "w1": (32, 8)}
    return {k: (rng.normal(size=s) / 4).astype(np.float32) for k, s in sizes.items()}


def mlp_loss(params, batch):
    out = jnp.tanh(batch["x"] @ params["w0"]) @ params["w1"]
    return jnp.mean((out - batch["y"]) ** 2)


def whole_batch(seed):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(32, 16)), rng.normal(size=(32, 8))
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def own_rows(batch):
    """What this process reads of a batch."""
    rank, count = jax.process_index(), jax.process_count()
    return {name: np.split(x, count)[rank] for name, x in batch.items()}


def mesh_of(shape, names, devices=None):
    kinds = (jax.sharding.AxisType.Auto,) * len(shape)
    devices = np.array(jax.devices() if devices is None else devices)
    return Mesh(devices.reshape(shape), names, axis_types=kinds)


def optimizer_for(level, mesh=None, base=None, **settings):
    strategy = jfleet.DistributedStrategy(
        sharding=True, sharding_configs={"level": level}, **settings
    )
    base = optax.sgd(0.1, momentum=0.9) if base is None else base
    return jfleet.distributed_optimizer(base, strategy, mesh=mesh)


def b87(levels):
    """Train at some levels; read all that a script may want to read."""
    mesh, found = jfleet.new_group(range(8)), {}
    for level in levels:
        amp = {"dtype": "float32", "init_loss_scaling": 8.0}
        opt = optimizer_for(level, mesh, amp=True, amp_configs=amp, clip=True)
        step, state = opt.minimize(mlp_loss), opt.create(mlp_params())
        for i in range(3):
            state, metrics = step(state, own_rows(whole_batch(i)))
        assert all(x.is_fully_replicated for x in jax.tree.leaves(metrics))
        try:
            np.asarray(state.params["w0"])
            readable = True
        except RuntimeError:
            readable = False
        found[level] = {
            "loss": float(metrics.loss),
            "norm": float(metrics.grad_norm),
            "clip": float(metrics.clip_factor),
            "scale": float(metrics.loss_scale),
            "next scale": float(opt.loss_scale(state.opt_state)),
            "skipped": int(metrics.skipped_steps),
            "synchronised": bool(metrics.synchronised),
            "step": int(state.step),
            "readable": readable,
            "params": [x.tolist() for x in jax.tree.leaves(to_host(opt.params(state)))],
        }
    return found


def b89():
    """Shapes and values of what is gathered and averaged."""
    rank = jax.process_index()
    mesh = jfleet.new_group(range(8))
    scalar = jax.device_put(np.float32(5), NamedSharding(mesh, PartitionSpec()))
    own = np.arange(10.0) + rank
    split = jfleet.shard_batch(own_rows({"x": np.arange(32.0)}), mesh=mesh)["x"]
    trees = {
        "host": to_host(own),
        "scalar": to_host(scalar),
        "split": to_host(split),
        "mean": process_mean(1.0 + 2 * rank),
        "mean of arrays": process_mean({"a": own, "n": 3 + rank}),
        "mean of a replicated scalar": process_mean(scalar),
        "mean of float64": process_mean(np.float64(1 + 1e-15)),
    }
    found = {
        name: [(np.shape(x), np.asarray(x).tolist()) for x in jax.tree.leaves(tree)]
        for name, tree in trees.items()
    }
    try:
        process_mean(np.zeros(2 + rank))
        found["unequal"] = "no error"
    except jfleet.DistributedError as error:
        found["unequal"] = str(error)
    return found


def b91(names):
    """An overflow in the rows of the last process, in the second step.

    A name is a level, or localsgd between two replicas of four shards.
    """
    found = {}
    amp = {"dtype": "float16", "init_loss_scaling": 8.0}
    amp |= {"decr_every_n_nan_or_inf": 1, "decr_ratio": 0.5}
    for name in names:
        level, mesh, settings = name, jfleet.new_group(range(8)), {}
        if name == "localsgd":
            level, mesh = "os_g", mesh_of((2, 4), ("replica", "shard"))
            settings = {"localsgd": True, "localsgd_configs": {"k_steps": 2}}
        opt = optimizer_for(level, mesh, amp=True, amp_configs=amp, **settings)
        step, state = opt.minimize(mlp_loss), opt.create(mlp_params())
        scales, moved, skipped = [], [], []
        before = to_host(state.params)
        for i in range(4):
            batch = whole_batch(i)
            if i == 1:
                batch["x"][-16:] = np.inf
            state, metrics = step(state, own_rows(batch))
            after = to_host(state.params)
            same = jax.tree.map(np.array_equal, before, after)
            moved.append(not all(jax.tree.leaves(same)))
            before = after
            scales.append(float(opt.loss_scale(state.opt_state)))
            skipped.append(int(metrics.skipped_steps))
        finite = all(np.isfinite(x).all() for x in jax.tree.leaves(before))
        found[name] = {
            "scales": scales,
            "moved": moved,
            "skipped": skipped,
            "finite": finite,
        }
    return found


def other_meshes():
    """Meshes of the devices of ``new_group(range(8))``, each in its own way."""
    devices = np.array(jax.devices())
    return {
        "reversed": mesh_of((8,), ("data",), devices[::-1]),
        "interleaved": mesh_of((8,), ("data",), devices.reshape(2, 4).T),
        "grid": mesh_of((2, 4), ("a", "b")),
    }


def placed_on(mesh, batch):
    """A batch that another part of a program laid out on its mesh."""
    rows = NamedSharding(mesh, PartitionSpec(tuple(mesh.axis_names)))

    def place(x):
        return jax.make_array_from_callback(x.shape, rows, lambda index: x[index])

    return jax.tree.map(place, batch)


def b92():
    """Loss and parameters after steps with batches that lie on other meshes."""
    opt = optimizer_for("os_g", jfleet.new_group(range(8)))
    step, state = opt.minimize(mlp_loss), opt.create(mlp_params())
    losses = []
    for i, mesh in enumerate(other_meshes().values()):
        state, metrics = step(state, placed_on(mesh, whole_batch(i)))
        losses.append(float(metrics.loss))
    params = [x.tolist() for x in jax.tree.leaves(to_host(state.params))]
    return {"losses": losses, "params": params}


@pytest.fixture(
    scope="module",
    params=[FAST, pytest.param(ALL, marks=pytest.mark.slow)],
    ids=["fast", "all"],
)
def two(request, tmp_path_factory):
    """What each of two processes found."""
    out = tmp_path_factory.mktemp("cases") / "found"
    start.run(SCRIPT, out, *request.param, count=2, devices=4)
    return [json.loads(out.with_name(f"found.{rank}").read_text()) for rank in range(2)]


@pytest.mark.multiprocess
class TestTwoProcesses:
    def test_b87_metrics_and_parameters_are_read_on_every_process(self, two):
        """A metric is replicated; what is split over processes is gathered."""
        assert two[0]["b87"] == two[1]["b87"]
        alone = b87(two[0]["b87"])
        for level, found in two[0]["b87"].items():
            assert found.pop("readable") is (level != "p_g_os")
            assert alone[level].pop("readable") is True
            assert_trees_close(found, alone[level], rtol=1e-5, atol=1e-6)
            assert (found["step"], found["skipped"], found["scale"]) == (3, 0, 8.0)

    def test_b89_shapes_do_not_depend_on_the_number_of_processes(self, two):
        """What is gathered has its own shape, and a mean that of one value."""
        first, second = two[0]["b89"], two[1]["b89"]
        assert first.pop("host") == [[[10], np.arange(10.0).tolist()]]
        assert second.pop("host") == [[[10], (np.arange(10.0) + 1).tolist()]]
        for rank, found in enumerate((first, second)):
            assert f"process {rank} passed [('(root)', ({2 + rank},)" in found.pop(
                "unequal"
            )
        assert first == second
        assert first["scalar"] == [[[], 5.0]]
        assert first["split"] == [[[32], np.arange(32.0).tolist()]]
        assert first["mean"] == [[[], 2.0]]
        mean = (np.arange(10.0) + 0.5).tolist()
        assert first["mean of arrays"] == [[[10], mean], [[], 3.5]]
        assert first["mean of a replicated scalar"] == [[[], 5.0]]
        assert first["mean of float64"] == [[[], 1 + 1e-15]]
        alone = b89()
        for name, values in first.items():
            assert [x[0] for x in values] == [list(x[0]) for x in alone[name]], name
        assert alone["mean"] == [((), 1.0)]

    def test_b91_an_overflow_on_one_process_is_one_on_all(self, two):
        """All skip the step and all lower the scale, under localsgd as well."""
        assert two[0]["b91"] == two[1]["b91"]
        for name, found in two[0]["b91"].items():
            assert found["scales"] == [8.0, 4.0, 4.0, 4.0], name
            assert found["moved"] == [True, False, True, True], name
            assert found["skipped"] == [0, 1, 1, 1], name
            assert found["finite"], name

    def test_b92_batches_on_other_meshes(self, two):
        assert two[0]["b92"] == two[1]["b92"]
        assert_trees_close(two[0]["b92"], b92(), rtol=1e-5, atol=1e-6)


def test_b92_a_batch_on_another_mesh_is_laid_out_anew():
    """Loss and parameters are those of one device, whatever mesh the batch is on."""
    found = b92()
    params, tx = mlp_params(), optax.sgd(0.1, momentum=0.9)
    opt_state = tx.init(params)
    for i, loss in enumerate(found["losses"]):
        want, grads = jax.value_and_grad(mlp_loss)(params, whole_batch(i))
        np.testing.assert_allclose(loss, want, rtol=1e-6)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    want = [np.asarray(x) for x in jax.tree.leaves(params)]
    assert_trees_close([np.array(x) for x in found["params"]], want, rtol=1e-5)


def test_b92_a_step_of_your_own_takes_what_shard_batch_laid_out():
    """Under jit a batch on another mesh is JAX's error; shard_batch moves it."""
    mesh = jfleet.new_group(range(8))
    pair = jfleet.group_sharded_parallel(
        (mlp_params(), optax.sgd(0.1).init(mlp_params())),
        "p_g_os",
        mesh=mesh,
        tx=optax.sgd(0.1),
    )
    loss = jax.jit(mlp_loss)
    want = float(loss(mlp_params(), whole_batch(0)))
    for name, other in other_meshes().items():
        batch = placed_on(other, whole_batch(0))
        if name != "grid":
            with pytest.raises(ValueError, match="incompatible devices"):
                loss(pair[0], batch)
        moved = jfleet.shard_batch(batch, mesh=mesh)
        np.testing.assert_allclose(float(loss(pair[0], moved)), want, rtol=1e-6)


@pytest.mark.parametrize("name", ["reversed", "interleaved", "grid"])
def test_b92_a_checkpoint_loads_onto_another_order_of_devices(tmp_path, name):
    opt = optimizer_for("p_g_os", jfleet.new_group(range(8)), optax.adam(1e-2))
    state, _ = opt.minimize(mlp_loss)(opt.create(mlp_params()), whole_batch(0))
    jfleet.save_group_sharded_model(state, tmp_path / "ckpt")
    mesh = other_meshes()[name]
    axes = {"sharding_configs": {"level": "p_g_os", "axis": mesh.axis_names}}
    strategy = jfleet.DistributedStrategy(sharding=True, **axes)
    other = jfleet.distributed_optimizer(optax.adam(1e-2), strategy, mesh=mesh)
    zeros = jax.tree.map(np.zeros_like, mlp_params())
    loaded = jfleet.load_group_sharded_model(tmp_path / "ckpt", other.create(zeros))
    for got, want in zip(jax.tree.leaves(loaded), jax.tree.leaves(state), strict=True):
        assert got.sharding.mesh == mesh
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()
