"""Every example runs, and shows what its first lines promise."""

import importlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jfleet import DistributedStrategy
from jfleet import mesh as meshes

EXAMPLES = Path(__file__).parents[1] / "examples"
PARTS = {
    *("corpus", "decoder", "measure", "tasks"),
    *("demo", "judge", "run_record", "ways"),
}
"""Modules that examples import; all other files are examples."""
WITH_TESTS = {"train_lm"}
"""Tested in a file of their own."""
FILES = {
    path.stem: path
    for path in sorted(EXAMPLES.glob("*.py"))
    if path.stem not in PARTS | WITH_TESTS
}
FAST = {
    *("sharding", "gradient_merge", "localsgd", "lars", "tensor_parallel"),
    *("plain_jax", "nnx_model", "resume_on_fewer_devices"),
}
"""One of each kind; the others run in ``make test-all``."""
MAX_LINES = 100

CLAIMS = {}


def claim(check):
    """Register what the result of an example must be; named like the file."""
    CLAIMS[check.__name__] = check
    return check


@pytest.fixture
def _alone(monkeypatch):
    """An example makes its own mesh and finds its parts beside it."""
    monkeypatch.setattr(meshes, "_current", None)
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in FILES]
)
def test_it_runs_and_keeps_its_promise(name, capsys):
    module = importlib.import_module(name)
    assert Path(module.__file__) == FILES[name]
    result = module.main()
    output = capsys.readouterr()
    assert len(output.out.splitlines()) >= 2
    assert output.err == ""
    CLAIMS[name](result)


def test_every_example_has_a_claim():
    assert set(CLAIMS) == set(FILES)
    assert set(FILES) >= FAST


@pytest.mark.parametrize("name", FILES)
def test_it_is_short_and_runs_from_the_command_line(name):
    text = FILES[name].read_text()
    assert len(text.splitlines()) < MAX_LINES
    assert text.endswith('\n\nif __name__ == "__main__":\n    main()\n')
    assert 'jax.config.update("jax_num_cpu_devices", 8)' in text


def test_parts_are_imported_by_examples():
    texts = [path.read_text() for path in EXAMPLES.glob("*.py")]
    for part in PARTS:
        pattern = re.compile(rf"^(import|from) {part}\b", re.MULTILINE)
        assert any(map(pattern.search, texts)), part


def test_the_table_names_every_file_and_command():
    text = (EXAMPLES / "README.md").read_text()
    rows = re.findall(r"^\| \[(.+?)\]\((.+?)\) \|.*\| `python (.+?)` \|$", text, re.M)
    targets = [target for _, target, _ in rows]
    wanted = {f"{name}.py" for name in [*FILES, *WITH_TESTS]}
    wanted |= {f"strategies/{path.name}" for path in EXAMPLES.glob("strategies/*")}
    assert sorted(targets) == sorted(wanted)
    for name, target, command in rows:
        assert name == Path(target).name
        assert f"examples/{target}" in command.split()
    for part in PARTS:
        assert f"`{part}.py`" in text


@pytest.mark.parametrize(
    "path", sorted(EXAMPLES.glob("strategies/*")), ids=lambda p: p.name
)
def test_strategy_files_are_what_to_json_writes(path):
    strategy = DistributedStrategy.from_json(path.read_text())
    assert json.loads(path.read_text()) == json.loads(strategy.to_json())


# What each example promises.


def falls(before, after, to):
    """The loss falls at least to the part ``to`` of what it was."""
    assert np.isfinite([before, after]).all()
    assert after < to * before


@claim
def linen_model(found):
    falls(found["before"], found["after"], 0.6)
    whole, mine = found["bytes"]
    assert whole / 8 <= mine < whole / 7.9


@claim
def nnx_model(found):
    falls(found["before"], found["after"], 0.2)
    whole, mine = found["bytes"]
    assert whole / 8 <= mine < whole / 7.8


@claim
def equinox_model(found):
    falls(found["before"], found["after"], 0.4)
    whole, mine = found["bytes"]
    assert whole / 8 <= mine < whole / 7.8


@claim
def plain_jax(found):
    falls(found["before"], found["after"], 0.6)
    whole, mine = found["bytes"]
    assert whole / 8 <= mine < whole / 7.9


@claim
def vision(found):
    assert found["before"] < 0.3
    assert found["after"] > 0.9


@claim
def finetune_lora(found):
    falls(found["before"], found["after"], 0.2)
    assert found["frozen"]
    assert found["trained_bytes"] < found["frozen_bytes"] / 2
    # Two moments of what is trained, and a counter.
    assert found["optimizer_bytes"] == 2 * found["trained_bytes"] + 4


@claim
def resume_on_fewer_devices(found):
    falls(found["before"], found["after"], 0.5)
    assert found["same"]
    np.testing.assert_allclose(*found["losses"], rtol=1e-4)


@claim
def sharding(found):
    losses = [result["losses"] for result in found.values()]
    np.testing.assert_allclose(losses, [losses[0]] * 4, rtol=1e-4)
    falls(losses[0][0], losses[0][-1], 0.8)
    none, os, os_g, p_g_os = found.values()
    assert none["params"] == os["params"] == os_g["params"]
    assert p_g_os["params"] < none["params"] / 7.9
    for split in (os, os_g, p_g_os):
        assert none["optimizer"] / 8 <= split["optimizer"] < none["optimizer"] / 7.9
    assert set(none["exchanged"]) == {"all-reduce"}
    assert os_g["exchanged"]["reduce-scatter"] > 30_000
    assert os_g["exchanged"]["all-reduce"] < 1000  # metrics, and leaves kept whole
    assert p_g_os["exchanged"]["all-gather"] > os_g["exchanged"]["all-gather"]


@claim
def amp(found):
    exact, coarse = found["float32"], found["bfloat16"]
    for before, after, _ in found.values():
        falls(before, after, 0.8)
    assert exact[1] != coarse[1]
    assert coarse[1] == pytest.approx(exact[1], rel=0.02)
    skipped = [result[2] for result in found.values()]
    assert skipped[:2] == [0, 0]
    assert skipped[2] > 0


@claim
def recompute(found):
    off, dots, nothing = found.values()
    falls(off[0], off[1], 0.9)
    for other in (dots, nothing):
        np.testing.assert_allclose(other[:2], off[:2], rtol=1e-5)
    assert nothing[2] <= dots[2] < 0.7 * off[2]


@claim
def gradient_merge(found):
    whole, last, each = (found[key] for key in (None, "last", "each"))
    falls(whole["losses"][0], whole["losses"][-1], 0.9)
    for other, rounds in ((last, 1), (each, 4)):
        np.testing.assert_allclose(other["losses"], whole["losses"], rtol=1e-4)
        assert other["rounds"] == pytest.approx(rounds, rel=0.02)
    assert whole["rounds"] == pytest.approx(1, rel=0.02)
    assert each["sent"] > 3 * last["sent"]


@claim
def fp16_allreduce(found):
    wide, narrow, fed_back = found.values()
    falls(wide["before"], wide["after"], 0.5)
    for other in (narrow, fed_back):
        assert other["after"] == pytest.approx(wide["after"], rel=1e-3)
        assert other["bytes"] == pytest.approx(wide["bytes"] / 2, rel=1e-2)


@claim
def localsgd(found):
    together, apart = found.values()
    falls(together["before"], together["after"], 0.7)
    falls(apart["before"], apart["after"], 0.7)
    assert together["every_step"] > 0
    assert apart["every_step"] == 0
    assert (together["meetings"], apart["meetings"]) == (33, 5)
    assert 0 < apart["meeting"] < 1.1 * together["every_step"]


@claim
def adaptive_localsgd(found):
    falls(found["before"], found["after"], 0.5)
    gaps = np.diff(found["meetings"])
    assert len(set(gaps.tolist())) > 1
    assert max(gaps) <= 16


@claim
def dgc(found):
    dense, sparse = found[1.0], found[0.01]
    falls(dense["before"], dense["after"], 0.5)
    falls(sparse["before"], sparse["after"], 0.5)
    # 8 devices send value and index of 1 in 100; an all-reduce sends each entry twice.
    assert 0 < sparse["bytes"] < 0.1 * dense["bytes"]


@claim
def lars(found):
    plain, layerwise = found.values()
    assert plain[-1] > 0.9 * plain[0]
    falls(layerwise[0], layerwise[-1], 0.3)


@claim
def lamb(found):
    plain, layerwise = found.values()
    falls(plain["before"], plain["after"], 0.3)
    falls(layerwise["before"], layerwise["after"], 0.3)
    np.testing.assert_allclose(list(layerwise["shares"].values()), 0.05, rtol=1e-3)
    assert max(plain["shares"].values()) > 0.2


@claim
def sync_batch_norm(found):
    alone, together = found[False], found[True]
    assert alone["before"] == together["before"]
    falls(together["before"], together["after"], 0.2)
    assert together["after"] < alone["after"] / 2


@claim
def tensor_parallel(found):
    whole, split = found[False], found[True]
    falls(whole["before"], whole["after"], 0.5)
    assert split["after"] == pytest.approx(whole["after"], rel=1e-4)
    assert split["params"] < whole["params"] / 3
    assert split["optimizer"] < whole["optimizer"] / 3
    assert split["specs"]["Dense_0/kernel"] == P(None, "model")
    assert split["specs"]["Dense_1/kernel"] == P("model")


@claim
def auto(found):
    falls(found["before"], found["after"], 0.5)
    applied = found["applied"]
    assert "sharding" in applied["nothing known"]
    assert {"sharding", "recompute"} <= set(applied["little memory"])
    assert "localsgd" in applied["a slow network, anything allowed"]
