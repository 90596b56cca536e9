"""Every pair and triple of switches: it runs as it must, or is refused with a reason.

The tables of docs/composition.md and docs/errors.md are checked here too. Report B99:
switches that did not fit on a chain were dropped without a word.
"""

import functools
import importlib.util
import itertools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jfleet._errors import ConfigError
from jfleet._resolving.builtin_rules import default_registry
from jfleet.optimizer import optimizer
from jfleet.resolver import build, resolve
from jfleet.strategy import SWITCHES, DistributedStrategy
from tests import strategy_reference as ref

DOCS = pathlib.Path(__file__).parent.parent / "docs"
SPEC = importlib.util.spec_from_file_location("tables", DOCS / "generate_tables.py")
tables = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tables)

FEATURES = [name for name in SWITCHES if name != "auto"]
ALONE = {"dgc", "localsgd", "adaptive_localsgd"}
TRANSFORMS = ALONE | {"amp", "gradient_merge", "fp16_allreduce", "clip", "lars", "lamb"}
NEVER = {
    *(frozenset(("dgc", other)) for other in ("fp16_allreduce", "lars", "lamb")),
    *(frozenset(pair) for pair in itertools.combinations(ALONE, 2)),
    frozenset(("lars", "lamb")),
}
"""What the specification forbids; written down here, not read from the rules."""
SAME_AXIS = {
    *(frozenset((one, "sharding")) for one in ALONE),
    *(frozenset((one, "fp16_allreduce")) for one in ALONE - {"dgc"}),
}
"""What needs an axis for each."""
MESH = {"replica": 2, "shard": 2, "model": 2}
SCALE = 64.0
OPTIONS = {
    "amp": {"dtype": "float16", "init_loss_scaling": SCALE},
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


def strategy_of(names):
    configs = {f"{name}_configs": OPTIONS[name] for name in names if name in OPTIONS}
    return DistributedStrategy(**dict.fromkeys(names, True), **configs)


def base_of(names):
    if "lamb" in names:
        rates = {"b1": ref.B1, "b2": ref.B2, "eps": ref.EPS}
        return optimizer(optax.adam, learning_rate=ref.RATE, **rates)
    return optimizer(optax.sgd, learning_rate=ref.RATE, momentum=ref.MOMENTUM)


def forbidden(names, sets):
    return [set(pair) for pair in sets if pair <= set(names)]


PAIRS = list(itertools.combinations(FEATURES, 2))
TRIPLES = list(itertools.combinations(FEATURES, 3))


def name_of(names):
    return "+".join(names)


@pytest.mark.parametrize("names", [*PAIRS, *TRIPLES], ids=name_of)
def test_every_combination_is_kept_whole_or_refused_with_both_names(names):
    strategy, before = strategy_of(names), strategy_of(names)
    for mesh, sets in (
        (MESH, NEVER),
        ({"data": 4, "model": 2}, NEVER | SAME_AXIS),
    ):
        clashes = forbidden(names, sets)
        if clashes:
            with pytest.raises(ConfigError, match="cannot run") as caught:
                resolve(strategy, base=base_of(names), mesh_shape=mesh)
            text = str(caught.value)
            assert any(all(name in text for name in pair) for pair in clashes), text
        else:
            found = resolve(strategy, base=base_of(names), mesh_shape=mesh)
            assert set(found.applied) == set(names)
            assert found == resolve(strategy, base=base_of(names), mesh_shape=mesh)
            assert all(found[name].source == "user" for name in names)
            assert all(name in found.explain() for name in names)
    assert strategy == before


PARAMS = {
    "w": np.sin(np.arange(12.0)).reshape(4, 3).astype(np.float32),
    "b": np.cos(np.arange(3.0)).astype(np.float32),
}
NUM_CALLS = 6


def gradient(call, replica, shard):
    """A gradient that differs between calls, replicas, shards and elements."""
    seed = 1.3 * call + 0.7 * replica + 0.4 * shard
    return {
        "w": np.cos(seed + 0.9 * np.arange(12.0)).reshape(4, 3).astype(np.float32),
        "b": np.sin(seed - 0.5 * np.arange(3.0)).astype(np.float32),
    }


def loss(call, replica):
    return 4.0 / (1 + call) + 0.1 * replica


def spoiled(names, call):
    """With amp, one element of one replica overflows in the third call."""
    return "amp" in names and call == 2


def shards_for(names):
    """Two, but one where four numbers would be summed in 16 bits in an open order."""
    return 1 if "fp16_allreduce" in names and not ALONE & set(names) else 2


@functools.cache
def run_both(names, num_shards):
    """Parameters per call and replica: of the library, of the reference."""
    mesh, shape = {"replica": 2, "shard": num_shards}, (2, num_shards)

    def spread(tree):
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (*shape, *x.shape)), tree)

    scale = SCALE if "amp" in names else 1.0
    base = base_of(names)
    found = resolve(strategy_of(sorted(names)), base=base, mesh_shape=mesh)
    tx = build(found, base, axis_name=("replica", "shard"))

    def one(params, state, grads, value):
        updates, state = tx.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    step = jax.vmap(jax.vmap(one, axis_name="shard"), axis_name="replica")
    step = jax.jit(step)
    params = spread(jax.tree.map(jnp.asarray, PARAMS))
    state = jax.vmap(jax.vmap(tx.init))(params)
    run = ref.Run(names, PARAMS, 2, scale)
    ours, theirs = [], []
    for call in range(NUM_CALLS):
        grads = [[gradient(call, r, s) for s in range(num_shards)] for r in range(2)]
        if spoiled(names, call):
            grads[1][0]["w"][2, 1] = np.inf
        stacked = jax.tree.map(
            lambda *x: jnp.stack(x).reshape(*shape, *x[0].shape) * scale,
            *[g for row in grads for g in row],
        )
        values = jnp.array(
            [[loss(call, r)] * num_shards for r in range(2)], jnp.float32
        )
        params, state = step(params, state, stacked, values)
        wide = [[{k: x.astype(float) for k, x in g.items()} for g in r] for r in grads]
        run.micro(wide, [loss(call, r) for r in range(2)])
        ours.append(jax.tree.map(np.asarray, params))
        theirs.append([dict(replica.w) for replica in run.replicas])
    return ours, theirs


def check_run(names):
    names = frozenset(names) & TRANSFORMS
    ours, theirs = run_both(names, shards_for(names))
    for call, (got, expected) in enumerate(zip(ours, theirs, strict=True)):
        shards = range(got["w"].shape[1])
        for replica, shard, key in itertools.product(range(2), shards, PARAMS):
            np.testing.assert_allclose(
                got[key][replica, shard],
                expected[replica][key],
                rtol=2e-5,
                atol=2e-6,
                err_msg=f"{sorted(names)}, call {call}, replica {replica}, {key}",
            )
    assert np.abs(ours[-1]["w"][0, 0] - PARAMS["w"]).max() > 1e-3
    for name in names:
        check_mark(name, ours, run_both(names - {name}, ours[0]["w"].shape[1])[0])


def check_mark(name, with_it, without):
    """A feature that was switched on shows: some parameter of some call differs."""
    apart = max(
        np.abs(a["w"] - b["w"]).max() for a, b in zip(with_it, without, strict=True)
    )
    # Gradients are off by a 16-bit rounding at most, so the mark is small there.
    assert apart > (1e-6 if name == "fp16_allreduce" else 1e-3), name


def legal(names):
    return not forbidden(names, NEVER)


@pytest.mark.parametrize("name", sorted(TRANSFORMS))
def test_every_feature_computes_what_it_must(name):
    check_run((name,))


@pytest.mark.parametrize(
    "names",
    [pair for pair in PAIRS if set(pair) <= TRANSFORMS and legal(pair)],
    ids=name_of,
)
def test_every_pair_computes_what_it_must(names):
    check_run(names)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [triple for triple in TRIPLES if set(triple) <= TRANSFORMS and legal(triple)],
    ids=name_of,
)
def test_every_triple_computes_what_it_must(names):
    check_run(names)


@pytest.mark.parametrize("page", tables.PAGES)
def test_pages_are_up_to_date(page):
    assert (DOCS / page).read_text() == tables.PAGES[page](), (
        f"run: python docs/generate_tables.py (docs/{page} is stale)"
    )


ROW = re.compile(r"^\| `(.*)` \| `(\w+)` \| (.*) \|$")
ERROR_ROWS = [
    match.groups()
    for line in (DOCS / "errors.md").read_text().splitlines()
    if (match := ROW.match(line))
]


@pytest.mark.parametrize(("code", "kind", "text"), ERROR_ROWS, ids=lambda x: None)
def test_the_page_of_errors(code, kind, text):
    assert tables.message(code) == (kind, text)
    with pytest.raises(ConfigError):
        exec(code, tables.namespace())


def test_the_page_of_errors_is_complete():
    codes = f"{tables.SETTINGS}{tables.RESOLVING}".replace("\\\n", "").split("\n")
    assert [row[0] for row in ERROR_ROWS] == [code for code in codes if code]


def test_the_page_of_composition_agrees_with_the_specification():
    text = (DOCS / "composition.md").read_text()
    for pair in itertools.combinations([r.name for r in default_registry], 2):
        row = next(x for x in text.splitlines() if f"| `{pair[0]}` |" in x)
        column = [r.name for r in default_registry].index(pair[1])
        cell = [x.strip() for x in row.split("|")[3:-1]][column]
        expected = "no" if frozenset(pair) in NEVER else "yes"
        expected = "2-D" if frozenset(pair) in SAME_AXIS else expected
        assert cell == expected, pair
