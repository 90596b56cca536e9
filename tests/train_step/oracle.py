"""A small model in JAX and in NumPy, and runs of both through the same strategy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jfleet.distributed import distributed_optimizer
from jfleet.optimizer import optimizer
from jfleet.strategy import DistributedStrategy
from tests import strategy_reference as ref

ROWS = 4  # of one device in one micro batch
SCALE = 64.0
OWN = {"localsgd", "adaptive_localsgd", "dgc"}
OPTIONS = {
    "amp": {"dtype": "float32", "init_loss_scaling": SCALE},
    "gradient_merge": {"k_steps": ref.MERGE},
    "localsgd": {"k_steps": ref.LOCAL_STEPS, "begin_step": ref.BEGIN},
    "adaptive_localsgd": {
        "init_k_steps": ref.INIT_K,
        "begin_step": ref.BEGIN,
        "max_k_steps": ref.MAX_K,
    },
    "dgc": {"sparsity": [ref.KEPT], "min_size": 1},
    "lars": {"lars_coeff": ref.COEFF, "lars_weight_decay": ref.LARS_DECAY},
    "lamb": {"lamb_weight_decay": ref.LAMB_DECAY},
    "clip": {"max_norm": ref.LIMIT},
}


def mesh_of(**shape):
    count = int(np.prod(list(shape.values())))
    return jax.make_mesh(
        tuple(shape.values()),
        tuple(shape),
        axis_types=(jax.sharding.AxisType.Auto,) * len(shape),
        devices=jax.devices()[:count],
    )


def base_of(names):
    if "lamb" in names:
        rates = {"b1": ref.B1, "b2": ref.B2, "eps": ref.EPS}
        return optimizer(optax.adam, learning_rate=ref.RATE, **rates)
    return optimizer(optax.sgd, learning_rate=ref.RATE, momentum=ref.MOMENTUM)


OUTER = {
    "name": "sgd",
    "learning_rate": ref.OUTER_RATE,
    "momentum": ref.OUTER_MOMENTUM,
    "nesterov": True,
}


def strategy_of(names, level=None, **configs):
    """``outer`` among the names gives localsgd an outer optimizer."""
    if "outer" in names:
        local = next(n for n in names if n.endswith("localsgd"))
        configs.setdefault(f"{local}_configs", {})["outer"] = OUTER
    names = [n for n in names if n != "outer"]
    for name in names:
        block = f"{name}_configs"
        if name in OPTIONS or block in configs:
            configs[block] = {**OPTIONS.get(name, {}), **configs.get(block, {})}
    if level is not None:
        names.append("sharding")
        configs.setdefault("sharding_configs", {})["level"] = level
    return DistributedStrategy(**dict.fromkeys(names, True), **configs)


def make_optimizer(names, level=None, mesh=None, **configs):
    return distributed_optimizer(
        base_of(names), strategy_of(names, level, **configs), mesh=mesh
    )


def params(dtype=np.float64):
    return {
        "w": np.sin(np.arange(32.0)).reshape(8, 4).astype(dtype),
        "b": np.cos(np.arange(4.0)).astype(dtype),
    }


def batch(step, num_rows, dtype=np.float64):
    grid = np.arange(num_rows * 8.0).reshape(num_rows, 8)
    x = np.cos(0.37 * grid + 1.3 * step)
    y = np.sin(0.21 * grid[:, :4] - 0.7 * step)
    return {"x": x.astype(dtype), "y": y.astype(dtype)}


def loss_fn(params, rows):
    out = jnp.tanh(rows["x"] @ params["w"]) + params["b"]
    return jnp.mean(jnp.sum((out - rows["y"]) ** 2, axis=1))


def loss_and_grads(w, rows):
    """The same in NumPy."""
    hidden = np.tanh(rows["x"] @ w["w"])
    error = hidden + w["b"] - rows["y"]
    count = len(error)
    slope = 2 * error * (1 - hidden**2) / count
    grads = {"w": rows["x"].T @ slope, "b": 2 * error.sum(0) / count}
    return float(np.mean(np.sum(error**2, axis=1))), grads


def rows_of(whole, device, num_devices, micro, num_micro):
    """What a device sees in a micro batch: every ``num_micro``-th of its rows."""

    def part(x):
        size = len(x) // num_devices
        return x[device * size : (device + 1) * size][micro::num_micro]

    return {key: part(x) for key, x in whole.items()}


class Expected:
    """What the parameters of every replica must be after each step."""

    def __init__(self, names, num_replicas, num_shards, num_steps):
        self.run = ref.Run(names, params(), num_replicas, scale=scale_of(names))
        self.micro = ref.MERGE if "gradient_merge" in names else 1
        self.shape = num_replicas, num_shards
        self.losses, self.params = [], []
        for step in range(num_steps):
            self._step(batch(step, ROWS * num_replicas * num_shards * self.micro))

    def _step(self, whole):
        num_replicas, num_shards = self.shape
        losses = np.zeros((num_replicas, num_shards))
        for micro in range(self.micro):
            grads = []
            for r in range(num_replicas):
                grads.append([])
                for s in range(num_shards):
                    device = r * num_shards + s
                    rows = rows_of(
                        whole, device, num_replicas * num_shards, micro, self.micro
                    )
                    loss, g = loss_and_grads(self.run.replicas[r].w, rows)
                    losses[r, s] += loss / self.micro
                    grads[-1].append(g)
            self.run.micro(grads, losses.mean(axis=1))
        self.losses.append(losses.mean())
        self.params.append([dict(replica.w) for replica in self.run.replicas])


def scale_of(names):
    return SCALE if "amp" in names else 1.0


def train(opt, num_steps, num_rows, *, loss=loss_fn, **options):
    """Run the library; returns the states' parameters and the metrics per step."""
    step = opt.minimize(loss, **options)
    state = opt.create(params())
    found, metrics = [], []
    for number in range(num_steps):
        state, now = step(state, batch(number, num_rows))
        found.append(jax.tree.map(np.asarray, state.params))
        metrics.append(jax.tree.map(np.asarray, now))
    return step, state, found, metrics


def assert_copies_agree(tree):
    """No array that claims to be a copy differs between devices."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        first = {}
        for shard in leaf.addressable_shards:
            data = np.asarray(shard.data)
            same = first.setdefault(str(shard.index), data)
            np.testing.assert_array_equal(data, same, jax.tree_util.keystr(path))


def check(names, level, mesh, num_steps=30, *, rtol=1e-9, sync=None):
    """Compare a run with its oracle, step by step."""
    own = OWN & set(names)
    replica = mesh.shape.get("replica", mesh.size)
    shape = (replica, mesh.size // replica)
    expected = Expected(names, *shape, num_steps)
    configs = {}
    if sync is not None:
        configs["gradient_merge_configs"] = {"sync": sync}
    with jax.enable_x64(True):
        opt = make_optimizer(names, level, mesh, **configs)
        rows = ROWS * mesh.size * expected.micro
        step, state, found, metrics = train(opt, num_steps, rows)
    for number in range(num_steps):
        for r in range(replica):
            for key in ("w", "b"):
                got = found[number][key]
                got = got[r] if own - {"dgc"} else got
                np.testing.assert_allclose(
                    got,
                    expected.params[number][r][key],
                    rtol=rtol,
                    atol=rtol,
                    err_msg=f"step {number}, replica {r}, {key}",
                )
        if metrics[number].synchronised:
            np.testing.assert_allclose(
                metrics[number].loss, expected.losses[number], rtol=max(rtol, 1e-6)
            )
    assert_copies_agree(state)
    return step, state, metrics
