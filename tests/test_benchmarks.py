"""The hand-written reference is right, and the scripts report what they measure."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = [str(ROOT / "benchmarks"), str(ROOT / "examples")]
STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def _path():
    sys.path[:0] = FOLDERS
    yield
    for folder in FOLDERS:
        sys.path.remove(folder)


def run_script(name, *args):
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / name), *map(str, args)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.fixture(scope="module")
def problem():
    """A tiny decoder, its batches, and its losses on one device by plain optax."""
    decoder = importlib.import_module("decoder")
    model = decoder.Decoder(width=32, num_layers=2)
    batches = np.random.default_rng(0).integers(0, 256, (STEPS, 8, 9), np.int32)
    tx = optax.adamw(1e-2)

    def init():
        return model.init(jax.random.key(0), batches[0, :, :-1])["params"]

    @jax.jit
    def step(params, opt_state, tokens):
        def loss_fn(params):
            return decoder.next_byte_losses(model.apply, params, tokens).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = jax.jit(init)()
    opt_state, losses = tx.init(params), []
    for tokens in batches:
        params, opt_state, loss = step(params, opt_state, tokens)
        losses.append(float(loss))
    return model, init, tx, batches, losses, params


def check_reference(problem, level, form):
    reference = importlib.import_module("reference")
    model, init, tx, batches, losses, params = problem
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    state = reference.create(init, tx, level, mesh)
    shapes = jax.eval_shape(init)
    step = reference.STEPS[form](shapes, tx, level, mesh, model.num_heads)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    found = []
    for tokens in batches:
        state, loss = step(state, jax.device_put(tokens, rows))
        found.append(float(loss))
    np.testing.assert_allclose(found, losses, rtol=2e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5),
        state.params,
        params,
    )
    split = {"dp": (1, 1), "os": (1, 8), "os_g": (1, 8), "p_g_os": (8, 8)}[level]
    kernel = state.params["blocks"]["up"]["kernel"]
    moment = state.opt_state[0].mu["blocks"]["up"]["kernel"]
    for array, parts in zip((kernel, moment), split, strict=True):
        shard = array.sharding.shard_shape(array.shape)
        assert np.prod(array.shape) == parts * np.prod(shard)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["constraints", "shard_map"])
@pytest.mark.parametrize("level", ["dp", "os", "os_g", "p_g_os"])
def test_the_reference_trains_the_example(problem, level, form):
    check_reference(problem, level, form)


def test_verdicts_name_what_is_missed():
    levels = importlib.import_module("levels")
    by_hand = {"ratio": 1.0, "loss_gap": 0.0, "argument_bytes": 5, "temporary_bytes": 5}
    ours = {"argument_bytes": 5, "temporary_bytes": 5}

    def kept(**changes):
        records = {"jfleet": ours, "constraints": by_hand | changes}
        records["shard_map"] = by_hand | {"ratio": 9.0, "temporary_bytes": 6}
        return [ok for ok, _ in levels.verdicts({"os_g": records})]

    assert kept() == [True, True, True]
    assert kept(ratio=1.04) == [False, True, True]
    assert kept(temporary_bytes=4) == [True, False, True]
    assert kept(loss_gap=1e-3) == [True, True, False]


@pytest.mark.slow
def test_levels_compares_the_same_work(tmp_path):
    output = tmp_path / "levels.json"
    model, work = ["--width=32", "--layers=2"], ["--length=8", "--rows=8"]
    repeats = ["--rounds=2", "--steps=2"]
    done = run_script("levels.py", *model, *work, *repeats, "--json", output)
    assert done.returncode == 0, done.stderr
    results = json.loads(output.read_text())
    assert list(results["levels"]) == ["os", "os_g", "p_g_os"]
    for level, records in results["levels"].items():
        assert list(records) == ["jfleet", "constraints", "shard_map"]
        ours, *others = records.values()
        for other in others:
            assert other["loss_gap"] < 1e-5
            assert 0 < other["ratio"] < 100
            # The example's TrainState also counts its steps.
            assert ours["state_bytes"] == other["state_bytes"] + 4
        assert f"| {level} " in done.stdout
        assert ours["collectives"]["all-gather"]["count"] > 0
    assert results["environment"]["jax"] == jax.__version__
    assert len(results["verdicts"]) == 9


@pytest.mark.slow
def test_checkpoints_reports_seconds(tmp_path):
    output = tmp_path / "checkpoints.json"
    args = ["--level", "p_g_os", "--repeats", 1, "--width", 32, "--json", output]
    done = run_script("checkpoints.py", *args)
    assert done.returncode == 0, done.stderr
    record = json.loads(output.read_text())["checkpoints"]["p_g_os"]
    assert set(record) == {
        "first save", "later saves", "first load", "later loads", "MiB",
    }  # fmt: skip
    assert all(value > 0 for value in record.values())


@pytest.mark.parametrize(
    ("topology", "mesh", "words"),
    [("v5e", None, "must look like"), ("v5e:2x4", "a", "must look like")],
)
def test_pod_explains_bad_topologies(monkeypatch, topology, mesh, words):
    pod = importlib.import_module("pod")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    with pytest.raises(pod.PodError, match=words):
        pod.pod_mesh(topology, mesh)


def test_pod_says_how_to_get_the_compiler(monkeypatch):
    pod = importlib.import_module("pod")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(pod.PodError, match=r'pip install "jfleet\[tpu\]"'):
        pod.pod_mesh("v5e:2x4", None)


@pytest.mark.slow
def test_pod_compiles_where_the_compiler_is_installed(tmp_path):
    output = tmp_path / "pod.json"
    sizes = ["--topology=v5e:2x4", "--size=1b", "--layers=1", "--length=128"]
    done = run_script("pod.py", *sizes, "--json", output)
    if importlib.util.find_spec("libtpu") is None:
        assert done.returncode == 2
        assert "not installed" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())["pod"]
    assert result["chips"] == 8
    state_gib = 12 * result["parameters"] / 8 / 2**30
    assert result["argument_gib"] == pytest.approx(state_gib, rel=1e-3)
    assert result["temporary_gib"] > 0
    assert result["wire_gib"]["all-gather"] > 0


@pytest.mark.slow
def test_whole_steps_compute_what_is_written_by_hand(tmp_path):
    out = tmp_path / "steps.json"
    found = run_script(
        "steps.py", "--rounds", 2, "--width", 64, "--layers", 2, "--json", out
    )
    assert found.returncode == 0, found.stderr[-2000:]
    results = json.loads(out.read_text())["results"]
    assert len(results) >= 5
    for name, r in results.items():
        by_hand, ours = r["losses"]
        assert abs(ours / by_hand - 1) <= r["allowed_gap"], name
