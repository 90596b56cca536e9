"""Every golden vector, in float32 and float64, on simulated replicas."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jfleet import optax_meta as meta
from tests.optax_meta import runners
from tests.optax_meta.vectors import load_all, mismatches

VECTORS = load_all()
CASES = [
    pytest.param(v, dtype, id=f"{v.name}-{dtype}")
    for v in VECTORS
    for dtype in ("float32", "float64")
    if v.only in (None, dtype) and v.algorithm != "lookahead"
]
LOOKAHEAD = [
    pytest.param(v, dtype, id=f"{v.name}-{dtype}")
    for v in VECTORS
    for dtype in ("float32", "float64")
    if v.algorithm == "lookahead"
]


# Compiling is nearly all the time these tests take.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def test_all_algorithms_are_run():
    assert len(VECTORS) >= 88
    assert {v.algorithm for v in VECTORS} == {*runners.RUNNERS, "lookahead"}


def stack(trees):
    return jax.tree.map(lambda *xs: jnp.stack(xs), *trees)


def cast(tree, dtype):
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)


def replica(tree, r):
    return jax.tree.map(lambda x: np.asarray(x[r]), tree)


def run(vector, dtype, setup):
    """Yield (parameters of all replicas, pinned state of all replicas) per step."""
    num = vector.replicas
    params = stack([cast(vector.params, dtype)] * num)
    state = jax.vmap(setup.tx.init)(params)

    def step(grads, state, params, extra):
        if setup.local_grads:
            scale = meta.loss_scale(state)
            grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
        updates, state = setup.tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), updates, state

    step = jax.jit(jax.vmap(step, axis_name=runners.AXIS), compiler_options=QUICK)
    for t in vector.steps:
        grads = stack([cast(g, dtype) for g in t["grads"]])
        extra = stack([cast(setup.extra(t, r), dtype) for r in range(num)])
        params, updates, state = step(grads, state, params, extra)
        pinned = [
            setup.read(replica(state, r), replica(updates, r)) for r in range(num)
        ]
        yield [replica(params, r) for r in range(num)], pinned


@pytest.mark.parametrize(("vector", "dtype"), CASES)
def test_vector(vector, dtype):
    check(vector, dtype, runners.RUNNERS[vector.algorithm])


@pytest.mark.parametrize(
    ("vector", "dtype"), [c for c in CASES if c.values[0].algorithm == "gradient_merge"]
)
def test_gradient_merge_with_one_reduction_per_window(vector, dtype):
    check(vector, dtype, lambda v: runners.gradient_merge(v, sync="last"))


def check(vector, dtype, runner):
    with jax.enable_x64(dtype == "float64"):
        found = []
        for t, (params, pinned) in enumerate(run(vector, dtype, runner(vector))):
            expected = vector.expected[t]
            tolerance = vector.tolerance[dtype]
            found += check_params(expected["params"], params, tolerance, f"step {t}")
            found += check_state(expected["state"], pinned, tolerance, f"step {t}")
        assert not found, "\n".join(found[:10])


def check_params(want, got, tolerance, where):
    want = want * len(got) if len(want) == 1 else want
    return mismatches(want, got, tolerance, f"{where} params")


def check_state(want, pinned, tolerance, where):
    """Per-replica lists are compared one by one, other values on every replica."""
    out = []
    for key, value in want.items():
        for r, got in enumerate(pinned):
            if key not in got:
                continue
            per_replica = isinstance(value, list) and len(value) == len(pinned)
            mine = value[r] if per_replica else value
            if key == "base":
                mine = {k: x for k, x in mine.items() if k in got[key]}
            if key == "k" and isinstance(value, dict):
                sent = {name: 0 for name in got[key]}
                mine = {**sent, **value}
            out += mismatches(mine, got[key], tolerance, f"{where} {key} of {r}")
    return out


@pytest.mark.parametrize(("vector", "dtype"), LOOKAHEAD)
def test_lookahead_of_optax(vector, dtype):
    """optax.lookahead is enough; slow weights may start after the first fast step."""
    with jax.enable_x64(dtype == "float64"):
        base = runners.base_of(vector.hyper["base"], runners.schedule(vector))
        k, alpha = vector.hyper["k"], vector.hyper["alpha"]
        tx = optax.lookahead(base, k, alpha)
        first = tx
        late = vector.options["slow_init"] == "after_first_step"
        if late:
            first = optax.lookahead(base, k, 1.0)  # fast weights stay where they are
        params = optax.LookaheadParams.init_synced(cast(vector.params, dtype))
        state = tx.init(params)
        for t, step in enumerate(vector.steps):
            grads = cast(step["grads"][0], dtype)
            updates, state = (first if t == 0 else tx).update(grads, state, params)
            params = optax.apply_updates(params, updates)
            if late and t == 0:
                params = optax.LookaheadParams.init_synced(params.fast)
            want, tolerance = vector.expected[t], vector.tolerance[dtype]
            found = mismatches(want["params"], [params.fast], tolerance, f"step {t}")
            found += mismatches(want["state"]["slow"], params.slow, tolerance, "slow")
            assert not found, "\n".join(found)


def test_a_wrong_result_is_noticed():
    vector = next(v for v in VECTORS if v.name == "lars_plain")
    tolerance = vector.tolerance["float32"]
    want = vector.expected[0]["params"]
    off = [jax.tree.map(lambda x: x * (1 + 1e-4), want[0])]
    assert not mismatches(want, want, tolerance)
    assert mismatches(want, off, tolerance)
    assert check_state({"k": 3}, [{"k": 3}, {"k": 4}], tolerance, "step 0")
