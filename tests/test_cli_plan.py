"""``plan`` and ``explain``, in this process where that is possible."""

import dataclasses
import importlib.util
import io
import itertools
import json
import pathlib
import re
import subprocess
import sys
import textwrap
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from rich.console import Console

import jfleet
from jfleet import cli
from jfleet._commands import _target_options
from jfleet._commands._compiled import CompilerError, compile_planned
from jfleet._commands._progress import progress
from jfleet._commands._user_code import told_warnings
from jfleet._tuning import target
from tests.processes import start

LEVELS = ("no sharding", "os", "os_g", "p_g_os")
SCRIPT = """
import dataclasses
import jax, jax.numpy as jnp, optax
import jfleet

shape = jax.ShapeDtypeStruct

def init():
    layer = {"kernel": jnp.zeros((64, 128)), "bias": jnp.zeros(128)}
    return {"layer": layer, "head": jnp.zeros((128, 8))}

def loss_fn(params, batch):
    layer = params["layer"]
    hidden = jnp.tanh(batch["x"] @ layer["kernel"] + layer["bias"])
    return jnp.mean((hidden @ params["head"] - batch["y"]) ** 2)

def batch():
    return {"x": jnp.zeros((32, 64)), "y": jnp.zeros((32, 8))}

def problem():
    return {"params": init, "tx": optax.adam(1e-3), "loss_fn": loss_fn, "batch": batch}

def merging():
    strategy = jfleet.DistributedStrategy(gradient_merge=True)
    strategy.gradient_merge_configs = {"k_steps": 2}
    return problem() | {"strategy": strategy}

@dataclasses.dataclass
class Given:
    params: object
    tx: object

def without_a_loss():
    return Given(init, optax.sgd(1.0))
"""
NUM_PARAMS = 64 * 128 + 128 + 128 * 8


def run(*words):
    """Run a command; return its exit code, that of a usage error too."""
    try:
        return cli.main([str(word) for word in words])
    except SystemExit as exit_:
        return exit_.code


@pytest.fixture(autouse=True)
def _own_path(monkeypatch):
    """What a command adds to the path of modules goes again."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "model.py"
    path.write_text(SCRIPT)
    return path


def written(folder: pathlib.Path, text: str) -> pathlib.Path:
    path = folder / "theirs.py"
    path.write_text(textwrap.dedent(text))
    return path


def answer(capsys, *words):
    assert run(*words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def bytes_of(plan, kind):
    return {row["kind"]: row["bytes"] for row in plan["memory"]["classes"]}[kind]


@pytest.fixture(scope="module")
def by_hand():
    """The same training, planned by the library."""
    names: dict = {}
    exec(SCRIPT, names)
    params, batch = map(jax.eval_shape, (names["init"], names["batch"]))
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((8,), ("data",), axis_types=auto)

    def plan(level, hardware=None):
        strategy = jfleet.DistributedStrategy(sharding=level is not None)
        if level is not None:
            strategy.sharding_configs = {"level": level}
        tx = optax.adam(1e-3)
        opt = jfleet.distributed_optimizer(tx, strategy, mesh=mesh, params=params)
        return jfleet.plan_step(opt, params, names["loss_fn"], batch, hardware=hardware)

    plan.params, plan.mesh = params, mesh
    plan.loss_fn, plan.batch = names["loss_fn"], batch
    return plan


class TestLevelsSideBySide:
    def test_numbers(self, script, capsys):
        found = answer(capsys, "plan", script, "--devices", 8)
        assert found["mesh_shape"] == [["data", 8]]
        assert found["ranked"] == []  # nothing says what fits
        assert tuple(found["levels"]) == LEVELS
        whole, state = 4 * NUM_PARAMS, 8 * NUM_PARAMS + 4
        split = 8 * NUM_PARAMS // 8 + 4
        for name, params, opt_state in (
            ("no sharding", whole, state),
            ("os", whole, split),
            ("os_g", whole, split),
            ("p_g_os", whole // 8, split),
        ):
            plan = found["levels"][name]
            assert bytes_of(plan, "parameters") == params
            assert bytes_of(plan, "optimizer state") == opt_state

    def test_they_are_the_plans_of_the_library(self, script, by_hand, capsys):
        found = answer(capsys, "plan", script, "--mesh", "data=8", "--hardware", "v5e")
        for name in LEVELS:
            plan = by_hand(None if name == "no sharding" else name, "v5e")
            assert found["levels"][name] == json.loads(plan.to_json())

    def test_table(self, script, capsys):
        assert run("plan", script, "--devices", 8) == 0
        text = capsys.readouterr().out
        assert f"{script}: mesh data=8, 8 devices; per device" in text
        for name in (*LEVELS, "optimizer state", "peak", "sent per step"):
            assert name in text
        assert "36.5 KiB" in text  # 4 bytes x 9,344 parameters, whole
        assert "name the hardware (--hardware v5e)" in text

    def test_winner(self, script, by_hand, capsys):
        """The fastest of those that fit, and no other."""
        peaks = {n: by_hand(n, "v5e").memory.peak_bytes for n in LEVELS[1:]}
        assert peaks["p_g_os"] < peaks["os"]
        words = ("plan", script, "--devices", 8, "--hardware", "v5e")
        found = answer(capsys, *words, "--memory", peaks["p_g_os"])
        fitting = [n for n, peak in peaks.items() if peak <= peaks["p_g_os"]]
        assert found["ranked"]
        assert set(found["ranked"]) == set(fitting)
        assert run(*words, "--memory", peaks["p_g_os"]) == 0
        text = capsys.readouterr().out
        assert f"{found['ranked'][0]} is the fastest by the estimate: " in text
        assert text.count(" NO ") == 4 - len(fitting)

    def test_the_order_is_that_of_the_estimates(self, script, capsys):
        words = ("plan", script, "--devices", 8, "--hardware", "h100")
        found = answer(capsys, *words)
        times = [found["levels"][n]["time"] for n in found["ranked"]]
        means = [t["low_seconds"] + t["high_seconds"] for t in times]
        assert len(means) == 4
        assert all(a <= b * 1.01 for a, b in itertools.pairwise(means))

    def test_nothing_fits(self, script, capsys):
        assert run("plan", script, "--devices", 8, "--memory", "1KiB") == 0
        text = capsys.readouterr().out
        assert re.search(r"Nothing fits 1.00 KiB per device; \w+ comes closest", text)

    def test_what_can_run_at_no_level(self, tmp_path, capsys):
        path = written(
            tmp_path,
            """
            import jax, optax
            def problem():
                x = jax.ShapeDtypeStruct((30, 4), "float32")
                return dict(params=x, tx=optax.sgd(1.0), loss_fn=abs, batch=x)
            """,
        )
        assert run("plan", path, "--devices", 8) == 2
        assert "the batch has 30 rows" in capsys.readouterr().err

    def test_one_device(self, script, capsys):
        assert run("plan", script, "--devices", 1) == 0
        text = capsys.readouterr().out
        assert "--devices 8 plans for 8" in text
        assert text.count("Note: sharding runs over data with one device") == 1


class TestOneStep:
    def test_level(self, script, by_hand, capsys):
        found = answer(capsys, "plan", script, "--devices", 8, "--level", "os_g")
        assert found["plan"] == json.loads(by_hand("os_g").to_json())
        layout = jfleet.plan(
            {"params": by_hand.params},
            "os_g",
            mesh=by_hand.mesh,
            tx=optax.adam(1e-3),
        )
        assert jfleet.Plan.from_json(json.dumps(found["layout"])) == layout

    def test_text(self, script, capsys):
        words = ("--mesh", "replica=2,shard=4", "--level", "p_g_os")
        assert run("plan", script, *words, "--memory", "1GB") == 0
        text = capsys.readouterr().out
        assert "Step: level p_g_os, mesh replica=2 x shard=4, 8 devices" in text
        assert "Plan: level p_g_os over shard" in text
        assert re.search(r"layer/kernel +float32\[64, 128\] +P\(None, 'shard'\)", text)
        assert text.endswith("fits 954 MiB\n")

    def test_strategy(self, script, tmp_path, capsys):
        strategy = jfleet.DistributedStrategy(gradient_merge=True, sharding=True)
        strategy.gradient_merge_configs = {"k_steps": 4}
        strategy.hybrid_configs = {"sharding_degree": 4, "dp_degree": 2}
        file = tmp_path / "strategy.json"
        file.write_text(strategy.to_json())
        found = answer(capsys, "plan", script, "--strategy", file)
        assert found["mesh_shape"] == [["replica", 2], ["shard", 4]]
        assert set(found["plan"]["applied"]) == {"gradient_merge", "sharding"}
        assert found["plan"]["level"] == "os_g"
        words = ("--strategy", file, "--level", "p_g_os", "--mesh", "data=8")
        strategy.hybrid_configs = {"sharding_degree": 8, "dp_degree": 1}
        file.write_text(strategy.to_json())
        words = ("--strategy", file, "--level", "p_g_os", "--mesh", "shard=8")
        found = answer(capsys, "plan", script, *words)
        assert found["mesh_shape"] == [["shard", 8]]
        assert found["plan"]["level"] == "p_g_os"

    def test_the_strategy_of_the_script(self, script, capsys):
        found = answer(capsys, "plan", f"{script}:merging", "--devices", 8)
        assert found["plan"]["applied"] == ["gradient_merge"]
        assert found["layout"] is None
        words = ("--devices", 8, "--level", "os")
        found = answer(capsys, "plan", f"{script}:merging", *words)
        assert set(found["plan"]["applied"]) == {"gradient_merge", "sharding"}
        # The layout is that of the state that the step keeps.
        layout = jfleet.Plan.from_json(json.dumps(found["layout"]))
        state = bytes_of(found["plan"], "optimizer state")
        assert layout.device_bytes("opt_state") == state

    def test_without_a_loss(self, script, capsys):
        words = ("plan", f"{script}:without_a_loss", "--devices", 8)
        found = answer(capsys, *words, "--level", "p_g_os")
        assert not found["plan"]["memory"]["complete"]
        assert bytes_of(found["plan"], "parameters") == 4 * NUM_PARAMS // 8

    def test_parameters_are_never_made(self, tmp_path, capsys):
        path = written(
            tmp_path,
            """
            import jax.numpy as jnp, optax
            def make():
                print("traced")
                return jnp.ones((2**20, 2**21))
            def problem():
                return dict(params=make, tx=optax.sgd(1.0))
            """,
        )
        assert run("plan", path, "--devices", 4096, "--level", "p_g_os", "--json") == 0
        out, err = capsys.readouterr()
        assert bytes_of(json.loads(out)["plan"], "parameters") == 2**31
        assert err == "traced\n"  # what a script prints is kept off the answer


class TestAuto:
    WORDS = ("--mesh", "data=8", "--hardware", "v5e", "--memory", "200KiB")

    def test_it_is_auto_plan(self, script, by_hand, capsys):
        chosen = jfleet.auto_plan(
            optax.adam(1e-3),
            by_hand.params,
            by_hand.loss_fn,
            by_hand.batch,
            mesh=by_hand.mesh,
            hardware="v5e",
            memory_bytes=200 * 2**10,
        )
        found = answer(capsys, "plan", script, "--auto", *self.WORDS)
        assert found["auto"] == json.loads(chosen.to_json())
        assert run("plan", script, "--auto", *self.WORDS) == 0
        assert capsys.readouterr().out == f"{chosen.explain()}\n"

    def test_a_level_that_is_set_stays(self, script, capsys):
        words = ("plan", script, "--auto", *self.WORDS, "--level", "os")
        names = [c["name"] for c in answer(capsys, *words)["auto"]["candidates"]]
        assert names
        assert all(name.startswith("os, ") for name in names)

    def test_shapes(self, tmp_path, capsys):
        file = tmp_path / "shapes.json"
        file.write_text('{"w": {"shape": [512, 256], "dtype": "float32"}}')
        found = answer(capsys, "plan", file, "--devices", 8, "--auto")
        assert len(found["auto"]["candidates"]) == 10
        assert found["auto"]["mesh_shape"] == found["mesh_shape"]


class TestShapes:
    def test_plan(self, tmp_path, capsys):
        file = tmp_path / "shapes.json"
        shapes = {
            "layers/0/kernel": {"shape": [512, 256], "dtype": "float32"},
            "layers/0/bias": {"shape": [256], "dtype": "bfloat16"},
            "scale": {"shape": [], "dtype": "float32"},
        }
        file.write_text(json.dumps(shapes))
        words = ("plan", file, "--devices", 8, "--level", "p_g_os")
        found = answer(capsys, *words, "--optimizer", "adam")
        layout = jfleet.Plan.from_json(json.dumps(found["layout"]))
        assert [(r.path, r.shape, r.dtype) for r in layout.of_kind("params")] == [
            ("layers/0/bias", (256,), "bfloat16"),
            ("layers/0/kernel", (512, 256), "float32"),
            ("scale", (), "float32"),
        ]
        state = bytes_of(found["plan"], "optimizer state")
        assert answer(capsys, *words) == found  # adam is the default
        words = (*words, "--optimizer", "sgd")
        kinds = [c["kind"] for c in answer(capsys, *words)["plan"]["memory"]["classes"]]
        assert state == 2 * (4 * 512 * 256 + 2 * 256) // 8 + 2 * 4 + 4
        assert "optimizer state" not in kinds

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("[]", "must hold an object of paths and shapes"),
            ("{", "is not JSON"),
            ('{"w": [4]}', "'w' must be like"),
            ('{"w": {"shape": [-1], "dtype": "float32"}}', "'w' must be like"),
            ('{"w": {"shape": [true], "dtype": "float32"}}', "'w' must be like"),
            ('{"w": {"shape": [4], "dtype": "float3"}}', "the dtype 'float3'"),
            ('{"w": {"shape": [4], "dtype": "str"}}', "the dtype 'str'"),
            ('{"w": {"shape": [4], "dtype": 3}}', "the dtype 3"),
            ('{"w": {"shape": [4], "dtype": "float64"}}', "JAX_ENABLE_X64"),
            (
                '{"a": {"shape": [4], "dtype": "float32"},'
                ' "a/b": {"shape": [4], "dtype": "float32"}}',
                "'a/b' is both an array and a branch",
            ),
            (
                '{"a/b": {"shape": [4], "dtype": "float32"},'
                ' "a": {"shape": [4], "dtype": "float32"}}',
                "'a' is both an array and a branch",
            ),
        ],
    )
    def test_bad_files(self, text, message, tmp_path, capsys):
        file = tmp_path / "shapes.json"
        file.write_text(text)
        assert run("plan", file, "--devices", 8) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mesh", "data"], "--mesh must name distinct axes"),
        (["--mesh", "a=2,a=4"], "--mesh must name distinct axes"),
        (["--mesh", "a=0"], "--mesh must name distinct axes"),
        (["--mesh", "a=-1,b=-1"], "only one size may be -1"),
        (["--mesh", "a=3,b=-1", "--devices", "8"], "does not divide 8 devices"),
        (["--mesh", "data=4", "--devices", "8"], "has 4 devices, not 8"),
        (["--devices", "0"], "--devices must be at least 1"),
        (["--devices", "8", "--level", "p_g"], "--level must be one of os, os_g"),
        (["--devices", "8", "--memory", "16G"], "--memory must be a size above 0"),
        (["--devices", "8", "--memory", "0"], "--memory must be a size above 0"),
        (["--devices", "8", "--hardware", "v5"], "hardware 'v5' is unknown"),
        (["--devices", "8", "--strategy", "no.json"], "--strategy no.json"),
        (["--devices", "8", "--auto"], "--auto needs the hardware"),
        (["--devices", "8", "--optimizer", "adam"], "--optimizer is for a target of"),
        (["--html", "no_folder/page.html"], "--html must be a file in a folder"),
        (["--topology", "v5e"], "topology must look like 'v5e:16x16'"),
    ],
)
def test_bad_options(words, message, script, capsys):
    assert run("plan", script, *words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err


class TestCodeOfTheUser:
    @pytest.mark.parametrize(
        ("body", "message"),
        [
            ("return 3", "must return a mapping or a dataclass"),
            ("return {}", "must return params and tx too"),
            ("return dict(params=w, tx=optax.sgd(1.0), los_fn=abs)", "mean 'loss_fn'?"),
            ("return dict(params=w, tx=3)", "tx must be an optax optimizer"),
            (
                "return dict(params=w, tx=optax.sgd(1.0), loss_fn=abs)",
                "needs the batch",
            ),
            (
                "return dict(params=w, tx=optax.sgd(1.0), loss_fn=3, batch=w)",
                "loss_fn must be a function",
            ),
            (
                "return dict(params=w, tx=optax.sgd(1.0), strategy={})",
                "strategy must be a jfleet.DistributedStrategy",
            ),
        ],
    )
    def test_descriptions_that_mean_nothing(self, body, message, tmp_path, capsys):
        path = written(
            tmp_path,
            f"""
            import jax, optax
            w = jax.ShapeDtypeStruct((8,), "float32")
            def problem():
                {body}
            """,
        )
        assert run("plan", path, "--devices", 8) == 2
        assert message in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("model.py:problm", "has no function 'problm'; did you mean 'problem'?"),
            ("model.py:shape", None),
            ("nothing.py", "there is none named"),
            ("model.txt", "TARGET must be a Python file"),
        ],
    )
    def test_no_such_thing(self, name, message, script, capsys):
        code = run("plan", script.parent / name, "--devices", 8)
        assert code == (1 if message is None else 2)
        err = capsys.readouterr().err
        assert (message or "raised an error") in err

    @pytest.mark.parametrize("command", ["plan", "explain"])
    def test_its_errors_are_shown_by_its_lines(self, command, tmp_path, capsys):
        (tmp_path / "beside_it.py").write_text("def product(x, w):\n    return x @ w\n")
        path = written(
            tmp_path,
            """
            import jax, optax
            from beside_it import product
            def loss_fn(params, x):
                return product(x, params).mean()
            def problem():
                x = jax.ShapeDtypeStruct((8, 5), "float32")
                w = jax.ShapeDtypeStruct((4, 4), "float32")
                return dict(params=w, tx=optax.sgd(1.0), loss_fn=loss_fn, batch=x)
            """,
        )
        assert run(command, path, "--devices", 8) == 1
        sys.modules.pop("beside_it")
        out, err = capsys.readouterr()
        assert out == ""
        files = re.findall(r'File "([^"]+)", line (\d+)', err)
        beside = str(tmp_path / "beside_it.py")
        assert files == [(str(path), "5"), (beside, "2")]
        assert "TypeError: dot_general requires" in err
        assert "JAX_TRACEBACK_FILTERING" not in err

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("def problem(:", "SyntaxError"),
            ("import no_such_module", "No module named 'no_such_module'"),
            ("import sys; sys.exit(3)", "is imported to be planned, not run"),
            ("def problem():\n    return 1 / 0", "ZeroDivisionError"),
            ("import jfleet\njfleet.DistributedStrategy(ampp=1)", "did you mean 'amp'"),
        ],
    )
    def test_it_fails_while_it_is_read(self, text, message, tmp_path, capsys):
        path = tmp_path / "theirs.py"
        path.write_text(text)
        assert run("plan", path, "--devices", 8) == 1
        err = capsys.readouterr().err
        assert err.startswith(f"error: {path} raised an error:\n")
        assert message in err
        assert "site-packages" not in err
        assert "importlib" not in err
        assert "_commands" not in err

    def test_a_mistake_of_jfleet_is_no_error_of_theirs(
        self, script, monkeypatch, capsys
    ):
        def broken(*_, **__):
            raise ZeroDivisionError("ours")

        monkeypatch.setattr("jfleet._commands._levels.plan_step", broken)
        with pytest.raises(ZeroDivisionError, match="ours"):
            run("plan", script, "--devices", 8)


@pytest.fixture(scope="module")
def explained(script):
    """``explain`` of p_g_os, run once."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        words = ("--mesh", "data=8", "--level", "p_g_os", "--json")
        assert run("explain", script, *words) == 0
    return json.loads(out.getvalue())


class TestPage:
    """What goes into the page; how it looks is tested in ``tests/html``."""

    def written(self, tmp_path, *words):
        page = tmp_path / "page.html"
        assert run("plan", *words, "--html", page) == 0
        return page.read_text("utf-8")

    def test_all_levels_also_where_one_was_asked_for(self, script, tmp_path):
        words = (script, "--devices", 8, "--level", "os_g", "--hardware", "v5e")
        text = self.written(tmp_path, *words)
        for name in LEVELS:
            assert f'data-info="{name}, parameters: ' in text
        assert "At level os_g; areas are" in text
        assert "Layout at level p_g_os" in text
        assert "Estimate of time on TPU v5e, os_g" in text
        assert re.search(r"layer/kernel: float32 \[64, 128\], \(whole, data\), ", text)

    def test_auto(self, script, tmp_path):
        words = (script, "--auto", *TestAuto.WORDS)
        text = self.written(tmp_path, *words)
        assert "What auto chose, and from what" in text
        assert '<p class="lead">auto chose ' in text

    def test_levels_that_cannot_run(self, script, tmp_path):
        file = tmp_path / "strategy.json"
        file.write_text(jfleet.DistributedStrategy(localsgd=True).to_json())
        words = (script, "--devices", 8, "--strategy", file)
        text = self.written(tmp_path, *words)
        assert text.count(">cannot run</span>") == 6  # in both pictures
        assert "os_g cannot run: strategy.sharding cannot run: each replica" in text
        assert "nothing is split without sharding" in text

    def test_a_file_that_cannot_be_written(self, script, tmp_path, capsys):
        assert run("plan", script, "--devices", 8, "--html", tmp_path) == 2
        page = tmp_path / ("x" * 300)  # longer than names may be
        assert run("plan", script, "--devices", 8, "--html", page) == 1
        assert "cannot be written" in capsys.readouterr().err


class TestExplain:
    def test_it_is_the_report_of_the_library(self, explained, by_hand):
        mesh = target.mesh_over(jax.devices(), {"data": 8})
        strategy = jfleet.DistributedStrategy(sharding=True)
        strategy.sharding_configs = {"level": "p_g_os"}
        opt = jfleet.distributed_optimizer(
            optax.adam(1e-3), strategy, mesh=mesh, params=by_hand.params
        )
        compiled = jfleet.compile_step(
            opt, mesh, by_hand.params, by_hand.loss_fn, by_hand.batch
        )
        report = jfleet.explain(compiled, level="p_g_os")
        assert explained["report"] == json.loads(report.to_json())
        assert {tuple(s["axes"]) for s in explained["report"]["sent"]} == {("data",)}
        plan = by_hand("p_g_os")
        assert explained["comparison"] == json.loads(plan.compare(compiled).to_json())
        assert explained["report"]["flags"] == []

    def test_text(self, script, capsys):
        assert run("explain", script, "--devices", 8) == 0
        text = capsys.readouterr().out
        assert "Compiled for 8 devices of cpu, no sharding:" in text
        assert re.search(r"arguments +\S+ KiB +\S+ KiB +\+0.0%", text)
        assert re.search(r"all-reduce +data ", text)

    def test_saved_text(self, tmp_path, capsys):
        mesh = target.mesh_over(jax.devices(), {"replica": 2, "shard": 4})
        spec = jax.sharding.PartitionSpec("shard")
        rows = jax.sharding.NamedSharding(mesh, spec)
        x = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=rows)
        text = jax.jit(jnp.sum).lower(x).compile().as_text()
        file = tmp_path / "step.hlo.txt"
        file.write_text(text)
        words = ("explain", file, "--mesh", "replica=2,shard=4")
        [sent] = answer(capsys, *words)["sent"]
        assert (sent["kind"], sent["axes"], sent["bytes"]) == (
            "all-reduce",
            ["shard"],
            4,
        )
        assert run("explain", file) == 0
        text = capsys.readouterr().out
        assert re.search(r"all-reduce +groups of 4 +1 ", text)
        assert run("explain", file, "--mesh", "data=2") == 2
        assert "--mesh has 2 devices, and the program uses" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("name", "words", "message"),
        [
            ("step.txt", [], "is no HLO text"),
            ("none.txt", [], "must be a script.py or a file of HLO text"),
            ("step.txt", ["--level", "os"], "--level is for a script"),
            ("shapes.json", [], "there is no step to compile"),
            ("model.py:without_a_loss", [], "has no loss_fn and batch"),
            (
                "model.py",
                ["--devices", "9"],
                "the mesh has 9 devices and 8 of platform",
            ),
        ],
    )
    def test_what_cannot_be_explained(self, name, words, message, script, capsys):
        (script.parent / "step.txt").write_text("hello")
        assert run("explain", script.parent / name, *words) == 2
        assert message in capsys.readouterr().err

    @pytest.mark.slow
    def test_devices_are_simulated(self, script):
        command = [sys.executable, "-m", "jfleet", "explain", str(script)]
        env = start.clean_environment()
        done = subprocess.run(
            [*command, "--mesh", "replica=2,shard=2", "--json"],
            env={k: v for k, v in env.items() if k != "JAX_NUM_CPU_DEVICES"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["where"] == "4 devices of cpu"
        assert found["report"]["mesh_shape"] == [["replica", 2], ["shard", 2]]


class TestTopology:
    def test_without_the_compiler(self, script, monkeypatch, capsys):
        monkeypatch.setattr(target.importlib.util, "find_spec", lambda _: None)
        for command in ("plan", "explain"):
            assert run(command, script, "--topology", "v5e:2x2") == 1
            assert 'pip install "jfleet[tpu]"' in capsys.readouterr().err

    def test_devices_that_disagree(self, script, monkeypatch, capsys):
        monkeypatch.setattr(_target_options, "topology_devices", lambda _: [None] * 4)
        words = ("--topology", "v5e:2x2", "--devices", "8")
        assert run("plan", script, *words) == 2
        assert "has 4 chips, and --devices is 8" in capsys.readouterr().err

    def test_shapes_cannot_be_compiled(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(_target_options, "topology_devices", lambda _: [None] * 4)
        file = tmp_path / "shapes.json"
        file.write_text('{"w": {"shape": [8], "dtype": "float32"}}')
        assert run("plan", file, "--topology", "v5e:2x2") == 2
        assert "there is no step to compile" in capsys.readouterr().err

    @pytest.fixture
    def here(self, monkeypatch):
        """Four devices of this process, in place of the chips."""
        found = jax.devices()[:4]
        monkeypatch.setattr(_target_options, "topology_devices", lambda _: found)

    def test_beside_the_plan(self, script, here, capsys):
        words = ("plan", script, "--topology", "v5e:2x2")
        found = answer(capsys, *words, "--level", "p_g_os")
        assert (found["mesh_shape"], found["hardware"]) == ([["data", 4]], "TPU v5e")
        assert found["plan"]["compiler"] == "tpu"
        planned = {r["name"]: r for r in found["compiled"]["comparison"]["memory"]}
        assert planned["arguments"]["planned"] == planned["arguments"]["compiled"]
        assert found["compiled"]["report"]["level"] == "p_g_os"
        for memory in ("1GiB", "1KiB"):  # the winner is compiled, or what comes closest
            assert run(*words, "--memory", memory) == 0
            text = capsys.readouterr().out
            said = r"(\S+) (?:is the fastest by the estimate|comes closest)"
            assert f"Compiled for v5e:2x2, {re.search(said, text)[1]}:" in text

    def test_auto_takes_the_next_while_the_compiler_fits_it_not(
        self, script, here, monkeypatch, capsys
    ):
        """The first is refused, the second too large, the third fits."""
        asked = []

        def compiled(problem, place, planned, devices):
            asked.append(planned.name)
            if len(asked) == 1:
                raise CompilerError("no room")
            real = compile_planned(problem, place, planned, devices)
            if len(asked) != 2:
                return real
            report = dataclasses.replace(real.report, peak_bytes=2**40)
            return dataclasses.replace(real, report=report)

        monkeypatch.setattr("jfleet._commands.plan.compile_planned", compiled)
        words = ("plan", script, "--topology", "v5e:2x2", "--mesh", "data=4", "--auto")
        found = answer(capsys, *words)
        assert len(asked) == 3
        first, second, third = found["auto"]["verified"]
        assert first == "no room"
        assert second.endswith("does not fit")
        assert third.endswith(": fits")
        chosen = [c for c in found["auto"]["candidates"] if c["verdict"] == "chosen"]
        assert third.startswith(chosen[0]["name"])

        def refused(*_):
            raise CompilerError("no room")

        monkeypatch.setattr("jfleet._commands.plan.compile_planned", refused)
        assert run(*words) == 1
        assert "the compiler fits none of them" in capsys.readouterr().err

    def test_the_compiler_refuses(self, script, here, monkeypatch, capsys):
        def out_of_memory(*_, **__):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: used 17G of 16G hbm")

        monkeypatch.setattr("jfleet._commands._compiled.compile_step", out_of_memory)
        words = ("plan", script, "--topology", "v5e:2x2", "--level", "os")
        assert run(*words) == 1
        err = capsys.readouterr().err
        assert "the compiler for v5e:2x2 refuses the step at os" in err
        assert "used 17G of 16G" in err

    @pytest.mark.slow
    @pytest.mark.parametrize("words", [["--level", "p_g_os"], [], ["--auto"]])
    def test_compiled(self, words, tmp_path, capsys):
        """The numbers where the compiler is installed, its absence where it is not."""
        path = tmp_path / "model.py"
        wide = SCRIPT.replace("64", "256").replace("128", "512").replace(" 8)", " 128)")
        path.write_text(wide)
        words = ("plan", path, "--topology", "v5e:2x2", *words)
        code = run(*words, "--json")
        out, err = capsys.readouterr()
        if importlib.util.find_spec("libtpu") is None:
            assert code == 1
            assert 'pip install "jfleet[tpu]", on Linux' in err
            return
        assert code == 0, err
        found = json.loads(out)
        assert found["mesh_shape"] == [["data", 4]]
        assert found["hardware"] == "TPU v5e"
        compiled = found["compiled"]
        report, rows = compiled["report"], compiled["comparison"]["memory"]
        planned = {r["name"]: r["planned"] for r in rows}
        assert report["arguments_bytes"] == pytest.approx(
            planned["arguments"], rel=0.05
        )
        assert report["peak_bytes"] >= report["arguments_bytes"]
        assert report["sent"]
        assert {tuple(s["axes"]) for s in report["sent"]} == {("data",)}
        assert compiled["where"] == "v5e:2x2"
        if "--level" in words:
            num = 256 * 512 + 512 + 512 * 128
            sizes = {kind: local for kind, local, _ in report["classes"]}
            assert sizes["parameters"] == 4 * num // 4
            assert compiled["level"] == "p_g_os"


def test_warnings_are_told_once_and_those_of_others_pass():
    def warn():
        with told_warnings() as told:
            warnings.warn("ours", jfleet.JfleetWarning, stacklevel=1)
            warnings.warn("ours", jfleet.JfleetWarning, stacklevel=1)
            warnings.warn("theirs", UserWarning, stacklevel=1)
        return told

    with pytest.warns(UserWarning, match="theirs"):
        told = warn()
    assert told == ["ours"]


def test_progress_is_shown_where_a_person_watches():
    out = io.StringIO()
    screen = Console(file=out, force_terminal=True, width=80)
    with progress("planning [b]every[/b] level", total=4, console=screen) as report:
        report(3, 4)
    assert "planning [b]every[/b] level" in out.getvalue()
    assert "3/4" in out.getvalue()
    out = io.StringIO()
    with progress("planning", console=Console(file=out)) as report:
        report(1, 2)
    assert out.getvalue() == ""
