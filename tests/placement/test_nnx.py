"""``(nnx.Module, nnx.Optimizer)`` pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jfleet
from tests.helpers import count_compilations
from tests.models import (
    LEVELS,
    assert_trees_close,
    make_batch,
    make_nnx,
    nnx_loss,
    nnx_step,
    shardings_of,
)


@pytest.fixture(scope="module")
def mesh():
    return jfleet.new_group(range(8))


def run(model, optimizer, mesh=None, steps=3, loss_fn=nnx_loss):
    step = nnx_step(loss_fn)
    for i in range(steps):
        batch = make_batch(i)
        batch = batch if mesh is None else jfleet.shard_batch(batch, mesh=mesh)
        loss = step(model, optimizer, batch)
    return loss


def params_of(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


@pytest.mark.parametrize("gather", [False, True], ids=["as-is", "gather_at_use"])
@pytest.mark.parametrize("level", LEVELS)
def test_values_and_layout(level, gather, mesh):
    plain = make_nnx()
    model, optimizer = jfleet.group_sharded_parallel(plain, level, mesh=mesh)
    assert type(model) is type(plain[0])
    assert type(optimizer) is nnx.Optimizer
    before = shardings_of(nnx.split((model, optimizer))[1])
    loss_fn = jfleet.gather_at_use(nnx_loss, model) if gather else nnx_loss
    run(model, optimizer, mesh, loss_fn=loss_fn)
    assert shardings_of(nnx.split((model, optimizer))[1]) == before
    want = make_nnx()
    run(*want)
    assert_trees_close(params_of(model), params_of(want[0]))
    kernel = model.first.kernel.get_value()
    split = kernel.sharding.shard_shape(kernel.shape) != kernel.shape
    assert split == (level == "p_g_os")
    moment = optimizer.opt_state[0].mu["first"]["kernel"].get_value()
    assert moment.sharding.spec == P(None, "data")


def test_the_second_step_compiles_nothing(mesh):
    model, optimizer = jfleet.group_sharded_parallel(make_nnx(), "os_g", mesh=mesh)
    step = nnx_step()
    batch = jfleet.shard_batch(make_batch(), mesh=mesh)
    step(model, optimizer, batch)
    with count_compilations() as count:
        step(model, optimizer, batch)
    assert count.compilations == 0


@pytest.mark.parametrize("level", LEVELS)
def test_batch_statistics_and_random_counters_are_extras(level, mesh):
    # The bias in front of the batch norm has no gradient but rounding, which Adam
    # would blow up; plain SGD does not.
    plain, want = (make_nnx(optax.sgd(1e-2), noisy=True) for _ in range(2))
    planned = jfleet.plan(plain, level, mesh=mesh)
    names = {row.path for row in planned.of_kind("extra")}
    assert {"0/norm/mean", "0/norm/var", "1/step"} <= names
    assert all("norm/mean" not in r.path for r in planned.of_kind("params"))
    model, optimizer = jfleet.group_sharded_parallel(plain, level, mesh=mesh)
    run(model, optimizer, mesh)
    run(*want)
    assert_trees_close(params_of(model), params_of(want[0]))
    np.testing.assert_allclose(
        model.norm.mean.get_value(), want[0].norm.mean.get_value(), rtol=1e-5
    )


def test_the_callers_objects_are_untouched(mesh):
    model, optimizer = make_nnx()
    tx = optimizer.tx
    before = jax.tree.map(np.asarray, params_of(model))
    pair = jfleet.group_sharded_parallel((model, optimizer), "p_g_os", mesh=mesh)
    run(*pair, mesh)
    assert optimizer.tx is tx
    assert_trees_close(params_of(model), before, rtol=0, atol=0)


def test_again_and_another_level(mesh):
    pair = jfleet.group_sharded_parallel(make_nnx(), "os", mesh=mesh)
    run(*pair, mesh, steps=2)
    pair = jfleet.group_sharded_parallel(pair, "p_g_os", mesh=mesh)
    assert int(pair[1].opt_state[0].count.get_value()) == 2
    assert pair[1].tx.policy.level == "p_g_os"
    assert not hasattr(pair[1].tx.inner, "policy")


@pytest.mark.parametrize("level", LEVELS)
def test_b08_tensor_parallel_metadata_survives(level):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    class Net(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(
                nnx.initializers.lecun_normal(), (None, "model")
            )
            self.first = nnx.Linear(16, 32, kernel_init=init, rngs=rngs)
            self.last = nnx.Linear(32, 8, rngs=rngs)

        def __call__(self, x):
            return self.last(nnx.relu(self.first(x)))

    with jax.set_mesh(mesh):  # flax wants one to make annotated variables
        model = Net(nnx.Rngs(0))
        pair = model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    model, optimizer = jfleet.group_sharded_parallel(pair, level, mesh=mesh)
    before = shardings_of(nnx.split((model, optimizer))[1])
    run(model, optimizer, mesh)
    assert shardings_of(nnx.split((model, optimizer))[1]) == before
    kernel = model.first.kernel.get_value()
    split = level == "p_g_os"
    assert kernel.sharding.spec == (P("data", "model") if split else P(None, "model"))


class Shared(nnx.Module):
    """One parameter, used as embedding and as head."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(64, 16, rngs=rngs)
        self.head = self.embed

    def __call__(self, tokens):
        return self.head.attend(self.embed(tokens))


@pytest.mark.parametrize("level", LEVELS)
def test_b76_a_shared_parameter_stays_one(level, mesh):
    tokens = jnp.arange(64).reshape(16, 4)

    def make():
        model = Shared(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    def loss(model, batch):
        losses = optax.softmax_cross_entropy_with_integer_labels
        return losses(model(batch), (batch + 1) % 64).mean()

    model, optimizer = jfleet.group_sharded_parallel(make(), level, mesh=mesh)
    assert model.head is model.embed
    step = nnx_step(loss)
    want = make()
    for _ in range(3):
        step(model, optimizer, jfleet.shard_batch(tokens, mesh=mesh))
        step(*want, tokens)
    assert_trees_close(params_of(model), params_of(want[0]))


@pytest.mark.parametrize("level", LEVELS)
def test_create_sharded(level, mesh):
    model, optimizer = jfleet.create_sharded(make_nnx, level=level, mesh=mesh)
    placed = jfleet.group_sharded_parallel(make_nnx(), level, mesh=mesh)
    assert shardings_of(nnx.split((model, optimizer))[1]) == shardings_of(
        nnx.split(placed)[1]
    )
    run(model, optimizer, mesh)
