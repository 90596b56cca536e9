import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jfleet import optax_meta as meta
from tests.optax_meta.simulate import (
    AXIS,
    assert_bits,
    assert_close,
    collectives,
    noise,
    run_replicas,
    spread,
    train,
)

W = {"w": jnp.asarray(noise((3, 2), 1), jnp.float32), "b": jnp.zeros(2)}


def take(runs, num):
    return list(itertools.islice(runs, num))


def random_grads(num_steps, num):
    return [
        {
            "w": jnp.asarray(noise((num, 3, 2), t)),
            "b": jnp.asarray(noise((num, 2), t + 50)),
        }
        for t in range(num_steps)
    ]


def test_b37_one_counter_for_the_whole_tree():
    params = {"w1": jnp.zeros(8), "w2": jnp.zeros((4, 2))}

    def grads(r, t, p):
        return jax.tree.map(lambda w: (r + 1) / 4 * (w - 1), p)

    tx = meta.localsgd(optax.sgd(0.5), 4, 1, axis_name=AXIS)
    out = take(run_replicas(tx, params, grads, num=8), 9)
    for t, want in [(1, 0.5625), (5, 0.9375687), (9, 0.9910910)]:
        for leaf in jax.tree.leaves(out[t - 1][0]):
            assert_close(leaf, np.full(leaf.shape, want), rtol=0, atol=1e-6)
    apart = [t for t, (p, _) in enumerate(out, start=1) if spread(p) > 1e-6]
    assert apart == [2, 3, 4, 6, 7, 8]
    assert [t for t, (_, s) in enumerate(out, 1) if s.synced.all()] == [1, 5, 9]


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_b41_warm_up_and_local_momentum(momentum):
    """Against a simulation of the replicas in float64."""
    grads = random_grads(14, 8)
    tx = meta.localsgd(optax.sgd(0.1, momentum), 3, 5, axis_name=AXIS)
    out = take(run_replicas(tx, W, grads), 14)
    w, trace = np.stack([np.float64(W["w"])] * 8), np.zeros((8, 3, 2))
    for t, (params, _) in enumerate(out, start=1):
        trace = (momentum or 0) * trace + np.float64(grads[t - 1]["w"])
        w = w - 0.1 * trace
        if t <= 5 or (t - 5) % 3 == 0:
            w = np.broadcast_to(w.mean(0), w.shape)
        assert_close(params["w"], w, rtol=1e-5, atol=1e-6)
        assert (spread(params) < 1e-6) == (t <= 5 or t in (8, 11, 14))
    if momentum is None:
        means = [jax.tree.map(lambda g: g.mean(0), g) for g in grads[:5]]
        for (a, _), (b, _) in zip(out, train(optax.sgd(0.1), W, means), strict=False):
            assert_close(a["w"][0], b["w"], rtol=1e-5, atol=1e-6)
    else:
        assert_close(out[-1][1].inner[0].trace["w"], trace, rtol=1e-5, atol=1e-6)


def test_b42_model_statistics_are_averaged_at_a_sync():
    tx = meta.localsgd(optax.sgd(0.1), 2, 0, axis_name=AXIS)

    def two(r):
        params, state = jnp.zeros(()), tx.init(jnp.zeros(()))
        stats = {"mean": 1.0 * r, "count": r}
        seen = []
        for _ in range(2):
            _, state = tx.update(1.0 * r, state, params)
            stats = meta.sync_model_state(stats, state.synced, axis_name=AXIS)
            seen.append(stats)
        return seen

    first, second = jax.vmap(two, axis_name=AXIS)(jnp.arange(4))
    assert_bits(first["mean"], jnp.arange(4.0))
    assert_bits(second["mean"], jnp.full(4, 1.5))
    assert_bits(second["count"], jnp.arange(4))


def test_period_one_is_synchronous_momentum():
    grads = random_grads(6, 4)
    tx = meta.localsgd(optax.sgd(0.1, 0.9), 1, axis_name=AXIS)
    out = take(run_replicas(tx, W, grads), 6)
    means = [jax.tree.map(lambda g: g.mean(0), g) for g in grads]
    for (a, _), (b, _) in zip(out, train(optax.sgd(0.1, 0.9), W, means), strict=True):
        for r in range(4):
            assert_close(jax.tree.map(lambda x, r=r: x[r], a), b, rtol=1e-5, atol=1e-6)


def test_equal_replicas_take_the_inner_updates_bit_for_bit():
    base = optax.sgd(0.1)
    tx = meta.localsgd(base, 1, axis_name=AXIS)
    w = jnp.asarray(noise((64,), 1), jnp.float32)
    g = jnp.asarray(noise((64,), 2), jnp.float32)
    update = jax.vmap(
        lambda g: tx.update(g, tx.init(w), w)[0], axis_name=AXIS, axis_size=2
    )
    want, _ = base.update(g, base.init(w), w)
    assert_bits(update(jnp.stack([g, g])), jnp.stack([want, want]))


def test_no_collective_between_synchronisations():
    tx = meta.localsgd(
        optax.adam(0.1), 4, average_state=True, outer=optax.sgd(1.0), axis_name=AXIS
    )
    seen = collectives(tx.update, W, tx.init(W), W)
    assert seen
    assert all("cond" in inside for _, inside, _ in seen)


def test_optimizer_state_is_averaged_only_when_asked():
    grads = random_grads(3, 4)
    for average in (False, True):
        tx = meta.localsgd(optax.adam(0.1), 3, 0, average_state=average, axis_name=AXIS)
        _, state = take(run_replicas(tx, W, grads), 3)[-1]
        assert (spread(state.inner[0].mu) < 1e-6) == average
        assert_bits(state.inner[0].count, jnp.full(4, 3))


def test_outer_sgd_with_rate_one_is_plain_averaging():
    grads = random_grads(7, 4)
    plain = meta.localsgd(optax.sgd(0.1), 3, axis_name=AXIS)
    outer = meta.localsgd(optax.sgd(0.1), 3, outer=optax.sgd(1.0), axis_name=AXIS)
    runs = [take(run_replicas(tx, W, grads), 7) for tx in (plain, outer)]
    for (a, _), (b, _) in zip(*runs, strict=True):
        assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_outer_nesterov_steps_on_the_averaged_change():
    """DiLoCo, against numpy in float64."""
    grads = random_grads(6, 4)
    tx = meta.localsgd(
        optax.sgd(0.1), 2, 0, outer=optax.sgd(0.7, 0.9, nesterov=True), axis_name=AXIS
    )
    out = take(run_replicas(tx, W, grads), 6)
    anchor = np.float64(W["w"])
    w, trace = np.stack([anchor] * 4), np.zeros_like(anchor)
    for t, (params, state) in enumerate(out, start=1):
        w = w - 0.1 * np.float64(grads[t - 1]["w"])
        if t % 2 == 0:
            change = anchor - w.mean(0)
            trace = 0.9 * trace + change
            anchor = anchor - 0.7 * (change + 0.9 * trace)
            w = np.stack([anchor] * 4)
            assert_close(state.anchor["w"], w, rtol=1e-5, atol=1e-6)
        assert_close(params["w"], w, rtol=1e-5, atol=1e-6)


def test_one_replica_is_the_inner_optimizer():
    grads = random_grads(5, 1)
    tx = meta.localsgd(optax.adam(0.1), 2, axis_name=AXIS)
    alone = train(optax.adam(0.1), W, [jax.tree.map(lambda g: g[0], g) for g in grads])
    for (a, s), (b, _) in zip(take(run_replicas(tx, W, grads), 5), alone, strict=True):
        assert int(s.count[0]) > 0
        assert_close(jax.tree.map(lambda x: x[0], a), b, rtol=1e-6)
    assert int(s.num_syncs[0]) == 3


@pytest.mark.parametrize("check_vma", [True, False])
def test_on_eight_devices(check_vma):
    mesh = jax.make_mesh((8,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    grads = random_grads(4, 8)
    tx = meta.localsgd(optax.sgd(0.1, 0.9), 2, axis_name=AXIS)

    def step(grads, state, params):
        grads, state, params = jax.tree.map(lambda x: x[0], (grads, state, params))
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return jax.tree.map(lambda x: x[None], (params, state))

    step = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=P(AXIS),
            out_specs=P(AXIS),
            check_vma=check_vma,
        )
    )
    params = jax.tree.map(lambda p: jnp.stack([p] * 8), W)
    state = jax.vmap(tx.init)(params)
    for g, (want, _) in zip(grads, run_replicas(tx, W, grads), strict=False):
        params, state = step(g, state, params)
        assert_close(params, want, rtol=1e-6, atol=1e-6)
