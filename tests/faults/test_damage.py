"""A damaged or hostile checkpoint: a typed error or the right values, nothing else."""

import json
import pickle
import subprocess
import sys
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

import jfleet._checkpoint
from jfleet._checkpoint import commit, orbax_io
from jfleet._errors import CheckpointError
from jfleet.checkpointer import Checkpointer
from jfleet.save import load_group_sharded_model, save_group_sharded_model
from tests.faults.damage import damage_cases, put
from tests.processes.start import ROOT, clean_environment
from tests.test_save_errors import rewrite

SMALL = {"w": jnp.zeros((8, 4)), "n": jnp.zeros((), int), "k": 0}


def at(step):
    return {"w": jnp.full((8, 4), step + 0.5), "n": jnp.asarray(step), "k": step}


def is_at(step, state):
    return (
        (np.asarray(state["w"]) == step + 0.5).all()
        and int(state["n"]) == step
        and state["k"] == step
    )


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_every_damaged_file_of_a_run(tmp_path, every):
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, at(step), extra=step)
    cases = list(damage_cases(tmp_path / "step_00000002", flips=12))[::every]
    assert len(cases) > 100 / every
    for path, data in cases:
        good = path.read_bytes()
        put(path, data)
        checkpointer = Checkpointer(tmp_path)
        assert checkpointer.latest() == 1
        assert list(checkpointer.problems()) == [2]
        with pytest.raises(CheckpointError, match="step_00000002"):
            checkpointer.restore(SMALL, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state, extra = checkpointer.restore(SMALL)
        assert extra == 1
        assert is_at(1, state)
        path.write_bytes(good)
    state, extra = checkpointer.restore(SMALL)
    assert extra == 2
    assert is_at(2, state)


# Someone who knows the checksums.


FORGED = {
    "file above": lambda m: m["files"].update({"../../secret": [6, 0]}),
    "file absolute": lambda m: m["files"].update({"/etc/passwd": [6, 0]}),
    "file odd": lambda m: m["files"].update({"d/../x": [6, 0]}),
    "file empty": lambda m: m["files"].update({"": [6, 0]}),
    "file back": lambda m: m["files"].update({"d\\x": [6, 0]}),
    "arrays above": lambda m: m.update(arrays="../arrays.0"),
    "arrays here": lambda m: m.update(arrays="."),
    "run": lambda m: m.update(run=[1]),
    "run step": lambda m: m.update(run={"step": "1", "extra": None}),
    "run negative": lambda m: m.update(run={"step": -1, "extra": None}),
    "run other": lambda m: m["run"].update(step=3),
    "no run": lambda m: m.update(run=None),
    "replicas": lambda m: m["entries"][0].update(replicas=5),
    "replicas text": lambda m: m["entries"][0].update(replicas="8"),
    "owner": lambda m: m["entries"][0].update(owner=3),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_manifests(tmp_path, name):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, at(1))
    (tmp_path / "secret").write_text("secret")
    rewrite(tmp_path / "step_00000001", FORGED[name])
    assert checkpointer.latest() is None
    with pytest.raises(CheckpointError, match=r"is damaged|does not fit"):
        checkpointer.restore(SMALL, 1)


@pytest.mark.parametrize("what", ["arrays", "file", "folder", "manifest"])
def test_links_do_not_lead_out(tmp_path, what):
    save_group_sharded_model(at(1), tmp_path / "ckpt")
    save_group_sharded_model(at(1), tmp_path / "other")
    folder, other = tmp_path / "ckpt", tmp_path / "other"
    name = {"arrays": "arrays.0", "manifest": "manifest.json"}.get(what)
    if name is None:
        inner = [
            p
            for p in (folder / "arrays.0").rglob("*")
            if p.is_dir() == (what == "folder")
        ]
        name = max(inner, key=lambda p: len(p.parts)).relative_to(folder).as_posix()
    # The same bytes are at the end of the link: only the link is wrong.
    (folder / name).rename(tmp_path / "moved")
    target = tmp_path / "moved" if what in ("file", "folder") else other / name
    (folder / name).symlink_to(target)
    with pytest.raises(CheckpointError, match="is a link"):
        load_group_sharded_model(folder, SMALL)


def test_the_rest_of_another_save_is_not_followed_out(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("mine")
    save_group_sharded_model(at(1), tmp_path / "ckpt")
    (tmp_path / "ckpt" / "arrays.7").symlink_to(tmp_path / "mine")
    save_group_sharded_model(at(2), tmp_path / "ckpt", overwrite=True)
    assert (tmp_path / "mine" / "notes").read_text() == "mine"
    assert not (tmp_path / "ckpt" / "arrays.7").exists()
    assert is_at(2, load_group_sharded_model(tmp_path / "ckpt", SMALL))


# A save that does not hold all is not complete.


def test_files_of_a_process_that_were_not_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(
        orbax_io.ocp.PyTreeCheckpointHandler, "finalize", lambda self, folder: None
    )
    with pytest.raises(CheckpointError, match=r"parts of 2 arrays.*same files\?"):
        save_group_sharded_model(at(1), tmp_path / "ckpt")
    with pytest.raises(CheckpointError, match="is incomplete"):
        load_group_sharded_model(tmp_path / "ckpt", SMALL)


def test_a_chunk_that_is_not_there(tmp_path, monkeypatch):
    import tensorstore as ts

    from jfleet._checkpoint.contents import check_contents, open_store

    save_group_sharded_model(at(1), tmp_path / "ckpt")
    folder = orbax_io.epath.Path(tmp_path / "ckpt" / "arrays.0")
    check_contents(folder, ["w", "n"])
    store = ts.KvStore.open(open_store(folder)).result()
    store.write("w/0.0", None).result()
    with pytest.raises(OSError, match=r"parts of 1 arrays.*'w'"):
        check_contents(folder, ["w", "n"])


# Loading runs no code.

SPY = """
import sys, warnings
warnings.simplefilter("ignore")
import jax
jax.config.update("jax_platforms", "cpu")
from jfleet.checkpointer import Checkpointer
from tests.faults.test_damage import SMALL, is_at
Checkpointer(sys.argv[1]).restore(SMALL)  # Imports and compilations happen here.
seen = []
BAD = ("pickle.find_class", "exec", "compile", "import", "marshal.loads", "os.system",
       "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "ctypes.dlopen")
sys.addaudithook(lambda event, args: seen.append((event, args)) if event in BAD else 0)
state, _ = Checkpointer(sys.argv[1]).restore(SMALL)
assert is_at(1, state)
print([e for e in seen if "concurrent" not in str(e)])
"""


def test_loading_runs_nothing_that_a_checkpoint_holds(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, at(1))
    folder = tmp_path / "step_00000001"
    names = {"state": "os.system", "jfleet": "__import__('os').system('true')"}
    rewrite(folder, lambda m: m["info"].update(names))
    (folder / "arrays.0" / "evil.pkl").write_bytes(pickle.dumps(print))
    (folder / "conftest.py").write_text("raise SystemExit")
    done = subprocess.run(
        [sys.executable, "-c", SPY, str(tmp_path)],
        capture_output=True,
        text=True,
        env=clean_environment(),
        cwd=ROOT,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


def test_no_module_of_checkpoints_knows_a_way_to_run_code():
    (folder,) = jfleet._checkpoint.__path__
    root = commit.epath.Path(folder)
    texts = [p.read_text() for p in [*root.glob("*.py"), root.parent / "export.py"]]
    assert len(texts) > 15
    for word in ("pickle", "eval(", "exec(", "__import__", "import_module", "marshal"):
        assert not any(word in text for text in texts), word


def test_manifests_hold_nothing_but_json(tmp_path):
    save_group_sharded_model({**at(1), "f": print}, tmp_path / "ckpt")
    text = json.loads((tmp_path / "ckpt" / "manifest.json").read_text())
    (entry,) = [e for e in text["entries"] if e["path"] == ["f"]]
    assert entry["kind"] == "static"
    assert entry["value"] is None
