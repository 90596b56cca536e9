"""auto: what it chooses from, what it takes, and why."""

import dataclasses
import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh

import jfleet
from jfleet._errors import ConfigError, ConfigTypeError
from jfleet._planning.hardware import Hardware
from jfleet._tuning.auto import auto_plan
from jfleet._tuning.candidates import Candidate, candidates, free_switches, mesh_splits
from jfleet._tuning.choice import Planned, next_up, ranked, why_not
from jfleet._tuning.sizes import Sizes
from jfleet.strategy import DistributedStrategy

AUTO = DistributedStrategy(auto=True)
LIMIT = 380_000
"""Bytes that fit more than one candidate."""


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, "float32")


def params():
    return {"up": shape(64, 256), "down": shape(256, 64), "odd": shape(3, 5)}


def loss_fn(params, x):
    hidden = jnp.tanh(x @ params["up"])
    return jnp.mean((hidden @ params["down"]) ** 2) + jnp.sum(params["odd"] ** 2)


def choose(**changes):
    known = {"devices": 4, "hardware": "v5e", "compiler": "cpu"}
    return auto_plan(
        optax.adam(1e-3), params(), loss_fn, shape(32, 64), **{**known, **changes}
    )


# Candidates.


def test_splits_of_devices():
    assert mesh_splits(1, wide=True) == [{"data": 1}]
    assert mesh_splits(6, wide=True) == [
        {"data": 6},
        {"replica": 2, "shard": 3},
        {"replica": 3, "shard": 2},
    ]
    assert mesh_splits(6, wide=False) == [{"data": 6}]


def test_what_is_left_to_auto():
    assert {"sharding", "recompute", "amp"} <= free_switches(AUTO)
    assert free_switches(DistributedStrategy(auto=True, amp=True)) == set()
    fill = DistributedStrategy(auto=True, amp=True, auto_configs={"mode": "fill"})
    assert "amp" not in free_switches(fill)
    assert "sharding" in free_switches(fill)
    assert free_switches(DistributedStrategy(sharding="auto")) == {"sharding"}
    assert free_switches(DistributedStrategy(amp=True)) == set()


def test_candidates_are_all_different_and_leave_nothing_to_auto():
    found = candidates(AUTO, mesh_splits(8, wide=True))
    assert len({c.name for c in found}) == len(found) == 3 * (4 + 3 + 3)
    assert not any(c.half for c in found)
    for one in found:
        assert free_switches(one.strategy) == set()
        on = one.strategy.sharding is True
        assert on == (one.level is not None)
        if on:
            assert one.strategy.sharding_configs["level"] == one.level
        assert (one.strategy.recompute is True) == (one.recompute is not None)
        assert not {"lars", "lamb", "dgc", "localsgd"} & set(one.strategy.to_dict())


def test_what_the_user_set_stays():
    strategy = DistributedStrategy(
        auto=True,
        auto_configs={"mode": "fill", "accuracy": "mixed"},
        gradient_merge=True,
        gradient_merge_configs={"k_steps": 2},
        sharding=True,
        sharding_configs={"level": "os"},
    )
    found = candidates(strategy, [{"data": 4}])
    assert {c.level for c in found} == {"os"}
    assert {c.sync for c in found} == {"last", "each"}
    assert {c.half for c in found} == {False, True}
    for one in found:
        assert one.strategy.gradient_merge_configs["k_steps"] == 2
        assert (one.strategy.amp is True) == one.half
    assert strategy.auto  # the caller's object is as it was


def test_without_a_loss_only_layouts_are_compared():
    found = candidates(AUTO, mesh_splits(4, wide=True), traced=False)
    assert {c.recompute for c in found} == {None}


# The choice.


def fake(cost, peak, *, level=None, recompute=None):
    one = Candidate(
        mesh_shape=(("data", 4),),
        level=level,
        recompute=recompute,
        sync=None,
        half=False,
        strategy=AUTO,
    )
    return Planned(candidate=one, peak_bytes=peak, cost=cost)


def test_the_fastest_that_fits_is_taken():
    slow, fast = fake(2.0, 10), fake(1.0, 30, level="os")
    assert ranked([slow, fast], 40) == [fast, slow]
    assert ranked([slow, fast], 20) == [slow]
    assert ranked([slow, fast], 5) == []
    assert next_up([slow, fast], slow, 20) is fast
    assert next_up([slow, fast], fast, 40) is None
    assert why_not(fast, slow, 20, "time") == "does not fit: 10 B more than there is"
    assert why_not(slow, fast, 40, "time") == "2.00 times the time"


def test_of_equally_fast_ones_the_simplest_is_taken():
    simple = fake(1.005, 30)
    complex_ = fake(1.0, 10, level="p_g_os", recompute="nothing_saveable")
    assert ranked([complex_, simple], None)[0] is simple
    assert why_not(complex_, simple, None, "time") == "no faster, and less simple"
    slower = dataclasses.replace(simple, cost=1.02)
    assert ranked([complex_, slower], None)[0] is complex_


def test_what_cannot_run_is_never_taken():
    broken = Planned(
        candidate=fake(1, 1).candidate, peak_bytes=None, cost=None, refused="no rows"
    )
    assert ranked([broken], None) == []
    assert why_not(broken, fake(1, 1), None, "time") == "cannot run: no rows"


# Sizes in closed form.


@pytest.mark.parametrize("level", [None, "os", "os_g", "p_g_os"])
def test_closed_form_agrees_with_the_plan(level):
    tree, mesh = params(), AbstractMesh((4,), ("data",))
    tx = optax.adam(1e-3)
    one = fake(0, 0, level=level).candidate
    sizes = Sizes.of(tree, tx.init)
    if level is None:
        whole = sum(x.size * 4 for x in jax.tree.leaves(tree))
        assert sizes.peak_bytes(one) == 4 * whole + 4
        return
    planned = jfleet.plan({"params": tree}, level, mesh=mesh, tx=tx)
    largest = 64 * 256 * 4 if level == "p_g_os" else 0
    grads = "grads" if level != "os" else "params"
    assert sizes.peak_bytes(one) == largest + sum(
        planned.device_bytes(kind) for kind in ("params", grads, "opt_state")
    )


def test_a_huge_state_is_split_where_the_devices_divide_it():
    experts = {f"e{i}": shape(7168, 2048) for i in range(500)}
    chosen = auto_plan(optax.adam(1e-3), experts, devices=4096, hardware="v5p")
    # 4096 divides neither dim, 2048 does.
    assert chosen.mesh_shape == {"replica": 2, "shard": 2048}
    assert chosen.plan is None
    assert "sends" in chosen.explain()


# From end to end.


def test_small_memory_splits_more():
    roomy = choose()
    least = min(p.peak_bytes for p in roomy.found)
    tight = choose(memory_bytes=least)
    assert tight.best.peak_bytes == least
    assert tight.strategy.sharding is True
    # With room, time alone decides: nothing estimated is faster.
    costs = [p.cost for p in roomy.found if p.cost is not None]
    assert roomy.best.cost <= 1.01 * min(costs)
    assert choose().to_json() == roomy.to_json()
    text = tight.explain()
    assert "does not fit" in text
    assert all(p.candidate.name in text for p in tight.found)


def test_the_choice_runs():
    chosen = choose(devices=jax.devices()[:4], memory_bytes=LIMIT, verify=True)
    assert "fits" in chosen.verified[-1]
    mesh = jax.make_mesh(
        tuple(chosen.mesh_shape.values()),
        tuple(chosen.mesh_shape),
        devices=jax.devices()[:4],
        axis_types=(jax.sharding.AxisType.Auto,) * len(chosen.mesh_shape),
    )
    opt = chosen.optimizer(mesh)
    state = opt.create(jax.tree.map(lambda s: np.ones(s.shape, s.dtype), params()))
    step = opt.minimize(loss_fn)
    state, metrics = step(state, np.ones((32, 64), np.float32))
    assert np.isfinite(metrics.loss)
    with pytest.raises(ConfigError, match="must have the chosen shape"):
        chosen.optimizer(AbstractMesh((3,), ("data",)))


def test_what_the_compiler_cannot_fit_gives_way(monkeypatch):
    """The first choice is planned to fit; a compiler that says no is believed."""
    needs = iter([LIMIT + 1, LIMIT])

    class Compiled:
        def memory_analysis(self):
            return types.SimpleNamespace(
                argument_size_in_bytes=next(needs) - 30,
                temp_size_in_bytes=20,
                output_size_in_bytes=15,
                alias_size_in_bytes=5,
            )

    module = sys.modules["jfleet._tuning.auto"]
    monkeypatch.setattr(module, "compile_step", lambda *_, **__: Compiled())
    known = {"devices": jax.devices()[:4], "memory_bytes": LIMIT, "verify": True}
    chosen = choose(**known)
    assert chosen.best is chosen.order[1]
    assert "does not fit" in chosen.verified[0]
    assert chosen.verified[1].endswith("fits")
    needs = iter([LIMIT + 1] * 100)
    with pytest.raises(ConfigError, match="fits none of them"):
        choose(**known)


def test_json_names_every_candidate():
    found = json.loads(choose().to_json())
    assert len(found["candidates"]) == 3 * (4 + 3)
    assert [c["verdict"] for c in found["candidates"]].count("chosen") == 1
    assert found["strategy"]["settings"].get("auto") is None


def test_bad_questions():
    with pytest.raises(ConfigError, match="smallest of 21 candidates"):
        choose(memory_bytes=1000)
    with pytest.raises(ConfigError, match="needs the hardware"):
        choose(hardware=None)
    with pytest.raises(ConfigError, match="needs the batch"):
        auto_plan(optax.sgd(0.1), params(), loss_fn, devices=4, hardware="v5e")
    with pytest.raises(ConfigError, match="not both"):
        choose(mesh=AbstractMesh((4,), ("data",)))
    with pytest.raises(ConfigError, match="at least 1"):
        choose(devices=0)
    with pytest.raises(ConfigError, match="above 0"):
        choose(memory_bytes=0)
    with pytest.raises(ConfigTypeError, match="DistributedStrategy"):
        choose(strategy={"auto": True})
    with pytest.raises(ConfigError, match="devices is only a number"):
        choose(devices=16, verify=True)
    with pytest.raises(ConfigError, match="nothing that can run"):
        auto_plan(
            optax.sgd(0.1), params(), loss_fn, shape(7, 64), devices=4, hardware="v5e"
        )


def test_hardware_of_ones_own_changes_the_choice():
    """Where links are slow, fewer bytes sent win."""
    known = {
        "name": "lab",
        "memory_bytes": 2**30,
        "flops": 1e12,
        "memory_bandwidth": 1e12,
    }
    slow = choose(hardware=Hardware(link_bandwidth=1e6, **known))
    least = min(p.plan.traffic.wire_bytes for p in slow.found if p.plan)
    assert slow.plan.traffic.wire_bytes <= 1.02 * least
