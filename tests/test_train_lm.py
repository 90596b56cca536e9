"""train_lm.py does what its output says, and explains what it cannot do."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jfleet import DistributedStrategy
from jfleet import mesh as meshes

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "train_lm.py"
TINY = ["--width=32", "--layers=2", "--length=16", "--learning-rate=0.01"]


@pytest.fixture(scope="module", autouse=True)
def _path():
    sys.path.insert(0, str(SCRIPT.parent))
    yield
    sys.path.remove(str(SCRIPT.parent))


@pytest.fixture
def train_lm(monkeypatch):
    """The script as a module, on the devices of this process."""
    module = importlib.import_module("train_lm")
    monkeypatch.setattr(module, "start_devices", lambda count: jax.devices()[:count])
    monkeypatch.setattr(meshes, "_current", None)
    return module


@pytest.fixture(scope="module")
def corpus():
    return importlib.import_module("corpus")


def run_script(*args, **environment):
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, args)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def read(folder):
    return json.loads((folder / "run.json").read_text())


def test_a_new_process_with_fewer_devices_continues(train_lm, tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    args = ["--level", "p_g_os", "--steps", "12", "--sample", "0", "--out", str(first)]
    assert train_lm.main([*TINY, *args]) == 0
    assert "Plan: level p_g_os" in capsys.readouterr().out

    done = run_script(
        "--resume", first, "--level", "os", "--devices", 4, "--steps", 6,
        "--sample", 8, "--out", second,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "every bit of the state is the same: yes" in done.stdout
    assert "the same " in done.stdout
    assert done.stdout.count(" | ") == 4  # lines of generated text
    before, after = read(first), read(second)
    assert (before["devices"], before["steps"], before["level"]) == (8, 12, "p_g_os")
    assert (after["devices"], after["steps"], after["level"]) == (4, 18, "os")
    assert before["last_loss"] < before["first_loss"]
    assert after["last_loss"] < after["first_loss"]
    assert abs(after["reload_gap"]) <= 1e-6 * before["last_loss"]
    assert after["fingerprint"] != before["fingerprint"]


STRATEGIES = {
    "amp_gradient_merge": [],
    "localsgd": ["--mesh", "replica=2,shard=-1"],
    "p_g_os_recompute_amp": [],
}


def strategy_file(name):
    return str(SCRIPT.parent / "strategies" / f"{name}.json")


def test_every_strategy_file_is_trained_with():
    files = {path.stem for path in SCRIPT.parent.glob("strategies/*.json")}
    assert files == set(STRATEGIES)


def check_strategy_runs(first, second, name, level):
    before, after = read(first), read(second)
    for record in (before, after):
        strategy = DistributedStrategy.from_json(Path(strategy_file(name)).read_text())
        assert DistributedStrategy.from_json(record["strategy"]) == strategy
        assert record["level"] == level
        assert record["last_loss"] < record["first_loss"]
    assert (before["devices"], before["steps"]) == (8, 12)
    assert (after["devices"], after["steps"]) == (4, 16)
    assert abs(after["reload_gap"]) <= 1e-6 * before["last_loss"]


def test_a_strategy_trains_and_goes_on_with_fewer_devices(
    train_lm, tmp_path, monkeypatch, capsys
):
    name, first, second = "amp_gradient_merge", tmp_path / "1", tmp_path / "2"
    args = ["--strategy", strategy_file(name), "--steps", "12", "--sample", "0"]
    assert train_lm.main([*TINY, *args, "--out", str(first)]) == 0
    output = capsys.readouterr().out
    assert "gradient_merge: accumulate gradients" in output
    assert "Plan:" not in output

    monkeypatch.setattr(meshes, "_current", None)
    args = ["--resume", str(first), "--devices", "4", "--steps", "4", "--sample", "0"]
    assert train_lm.main([*TINY, *args, "--out", str(second)]) == 0
    assert "every bit of the state is the same: yes" in capsys.readouterr().out
    check_strategy_runs(first, second, name, "os_g")


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_goes_on_in_a_new_process(name, tmp_path):
    first, second = tmp_path / "1", tmp_path / "2"
    args = ["--strategy", strategy_file(name), *STRATEGIES[name], "--steps", 12]
    done = run_script(*TINY, *args, "--out", first)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" | ") == 4  # lines of generated text
    args = ["--resume", first, "--devices", 4, "--steps", 4, "--learning-rate", 0.01]
    done = run_script(*args, "--out", second)
    assert done.returncode == 0, done.stderr
    assert "every bit of the state is the same: yes" in done.stdout
    check_strategy_runs(first, second, name, "p_g_os" if "p_g_os" in name else "os_g")


def write_strategy(path, **settings):
    path.write_text(DistributedStrategy(**settings).to_json())
    return str(path)


def test_a_level_that_is_given_comes_before_the_strategys(train_lm, tmp_path):
    ways = importlib.import_module("ways")
    file = Path(strategy_file("p_g_os_recompute_amp"))
    assert ways.read_strategy(file, None).sharding_configs["level"] == "p_g_os"
    changed = ways.read_strategy(file, "os")
    assert changed.sharding_configs["level"] == "os"
    assert changed.amp is True
    plain = Path(write_strategy(tmp_path / "amp.json", amp=True))
    assert ways.read_strategy(plain, None).sharding is False
    assert ways.read_strategy(plain, "os_g").sharding is True


@pytest.mark.parametrize(
    ("settings", "args", "words"),
    [
        (None, [], ["--strategy cannot read", "strategy.json"]),
        ("{}", [], ["--strategy strategy.json", "is no strategy"]),
        ({"sharding": False}, ["--level", "os"], ["--level os", "switches off"]),
        ({"auto": True}, ["--level", "os"], ["--level os", "drop --level, or auto"]),
        (
            {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}},
            ["--batch", "24"],
            ["multiple of 16", "got 24", "--batch 32"],
        ),
        (
            {"localsgd": True},
            ["--level", "os"],
            ["localsgd", "{'replica': 2, 'shard': 4}"],
        ),
        ({"dgc": True}, [], ["dgc", "optax.sgd"]),
        (
            {"hybrid_configs": {"dp_degree": 2}},
            ["--mesh", "data=8"],
            ["hybrid_configs"],
        ),
        ({"amp": True}, ["--resume", "plain"], ["--strategy", "leave it out"]),
        (None, ["--resume", "plain", "--length", "8"], ["--length must be 16"]),
    ],
)
def test_strategies_that_cannot_be_used_are_explained(
    train_lm, tmp_path, monkeypatch, capsys, settings, args, words
):
    monkeypatch.chdir(tmp_path)
    Path("plain").mkdir()
    record().write(Path("plain"))
    if isinstance(settings, dict):
        write_strategy(Path("strategy.json"), **settings)
    elif settings is not None:
        Path("strategy.json").write_text(settings)
    assert train_lm.main([*TINY, "--strategy", "strategy.json", *args]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    for word in words:
        assert word in error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        ("sgd", {"dgc": True, "dgc_configs": {"min_size": 1, "sparsity": [0.9]}}),
        ("sgd", {"lars": True, "lars_configs": {"lars_coeff": 0.1}}),
        ("adam", {"lamb": True}),
        ("adamw", {"auto": True}),
    ],
)
def test_strategies_that_need_an_optimizer(train_lm, tmp_path, optimizer, settings):
    file = write_strategy(tmp_path / "strategy.json", **settings)
    rate = ["--learning-rate", "0.1" if optimizer == "sgd" else "0.01"]
    args = ["--strategy", file, "--optimizer", optimizer, *rate, "--steps", "16"]
    assert train_lm.main([*TINY, *args, "--sample", "0"]) == 0


def test_a_loss_that_does_not_fall_is_a_failure(train_lm, monkeypatch, capsys):
    monkeypatch.setattr(train_lm, "train", lambda state, *_: state)
    assert train_lm.main([*TINY, "--sample", "0"]) == 1
    assert "FAILED: the held-out loss did not fall" in capsys.readouterr().err


def record(**changes):
    module = importlib.import_module("run_record")
    settings = dict(level="os", devices=8, steps=3, width=32, layers=2, length=16)
    settings |= dict(optimizer="adamw", strategy=None, mesh=None)
    found = dict(held_out_crc=7, first_loss=5.0, last_loss=4.0, reload_gap=None)
    return module.RunRecord(data=[], fingerprint=1, **settings, **(found | changes))


@pytest.mark.parametrize(
    ("bits", "loss", "reason"),
    [
        (2, 4.0, "the loaded state differs"),
        (1, 4.00001, "held-out loss was 4.0 when saved and is 4.00001 now"),
        (1, float("nan"), "is nan now"),
    ],
)
def test_a_reload_that_differs_is_a_failure(train_lm, monkeypatch, bits, loss, reason):
    monkeypatch.setattr(train_lm, "fingerprint", lambda state: bits)
    with pytest.raises(train_lm.CheckFailed, match=reason):
        train_lm.check_reload(record(), None, 7, loss)


def test_a_reload_compares_only_losses_on_the_same_text(train_lm, monkeypatch):
    monkeypatch.setattr(train_lm, "fingerprint", lambda state: 1)
    assert train_lm.check_reload(record(), None, 7, 4.000001) == pytest.approx(1e-6)
    assert train_lm.check_reload(record(), None, 8, 9.0) is None


def test_the_fingerprint_sees_every_leaf_and_every_place(train_lm):
    state = {"a": np.arange(4.0, dtype=np.float32), "b": np.int32(3)}
    marks = {train_lm.fingerprint(state)}
    marks.add(train_lm.fingerprint({**state, "b": np.int32(4)}))
    marks.add(train_lm.fingerprint({**state, "a": state["a"][::-1]}))
    marks.add(train_lm.fingerprint({**state, "a": -state["a"]}))  # only 0.0's sign too
    assert len(marks) == 4


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--data", "no-such.txt"], ["no-such.txt", "No such file", "--data"]),
        (["--data", "."], ["cannot read '.'", "--data"]),
        (["--data", "short.txt"], ["at least 650 bytes", "got 20", "--length"]),
        (["--resume", "empty"], ["--resume", "'empty'", "--out empty"]),
        (["--resume", "broken"], ["--resume", "'broken'", "--out broken"]),
        (["--out", "other"], ["--out", "'other'", "choose another"]),
        (["--out", "short.txt"], ["--out must be a folder", "'short.txt'"]),
        (["--batch", "12"], ["multiple of 8", "got 12", "--batch 16"]),
    ],
)
def test_bad_requests_are_explained(
    train_lm, tmp_path, monkeypatch, capsys, args, words
):
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("twenty bytes of text")
    for name, content in {"other/keep": "x", "broken/run.json": "{"}.items():
        Path(name).parent.mkdir()
        Path(name).write_text(content)
    assert train_lm.main(args) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    for word in words:
        assert word in error
    assert Path("other/keep").read_text() == "x"


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--level", "p_g"], "p_g_os"),
        (["--steps", "0"], "at least 1"),
        (["--devices", "-1"], "at least 1"),
        (["--width", "20"], "multiple of 8"),
        (["--mesh", "replica:2"], "must look like replica=2,shard=-1"),
        (["--optimizer", "lion"], "adamw"),
        (["--demo", "--strategy", "x.json"], "--demo shows all levels"),
        (["--demo", "--level", "os"], "--demo shows all levels"),
    ],
)
def test_bad_arguments_are_explained(train_lm, capsys, args, word):
    with pytest.raises(SystemExit) as exit_:
        train_lm.main(args)
    assert exit_.value.code == 2
    assert word in capsys.readouterr().err


def test_more_devices_than_there_are(monkeypatch):
    module = importlib.import_module("train_lm")
    monkeypatch.setattr(jax.config, "update", lambda *_: None)  # JAX has started
    assert module.start_devices(None) == jax.devices()
    assert module.start_devices(3) == jax.devices()[:3]
    with pytest.raises(module.UsageError, match="at most 8 here, got 16"):
        module.start_devices(16)


def test_rows_are_a_multiple_of_the_devices(train_lm):
    assert [train_lm.rows_per_step(None, n) for n in (1, 3, 8, 32)] == [16, 18, 16, 32]
    assert train_lm.rows_per_step(None, 48) == 48
    assert train_lm.rows_per_step(24, 8) == 24


def test_the_corpus_repeats_and_keeps_text_back(corpus, tmp_path):
    files = []
    for i in range(20):
        files.append(tmp_path / f"{i}.txt")
        files[-1].write_bytes(bytes([i]) * 50)
    text = corpus.load(files, length=8)
    assert set(text.held_out) == {9, 19}
    assert set(text.train) == set(range(20)) - {9, 19}
    assert text.batch(3, 4).shape == (4, 9)
    np.testing.assert_array_equal(text.batch(3, 4), text.batch(3, 4))
    assert (text.batch(3, 64) != text.batch(4, 64)).any()
    assert text.held_out_rows(5)[[0, -1], [0, -1]].tolist() == [9, 19]

    one = corpus.load(files[:1], length=4)
    assert (len(one.train), len(one.held_out)) == (45, 5)


def test_the_standard_library_is_the_default_text(corpus):
    text = corpus.load(None, length=64)
    assert text.num_files > 20
    assert len(text.train) > 1_000_000
    assert b"import" in text.train.tobytes()


def test_a_record_comes_back(tmp_path):
    one = record(reload_gap=0.0)
    one.write(tmp_path)
    assert type(one).read(tmp_path) == one
    type(one).check_output(tmp_path)  # its own folder may be used again
    changed = dataclasses.replace(one, steps=4)
    assert changed != one


@pytest.mark.slow
def test_the_demonstration(tmp_path):
    out = tmp_path / "demo"
    done = run_script("--demo", *TINY, "--steps", 10, "--sample", 8, "--out", out)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "everything as it must be" in done.stdout
    pairs = {"os": "p_g_os", "os_g": "os", "p_g_os": "os_g"}
    losses = []
    for level, other in pairs.items():
        trained, resumed = read(out / level), read(out / f"{level}-then-{other}")
        assert (trained["level"], resumed["level"]) == (level, other)
        assert (trained["devices"], resumed["devices"]) == (8, 4)
        assert (trained["steps"], resumed["steps"]) == (10, 15)
        assert resumed["last_loss"] < trained["last_loss"] < trained["first_loss"]
        losses.append(trained["last_loss"])
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)


@pytest.mark.slow
def test_the_demonstration_fails_when_a_part_fails(tmp_path):
    done = run_script(
        "--demo", *TINY, "--learning-rate", 0, "--steps", 2, "--out", tmp_path / "demo"
    )
    assert done.returncode == 1
    assert "FAILED: this command ended with exit status 1" in done.stderr
