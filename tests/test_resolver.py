"""resolve, build, auto, the registry: what runs and what is said about it."""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jfleet._errors import ConfigError, JfleetWarning
from jfleet._resolving.builtin_rules import default_registry
from jfleet._resolving.rules import Registry, Rule
from jfleet.optimizer import Optimizer, optimizer
from jfleet.resolver import build, resolve
from jfleet.strategy import SWITCHES, DistributedStrategy

SGD = optimizer(optax.sgd, learning_rate=0.1, momentum=0.9)
ADAM = optimizer(optax.adam, learning_rate=0.01)
BASES = {"sgd": SGD, "adam": ADAM, "plain": optax.adam(0.01)}
ONE, EIGHT = {"data": 1}, {"data": 8}
GRID = {"replica": 2, "shard": 4}
PARAMS = {"w": jnp.ones((64, 64)), "b": jnp.zeros(64)}
PARAM_BYTES = 4 * (64 * 64 + 64)


def strategy(**settings):
    return DistributedStrategy(**settings)


# Strict auto: the seed cases.


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(
    ("mesh", "applied"),
    [(None, ()), (ONE, ()), (EIGHT, ("sharding",)), (GRID, ("sharding",))],
)
def test_auto_alone(base, mesh, applied):
    s = strategy(auto=True)
    found = resolve(s, base=BASES[base], mesh_shape=mesh)
    assert found.applied == applied
    assert found.strict_auto
    assert all(choice.source == "auto" for choice in found.choices)
    assert found == resolve(s, base=BASES[base], mesh_shape=mesh)
    assert s == strategy(auto=True)
    if applied:
        assert found.options("sharding").level == "os_g"
        assert "chosen by auto" in found.explain()


@pytest.mark.parametrize(
    ("settings", "applied"),
    [
        ({"amp": True}, ("amp",)),
        ({"amp": False}, ()),
        ({"localsgd": True, "localsgd_configs": {"k_steps": 2}}, ("localsgd",)),
        ({"localsgd_configs": {"k_steps": 2}}, ()),
        ({"gradient_scale_configs": {"scale_strategy": "avg"}}, ()),
    ],
)
def test_auto_with_something_else_is_ignored_aloud(settings, applied):
    with pytest.warns(
        JfleetWarning, match=r"auto is ignored because you set"
    ) as caught:
        found = resolve(strategy(auto=True, **settings), base=SGD, mesh_shape=EIGHT)
    assert found.applied == applied
    assert not found.strict_auto
    assert "auto is ignored" in found.explain()
    assert next(iter(settings)) in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        by_hand = resolve(strategy(**settings), base=SGD, mesh_shape=EIGHT)
    assert by_hand.applied == applied
    assert by_hand.rules == found.rules


def test_auto_on_one_object_does_not_touch_another():
    one, two = strategy(auto=True), strategy(amp=True)
    first = resolve(one, base=SGD, mesh_shape=EIGHT)
    assert resolve(two, base=SGD, mesh_shape=EIGHT).applied == ("amp",)
    assert resolve(one, base=SGD, mesh_shape=EIGHT) == first
    assert resolve(strategy(), base=SGD, mesh_shape=EIGHT).applied == ()


def test_fill_keeps_what_was_set_and_chooses_the_rest():
    fill = {"auto": True, "auto_configs": {"mode": "fill", "accuracy": "mixed"}}
    found = resolve(strategy(**fill, clip=True), base=SGD, mesh_shape=EIGHT)
    assert found.applied == ("amp", "clip", "sharding")
    assert [found[n].source for n in found.applied] == ["auto", "user", "auto"]
    found = resolve(strategy(**fill, amp=False), base=SGD, mesh_shape=EIGHT)
    assert found.applied == ("sharding",)
    assert found["amp"].source == "user"
    options = {"sharding_configs": {"min_shard_size": 10, "level": "os"}}
    found = resolve(strategy(**fill, **options), base=SGD, mesh_shape=EIGHT)
    assert found.options("sharding").min_shard_size == 10
    assert found.options("sharding").level == "os"


def test_a_single_switch_may_be_auto():
    found = resolve(
        strategy(sharding="auto", amp="auto", clip=True), base=SGD, mesh_shape=EIGHT
    )
    assert found.applied == ("clip", "sharding")
    assert "exact" in found.refused["amp"]
    assert found["localsgd"].source == "default"


def test_strict_auto_trains_like_the_same_switches_by_hand():
    """Case B98: bit for bit."""
    auto = resolve(strategy(auto=True), base=SGD, mesh_shape=EIGHT)
    settings = {name: True for name in auto.applied}
    settings["sharding_configs"] = {"level": auto.options("sharding").level}
    hand = resolve(strategy(**settings), base=SGD, mesh_shape=EIGHT)
    assert hand.rules == auto.rules
    results = []
    for resolution in (auto, hand):
        tx, params = build(resolution, SGD), PARAMS
        state = tx.init(params)
        for step in range(5):
            grads = jax.tree.map(lambda x, n=step: jnp.cos(x + n), params)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        results.append(params)
    jax.tree.map(np.testing.assert_array_equal, *results)


SLOW_NETWORK = {
    "accuracy": "any",
    "network_bytes_per_second": PARAM_BYTES * 2 * 7 / 8,
    "compute_seconds": 0.25,
}


@pytest.mark.parametrize("accuracy", ["exact", "mixed", "any"])
@pytest.mark.parametrize("mesh", [None, ONE, EIGHT, GRID])
@pytest.mark.parametrize("base", BASES)
def test_auto_never_costs_more_accuracy_than_allowed(accuracy, mesh, base):
    limits = {**SLOW_NETWORK, "accuracy": accuracy, "device_memory_bytes": 1000}
    s = strategy(auto=True, auto_configs={**limits, "activation_bytes": 10**9})
    found = resolve(s, base=BASES[base], mesh_shape=mesh, params=PARAMS)
    allowed = {"exact": {"nothing", "rounding"}, "mixed": {"precision"}, "any": None}
    allowed["mixed"] |= allowed["exact"]
    for rule in found.rules:
        assert allowed[accuracy] is None or rule.changes in allowed[accuracy]
        assert rule.name not in ("lars", "lamb")
    assert ("amp" in found) == (accuracy != "exact")
    assert all(len(choice.reason) > 10 for choice in found.choices)


def test_auto_on_a_slow_network():
    settings = {"auto": True, "auto_configs": SLOW_NETWORK}
    # Communication takes 4 of compute. One axis: sharding has it.
    found = resolve(strategy(**settings), base=SGD, mesh_shape=EIGHT, params=PARAMS)
    assert found.applied == ("amp", "fp16_allreduce", "sharding")
    assert found["fp16_allreduce"].numbers["communication_per_compute"] == 4.0
    assert "sharding uses the only axis" in found.refused["localsgd"]
    found = resolve(strategy(**settings), base=SGD, mesh_shape=GRID, params=PARAMS)
    assert found.applied == ("amp", "dgc", "sharding")
    found = resolve(strategy(**settings), base=ADAM, mesh_shape=GRID, params=PARAMS)
    assert found.applied == ("amp", "localsgd", "sharding")
    assert found.options("localsgd").k_steps == 4
    fast = {**SLOW_NETWORK, "compute_seconds": 10.0}
    s = strategy(auto=True, auto_configs=fast)
    found = resolve(s, base=SGD, mesh_shape=GRID, params=PARAMS)
    assert found.applied == ("amp", "sharding")


@pytest.mark.parametrize(
    ("memory", "activations", "applied", "level"),
    [
        (None, None, ("sharding",), "os_g"),
        # os_g holds P + (P + 2P) / 8 = 22.9 kB, p_g_os 4P / 8 = 8.3 kB of P = 16.6 kB.
        (40_000, 10_000, ("sharding",), "os_g"),
        (25_000, 10_000, ("sharding",), "p_g_os"),
        (25_000, 20_000, ("recompute", "sharding"), "p_g_os"),
    ],
)
def test_auto_with_a_memory_limit(memory, activations, applied, level):
    limits = {"device_memory_bytes": memory, "activation_bytes": activations}
    s = strategy(auto=True, auto_configs=limits)
    found = resolve(s, base=ADAM, mesh_shape=EIGHT, params=PARAMS)
    assert found.applied == applied
    assert found.options("sharding").level == level
    numbers = found["sharding"].numbers
    assert numbers["param_bytes"] == PARAM_BYTES
    assert numbers["state_bytes"] == 2 * PARAM_BYTES + 4
    assert found["sharding"].reason in found.explain()
    if "recompute" in applied:
        needed = -(-(4 * PARAM_BYTES + 4) // 8) + activations
        assert found["recompute"].numbers["needed_bytes"] == needed


def test_auto_does_not_split_what_is_not_there():
    base = optimizer(optax.sgd, learning_rate=0.1)
    found = resolve(strategy(auto=True), base=base, mesh_shape=EIGHT, params=PARAMS)
    assert found.applied == ()
    assert "no state worth splitting" in found.refused["sharding"]


def test_what_auto_proposed_yields_to_what_the_user_set():
    s = strategy(auto=True, auto_configs={"mode": "fill"}, localsgd=True)
    found = resolve(s, base=ADAM, mesh_shape=EIGHT)
    assert found.applied == ("localsgd",)
    assert "localsgd" in found.refused["sharding"]
    assert resolve(s, base=ADAM, mesh_shape=GRID).applied == ("localsgd", "sharding")


# Cases.


@pytest.mark.parametrize(
    ("name", "base", "kind"),
    [
        ("dgc", optax.adam(0.1), "optax.sgd"),
        ("dgc", ADAM, "optax.sgd"),
        ("dgc", optimizer(optax.adamw, learning_rate=0.1), "optax.sgd"),
        ("dgc", optimizer(optax.lamb, learning_rate=0.1), "optax.sgd"),
        ("lars", ADAM, "optax.sgd"),
        ("lars", optax.adam(0.1), "optax.sgd"),
        ("lamb", SGD, "optax.adam"),
        ("lamb", optax.sgd(0.1), "optax.adam"),
    ],
)
def test_b100_a_base_that_does_not_fit_is_an_error(name, base, kind):
    with pytest.raises(ConfigError, match=rf"strategy.{name} cannot run") as caught:
        resolve(strategy(**{name: True}), base=base, mesh_shape=EIGHT)
    assert kind in str(caught.value)


def test_b100_replacing_the_base_is_reported():
    for name, base in (("lars", SGD), ("dgc", SGD), ("lamb", ADAM)):
        found = resolve(strategy(**{name: True}), base=base, mesh_shape=EIGHT)
        assert f"takes the place of {base!r}" in found[name].reason
        assert f"takes the place of {base!r}" in found.explain()
    found = resolve(strategy(localsgd=True), base=optax.adam(0.1), mesh_shape=EIGHT)
    assert found.applied == ("localsgd",)


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("lamb", {"eps_root": 1e-8}),
        ("lamb", {"mu_dtype": "bfloat16"}),
        ("lamb", {"nesterov": True}),
        ("lars", {"accumulator_dtype": "bfloat16"}),
    ],
)
def test_no_hyperparameter_of_the_base_is_lost(name, lost):
    factory = optax.adam if name == "lamb" else optax.sgd
    base = optimizer(factory, learning_rate=0.1, **lost)
    with pytest.raises(ConfigError, match=next(iter(lost))):
        resolve(strategy(**{name: True}), base=base)


def test_b103_sharding_that_cannot_be_honoured():
    s = strategy(sharding=True, sharding_configs={"axis": "shard"})
    with pytest.raises(ConfigError, match=r"'shard'.*\{'data': 8\}"):
        resolve(s, base=SGD, mesh_shape=EIGHT)
    with pytest.warns(JfleetWarning, match="nothing is split") as caught:
        found = resolve(strategy(sharding=True), base=SGD, mesh_shape=ONE)
    assert len(caught) == 1
    assert found.applied == ("sharding",)
    assert "nothing is split" in found.explain()


def test_b104_the_strategy_is_only_read():
    s = strategy(amp=True, sharding=True, gradient_merge_configs={"k_steps": 4})
    s.gradient_merge = True
    before = s.copy()
    found = resolve(s, base=SGD, mesh_shape=EIGHT)
    assert s == before
    s.gradient_merge_configs = {"k_steps": 8}
    s.amp = False
    assert found.options("gradient_merge").k_steps == 4
    assert "amp" in found


# Axes.


@pytest.mark.parametrize(
    ("settings", "mesh", "axes"),
    [
        ({"localsgd": True}, EIGHT, {"localsgd": ("data",)}),
        ({"localsgd": True}, GRID, {"localsgd": ("replica",)}),
        (
            {"localsgd": True, "sharding": True},
            {"dcn": 2, "data": 4},
            {"localsgd": ("dcn",), "sharding": ("data",)},
        ),
        (
            {"dgc": True, "dgc_configs": {"axis": ["replica", "shard"]}},
            GRID,
            {"dgc": ("replica", "shard")},
        ),
        (
            {"localsgd": True, "fp16_allreduce": True},
            GRID,
            {"localsgd": ("replica",), "fp16_allreduce": ("shard",)},
        ),
        ({"fp16_allreduce": True}, GRID, {"fp16_allreduce": ("replica", "shard")}),
        (
            {"tensor_parallel": True, "fp16_allreduce": True},
            {"data": 4, "model": 2},
            {"tensor_parallel": ("model",), "fp16_allreduce": ("data",)},
        ),
        (
            {
                "tensor_parallel": True,
                "tensor_parallel_configs": {"axis": "heads", "degree": 2},
                "localsgd": True,
            },
            {"data": 4, "heads": 2},
            {"tensor_parallel": ("heads",), "localsgd": ("data",)},
        ),
    ],
)
def test_axes(settings, mesh, axes):
    found = resolve(strategy(**settings), base=SGD, mesh_shape=mesh)
    assert found.axes == axes
    local = {a for n, given in axes.items() for a in given if n in LOCAL}
    assert set(found.local_axes) == local
    assert found.needs_replica_gradients == bool(local)


LOCAL = {"localsgd", "dgc", "fp16_allreduce"}


def test_features_that_want_the_axis_of_tensor_parallelism_are_refused():
    s = strategy(tensor_parallel=True, localsgd=True)
    s.localsgd_configs = {"axis": "model"}
    with pytest.raises(ConfigError, match="tensor_parallel splits layers over model"):
        resolve(s, base=SGD, mesh_shape={"data": 4, "model": 2})
    s = strategy(sharding=True, localsgd=True)
    s.sharding_configs = {"optimizer_axis": ["shard", "replica"]}
    with pytest.raises(ConfigError, match="splits them over replica"):
        resolve(s, base=SGD, mesh_shape=GRID)


def test_who_takes_batch_statistics():
    s = strategy(sync_batch_norm=True)
    found = resolve(s, base=SGD, mesh_shape=GRID)
    assert found.batch_norm_axes == ()
    assert "one global array" in found.explain()
    s.localsgd = True
    found = resolve(s, base=SGD, mesh_shape=GRID)
    assert found.batch_norm_axes == ("replica",)
    assert "BatchNorm(axis_name=('replica',))" in found.explain()


def test_reducer():
    def reducer(**settings):
        return resolve(strategy(**settings), base=SGD, mesh_shape=EIGHT).reducer

    assert reducer() == "mean"
    assert reducer(amp=True) == "mean"
    assert reducer(dgc=True) == "dgc"
    assert reducer(localsgd=True) == "localsgd"
    assert reducer(fp16_allreduce=True) == "fp16_allreduce"


def test_sync_last_needs_the_gradients_of_the_replicas():
    s = strategy(gradient_merge=True)
    assert not resolve(s, base=SGD, mesh_shape=EIGHT).needs_replica_gradients
    s.gradient_merge_configs = {"sync": "last"}
    found = resolve(s, base=SGD, mesh_shape=EIGHT)
    assert found.local_axes == ("data",)
    assert found.num_local == 8


def test_hybrid_configs_agree_with_the_mesh():
    s = strategy(sharding=True, hybrid_configs={"sharding_degree": 4, "dp_degree": 2})
    assert resolve(s, base=SGD, mesh_shape=s.mesh_shape()).applied == ("sharding",)
    assert resolve(s, base=SGD).applied == ("sharding",)
    for mesh in (EIGHT, {"replica": 4, "shard": 2}, {**GRID, "model": 2}):
        with pytest.raises(ConfigError, match="hybrid_configs describes"):
            resolve(s, base=SGD, mesh_shape=mesh)
    s = strategy(hybrid_configs={"mp_degree": 2})
    with pytest.raises(ConfigError, match="tensor_parallel is off"):
        resolve(s, base=SGD)


def test_degree_minus_one_is_any():
    s = strategy(sharding=True, sharding_configs={"degree": -1})
    assert resolve(s, base=SGD, mesh_shape=EIGHT).applied == ("sharding",)
    s.sharding_configs = {"degree": 8}
    assert resolve(s, base=SGD, mesh_shape=EIGHT).applied == ("sharding",)


def test_options_without_their_switch_warn():
    with pytest.warns(JfleetWarning, match="clip_configs is set but clip is off"):
        resolve(strategy(clip_configs={"max_norm": 1}), base=SGD)
    resolve(strategy(clip_configs={"max_norm": 1}, clip=False), base=SGD)
    with pytest.warns(JfleetWarning, match="nothing is left to auto"):
        resolve(strategy(auto_configs={"mode": "fill"}), base=SGD)


# The scale of amp.


def test_bfloat16_has_no_scale_unless_asked_for():
    def amp(**configs):
        s = strategy(amp=True, amp_configs=configs)
        found = resolve(s, base=SGD)
        return found.options("amp"), found.scales_loss

    options, scales = amp()
    assert (options.init_loss_scaling, options.use_dynamic_loss_scaling) == (1.0, False)
    assert not scales
    options, scales = amp(dtype="float16")
    assert (options.init_loss_scaling, options.use_dynamic_loss_scaling) == (
        32768,
        True,
    )
    assert scales
    assert amp(init_loss_scaling=8.0)[1]
    assert not amp(init_loss_scaling=1, use_dynamic_loss_scaling=False)[1]
    assert not amp(dtype="float32")[1]


# build.


def test_no_strategy_is_the_base():
    found = resolve(strategy(), base=SGD)
    assert build(found, SGD).init is SGD.init
    assert found.explain().startswith("Strategy on unknown mesh\nApplied: nothing")


@pytest.mark.parametrize("name", [n for n in SWITCHES if n != "auto"])
def test_state_does_not_depend_on_the_axes_in_scope(name):
    base = ADAM if name == "lamb" else SGD
    s = strategy(**{name: True, "gradient_merge": True})
    mesh = {"data": 8, "model": 1} if name != "tensor_parallel" else {"model": 8}
    found = resolve(s, base=base, mesh_shape=mesh)
    shapes = [
        jax.eval_shape(build(found, base, axis_name=axis).init, PARAMS)
        for axis in (None, *(["data"] if "data" in mesh else []))
    ]
    assert all(s == shapes[0] for s in shapes)


def vmapped(tx, params, grads, **extra):
    """Updates of every replica; ``grads`` has them along dim 0."""

    def one(g):
        return tx.update(g, tx.init(params), params, **extra)[0]

    return jax.jit(jax.vmap(one, axis_name="data"))(grads)


@pytest.mark.parametrize("how", ["avg", "sum"])
@pytest.mark.parametrize("features", [(), ("fp16_allreduce",), ("clip",)])
def test_scale_strategy(how, features):
    base = optax.sgd(1.0)
    s = strategy(**dict.fromkeys(features, True), clip_configs={"max_norm": 1e6})
    s.clip = "clip" in features
    s.gradient_scale_configs = {"scale_strategy": how}
    found = resolve(s, base=base, mesh_shape={"data": 4})
    grads = jnp.arange(4.0)
    expected = -6.0 if how == "sum" else -1.5
    updates = vmapped(build(found, base, axis_name="data"), jnp.zeros(()), grads)
    np.testing.assert_array_equal(updates, np.full(4, expected))
    if not found.needs_replica_gradients:
        tx = build(found, base)
        update, _ = tx.update(grads.mean(), tx.init(grads[0]), grads[0])
        assert update == expected


@pytest.mark.parametrize(("how", "expected"), [("avg", -2.5), ("sum", -10.0)])
@pytest.mark.parametrize("sync", ["auto", "last", "each"])
def test_every_sync_gives_the_same(sync, how, expected):
    base = optax.sgd(1.0)
    s = strategy(gradient_merge=True)
    s.gradient_scale_configs = {"scale_strategy": how}
    s.gradient_merge_configs = {"k_steps": 2, "sync": sync}
    found = resolve(s, base=base, mesh_shape={"data": 4})
    tx = build(found, base, axis_name="data")
    params = jnp.zeros(())

    def two(first, second):
        state = tx.init(params)
        zero, state = tx.update(first, state, params)
        update, state = tx.update(second, state, params)
        return zero, update, state.acc

    run = jax.jit(jax.vmap(two, axis_name="data"))
    zero, update, _ = run(jnp.arange(4.0), 2 + jnp.arange(4.0))
    np.testing.assert_array_equal(zero, np.zeros(4))
    np.testing.assert_array_equal(update, np.full(4, expected))
    text = str(jax.make_jaxpr(two, axis_env=[("data", 4)])(1.0, 1.0))
    inside = text.index("cond") if "cond" in text else len(text)
    reduced_first = "psum" in text[:inside]
    assert reduced_first == (sync == "each"), text


def test_axes_that_overlap_or_lack_are_refused():
    s = strategy(fp16_allreduce=True, localsgd=True)
    found = resolve(s, base=SGD)
    with pytest.raises(ConfigError, match="would both reduce over data"):
        build(found, SGD, axis_name="data")
    s = strategy(dgc=True, dgc_configs={"axis": ["replica", "shard"]})
    found = resolve(s, base=SGD, mesh_shape=GRID)
    with pytest.raises(ConfigError, match="name all of its axes"):
        build(found, SGD, axis_name="replica")


def test_loss_wrappers_come_in_order():
    s = strategy(amp=True, recompute=True)
    found = resolve(s, base=SGD)

    def loss_fn(params, x):
        return jnp.sum(jnp.tanh(x @ params["w"]))

    for wrap in found.loss_wrappers():
        loss_fn = wrap(loss_fn)
    arguments = ({"w": jnp.ones((2, 2))}, jnp.ones((1, 2)))
    equations = jax.make_jaxpr(loss_fn)(*arguments).eqns
    names = [equation.primitive.name for equation in equations]
    # The cast is outside: what is recomputed starts from the narrow copies.
    assert names.index("convert_element_type") < names.index("remat2")
    assert names.count("remat2") == 1
    remat = equations[names.index("remat2")]
    assert {str(v.aval.dtype) for v in remat.invars} == {"bfloat16"}
    assert loss_fn(*arguments).dtype == jnp.float32
    assert found.applied == ("recompute", "amp")


@pytest.mark.parametrize("with_amp", [True, False])
def test_who_handles_an_overflow_on_the_wire(with_amp):
    """With amp its scale must hear of it; without amp the reducer skips by itself."""
    s = strategy(fp16_allreduce=True, amp=with_amp)
    found = resolve(s, base=SGD, mesh_shape={"data": 2})
    tx = build(found, SGD, axis_name="data")

    def one(g):
        return tx.update(g, tx.init(g), jnp.zeros(()))

    run = jax.jit(jax.vmap(one, axis_name="data"))
    updates, state = run(jnp.array([1.0, 1e6]))
    np.testing.assert_array_equal(updates, [0.0, 0.0])
    # Out of the 16-bit reducer comes infinity; amp is inside of it.
    scaling = state.inner if with_amp else state
    np.testing.assert_array_equal(scaling.num_skipped, [1, 1])
    # SGD with momentum has not moved.
    momentum = jax.tree.leaves(scaling.inner)
    assert all(not np.asarray(leaf).any() for leaf in momentum)


# The outer optimizer of localsgd.


def test_outer_optimizer():
    s = strategy(localsgd=True)
    s.localsgd_configs = {"outer": {"name": "sgd", "learning_rate": 0.5}}
    found = resolve(s, base=optax.sgd(1.0), mesh_shape={"data": 2})
    tx = build(found, optax.sgd(1.0), axis_name="data")
    updates = vmapped(tx, jnp.zeros(()), jnp.array([1.0, 3.0]))
    # The replicas moved by -1 and -3; the mean change is halved.
    np.testing.assert_array_equal(updates, [-1.0, -1.0])


# Reports.


def test_report_as_json():
    s = strategy(clip=True, amp="auto")
    found = resolve(s, base=SGD, mesh_shape=EIGHT)
    content = json.loads(found.to_json(indent=1))
    assert content["applied"] == ["clip"]
    assert content["mesh"] == EIGHT
    assert content["reducer"] == "mean"
    by_name = {choice["name"]: choice for choice in content["choices"]}
    assert by_name["clip"]["options"]["max_norm"] == 1.0
    assert by_name["clip"]["source"] == "user"
    assert by_name["amp"] == {
        "name": "amp",
        "on": False,
        "source": "auto",
        "reason": found.refused["amp"],
        "numbers": {},
        "options": None,
        "axes": [],
    }
    assert len(by_name) == len(default_registry)
    assert hash(found) == hash(resolve(s, base=SGD, mesh_shape=EIGHT))


def test_unknown_choice():
    found = resolve(strategy(), base=SGD)
    with pytest.raises(KeyError, match="nothing"):
        found["nothing"]


# Third parties.


def double(options, context, inner):
    return optax.chain(optax.scale(options["factor"]), inner)


MINE = Rule(name="mine", phase="clip", summary="scales gradients", wrap=double)


def test_a_third_party_registers_a_rule_without_touching_ours():
    rules = default_registry.copy()
    rules.register(MINE)
    s = strategy(extensions={"mine": {"factor": 2.0}}, clip=True, amp=True)
    found = resolve(s, base=optax.sgd(1.0), registry=rules)
    assert found.applied == ("amp", "clip", "mine")
    assert hash(found) == hash(resolve(s, base=optax.sgd(1.0), registry=rules))
    tx = build(found, optax.sgd(1.0))
    # The clip comes first, then the factor.
    update, _ = tx.update(jnp.array(5.0), tx.init(jnp.zeros(())), jnp.zeros(()))
    assert update == -2.0
    with pytest.raises(ConfigError, match="no rule 'mine'"):
        resolve(s, base=optax.sgd(1.0))
    assert "mine" not in default_registry
    assert rules.unregister("mine") is MINE
    assert len(rules) == len(default_registry)


def test_a_rule_of_a_third_party_takes_part_in_conflicts():
    rules = default_registry.copy()
    rules.register(
        Rule(
            name="other",
            phase="base",
            summary="another optimizer",
            excludes=(("amp", "it needs full precision"),),
            replaces=("base",),
            wrap=lambda options, context, inner: optax.sgd(1.0),
        )
    )
    for settings, text in (
        ({"lars": True}, "both replace the optimizer"),
        ({"amp": True}, "it needs full precision"),
    ):
        s = strategy(extensions={"other": True}, **settings)
        with pytest.raises(ConfigError, match=text):
            resolve(s, base=SGD, registry=rules)
    s = strategy(extensions={"other": True}, auto=True)
    s.auto_configs = {"mode": "fill", "accuracy": "mixed"}
    found = resolve(s, base=SGD, registry=rules)
    assert found.applied == ("other",)
    assert "it needs full precision" in found.refused["amp"]
    s = strategy(extensions={"other": False}, amp=True)
    assert resolve(s, base=SGD, registry=rules).applied == ("amp",)
    s = strategy(auto=True)
    found = resolve(s, base=SGD, mesh_shape=EIGHT, registry=rules)
    assert "third parties" in found.refused["other"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"name": "two words"}, "must be a word"),
        ({"phase": "clipp"}, "did you mean 'clip'"),
        ({"phase": "loss"}, "needs nests"),
        ({"nests": "loss"}, "nests must be one of"),
        ({"changes": "everything"}, "changes must be one of"),
        ({"replaces": ("loss",)}, "replaces must hold"),
    ],
)
def test_bad_rules(change, text):
    fields = {"name": "mine", "phase": "clip", "summary": "", "wrap": double, **change}
    with pytest.raises(ConfigError, match=text):
        Rule(**fields)


def test_bad_registrations():
    rules = Registry([MINE])
    with pytest.raises(ConfigError, match="there is a rule 'mine' already"):
        rules.register(MINE)
    with pytest.raises(TypeError, match=r"needs a jfleet\.Rule"):
        rules.register("mine")
    with pytest.raises(ConfigError, match="did you mean 'mine'"):
        rules.unregister("min")
    with pytest.raises(ConfigError, match="no rule 'amp'"):
        resolve(strategy(amp=True), base=SGD, registry=rules)


# jfleet.optimizer.


def test_optimizer_is_an_optax_transformation():
    plain = optax.sgd(0.1, momentum=0.9)
    params = {"w": jnp.ones(3)}
    chained = optax.chain(optax.scale(2.0), SGD)
    assert isinstance(SGD, optax.GradientTransformationExtraArgs)
    ours, theirs = SGD.init(params), plain.init(params)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    updates, _ = SGD.update(params, ours, params, value=1.0)
    jax.tree.map(
        np.testing.assert_array_equal, updates, plain.update(params, theirs)[0]
    )
    chained.update(params, chained.init(params), params)


def test_optimizer_remembers_and_compares():
    same = optimizer(optax.sgd, learning_rate=0.1, momentum=0.9)
    assert isinstance(same, Optimizer)
    assert same == SGD
    assert hash(same) == hash(SGD)
    assert same != optimizer(optax.sgd, learning_rate=0.2, momentum=0.9)
    assert same.hyperparameters == {"learning_rate": 0.1, "momentum": 0.9}
    assert same.arguments["nesterov"] is False
    assert same.changed == same.hyperparameters
    assert optimizer(optax.adam, learning_rate=0.1, b1=0.9).changed == {
        "learning_rate": 0.1
    }
    assert same.factory is optax.sgd
    assert same.kind == "sgd"
    assert repr(same) == "jfleet.optimizer(sgd, learning_rate=0.1, momentum=0.9)"


def test_optimizer_with_a_factory_of_ones_own():
    def mine(rate):
        return optax.sgd(rate)

    assert optimizer(mine, rate=0.1).kind == "other (mine)"
    with pytest.raises(ConfigError, match="did you mean 'rate'"):
        optimizer(mine, rates=0.1)
    with pytest.raises(TypeError, match="must return an optax transformation"):
        optimizer(lambda a: a, a=1)
    with pytest.raises(TypeError, match="must name its arguments"):
        optimizer(dict, a=1)
