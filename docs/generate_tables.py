"""Write tables of the documents from the code.

    python docs/generate_tables.py

All of composition.md, errors.md and settings.md; of choose_a_strategy.md,
from_paddle.md and the pages in meta_optimizers the parts between two comments.

A test compares the files with what this script would write.
"""

import ast
import dataclasses
import functools
import itertools
import pathlib
import re
import warnings

import optax

from jfleet._errors import ConfigError, JfleetError
from jfleet._resolving.auto import NEVER
from jfleet._resolving.builtin_rules import default_registry
from jfleet._settings import options as _options
from jfleet._settings import placement_options as _placement_options
from jfleet._settings.fleet_names import ELSEWHERE, KEYS_ELSEWHERE
from jfleet.optimizer import optimizer
from jfleet.resolver import resolve
from jfleet.strategy import DistributedStrategy

HERE = pathlib.Path(__file__).parent
ONE_AXIS = {"data": 4, "model": 2}
TWO_AXES = {"replica": 2, "shard": 2, "model": 2}
FEATURES = tuple(rule.name for rule in default_registry)


def base_for(names):
    """An optimizer that every one of these features accepts, where there is one."""
    if "lamb" in names:
        return optimizer(optax.adam, learning_rate=0.01)
    return optimizer(optax.sgd, learning_rate=0.1, momentum=0.9)


def try_together(names, mesh_shape):
    """Return None if all run together on the mesh, else why not."""
    strategy = DistributedStrategy(**dict.fromkeys(names, True))
    try:
        found = resolve(strategy, base=base_for(names), mesh_shape=mesh_shape)
    except ConfigError as error:
        return str(error).split("cannot run: ", 1)[1]
    assert set(found.applied) == set(names), (names, found.applied)
    return None


def verdict(names):
    """Return ``yes``, ``2-D`` or ``no``, and the reason for the last two."""
    reason = try_together(names, ONE_AXIS)
    if reason is None:
        return "yes", None
    reason_2d = try_together(names, TWO_AXES)
    return ("2-D", reason) if reason_2d is None else ("no", reason_2d)


def composition():
    """The page about what goes together."""
    verdicts = {
        frozenset(pair): verdict(pair) for pair in itertools.combinations(FEATURES, 2)
    }
    letters = {name: str(number) for number, name in enumerate(FEATURES, 1)}
    head = " | ".join(letters.values())
    lines = [
        "# Which switches go together",
        "",
        "Written by `docs/generate_tables.py` from the rules; do not edit.",
        "",
        "A switch that you set runs, or `distributed_optimizer` raises and says why.",
        "`yes`: both run, on any mesh. `2-D`: both run on a mesh with an axis for",
        "each, such as `jfleet.init({'replica': 2, 'shard': 4})`. `no`: they never",
        "run together. The rows are in the order in which a step applies the features.",
        "",
        f"| | | {head} |",
        "|---|---|" + "---|" * len(FEATURES),
    ]
    for row in FEATURES:
        cells = [
            "" if row == column else verdicts[frozenset((row, column))][0]
            for column in FEATURES
        ]
        lines.append(f"| {letters[row]} | `{row}` | " + " | ".join(cells) + " |")
    lines += ["", "## Why not", "", "| pair | | reason |", "|---|---|---|"]
    for pair in itertools.combinations(FEATURES, 2):
        answer, reason = verdicts[frozenset(pair)]
        if reason is not None:
            lines.append(f"| `{pair[0]}` + `{pair[1]}` | {answer} | {reason} |")
    lines += ["", "## What each one is", ""]
    lines += [
        "| switch | phase | does | base | changes |",
        "|---|---|---|---|---|",
    ]
    for rule in default_registry:
        bases = ", ".join(f"`optax.{kind}`" for kind in rule.bases) or "any"
        lines.append(
            f"| `{rule.name}` | {rule.phase} | {rule.summary} | {bases} | "
            f"{rule.changes} |"
        )
    return "\n".join(lines) + "\n"


SETTINGS = """
s.gradient_merg = True
s.amp = "True"
s.amp = 1
s.auto = "auto"
s.amp_configs = True
s.amp_configs = {"init_loss_scalling": 1}
s.amp_configs = {"init_loss_scaling": 0}
s.amp_configs = {"decr_ratio": 2}
s.amp_configs = {"incr_ratio": 0.5}
s.amp_configs = {"use_dynamic_loss_scaling": "yes"}
s.amp_configs = {"dtype": "float8"}
s.amp_configs = {"keep_fp32": "norm"}
s.amp_configs = {"keep_fp32": ["("]}
s.amp_configs = {"on_overflow": "ignore"}
s.amp_configs = {"custom_white_list": ["softmax"]}
s.amp_configs = {"use_pure_fp16": True}
s.amp_configs["dtype"] = "float16"
s.recompute_configs = {"policy": "dots_savable"}
s.recompute_configs = {"checkpoints": ["fc1"]}
s.gradient_merge_configs = {"k_steps": 0}
s.gradient_merge_configs = {"k_steps": -1}
s.gradient_merge_configs = {"k_steps": 2.5}
s.gradient_merge_configs = {"k_steps": "4"}
s.gradient_merge_configs = {"k_steps": True}
s.localsgd_configs = {"k_steps": 0}
s.localsgd_configs = {"begin_step": -1}
s.localsgd_configs = {"outer": {"learning_rate": 0.7}}
s.localsgd_configs = {"init_k_steps": 4}
s.adaptive_localsgd_configs = {"init_k_steps": 32}
s.adaptive_localsgd_configs = {"form": "fleet2"}
s.dgc_configs = {"sparsity": [1.5]}
s.dgc_configs = {"sparsity": []}
s.dgc_configs = {"sparsity": 0.9}
s.dgc_configs = {"rampup_step": 0}
s.lars_configs = {"lars_coeff": float("nan")}
s.lars_configs = {"exclude_from_weight_decay": "bias"}
s.lamb_configs = {"lamb_weight_decay": -0.1}
s.fp16_allreduce_configs = {"order": "cast"}
s.clip_configs = {"max_norm": -1}
s.clip_configs = {"clip_norm": 1.0}
s.sharding_configs = {"level": "OS"}
s.sharding_configs = {"level": "zero3"}
s.sharding_configs = {"level": None}
s.sharding_configs = {"stage": 4}
s.sharding_configs = {"stage": 2, "level": "os"}
s.sharding_configs = {"segment_broadcast_MB": 32}
s.sharding_configs = {"degree": 0}
s.sharding_configs = {"axis": ["data", "data"]}
s.sharding_configs = {"rules": ["kernel"]}
s.hybrid_configs = {"pp_degree": 2}
s.hybrid_configs = {"order": ["dp", "mp"]}
s.gradient_scale_configs = {"scale_strategy": "customized"}
s.auto_configs = {"mode": "full"}
s.auto_configs = {"accuracy": "high"}
s.extensions = {"amp": {}}
s.extensions = {"mine": object}
s.a_sync = True
s.pipeline = True
s.qat = True
s.nccl_comm_num = 2
s.build_strategy = None
s.fp16_compress = True
S.from_json("amp: true")
S.from_json('{"amp": true}')
S.from_json('{"jfleet_strategy": 99, "settings": {}}')
S.from_json('{"jfleet_strategy": 1, "settings": {"ampp": true}}')
S.from_json(3)
"""

RESOLVING = """
resolve(S(dgc=True), base=optax.sgd(0.1))
resolve(S(dgc=True), base=adam)
resolve(S(lars=True), base=adam)
resolve(S(lamb=True), base=sgd)
resolve(S(lamb=True), base=optimizer(optax.adamw, learning_rate=0.1))
resolve(S(lamb=True), base=optimizer(optax.adam, learning_rate=0.1, eps_root=1e-8))
resolve(S(adaptive_localsgd=True), base=optax.sgd(0.1))
resolve(S(lars=True, lamb=True), base=sgd)
resolve(S(dgc=True, localsgd=True), base=sgd)
resolve(S(dgc=True, clip=True, dgc_configs={"clip_norm": 2}), base=sgd)
resolve(S(localsgd=True, adaptive_localsgd=True), base=sgd)
resolve(S(localsgd=True, sharding=True), base=sgd, mesh_shape=data8)
resolve(S(localsgd=True, fp16_allreduce=True), base=sgd, mesh_shape=data8)
resolve(S(sharding=True, sharding_configs={"axis": "x"}), base=sgd, mesh_shape=data8)
resolve(S(sharding=True, sharding_configs={"degree": 4}), base=sgd, mesh_shape=data8)
resolve(S(sharding=True), base=sgd, mesh_shape={"a": 2, "b": 4})
resolve(S(tensor_parallel=True), base=sgd, mesh_shape=data8)
resolve(S(hybrid_configs={"sharding_degree": 4}), base=sgd, mesh_shape=data8)
resolve(S(sharding=True, hybrid_configs={"sharding_degree": 4}), base=sgd, \
mesh_shape=data8)
resolve(S(gradient_scale_configs={"scale_strategy": "sum"}), base=sgd)
resolve(S(dgc=True, gradient_scale_configs={"scale_strategy": "sum"}), \
base=sgd, mesh_shape=data8)
resolve(S(dgc=True, gradient_merge=True, \
gradient_merge_configs={"sync": "each"}), base=sgd)
resolve(S(localsgd=True, localsgd_configs={"outer": {"name": "sdg"}}), base=sgd)
resolve(S(localsgd=True, localsgd_configs={"outer": {"name": "sgd", \
"rate": 1}}), base=sgd)
resolve(S(extensions={"lookahead": True}), base=sgd)
resolve({"amp": True}, base=sgd)
resolve(S(), base=0.1)
resolve(S(), base=sgd, mesh_shape=8)
optimizer(optax.sgd, lr=0.1)
optimizer(optax.sgd(0.1))
"""


def namespace():
    """What the rows of docs/errors.md may use."""
    return {
        "S": DistributedStrategy,
        "s": DistributedStrategy(),
        "resolve": resolve,
        "optimizer": optimizer,
        "optax": optax,
        "sgd": base_for(()),
        "adam": base_for(("lamb",)),
        "data8": {"data": 8},
    }


def message(code):
    """Run one row; return the class and the text of what it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            exec(code, namespace())
        except JfleetError as error:
            # Addresses of functions differ from run to run.
            return type(error).__name__, re.sub(r" at 0x[0-9a-f]+", "", str(error))
    raise AssertionError(f"{code} raises nothing")


def error_rows(codes):
    """Rows of one table of docs/errors.md."""
    yield "| code | raises | message |"
    yield "|---|---|---|"
    for code in codes.strip().splitlines():
        kind, text = message(code)
        yield f"| `{code}` | `{kind}` | {text} |"


def errors():
    """The page about wrong settings."""
    lines = [
        "# What wrong settings get",
        "",
        "Written by `docs/generate_tables.py` by running every row; do not edit.",
        "",
        "Every error is a `ConfigError` (a `ValueError`). A wrong type is a",
        "`SettingTypeError`, which is a `TypeError` too; a name that does not exist",
        "is an `UnknownSettingError`, which is an `AttributeError` as well.",
        "",
        "## When a setting is made",
        "",
        "`S` is `jfleet.DistributedStrategy` and `s` is `S()`.",
        "",
        *error_rows(SETTINGS),
        "",
        "## When a strategy is resolved",
        "",
        "Also raised by `distributed_optimizer`. `sgd` and `adam` are made by",
        "`jfleet.optimizer`; `data8` is `{'data': 8}`.",
        "",
        *error_rows(RESOLVING),
    ]
    return "\n".join(lines) + "\n"


def blocks():
    """Yield every options class with the documented text of its fields."""
    for module in (_options, _placement_options):
        for node in ast.parse(pathlib.Path(module.__file__).read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name.endswith("Configs"):
                texts = {
                    field.target.id: " ".join(text.value.value.split())
                    for field, text in itertools.pairwise(node.body)
                    if isinstance(field, ast.AnnAssign)
                    and isinstance(text, ast.Expr)
                    and isinstance(text.value, ast.Constant)
                }
                yield getattr(module, node.name), texts


def settings():
    """The page of every key of every ``*_configs`` block, with its default."""
    lines = [
        "# Every setting and its default",
        "",
        "Written by `docs/generate_tables.py` from the code; do not edit.",
    ]
    for options, texts in blocks():
        summary = " ".join(options.__doc__.split("\n\n")[0].split())
        lines += ["", f"## `{options.BLOCK}`", "", summary, ""]
        lines += option_rows(options, texts)
    return "\n".join(lines) + "\n"


def option_rows(options, texts):
    """The table of one block of options."""
    yield "| key | default | must be | meaning |"
    yield "|---|---|---|---|"
    for field in dataclasses.fields(options):
        rule = field.metadata["check"].rule.replace("|", "or")
        text = texts[field.name].replace("|", "or")
        yield f"| `{field.name}` | `{field.default!r}` | {rule} | {text} |"


def with_part(page, lines):
    """A page whose part between the two comments is these lines."""
    begin, end = "<!-- begin generated -->", "<!-- end generated -->"
    before, rest = (HERE / page).read_text().split(begin)
    return "\n".join([f"{before}{begin}", *lines, f"{end}{rest.split(end)[1]}"])


def never_auto():
    """The part of the page about strategies: what auto leaves alone."""
    rows = [f"| `{name}` | {reason} |" for name, reason in NEVER.items()]
    return with_part(
        "choose_a_strategy.md", ["", "| switch | why |", "|---|---|", *rows, ""]
    )


def of_fleet():
    """The part of the page about Paddle: settings that jfleet lacks."""
    names = {**ELSEWHERE} | {
        f"{block}[{key!r}]": text
        for block, keys in KEYS_ELSEWHERE.items()
        for key, text in keys.items()
    }
    rows = [f"| `{name}` | {text} |" for name, text in names.items()]
    return with_part(
        "from_paddle.md", ["", "| setting | instead |", "|---|---|", *rows, ""]
    )


def meta_optimizer(rule):
    """The part of a meta optimizer's page: its options, and what it goes with."""
    options, texts = next(pair for pair in blocks() if pair[0] is rule.options)
    lines = ["", "## Options", "", f"Of `strategy.{options.BLOCK}`:", ""]
    lines += [*option_rows(options, texts), "", "## Composes with", ""]
    base = ", ".join(f"`optax.{kind}`" for kind in rule.bases) or "any optimizer"
    lines.append(f"- base: {base}")
    lines.append(f"- phase: {rule.phase}; it changes: {rule.changes}")
    found = {"yes": [], "2-D": [], "no": []}
    for other in FEATURES:
        if other != rule.name:
            answer, reason = verdict(sorted((rule.name, other), key=FEATURES.index))
            found[answer].append((other, reason))
    on_any = ", ".join(f"`{other}`" for other, _ in found["yes"])
    lines.append(f"- on any mesh: {on_any}")
    for answer, words in ("2-D", "with an axis for each"), ("no", "never"):
        lines += [f"- {words}, `{other}`: {why}" for other, why in found[answer]]
    return with_part(f"meta_optimizers/{rule.name}.md", [*lines, ""])


PAGES = {
    "composition.md": composition,
    "errors.md": errors,
    "settings.md": settings,
    "choose_a_strategy.md": never_auto,
    "from_paddle.md": of_fleet,
    **{
        f"meta_optimizers/{rule.name}.md": functools.partial(meta_optimizer, rule)
        for rule in default_registry
    },
}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (HERE / name).write_text(page())
