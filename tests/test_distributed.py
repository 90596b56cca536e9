"""distributed_optimizer as an optax transformation: jit, TrainState, nnx, shard_map."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jfleet
from jfleet import mesh as meshes
from jfleet._errors import ConfigError, JfleetWarning, PlacementError
from jfleet._resolving.placement import needs_mesh, placement_policy
from jfleet.distributed import DistributedOptimizer, distributed_optimizer
from jfleet.optimizer import optimizer
from jfleet.strategy import SWITCHES, DistributedStrategy
from tests.helpers import count_compilations

SGD = optimizer(optax.sgd, learning_rate=0.1, momentum=0.9)
PARAMS = {
    "layer": {
        "kernel": jnp.sin(jnp.arange(128.0)).reshape(16, 8),
        "bias": jnp.zeros(8),
    }
}
X = jnp.cos(jnp.arange(128.0)).reshape(8, 16)


def strategy(**settings):
    return DistributedStrategy(**settings)


def mesh_of(**shape):
    return jax.make_mesh(
        tuple(shape.values()),
        tuple(shape),
        axis_types=(jax.sharding.AxisType.Auto,) * len(shape),
        devices=jax.devices()[: int(np.prod(list(shape.values())))],
    )


def loss_fn(params, x):
    layer = params["layer"]
    return jnp.mean(jnp.tanh(x @ layer["kernel"] + layer["bias"]) ** 2)


def train(tx, steps=4, params=PARAMS, x=X):
    """The user's own step, untouched."""
    state = TrainState.create(apply_fn=loss_fn, params=params, tx=tx)

    @jax.jit
    def step(state, x):
        return state.apply_gradients(grads=jax.grad(state.apply_fn)(state.params, x))

    for _ in range(steps):
        state = step(state, x)
    return state


def assert_close(one, two, rtol=1e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol, 1e-7), one, two)


@pytest.fixture
def fresh_mesh(monkeypatch):
    """No mesh of ``init`` yet, and none left behind."""
    monkeypatch.setattr(meshes, "_current", None)


@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
@pytest.mark.parametrize("base", [SGD, optax.adam(1e-2), optax.adafactor(1e-2)])
def test_train_state_in_plain_jit(level, base):
    s = strategy(sharding=True, sharding_configs={"level": level}, clip=True)
    tx = distributed_optimizer(base, s, mesh=mesh_of(data=8), params=PARAMS)
    state = train(tx)
    plain = train(optax.chain(optax.clip_by_global_norm(1.0), base))
    assert_close(state.params, plain.params)
    for leaf in jax.tree.leaves(state.opt_state):
        if leaf.shape == (16, 8):
            assert leaf.sharding.spec == P("data")
    assert tx.resolution.applied == ("clip", "sharding")
    assert "sharding over data" in tx.explain()


def test_the_second_step_compiles_nothing_new():
    s = strategy(sharding=True, gradient_merge=True, clip=True)
    mesh = mesh_of(data=8)
    made = [distributed_optimizer(SGD, s, mesh=mesh, params=PARAMS) for _ in range(2)]
    assert made[0] == made[1]
    assert hash(made[0]) == hash(made[1])

    @jax.jit
    def step(state, x):
        return state.apply_gradients(grads=jax.grad(loss_fn)(state.params, x))

    whole = jax.device_put(PARAMS, NamedSharding(mesh, P()))
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    states = [TrainState.create(apply_fn=loss_fn, params=whole, tx=tx) for tx in made]
    state = step(step(states[0], x), x)
    with count_compilations() as count:
        step(state, x)
        step(states[1], x)
    assert count.compilations == 0


@pytest.mark.parametrize(
    "levels", [*itertools.permutations(["os", "os_g", "p_g_os"], 2)]
)
def test_before_and_after_group_sharded_parallel(levels):
    """The verb lays a state out anew; wrappers do not pile up (case B110)."""
    mesh = mesh_of(data=8)
    s = strategy(sharding=True, sharding_configs={"level": levels[0]})
    s.gradient_merge = True
    s.gradient_merge_configs = {"k_steps": 2}
    tx = distributed_optimizer(SGD, s, mesh=mesh, params=PARAMS)
    state = TrainState.create(apply_fn=loss_fn, params=PARAMS, tx=tx)
    for level in levels:
        state = jfleet.group_sharded_parallel(state, level, mesh=mesh)
    assert state.tx.policy.level == levels[1]
    assert isinstance(state.tx.inner, DistributedOptimizer)
    assert state.tx.resolution.applied == ("gradient_merge", "sharding")

    @jax.jit
    def step(state, x):
        return state.apply_gradients(grads=jax.grad(loss_fn)(state.params, x))

    for _ in range(4):
        state = step(state, X)
    assert_close(state.params, train(optax.MultiSteps(SGD, 2)).params)


def test_nnx_optimizer():
    s = strategy(clip=True, gradient_merge=True, amp=True)
    s.gradient_merge_configs = {"k_steps": 2}
    tx = distributed_optimizer(optax.adam(1e-2), s)
    model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    twin = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    optimizers = [
        nnx.Optimizer(model, tx, wrt=nnx.Param),
        nnx.Optimizer(
            twin,
            optax.MultiSteps(
                optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)), 2
            ),
            wrt=nnx.Param,
        ),
    ]

    @nnx.jit
    def step(model, optimizer):
        grads = nnx.grad(lambda m: jnp.mean(m(X) ** 2))(model)
        optimizer.update(model, grads)

    for _ in range(4):
        step(model, optimizers[0])
        step(twin, optimizers[1])
    assert_close(nnx.state(model), nnx.state(twin))


# Strategies that need the gradient of every replica.

NEEDY = {
    "dgc": {"sparsity": [0.5], "min_size": 1},
    "fp16_allreduce": {},
    "localsgd": {"k_steps": 2},
    "adaptive_localsgd": {"init_k_steps": 2},
    "gradient_merge": {"k_steps": 2, "sync": "last"},
}


def needy(name):
    return strategy(**{name: True, f"{name}_configs": NEEDY[name]})


@pytest.mark.parametrize("name", NEEDY)
def test_plain_jit_refuses_what_it_cannot_honour(name):
    tx = distributed_optimizer(SGD, needy(name), mesh=mesh_of(data=8))
    state = tx.init(PARAMS)
    for update in (tx.update, jax.jit(tx.update)):
        with pytest.raises(ConfigError, match=r"opt\.minimize\(loss_fn\)") as caught:
            update(PARAMS, state, PARAMS)
        assert name in str(caught.value)
        assert "data" in str(caught.value)


@pytest.mark.parametrize("name", NEEDY)
def test_one_replica_runs_anywhere(name):
    mesh = mesh_of(data=1)
    if name == "gradient_merge":
        tx = distributed_optimizer(SGD, needy(name), mesh=mesh)
    else:
        with pytest.warns(JfleetWarning, match="one device"):
            tx = distributed_optimizer(SGD, needy(name), mesh=mesh)
    state = tx.init(PARAMS)
    updates, _ = jax.jit(tx.update)(PARAMS, state, PARAMS, value=1.0)
    assert all(np.isfinite(u).all() for u in jax.tree.leaves(updates))


@pytest.mark.parametrize("name", NEEDY)
def test_inside_shard_map_and_vmap_it_reduces_by_itself(name):
    mesh = mesh_of(data=4)
    tx = distributed_optimizer(SGD, needy(name), mesh=mesh)
    grads = jnp.cos(jnp.arange(32.0)).reshape(4, 8)
    params = jnp.sin(jnp.arange(8.0))

    def three(g):
        state, w = tx.init(params), params
        for _ in range(3):
            updates, state = tx.update(g, state, w, value=jnp.float32(1.0))
            w = optax.apply_updates(w, updates)
        return w

    by_vmap = jax.jit(jax.vmap(three, axis_name="data"))(grads)
    mapped = jax.shard_map(
        lambda g: three(g[0])[None],
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=False,
    )
    by_shards = jax.jit(mapped)(grads)
    np.testing.assert_allclose(by_vmap, by_shards, 1e-6, 1e-7)
    alike = np.ptp(by_vmap, axis=0).max() < 1e-6
    # Three steps: averaged after the first and the third.
    assert alike
    assert np.abs(by_vmap[0] - params).max() > 1e-3


def test_an_axis_of_ones_own_is_reduced_even_without_needy_features():
    tx = distributed_optimizer(
        optax.sgd(1.0), strategy(clip=True), mesh=mesh_of(data=4)
    )

    def update(g):
        return tx.update(g, tx.init(g), g)[0]

    by_vmap = jax.vmap(update, axis_name="data")(jnp.array([0.1, 0.2, 0.3, 0.4]))
    np.testing.assert_allclose(by_vmap, np.full(4, -0.25), 1e-6)
    np.testing.assert_allclose(update(jnp.float32(0.25)), -0.25, 1e-6)


# The loss.


def test_float16_needs_to_know_the_scale():
    s = strategy(amp=True, amp_configs={"dtype": "float16"})
    tx = distributed_optimizer(optax.sgd(1.0), s)
    w = jnp.zeros(2)
    state = tx.init(w)
    with pytest.raises(ConfigError, match="loss_scale"):
        tx.update(w, state, w)
    scale = tx.loss_scale(state)
    assert scale == 32768
    for used in (scale, 8.0, 1.0):
        updates, after = tx.update(used * jnp.ones(2), state, w, loss_scale=used)
        np.testing.assert_array_equal(updates, [-1.0, -1.0])
        assert after.good == 1
    updates, after = tx.update(jnp.array([jnp.inf, 1]), state, w, loss_scale=scale)
    np.testing.assert_array_equal(updates, [0.0, 0.0])
    assert after.num_skipped == 1


def test_bfloat16_needs_no_scale():
    tx = distributed_optimizer(optax.sgd(1.0), strategy(amp=True))
    w = jnp.zeros(2)
    assert tx.loss_scale(tx.init(w)) == 1.0
    updates, _ = tx.update(jnp.ones(2), tx.init(w), w)
    np.testing.assert_array_equal(updates, [-1.0, -1.0])
    # One step for every strategy: a scale that was applied is taken out again.
    updates, _ = tx.update(jnp.full(2, 4.0), tx.init(w), w, loss_scale=4.0)
    np.testing.assert_array_equal(updates, [-1.0, -1.0])


def test_wrap_loss():
    tx = distributed_optimizer(SGD, strategy(amp=True, recompute=True))
    text = str(jax.make_jaxpr(tx.wrap_loss(loss_fn))(PARAMS, X))
    assert "bf16[8,8]" in text
    assert "checkpoint" in text or "remat" in text
    untouched = distributed_optimizer(SGD, strategy(clip=True)).wrap_loss(loss_fn)
    assert untouched is loss_fn


# Placement.


def test_tensor_parallel_rules_place_the_state():
    mesh = mesh_of(data=2, model=4)
    s = strategy(tensor_parallel=True, sharding=True)
    s.tensor_parallel_configs = {"rules": [("kernel$", (None, "model"))]}
    tx = distributed_optimizer(SGD, s, mesh=mesh, params=PARAMS)
    trace = tx.init(PARAMS)[0].trace["layer"]
    assert trace["kernel"].sharding.spec == P("data", "model")
    assert trace["bias"].sharding.spec == P("data")
    assert_close(train(tx).params, train(SGD).params)
    s.sharding = False
    tx = distributed_optimizer(SGD, s, mesh=mesh, params=PARAMS)
    trace = tx.init(PARAMS)[0].trace["layer"]
    assert trace["kernel"].sharding.spec == P(None, "model")
    assert trace["bias"].sharding.spec == P()
    assert_close(train(tx).params, train(SGD).params)


def test_tensor_parallel_keeps_the_specs_of_the_arrays():
    mesh = mesh_of(data=2, model=4)
    kernel = PARAMS["layer"]["kernel"]
    split = jax.device_put(kernel, NamedSharding(mesh, P("model")))
    params = {"layer": {**PARAMS["layer"], "kernel": split}}
    s = strategy(tensor_parallel=True)
    tx = distributed_optimizer(SGD, s, mesh=mesh, params=params)
    state = tx.init(params)
    assert state[0].trace["layer"]["kernel"].sharding.spec == P("model")


def test_tensor_parallel_that_splits_nothing_is_refused():
    mesh = mesh_of(data=2, model=4)
    s = strategy(tensor_parallel=True)
    with pytest.raises(PlacementError, match="splits nothing"):
        distributed_optimizer(SGD, s, mesh=mesh, params=PARAMS)
    for rule, text in (
        (("kernels", ("model",)), "matches no parameter"),
        (("kernel", ("modle",)), "modle"),
        (("kernel", ("model", "model")), "twice"),
        (("bias", (None, "model")), "2 entries for 1 dims"),
    ):
        s.tensor_parallel_configs = {"rules": [rule]}
        with pytest.raises(PlacementError, match=text):
            distributed_optimizer(SGD, s, mesh=mesh, params=PARAMS)
    with pytest.warns(JfleetWarning, match="pass params="):
        distributed_optimizer(SGD, s, mesh=mesh)


def test_every_option_of_sharding_reaches_the_policy():
    mesh = mesh_of(replica=2, shard=4)
    s = strategy(sharding=True)
    s.sharding_configs = {
        "stage": 3,
        "optimizer_axis": ["shard", "replica"],
        "min_shard_size": 5,
        "offload": True,
        "rules": [("kernel", (None, "shard"))],
        "exclude": ["bias"],
    }
    tx = distributed_optimizer(SGD, s, mesh=mesh, params=PARAMS)
    expected = {
        "mesh": mesh,
        "level": "p_g_os",
        "axes": ("shard",),
        "optimizer_axes": ("shard", "replica"),
        "rules": (("kernel", P(None, "shard")),),
        "exclude": ("bias",),
        "min_shard_size": 5,
        "kept": (),
        "offload": True,
    }
    assert {name: getattr(tx.policy, name) for name in expected} == expected


def test_an_abstract_mesh_only_plans():
    mesh = AbstractMesh((256,), ("data",))
    shapes = jax.eval_shape(lambda: {"w": jnp.zeros((1024, 1024))})
    tx = distributed_optimizer(SGD, strategy(auto=True), mesh=mesh, params=shapes)
    assert isinstance(tx, DistributedOptimizer)
    assert tx.resolution.applied == ("sharding",)
    policy = placement_policy(tx.resolution, mesh, shapes)
    assert policy.level == "os_g"
    plain = distributed_optimizer(SGD, strategy(clip=True), mesh=mesh)
    assert placement_policy(plain.resolution, mesh, shapes) is None


# Meshes and arguments.


def test_the_mesh_of_init_is_the_default(fresh_mesh):
    assert distributed_optimizer(SGD, strategy(amp=True)).mesh is None
    assert meshes._current is None
    mesh = jfleet.init({"replica": 2, "shard": 4})
    assert distributed_optimizer(SGD, strategy(amp=True)).mesh is mesh
    tx = distributed_optimizer(SGD, strategy(localsgd=True))
    assert tx.resolution.axes == {"localsgd": ("replica",)}


def test_a_strategy_that_needs_a_mesh_makes_one(fresh_mesh):
    tx = distributed_optimizer(SGD, strategy(sharding=True))
    assert dict(tx.mesh.shape) == {"data": 8}
    assert jfleet.init() is tx.mesh


def test_which_strategies_need_a_mesh():
    alone = {"amp", "recompute", "gradient_merge", "clip", "lars", "lamb"}
    alone |= {"sync_batch_norm"}
    for name in SWITCHES:
        assert needs_mesh(strategy(**{name: True})) == (name not in alone)
        assert not needs_mesh(strategy(**{name: False}))
        if name != "auto":
            assert needs_mesh(strategy(**{name: "auto"}))
    assert needs_mesh(strategy(gradient_merge_configs={"sync": "last"}))
    assert not needs_mesh(strategy(gradient_merge_configs={"k_steps": 2}))


def test_changing_the_strategy_later_changes_nothing():
    """Case B104, and one strategy for two optimizers."""
    s = strategy(gradient_merge=True, gradient_merge_configs={"k_steps": 2})
    before = s.copy()
    one = distributed_optimizer(optax.sgd(1.0), s)
    two = distributed_optimizer(optax.sgd(2.0), s)
    assert s == before
    s.gradient_merge = False
    s.amp = True
    for tx, expected in ((one, -1.0), (two, -2.0)):
        w = jnp.zeros(())
        updates, state = tx.update(jnp.ones(()), tx.init(w), w)
        assert updates == 0
        updates, state = tx.update(jnp.ones(()), state, w)
        assert updates == expected


def test_bad_arguments():
    s = strategy(clip=True)
    with pytest.raises(ConfigError, match="already"):
        distributed_optimizer(distributed_optimizer(SGD, s), s)
    placed = distributed_optimizer(SGD, strategy(sharding=True), mesh=mesh_of(data=8))
    with pytest.raises(ConfigError, match="already"):
        distributed_optimizer(placed, s)
    with pytest.raises(TypeError, match="DistributedStrategy"):
        distributed_optimizer(SGD, {"amp": True})
    with pytest.raises(TypeError, match="optax transformation"):
        distributed_optimizer(None, s)
    with pytest.raises(TypeError, match="AbstractMesh"):
        distributed_optimizer(SGD, s, mesh={"data": 8})


def test_repr_and_attributes():
    tx = distributed_optimizer(SGD, strategy(clip=True))
    assert repr(tx) == f"DistributedOptimizer({SGD!r}, applied=('clip',))"
    assert tx.base is SGD
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    chained = optax.chain(tx, optax.scale(2.0))
    updates, _ = chained.update(PARAMS, chained.init(PARAMS), PARAMS)
    alone, _ = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    assert_close(updates, jax.tree.map(lambda x: 2 * x, alone))
