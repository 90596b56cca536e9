"""A model with everything in it, against one device that trains it in plain optax.

Tied embeddings, a frozen table, a scanned block and a matrix that is split over a
``model`` axis; 30 steps in float64. What the mesh does must not show in the values.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jfleet.distributed import distributed_optimizer
from jfleet.strategy import DistributedStrategy
from tests.train_step.oracle import mesh_of

WORDS, WIDTH, LAYERS, STEPS = 12, 8, 2, 30
NUM_MICRO = 2


def params(dtype=np.float64):
    grid = iter(range(100))

    def wave(*shape):
        size = int(np.prod(shape))
        return (0.4 * np.sin(np.arange(size) * 0.7 + next(grid))).reshape(shape)

    tree = {
        "embed": wave(WORDS, WIDTH),  # tied: also the head
        "blocks": {"up": wave(LAYERS, WIDTH, 16), "down": wave(LAYERS, 16, WIDTH)},
        "frozen": {"position": wave(4, WIDTH)},
    }
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def batch(step):
    rows = np.arange(16 * 5).reshape(16, 5)
    return ((rows * 7 + step * 3 + rows // 5) % WORDS).astype(np.int32)


def loss_fn(params, tokens):
    x = params["embed"][tokens[:, :-1]] + params["frozen"]["position"]

    def block(x, w):
        return x + jnp.tanh(x @ w["up"]) @ w["down"], None

    x, _ = jax.lax.scan(block, x, params["blocks"])
    logits = (x @ params["embed"].T).astype(jnp.promote_types(x.dtype, jnp.float32))
    labels = tokens[:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def base():
    def label(tree):
        return {key: "off" if key == "frozen" else "on" for key in tree}

    inner = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.02))
    return optax.multi_transform({"on": inner, "off": optax.set_to_zero()}, label)


@functools.cache
def expected(low=None):
    """Parameters and losses after every step on one device."""
    with jax.enable_x64(True):
        tx, w = base(), params(np.float32 if low else np.float64)
        state, found = tx.init(w), []

        def loss(w, tokens):
            if low is None:
                return loss_fn(w, tokens)
            return loss_fn(jax.tree.map(lambda x: x.astype(low), w), tokens)

        @jax.jit
        def step(w, state, tokens):
            value, grads = jax.value_and_grad(loss)(w, tokens)
            updates, state = tx.update(grads, state, w)
            return optax.apply_updates(w, updates), state, value

        for number in range(STEPS):
            w, state, value = step(w, state, batch(number))
            found.append((jax.tree.map(np.asarray, w), float(value)))
    return found


def optimizer_on(mesh, level, **settings):
    strategy = DistributedStrategy(**settings)
    if level is not None:
        strategy.sharding = True
        strategy.sharding_configs = {"level": level}
    if "model" in mesh.shape:
        strategy.tensor_parallel = True
        strategy.tensor_parallel_configs = {
            "rules": [("up$", (None, None, "model")), ("down$", (None, "model", None))]
        }
    return distributed_optimizer(base(), strategy, mesh=mesh, params=params())


def compare(opt, dtype=np.float64, *, low=None, rtol=1e-9):
    reference = expected(low)
    with jax.enable_x64(True):
        step, state = opt.minimize(loss_fn), opt.create(params(dtype))
        start = jax.tree.map(lambda x: x.sharding, state)
        for number in range(STEPS):
            state, metrics = step(state, batch(number))
            want, loss = reference[number]
            np.testing.assert_allclose(metrics.loss, loss, rtol=max(rtol, 1e-6))
            for got, value in zip(
                jax.tree.leaves(state.params), jax.tree.leaves(want), strict=True
            ):
                np.testing.assert_allclose(
                    got, value, rtol=rtol, atol=rtol, err_msg=f"step {number}"
                )
    assert jax.tree.map(lambda x: x.sharding, state) == start
    np.testing.assert_array_equal(
        state.params["frozen"]["position"], params(dtype)["frozen"]["position"]
    )
    return state


MERGED = {"gradient_merge": True}
CASES = {
    "plain": {},
    "last": {
        **MERGED,
        "gradient_merge_configs": {"k_steps": NUM_MICRO, "sync": "last"},
    },
    "each": {
        **MERGED,
        "gradient_merge_configs": {"k_steps": NUM_MICRO, "sync": "each"},
    },
    "recompute": {"recompute": True},
}
LEVELS = (None, "os", "os_g", "p_g_os")
MESHES = {"data": {"data": 4}, "model": {"data": 2, "model": 2}}
FAST = {("last", "p_g_os", "model"), ("recompute", "p_g_os", "data")}


def cases():
    for name in CASES:
        for level in LEVELS:
            for mesh in MESHES:
                fast = (name, level, mesh) in FAST or (name == "plain" and level)
                marks = () if fast else pytest.mark.slow
                yield pytest.param(name, level, mesh, marks=marks)


@pytest.mark.parametrize(("name", "level", "mesh"), list(cases()))
def test_values(name, level, mesh):
    opt = optimizer_on(mesh_of(**MESHES[mesh]), level, **CASES[name])
    state = compare(opt)
    if mesh == "model":
        assert "model" in str(state.params["blocks"]["up"].sharding.spec)
    if level == "p_g_os":
        assert state.params["embed"].sharding.spec == P("data")


@pytest.mark.parametrize(
    ("dtype", "level"),
    [
        ("bfloat16", "p_g_os"),
        pytest.param("bfloat16", "os", marks=pytest.mark.slow),
        pytest.param("bfloat16", "os_g", marks=pytest.mark.slow),
        pytest.param("float16", "os", marks=pytest.mark.slow),
        ("float16", "os_g"),
        pytest.param("float16", "p_g_os", marks=pytest.mark.slow),
    ],
)
def test_low_precision(dtype, level):
    """A 16-bit loss: sums of the mesh differ by roundings of that format.

    Adam moves each weight by about its rate whatever the gradient's size, so that one
    rounding of a gradient near zero may turn a step round: 2 x 0.02 per such step.
    """
    configs = {"dtype": dtype, "init_loss_scaling": 64.0}
    opt = optimizer_on(mesh_of(data=4), level, amp=True, amp_configs=configs)
    unit = float(jnp.finfo(dtype).eps)
    state = compare(opt, np.float32, low=dtype, rtol=8 * unit)
    assert all(x.dtype == np.float32 for x in jax.tree.leaves(state.params))
