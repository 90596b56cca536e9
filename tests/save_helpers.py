"""States and comparisons for the tests of saving and loading."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jfleet._tree import map_with_path

LEVELS = ("os", "os_g", "p_g_os")
# One object: TrainState compares its optimizer by identity.
ADAM = optax.adam(1e-2)


def make_mesh(num_devices, axis="data"):
    devices = np.array(jax.devices()[:num_devices])
    return Mesh(devices, (axis,), axis_types=(AxisType.Auto,))


def spec_for(shape, num_shards, axis="data"):
    """The largest dimension that divides, else nothing."""
    fits = [d for d, size in enumerate(shape) if size and size % num_shards == 0]
    if not fits:
        return PartitionSpec()
    dim = max(fits, key=lambda d: shape[d])
    return PartitionSpec(*[None] * dim, axis)


def lay_out(state, mesh, level="p_g_os"):
    """Lay a state out by hand: optimizer split, parameters only at p_g_os."""
    size = mesh.devices.size

    def place(path, leaf):
        whole = "opt_state" not in path and level != "p_g_os"
        spec = PartitionSpec() if whole else spec_for(jnp.shape(leaf), size)
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    return map_with_path(place, state)


def abstract_on(state):
    """Shapes and shardings of a state, without its values."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=x.sharding, weak_type=x.weak_type
        ),
        state,
    )


def mlp_params(sizes=(48, 96, 48), seed=0):
    rng = np.random.default_rng(seed)
    return {
        f"layer_{i}": {
            "kernel": jnp.asarray(rng.normal(size=(a, b)), jnp.float32) / a**0.5,
            "bias": jnp.asarray(rng.normal(size=(b,)), jnp.float32),
        }
        for i, (a, b) in enumerate(itertools.pairwise(sizes))
    }


def mlp_apply(params, x):
    for name in sorted(params):
        x = jnp.tanh(x @ params[name]["kernel"] + params[name]["bias"])
    return x


def mlp_state(tx=None, sizes=(48, 96, 48), seed=0):
    return TrainState.create(
        apply_fn=mlp_apply,
        params=mlp_params(sizes, seed),
        tx=tx or ADAM,
    )


def mlp_batch(width=48):
    return jnp.asarray(np.random.default_rng(7).normal(size=(16, width)), jnp.float32)


def train(state, num_steps, batch=None):
    batch = mlp_batch() if batch is None else batch
    for _ in range(num_steps):
        state = train_step(state, batch)
    return state


@jax.jit
def train_step(state, batch):
    def loss(params):
        return jnp.mean((state.apply_fn(params, batch) - 0.5) ** 2)

    grads = jax.grad(loss)(state.params)
    return state.apply_gradients(grads=grads)


def host(tree):
    """Copies on the host, random keys as their data."""

    def copy(leaf):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(
            leaf.dtype, jax.dtypes.prng_key
        ):
            leaf = jax.random.key_data(leaf)
        return np.array(leaf)

    return jax.tree.map(copy, tree)


def bits(leaf):
    return np.ascontiguousarray(host(leaf)).tobytes()


def assert_same_bits(got, want):
    """Same structure, same Python types, same dtypes and shapes, same bits."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    got = jax.tree_util.tree_leaves_with_path(got)
    want = jax.tree_util.tree_leaves_with_path(want)
    for (path, a), (_, b) in zip(got, want, strict=True):
        where = jax.tree_util.keystr(path)
        assert jnp.shape(a) == jnp.shape(b), where
        assert getattr(a, "dtype", None) == getattr(b, "dtype", None), where
        assert isinstance(a, jax.Array) == isinstance(b, jax.Array), where
        if not isinstance(a, jax.Array):
            assert type(a) is type(b), where
        if isinstance(a, int):
            assert a == b, where
        else:
            assert bits(a) == bits(b), where


def assert_laid_out_as(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if isinstance(b, jax.Array | jax.ShapeDtypeStruct) and b.sharding is not None:
            assert a.sharding == b.sharding
            assert getattr(b, "committed", True) == a.committed
