"""DistributedStrategy: forms, defaults, validation, what was set, copies, JSON."""

import ast
import copy
import inspect
import pathlib
import pickle
import re
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from jfleet import optax_meta
from jfleet._errors import ConfigError
from jfleet._settings import options as _options
from jfleet._settings import placement_options as _placement_options
from jfleet._settings.fleet_names import ELSEWHERE, KEYS_ELSEWHERE, UnknownSettingError
from jfleet.optax_meta.recompute import POLICIES
from jfleet.strategy import OPTIONS, SETTINGS, SWITCHES, DistributedStrategy

DOCUMENTED_DEFAULTS = {
    "amp_configs": {
        "dtype": "bfloat16",
        "init_loss_scaling": 32768.0,
        "incr_every_n_steps": 1000,
        "decr_every_n_nan_or_inf": 2,
        "incr_ratio": 2.0,
        "decr_ratio": 0.8,
        "use_dynamic_loss_scaling": True,
        "on_overflow": "skip",
    },
    "gradient_merge_configs": {"k_steps": 1, "avg": True},
    "localsgd_configs": {"k_steps": 1, "begin_step": 1, "average_state": False},
    "adaptive_localsgd_configs": {
        "init_k_steps": 1,
        "begin_step": 1,
        "max_k_steps": 16,
        "form": "paper",
    },
    "dgc_configs": {
        "rampup_begin_step": 0,
        "rampup_step": 1,
        "sparsity": (0.999,),
        "min_size": 16384,
    },
    "lars_configs": {
        "lars_coeff": 0.001,
        "lars_weight_decay": 0.0005,
        "epsilon": 0.0,
        "exclude_from_weight_decay": (),
        "trust_on_excluded": False,
    },
    "lamb_configs": {
        "lamb_weight_decay": 0.01,
        "exclude_from_weight_decay": (),
        "trust_on_excluded": False,
    },
    "fp16_allreduce_configs": {
        "dtype": "float16",
        "order": "scale_then_cast",
        "scale": False,
        "error_feedback": False,
    },
    "gradient_scale_configs": {"scale_strategy": "avg"},
    "auto_configs": {"mode": "strict", "accuracy": "exact"},
}


@pytest.mark.parametrize("block", DOCUMENTED_DEFAULTS)
def test_defaults(block):
    found = getattr(DistributedStrategy(), block)
    expected = DOCUMENTED_DEFAULTS[block]
    assert {key: found[key] for key in expected} == expected


# Options whose names differ from those of the factory that takes them.
FACTORY_NAMES = {
    "amp_configs": (
        optax_meta.dynamic_loss_scaling,
        {
            "init_loss_scaling": "init_scale",
            "incr_every_n_steps": "incr_every",
            "decr_every_n_nan_or_inf": "decr_every",
            "incr_ratio": "incr_ratio",
            "decr_ratio": "decr_ratio",
            "min_loss_scaling": "floor",
            "use_dynamic_loss_scaling": "dynamic",
            "on_overflow": "on_overflow",
        },
    ),
    "lars_configs": (
        optax_meta.lars,
        {
            "lars_coeff": "coeff",
            "lars_weight_decay": "weight_decay",
            "epsilon": "eps",
            "exclude_from_weight_decay": "exclude",
        },
    ),
    "lamb_configs": (
        optax_meta.lamb,
        {"lamb_weight_decay": "weight_decay", "exclude_from_weight_decay": "exclude"},
    ),
    "dgc_configs": (optax_meta.dgc, {}),
    "localsgd_configs": (optax_meta.localsgd, {}),
    "adaptive_localsgd_configs": (optax_meta.adaptive_localsgd, {}),
    "gradient_merge_configs": (optax_meta.gradient_merge, {}),
    "fp16_allreduce_configs": (optax_meta.fp16_allreduce, {}),
    "recompute_configs": (optax_meta.recompute, {}),
}


@pytest.mark.parametrize("block", FACTORY_NAMES)
def test_defaults_are_those_of_the_factories(block):
    factory, renamed = FACTORY_NAMES[block]
    parameters = inspect.signature(factory).parameters
    compared = 0
    for key, value in getattr(DistributedStrategy(), block).items():
        name = renamed.get(key, key)
        if name in parameters and (block, key) != ("gradient_merge_configs", "sync"):
            assert value == parameters[name].default, key
            compared += 1
    assert compared >= 2


def test_recompute_policies_are_those_of_the_transformation():
    assert set(_options.RECOMPUTE_POLICIES) == set(POLICIES)


def field_docs(module):
    """(class, field, documentation) of every option, from the source."""
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ClassDef):
            rows = zip(node.body, [*node.body[1:], None], strict=True)
            for statement, following in rows:
                if isinstance(statement, ast.AnnAssign) and (
                    statement.target.id != "BLOCK"
                ):
                    value = getattr(following, "value", None)
                    yield node.name, statement.target.id, getattr(value, "value", None)


def test_every_option_is_documented():
    docs = [*field_docs(_options), *field_docs(_placement_options)]
    assert len(docs) > 60
    for name, field, text in docs:
        assert isinstance(text, str), f"{name}.{field}"
        assert len(text) > 5, f"{name}.{field}"


def test_attribute_form_and_keyword_form_agree():
    one = DistributedStrategy()
    one.amp = True
    one.amp_configs = {"dtype": "float16", "keep_fp32": ["norm"]}
    two = DistributedStrategy(
        amp=True, amp_configs={"dtype": jnp.float16, "keep_fp32": ("norm",)}
    )
    assert one == two
    assert one != DistributedStrategy(amp=True)
    assert one != "amp"


def test_every_switch_takes_its_three_values():
    for name in SWITCHES:
        strategy = DistributedStrategy()
        assert getattr(strategy, name) is False
        for value in (True, False, *(["auto"] if name != "auto" else [])):
            setattr(strategy, name, value)
            assert getattr(strategy, name) is value


def test_dicts_merge_keys_and_lists_replace():
    strategy = DistributedStrategy(dgc_configs={"sparsity": [0.5], "min_size": 4})
    strategy.dgc_configs = {"sparsity": [0.75, 0.9]}
    assert strategy.dgc_configs["sparsity"] == (0.75, 0.9)
    assert strategy.dgc_configs["min_size"] == 4
    strategy.dgc_configs = {}
    assert strategy.dgc_configs["min_size"] == 4


def test_the_dict_of_the_caller_is_not_touched():
    sparsity = [0.5]
    given = {"sparsity": sparsity, "min_size": 4}
    before = copy.deepcopy(given)
    strategy = DistributedStrategy(dgc_configs=given)
    sparsity.append(0.9)
    assert given == {**before, "sparsity": [0.5, 0.9]}
    assert strategy.dgc_configs["sparsity"] == (0.5,)


def test_a_refused_dict_changes_nothing():
    strategy = DistributedStrategy(amp_configs={"incr_ratio": 4})
    before = strategy.copy()
    with pytest.raises(ConfigError):
        strategy.amp_configs = {"decr_ratio": 0.5, "incr_every_n_steps": 0}
    assert strategy == before


def test_numpy_numbers_are_numbers():
    strategy = DistributedStrategy(
        gradient_merge_configs={"k_steps": np.int32(4)},
        clip_configs={"max_norm": np.float32(0.5)},
    )
    assert type(strategy.gradient_merge_configs["k_steps"]) is int
    assert type(strategy.clip_configs["max_norm"]) is float


def test_stages_and_names_of_fleet():
    for stage, level in ((1, "os"), (2, "os_g"), (3, "p_g_os")):
        strategy = DistributedStrategy(
            sharding_configs={"stage": stage, "sharding_degree": 4}
        )
        assert strategy.sharding_configs["level"] == level
        assert strategy.sharding_configs["degree"] == 4
    strategy = DistributedStrategy(
        tensor_parallel_configs={"tensor_parallel_degree": 2}
    )
    assert strategy.tensor_parallel_configs["degree"] == 2


@pytest.mark.parametrize("name", sorted(ELSEWHERE))
def test_settings_of_fleet_say_what_to_use_instead(name):
    strategy = DistributedStrategy()
    with pytest.raises(UnknownSettingError, match="jfleet lacks") as caught:
        setattr(strategy, name, True)
    assert ELSEWHERE[name] in str(caught.value)
    with pytest.raises(AttributeError, match="jfleet lacks"):
        getattr(strategy, name)
    assert not hasattr(strategy, name)
    assert name not in SETTINGS


def test_keys_of_fleet_say_what_to_use_instead():
    for block, keys in KEYS_ELSEWHERE.items():
        for key, instead in keys.items():
            with pytest.raises(UnknownSettingError) as caught:
                setattr(DistributedStrategy(), block, {key: 1})
            assert instead in str(caught.value)
            assert block in str(caught.value)
            known = OPTIONS[block].__dataclass_fields__
            assert key not in known


def test_what_was_set():
    strategy = DistributedStrategy(amp=False, clip_configs={"max_norm": 1.0})
    assert strategy.user_set == ("amp", "clip_configs.max_norm")
    assert strategy.is_set("amp")
    assert not strategy.is_set("clip")
    assert strategy.is_set("clip_configs", "max_norm")
    assert not strategy.is_set("clip_configs", "exclude")
    strategy.unset("amp", "clip_configs")
    assert strategy == DistributedStrategy()
    with pytest.raises(UnknownSettingError, match="did you mean 'amp'"):
        strategy.unset("ampp")


FULL = {
    "auto": True,
    "amp": "auto",
    "recompute": False,
    "sharding": True,
    "sharding_configs": {"stage": 3, "rules": [("k$", (None, ["a", "b"]))]},
    "localsgd_configs": {"outer": {"name": "sgd", "learning_rate": 0.7}},
    "hybrid_configs": {"dp_degree": 2, "sharding_degree": 4},
    "extensions": {"mine": {"sizes": [1, 2]}, "other": True, "third": False},
}


@pytest.mark.parametrize("settings", [{}, {"amp": True}, FULL])
def test_round_trips(settings):
    strategy = DistributedStrategy(**settings)
    for other in (
        DistributedStrategy.from_json(strategy.to_json()),
        DistributedStrategy.from_json(strategy.to_json(indent=2).encode()),
        DistributedStrategy(**strategy.to_dict()),
        strategy.copy(),
        copy.copy(strategy),
        copy.deepcopy(strategy),
        pickle.loads(pickle.dumps(strategy)),
        eval(repr(strategy)),
    ):
        assert other == strategy
        assert other.user_set == strategy.user_set
        other.dgc = True
        other.sharding_configs = {"exclude": ["bias"]}
        other.extensions = {"fourth": True}
        assert other != strategy
    assert strategy == DistributedStrategy(**settings)


def test_objects_do_not_affect_one_another():
    one, two = DistributedStrategy(auto=True), DistributedStrategy()
    two.amp = True
    assert one.user_set == ("auto",)
    assert two.user_set == ("amp",)


def test_a_strategy_cannot_be_a_key():
    with pytest.raises(TypeError, match="unhashable"):
        hash(DistributedStrategy())


@pytest.mark.parametrize(
    ("hybrid", "shape"),
    [
        ({}, {"data": -1}),
        ({"dp_degree": 8}, {"data": 8}),
        ({"dp_degree": 1}, {"data": 1}),
        ({"dp_degree": 2, "sharding_degree": 4}, {"replica": 2, "shard": 4}),
        ({"dp_degree": 1, "sharding_degree": 4}, {"shard": 4}),
        ({"mp_degree": 2}, {"data": -1, "model": 2}),
        (
            {
                "dp_degree": 2,
                "sharding_degree": 2,
                "mp_degree": 2,
                "order": ["mp", "sharding", "dp", "pp", "sep"],
            },
            {"model": 2, "shard": 2, "replica": 2},
        ),
    ],
)
def test_mesh_shape(hybrid, shape):
    found = DistributedStrategy(hybrid_configs=hybrid).mesh_shape()
    assert list(found.items()) == list(shape.items())


def test_import_needs_no_jax():
    code = (
        "import sys, importlib.machinery, types\n"
        "package = types.ModuleType('jfleet')\n"
        f"package.__path__ = [{str(SOURCE)!r}]\n"
        "sys.modules['jfleet'] = package\n"
        "import jfleet.strategy\n"
        "assert 'jax' not in sys.modules and 'optax' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


SOURCE = str(pathlib.Path(inspect.getfile(_options)).parent.parent)


DOCS = pathlib.Path(__file__).parent.parent / "docs"
DOCUMENTED = {
    (block, key): ast.literal_eval(default)
    for block, table in re.findall(
        r"^## `(\w+)`\n(.*?)(?=^## |\Z)",
        (DOCS / "settings.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    for key, default in re.findall(r"^\| `(\w+)` \| `(.*?)` \|", table, re.MULTILINE)
}


def test_b108_every_key_is_documented_with_the_default_of_the_code():
    coded = {
        (name, key): value
        for name in dir(DistributedStrategy())
        if name.endswith("_configs")
        for key, value in dict(getattr(DistributedStrategy(), name)).items()
    }
    assert coded.keys() == DOCUMENTED.keys()
    for key, value in coded.items():
        assert DOCUMENTED[key] == value, key
