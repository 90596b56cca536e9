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
    train,
)
from tests.optax_meta.vectors import lcg

LARGE = (128, 128)


def take(runs, num):
    return list(itertools.islice(runs, num))


def local_grads(num_steps, num, shape=LARGE):
    return [
        {"w": jnp.asarray(lcg(t, (num, *shape), 1.0), jnp.float32)}
        for t in range(num_steps)
    ]


def oracle(grads, num_kept, *, lr=0.1, momentum=0.9):
    """DGC of one tensor in float64 numpy, from zero weights."""
    num, shape = grads[0].shape[0], grads[0].shape[1:]
    w, u, v = np.zeros(shape), np.zeros(grads[0].shape), np.zeros(grads[0].shape)
    for g in grads:
        u = momentum * u + g
        v = v + u
        total = np.zeros(w.size)
        for r in range(num):
            at = np.argsort(-np.abs(v[r].ravel()), kind="stable")[:num_kept]
            total[at] += v[r].ravel()[at]
            v[r].reshape(-1)[at] = 0
            u[r].reshape(-1)[at] = 0
        w = w - lr * total.reshape(shape) / num
        yield w


def test_b44_momentum_is_applied_once():
    grads = local_grads(10, 8)
    tx = meta.dgc(0.1, 0.9, axis_name=AXIS)
    out = take(run_replicas(tx, {"w": jnp.zeros(LARGE)}, grads), 10)
    exact = oracle([np.float64(g["w"]) for g in grads], 17)
    for (params, state), want in zip(out, exact, strict=True):
        assert_close(params["w"], np.stack([want] * 8), rtol=1e-5, atol=1e-6)
        assert state.num_sent["w"].tolist() == [17] * 8


def test_b46_ramp_and_local_clip():
    tx = meta.dgc(
        0.1,
        0.9,
        clip_norm=1.0,
        rampup_begin_step=2,
        rampup_step=4,
        sparsity=(0.75, 0.9375, 0.984375, 0.996),
        axis_name=AXIS,
    )
    grads = local_grads(10, 8)
    # Norms far under the limit, but for the last step: 10 on every replica.
    grads = [jax.tree.map(lambda g: g * 1e-3, g) for g in grads]
    grads[-1] = {"w": jnp.full((8, *LARGE), 10 / 128)}
    out = take(run_replicas(tx, {"w": jnp.zeros(LARGE)}, grads), 10)
    sent = [int(s.num_sent["w"][0]) for _, s in out]
    assert sent == [0, 0, 4096, 1024, 256, 66, 66, 66, 66, 66]
    means = [{"w": g["w"].mean(0)} for g in grads[:2]]
    dense = train(optax.sgd(0.1, 0.9), {"w": jnp.zeros(LARGE)}, means)
    for (a, _), (b, _) in zip(out, dense, strict=False):
        assert_close(a["w"][0], b["w"], rtol=1e-6, atol=1e-9)
    # What enters u is g limited to c * sqrt(N); in units of g / N that is c / sqrt(N).
    before, after = out[-2][1], out[-1][1]
    entered = np.float64(after.u["w"]) - 0.9 * np.float64(before.u["w"])
    kept = np.asarray(after.u["w"][0]) != 0
    per_entry = entered[0][kept] / 8
    assert_close(per_entry * 128, np.full(kept.sum(), 8**-0.5), rtol=1e-5)


def test_b47_one_replica_and_other_axis_names():
    grads = local_grads(3, 8)
    params = {"w": jnp.zeros(LARGE)}
    alone = train(meta.dgc(0.1), params, [{"w": g["w"][0]} for g in grads])[-1]
    assert np.isfinite(alone[0]["w"]).all()
    results = []
    for name in ("dp", "data", "batch"):
        tx = meta.dgc(0.1, axis_name=name)

        def three(w, tx=tx):
            state, p = tx.init(params), params
            for g in w:
                updates, state = tx.update({"w": g}, state, p)
                p = optax.apply_updates(p, updates)
            return p["w"]

        stacked = jnp.stack([g["w"] for g in grads], axis=1)
        results.append(jax.jit(jax.vmap(three, axis_name=name))(stacked))
    assert_bits(results[0], results[1])
    assert_bits(results[0], results[2])


def test_b49_small_and_16_bit_leaves_are_dense():
    params = {
        "small": jnp.zeros((64, 64)),
        "edge": jnp.zeros(LARGE),
        "scalar": jnp.zeros(()),
        "bias": jnp.zeros(7),
        "low": jnp.zeros(LARGE, jnp.bfloat16),
    }
    assert meta.dgc_compressed_paths(params) == ["edge"]
    assert meta.dgc_compressed_paths(params, exclude="edge") == []
    tx = meta.dgc(0.1, 0.9, axis_name=AXIS)

    def grads(r, t, p):
        return jax.tree.map(
            lambda w: (jnp.sin(jnp.arange(w.size) + r + t)).reshape(w.shape), p
        )

    out = take(run_replicas(tx, params, grads, num=8), 3)
    means = [
        jax.tree.map(
            lambda *g: sum(g) / 8,
            *[grads(float(r), float(t), params) for r in range(8)],
        )
        for t in range(3)
    ]
    for name in ("small", "scalar", "bias"):
        want = train(optax.sgd(0.1, 0.9), params[name], [mean[name] for mean in means])[
            -1
        ][0]
        assert_close(out[-1][0][name][0], want, rtol=1e-5, atol=1e-7)
    sent = {k: int(x[0]) for k, x in out[-1][1].num_sent.items()}
    assert sent == {"small": 0, "edge": 17, "scalar": 0, "bias": 0, "low": 0}
    assert out[-1][1].v["small"] is None
    assert out[-1][1].u["low"].dtype == jnp.float32


def test_only_values_and_indices_travel():
    params = {"w": jnp.zeros(LARGE), "b": jnp.zeros(7)}
    tx = meta.dgc(0.1, sparsity=(0.75, 0.999), rampup_step=4, axis_name=AXIS)
    seen = collectives(tx.update, params, tx.init(params), params)
    gathered = {x for name, _, x in map(flat, seen) if name == "all_gather"}
    assert gathered == {
        ("float32", (4096,)),
        ("int32", (4096,)),
        ("float32", (17,)),
        ("int32", (17,)),
    }
    reduced = [x for name, _, x in map(flat, seen) if name.startswith("psum")]
    assert set(reduced) == {("float32", (7,))}


def flat(row):
    name, inside, operands = row
    (operand,) = operands
    return name, inside, operand


@pytest.mark.parametrize("nesterov", [False, True])
def test_replicas_stay_together_when_the_level_returns_to_zero(nesterov):
    tx = meta.dgc(
        0.1,
        nesterov=nesterov,
        sparsity=(0.75, 0.0),
        rampup_step=4,
        min_size=1,
        axis_name=AXIS,
    )
    grads = local_grads(6, 4, (8,))
    out = take(run_replicas(tx, {"w": jnp.zeros(8)}, grads), 6)
    assert [int(s.num_sent["w"][0]) for _, s in out] == [2, 2, 0, 0, 0, 0]
    for params, _ in out:
        assert_bits(params["w"], jnp.stack([params["w"][0]] * 4))


@pytest.mark.parametrize("options", [{}, {"nesterov": True}])
def test_nothing_jumps_at_the_hand_over(options):
    """With everything sent and no masking, DGC is momentum SGD without a seam."""
    tx = meta.dgc(
        0.1,
        sparsity=(1e-9,),
        rampup_begin_step=3,
        min_size=1,
        factor_masking=False,
        **options,
    )
    grads = [g["w"][0] for g in local_grads(6, 1, (8,))]
    ours = train(tx, jnp.zeros(8), grads)
    theirs = train(optax.sgd(0.1, 0.9, **options), jnp.zeros(8), grads)
    assert int(ours[-1][1].num_sent) == 8
    for (a, _), (b, _) in zip(ours, theirs, strict=True):
        assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_decay_outside_is_the_same_as_dense_decay_for_dense_tensors():
    grads = [g["w"][0] for g in local_grads(5, 1, (8,))]
    w = jnp.asarray(noise((8,), 9), jnp.float32)
    runs = [
        train(meta.dgc(0.1, weight_decay=0.1, weight_decay_mode=m), w, grads)
        for m in ("local", "outside")
    ]
    assert_close(runs[0][-1][0], runs[1][-1][0], rtol=1e-5)


def test_clip_in_the_dense_phase():
    big, small = jnp.full(16, 3.0), jnp.full(4, 4.0)
    params = {"big": jnp.zeros(16), "small": jnp.zeros(4)}
    grads = {"big": big, "small": small}

    def first(**options):
        tx = meta.dgc(
            1.0, 0.0, rampup_begin_step=9, min_size=16, clip_norm=2.0, **options
        )
        return jax.tree.map(lambda x: -x, tx.update(grads, tx.init(params), params)[0])

    norm = float(np.sqrt(16 * 9 + 4 * 16))
    out = first()
    assert_close((out["big"], out["small"]), (big * 2 / norm, small * 2 / norm))
    out = first(dense_phase_clip="none")
    assert_close((out["big"], out["small"]), (big, small / 4))
    out = first(clip_scope="per_tensor")
    assert_close((out["big"], out["small"]), (big / 6, small / 4))
    out = first(clip_scope="per_tensor", dense_phase_clip="none")
    assert_close((out["big"], out["small"]), (big, small / 4))


def test_on_eight_devices():
    mesh = jax.make_mesh((8,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    grads = local_grads(3, 8, (16, 4))
    tx = meta.dgc(
        0.1, sparsity=(0.75,), rampup_begin_step=1, min_size=8, axis_name=AXIS
    )

    def step(grads, state, params):
        state = jax.tree.map(lambda x: x[0], state)
        updates, state = tx.update({"w": grads["w"][0]}, state, params)
        params = optax.apply_updates(params, updates)
        return params, jax.tree.map(lambda x: x[None], state)

    specs = (P(AXIS), P(AXIS), P())
    step = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=specs,
            out_specs=(P(), P(AXIS)),
            check_vma=False,
        )
    )
    params = {"w": jnp.zeros((16, 4))}
    state = jax.vmap(lambda _: tx.init(params))(jnp.arange(8))
    for g, (want, _) in zip(grads, run_replicas(tx, params, grads), strict=False):
        params, state = step(g, state, params)
        assert_close(params["w"], want["w"][0], rtol=1e-6, atol=1e-7)
        for shard in params["w"].addressable_shards:
            assert_bits(shard.data, params["w"])
