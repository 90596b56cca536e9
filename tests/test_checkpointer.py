"""The checkpoint directory of a run: nothing lost, nothing wrong picked."""

import json
import os
import shutil
import signal
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfleet
from jfleet._checkpoint.manifest import read_manifest
from jfleet._errors import (
    CheckpointError,
    ConfigError,
    ConfigTypeError,
    DonatedBufferError,
    JfleetWarning,
)
from jfleet.checkpointer import Checkpointer
from jfleet.save import load_group_sharded_model, save_group_sharded_model
from tests.processes import start
from tests.save_helpers import (
    abstract_on,
    assert_same_bits,
    host,
    lay_out,
    make_mesh,
    mlp_batch,
    mlp_state,
    train_step,
)

SMALL = {"w": jnp.arange(6.0), "n": jnp.zeros((), int)}


def at(step):
    """A state that is different at every step."""
    return {"w": jnp.arange(6.0) + step, "n": jnp.asarray(step)}


def fill(directory, steps, **options):
    with Checkpointer(directory, **options) as checkpointer:
        for step in steps:
            checkpointer.save(step, at(step), extra={"row": step})


def folders(directory):
    return sorted(p.name for p in Path(directory).iterdir())


def name(step):
    return f"step_{step:08d}"


def flip(path, place=-1):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


def biggest_file(folder):
    return max((p for p in folder.rglob("d/*")), key=lambda p: p.stat().st_size)


# What comes back.


def test_every_step_comes_back_with_its_extra(tmp_path):
    fill(tmp_path, [3, 5, 8])
    checkpointer = Checkpointer(tmp_path)
    assert checkpointer.steps() == [3, 5, 8]
    assert checkpointer.latest() == 8
    assert checkpointer.problems() == {}
    for step in (None, 3, 5, 8):
        state, extra = checkpointer.restore(SMALL, step)
        assert_same_bits(state, at(step or 8))
        assert extra == {"row": step or 8}
    assert checkpointer.report.differences == ()


def test_a_checkpoint_of_a_run_is_a_checkpoint(tmp_path):
    fill(tmp_path, [4])
    assert_same_bits(load_group_sharded_model(tmp_path / name(4), SMALL), at(4))


EXTRAS = [None, 3, "text", [1, [2.5, True]], {"shard": [0, 7], "epoch": {"of": None}}]


@pytest.mark.parametrize("extra", EXTRAS)
def test_extra_values(tmp_path, extra):
    with Checkpointer(tmp_path, async_=False) as checkpointer:
        checkpointer.save(1, SMALL, extra=extra)
        assert checkpointer.restore(SMALL)[1] == extra


@pytest.mark.parametrize(
    "extra", [(1, 2), {1: 2}, {"a": (1,)}, np.arange(2), jnp.ones(()), float("nan")]
)
def test_extra_values_that_json_would_change(tmp_path, extra):
    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(ConfigTypeError, match="extra must"):
        checkpointer.save(1, SMALL, extra=extra)
    checkpointer.close()
    assert checkpointer.latest() is None


def test_arguments(tmp_path):
    for options in ({"keep": 0}, {"every": 0}, {"every": -3}):
        with pytest.raises(ConfigError, match="must be at least 1, got"):
            Checkpointer(tmp_path, **options)
    for options in ({"keep": 1.5}, {"every": True}, {"async_": 1}):
        with pytest.raises(ConfigTypeError, match="must be"):
            Checkpointer(tmp_path, **options)
    with pytest.raises(ConfigTypeError, match="path of a folder"):
        Checkpointer(SMALL)
    with Checkpointer(tmp_path) as checkpointer:
        for call in (checkpointer.save, checkpointer.maybe_save):
            with pytest.raises(ConfigTypeError, match=r"got Array.*int\(\.\.\.\)"):
                call(jnp.asarray(1), SMALL)
            with pytest.raises(ConfigError, match="step must be at least 0, got -1"):
                call(-1, SMALL)
        with pytest.raises(ConfigTypeError, match="step must be an integer"):
            checkpointer.restore(SMALL, "1")
    assert folders(tmp_path) == []


def test_nothing_to_restore(tmp_path):
    checkpointer = Checkpointer(tmp_path / "run")
    assert checkpointer.steps() == []
    assert checkpointer.latest() is None
    with pytest.raises(CheckpointError, match="no checkpoint that can be loaded"):
        checkpointer.restore(SMALL)
    with pytest.raises(CheckpointError, match="step_00000003 does not exist"):
        checkpointer.restore(SMALL, 3)
    assert not (tmp_path / "run").exists()


# A run that resumes is the run that was not stopped.


def strategies():
    amp = jfleet.DistributedStrategy(amp=True, sharding=True, clip=True)
    amp.amp_configs = {"dtype": "float16", "init_loss_scaling": 2.0**30}
    amp.sharding_configs = {"level": "os_g"}
    local = jfleet.DistributedStrategy(localsgd=True)
    local.localsgd_configs = {"k_steps": 3}
    half = jfleet.DistributedStrategy(fp16_allreduce=True)
    half.fp16_allreduce_configs = {"error_feedback": True}
    return {"amp": amp, "localsgd": local, "fp16_allreduce": half}


@pytest.mark.parametrize(
    "which",
    [
        "amp",
        pytest.param("localsgd", marks=pytest.mark.slow),
        pytest.param("fp16_allreduce", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_equals_an_unbroken_one(tmp_path, which):
    schedule = optax.linear_schedule(0.1, 0.01, 8)
    mesh = make_mesh(4)
    opt = jfleet.distributed_optimizer(
        optax.adam(schedule), strategies()[which], mesh=mesh
    )

    def init(key):
        dtype = jnp.float16 if which == "amp" else jnp.float32
        return {"w": jax.random.normal(key, (8, 4), dtype), "b": jnp.zeros(4, dtype)}

    def loss_fn(params, batch, key):
        x = batch + 0.1 * jax.random.normal(key, batch.shape, batch.dtype)
        y = x @ params["w"] + params["b"]
        return jnp.mean(y.astype(jnp.float32) ** 2)

    step = opt.minimize(loss_fn, rng=True)
    rows = np.random.default_rng(0).normal(size=(12, 8, 8)).astype(np.float32)
    key = jax.random.key(3)

    def run(state, start, stop):
        shown = []
        for i in range(start, stop):
            state, metrics = step(state, rows[i], key)
            shown.append(host(metrics))
        return state, shown

    whole, want = run(opt.create(init, jax.random.key(0)), 0, 8)
    half, first = run(opt.create(init, jax.random.key(0)), 0, 5)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(5, half, extra={"row": 5})
    if which == "amp":
        assert float(first[-1].loss_scale) < 2.0**30  # It has fallen by then.
    state = opt.create(init, jax.random.key(9))
    state, extra = Checkpointer(tmp_path).restore(state)
    resumed, rest = run(state, extra["row"], 8)
    assert_same_bits(resumed, whole)
    assert_same_bits(first + rest, want)


def test_nnx_pairs_and_typed_keys(tmp_path):
    def pair(seed):
        model = nnx.Linear(4, 4, rngs=nnx.Rngs(seed))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    model, optimizer = pair(0)
    key = jax.random.key(5)
    optimizer.update(model, nnx.grad(lambda m: m(jnp.ones((2, 4))).sum())(model))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"pair": (model, optimizer), "key": key})
    fresh = {"pair": pair(1), "key": jax.random.key(0)}
    state, _ = Checkpointer(tmp_path).restore(fresh)
    loaded, loaded_optimizer = state["pair"]
    assert_same_bits(nnx.state(loaded), nnx.state(model))
    assert_same_bits(nnx.state(loaded_optimizer), nnx.state(optimizer))
    assert_same_bits(state["key"], key)


@pytest.mark.parametrize("around", [pytest.param(False, marks=pytest.mark.slow), True])
def test_padded_states_hold_logical_shapes_also_inside_of_a_dict(tmp_path, around):
    params = {"w": jnp.arange(15.0 * 3).reshape(15, 3)}

    def state(num_devices):
        tree = mlp_state(optax.adam(1e-2)).replace(params=params)
        tree = tree.replace(opt_state=tree.tx.init(params))
        placed = jfleet.group_sharded_parallel(
            tree, level="p_g_os", mesh=make_mesh(num_devices), pad=True
        )
        return {"state": placed, "at": 3} if around else placed

    saved = state(8)
    assert (saved["state"] if around else saved).params["w"].shape == (16, 3)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, saved)
    shapes = {e.shape for e in read_manifest(tmp_path / name(1)).entries}
    assert (15, 3) in shapes
    assert (16, 3) not in shapes
    target = state(4)
    loaded, _ = checkpointer.restore(target)
    got, want = (s["state"] if around else s for s in (loaded, target))
    assert got.params["w"].shape == want.params["w"].shape == (16, 3)
    assert got.params["w"].sharding == want.params["w"].sharding
    np.testing.assert_array_equal(got.params["w"][:15], params["w"])


@pytest.mark.slow
def test_b84_donated_steps_and_saves_at_every_step(tmp_path):
    state = lay_out(mlp_state(sizes=(48, 480, 48)), make_mesh(8))
    shardings = jax.tree.map(lambda x: x.sharding, state)
    step = jax.jit(train_step.__wrapped__, donate_argnums=0, out_shardings=shardings)
    before = []
    with Checkpointer(tmp_path, keep=None) as checkpointer:
        for number in range(1, 6):
            state = step(state, mlp_batch())
            before.append(host(state))
            assert checkpointer.maybe_save(number, state)
    for number, want in enumerate(before, 1):
        loaded, _ = checkpointer.restore(state, number)
        assert_same_bits(host(loaded), want)


def test_restore_into_donated_abstract_and_given_away_states(tmp_path):
    state = lay_out(mlp_state(), make_mesh(8))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
    target = jax.tree.map(lambda x: x + 1, state)
    shapes = abstract_on(target)
    loaded, _ = checkpointer.restore(target)
    assert not any(x.is_deleted() for x in jax.tree.leaves(target))
    assert_same_bits(loaded, state)
    loaded, _ = checkpointer.restore(target, donate=True)
    assert all(x.is_deleted() for x in jax.tree.leaves(target))
    assert_same_bits(loaded, state)
    assert_same_bits(checkpointer.restore(target)[0], state)
    assert_same_bits(checkpointer.restore(shapes)[0], state)


def test_a_target_is_donated_only_when_all_is_known_to_fit(tmp_path):
    fill(tmp_path, [1])
    other = {"w": jnp.zeros(7), "n": jnp.zeros((), int)}
    with pytest.raises(CheckpointError, match="does not fit this state"):
        Checkpointer(tmp_path).restore(other, donate=True)
    target = jax.tree.map(jnp.copy, SMALL)
    flip(biggest_file(tmp_path / name(1)))
    with pytest.raises(CheckpointError, match="files have changed"):
        Checkpointer(tmp_path).restore(target, donate=True)
    for tree in (other, target):
        assert not any(x.is_deleted() for x in jax.tree.leaves(tree))


def test_donated_states_are_refused(tmp_path):
    state = jax.tree.map(jnp.copy, SMALL)
    state["w"].delete()
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(DonatedBufferError, match="'w'"):
            checkpointer.save(1, state)
        checkpointer.save(1, SMALL)
    assert checkpointer.steps() == [1]


# When it saves.


def test_maybe_save_saves_at_multiples_and_not_twice(tmp_path):
    with Checkpointer(tmp_path, every=3, keep=None) as checkpointer:
        saved = [s for s in range(1, 10) if checkpointer.maybe_save(s, at(s))]
        assert saved == [3, 6, 9]
        assert not checkpointer.maybe_save(9, at(9))
    with Checkpointer(tmp_path, every=3, keep=None) as checkpointer:
        state, _ = checkpointer.restore(SMALL)
        before = (tmp_path / name(9) / "manifest.json").stat().st_mtime_ns
        assert not checkpointer.maybe_save(9, state)
        assert (tmp_path / name(9) / "manifest.json").stat().st_mtime_ns == before
        assert checkpointer.maybe_save(12, at(12))
    assert checkpointer.steps() == [3, 6, 9, 12]


def test_save_replaces_a_step(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, at(2), extra="old")
        checkpointer.save(2, at(7), extra="new")
    state, extra = checkpointer.restore(SMALL, 2)
    assert_same_bits(state, at(7))
    assert extra == "new"


def test_without_async_the_save_is_complete_at_once(tmp_path):
    with Checkpointer(tmp_path, async_=False) as checkpointer:
        assert checkpointer.maybe_save(1, at(1))
        assert (tmp_path / name(1) / "manifest.json").exists()


def test_a_new_run_does_not_save_below_an_old_one(tmp_path):
    fill(tmp_path, [10, 20])
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(CheckpointError, match=r"step 5 cannot.*of step 20.*resume"):
            checkpointer.maybe_save(5, at(5))
        assert folders(tmp_path) == [name(10), name(20)]
        checkpointer.restore(SMALL, 10)
        with pytest.raises(CheckpointError, match="step 15 cannot be saved"):
            checkpointer.save(15, at(15))
        shutil.rmtree(tmp_path / name(20))
        checkpointer.save(15, at(15))
    assert checkpointer.latest() == 15


# Retention.


def test_the_newest_complete_ones_are_kept(tmp_path):
    fill(tmp_path, range(1, 7), keep=2)
    assert folders(tmp_path) == [name(5), name(6)]
    fill(tmp_path, [7], keep=1)
    assert folders(tmp_path) == [name(7)]
    fill(tmp_path, [8, 9], keep=None)
    assert folders(tmp_path) == [name(7), name(8), name(9)]


def test_what_is_damaged_does_not_count_as_kept(tmp_path):
    fill(tmp_path, [1, 2, 3], keep=3)
    biggest_file(tmp_path / name(2)).unlink()
    flip(tmp_path / name(3) / "manifest.json", 100)
    fill(tmp_path, [4], keep=2)
    # 1 and 4 are the newest two that are complete; 2 and 3 are evidence.
    assert folders(tmp_path) == [name(step) for step in (1, 2, 3, 4)]
    assert Checkpointer(tmp_path).steps() == [1, 4]
    fill(tmp_path, [5], keep=2)
    assert folders(tmp_path) == [name(4), name(5)]


def test_rests_are_removed_and_what_is_not_ours_stays(tmp_path):
    fill(tmp_path, [1])
    (tmp_path / name(2) / "arrays.0" / "d").mkdir(parents=True)
    (tmp_path / name(3)).mkdir()
    (tmp_path / name(4)).mkdir()
    (tmp_path / name(4) / "notes.txt").write_text("mine")
    (tmp_path / "step_5").mkdir()
    (tmp_path / "step_000000005").mkdir()
    (tmp_path / "log").mkdir()
    fill(tmp_path, [6], keep=1)
    assert folders(tmp_path) == sorted(
        [name(4), name(6), "log", "step_000000005", "step_5"]
    )
    assert (tmp_path / name(4) / "notes.txt").read_text() == "mine"


def test_a_file_of_yours_in_an_old_step_stays(tmp_path):
    fill(tmp_path, [1])
    (tmp_path / name(1) / "notes.txt").write_text("mine")
    fill(tmp_path, [2], keep=1)
    assert folders(tmp_path / name(1)) == ["notes.txt"]
    assert Checkpointer(tmp_path).steps() == [2]


def test_the_only_one_that_loads_is_not_removed_before_there_is_another(
    tmp_path, monkeypatch
):
    fill(tmp_path, [1], keep=1)

    def full(*args):
        raise OSError(28, "No space left on device")

    for where in ("commit.write_manifest", "commit.digest", "orbax_io.Writing.join"):
        with monkeypatch.context() as patch:
            patch.setattr(f"jfleet._checkpoint.{where}", full)
            with pytest.raises(CheckpointError, match="of step 2 could not be written"):
                fill(tmp_path, [2], keep=1)
        with pytest.warns(JfleetWarning, match="step 1 is the newest that loads"):
            state, _ = Checkpointer(tmp_path).restore(SMALL)
        assert_same_bits(state, at(1))
    fill(tmp_path, [2], keep=1)
    assert folders(tmp_path) == [name(2)]


# The newest that is whole.


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-1])


BREAK = {
    "no manifest": lambda f: (f / "manifest.json").unlink(),
    "manifest": lambda f: flip(f / "manifest.json", 200),
    "file gone": lambda f: biggest_file(f).unlink(),
    "file short": lambda f: cut_short(biggest_file(f)),
    "one bit": lambda f: flip(biggest_file(f), 10),
    "no arrays": lambda f: shutil.rmtree(f / "arrays.0"),
    "empty": lambda f: [shutil.rmtree(f), f.mkdir()],
}


@pytest.mark.parametrize("how", BREAK)
def test_what_is_not_whole_is_named_and_never_picked(tmp_path, how):
    fill(tmp_path, [1, 2, 3])
    BREAK[how](tmp_path / name(3))
    checkpointer = Checkpointer(tmp_path)
    assert checkpointer.latest() == 2
    assert list(checkpointer.problems()) == [3]
    with pytest.warns(JfleetWarning, match=r"step 2 is the newest.*\n  step 3: ") as w:
        state, extra = checkpointer.restore(SMALL)
    assert w[0].filename == __file__
    assert_same_bits(state, at(2))
    assert extra == {"row": 2}
    with pytest.raises(CheckpointError, match="step_00000003") as caught:
        checkpointer.restore(SMALL, 3)
    if how == "no manifest":
        assert "is incomplete (interrupted save)" in str(caught.value)
        assert "is incomplete (interrupted save)" in checkpointer.problems()[3]
    # The run goes on from there, and replaces what was broken.
    with checkpointer:
        checkpointer.save(3, at(3))
    assert checkpointer.problems() == {}
    assert checkpointer.latest() == 3


def test_all_broken(tmp_path):
    fill(tmp_path, [1, 2])
    for step in (1, 2):
        flip(biggest_file(tmp_path / name(step)))
    checkpointer = Checkpointer(tmp_path)
    assert checkpointer.latest() is None
    with pytest.raises(CheckpointError, match=r"(?s)step 2: .*changed.*step 1: "):
        checkpointer.restore(SMALL)


def test_folders_under_other_names_and_links(tmp_path):
    run = tmp_path / "run"
    fill(run, [1, 2])
    shutil.copytree(run / name(2), run / name(7))
    save_group_sharded_model(SMALL, run / name(8))
    fill(tmp_path / "other", [9])
    (run / name(9)).symlink_to(tmp_path / "other" / name(9))
    checkpointer = Checkpointer(run)
    assert checkpointer.latest() == 2
    problems = checkpointer.problems()
    assert "it holds step 2, not step 7" in problems[7]
    assert "it holds step None, not step 8" in problems[8]
    assert "it is a link" in problems[9]
    with checkpointer, pytest.raises(CheckpointError, match="is a link; remove it"):
        checkpointer.save(9, at(9))
    fill(run, [10], keep=1)
    assert folders(run) == [name(9), name(10)]
    assert folders(tmp_path / "other" / name(9)) == ["arrays.0", "manifest.json"]


# Errors of the background.


@pytest.fixture
def broken_writer(monkeypatch):
    def write_manifest(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jfleet._checkpoint.commit.write_manifest", write_manifest)
    return monkeypatch


CALLS = {
    "maybe_save": lambda c: c.maybe_save(12, at(12)),
    "maybe_save that is not due": lambda c: c.maybe_save(11, at(11)),
    "save": lambda c: c.save(11, at(11)),
    "restore": lambda c: c.restore(SMALL),
    "latest": lambda c: c.latest(),
    "steps": lambda c: c.steps(),
    "wait": lambda c: c.wait(),
    "close": lambda c: c.close(),
    "exit": lambda c: c.__exit__(None, None, None),
    "another save": lambda c: save_group_sharded_model(SMALL, c.directory / "x"),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_error_of_the_background_comes_up_in_the_next_call(
    tmp_path, broken_writer, call
):
    checkpointer = Checkpointer(tmp_path, every=6)
    checkpointer.maybe_save(6, at(6))
    assert checkpointer._handle is not None
    checkpointer._handle.join()
    with pytest.raises(CheckpointError, match=r"of step 6 could not.*No space left"):
        CALLS[call](checkpointer)
    broken_writer.undo()
    assert checkpointer.maybe_save(6, at(6))  # It may be tried again,
    checkpointer.close()
    assert checkpointer.latest() == 6  # and the error came up once.


def test_an_error_in_the_loop_is_not_hidden_by_one_of_the_background(
    tmp_path, broken_writer
):
    def loop():
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(3, at(3))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        loop()
    assert "step 3 could not be written" in caught.value.__notes__[0]


# SIGTERM.


@pytest.fixture
def handler():
    """A handler of the user's, which must be back in the end."""

    def mine(number, frame):
        raise AssertionError("nobody watched")

    before = signal.signal(signal.SIGTERM, mine)
    yield mine
    assert signal.getsignal(signal.SIGTERM) is mine
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("call", ["maybe_save", "save"])
def test_sigterm_saves_once_and_lets_the_loop_end(tmp_path, handler, call):
    with Checkpointer(tmp_path, every=100, keep=None) as checkpointer:
        for step in range(1, 9):
            if step == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            if step != 5 or call == "maybe_save":
                checkpointer.maybe_save(step, at(step), extra=step)
            else:
                checkpointer.save(step, at(step), extra=step)
            assert checkpointer.preempted == (step >= 5)
            if checkpointer.preempted:
                # Complete already: the machine may be gone in a moment.
                assert (tmp_path / name(5) / "manifest.json").exists()
    assert folders(tmp_path) == [name(5)]
    assert checkpointer.restore(SMALL)[1] == 5


def test_sigterm_during_a_save_counts(tmp_path, handler, monkeypatch):
    from jfleet._checkpoint import orbax_io

    real = orbax_io.Writing.__init__

    def begin(self, *args):
        os.kill(os.getpid(), signal.SIGTERM)
        real(self, *args)

    monkeypatch.setattr(orbax_io.Writing, "__init__", begin)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.maybe_save(1, at(1))
        assert checkpointer.preempted
        assert (tmp_path / name(1) / "manifest.json").exists()


def test_sigterm_with_nothing_new_to_save(tmp_path, handler):
    fill(tmp_path, [4])
    with Checkpointer(tmp_path) as checkpointer:
        state, _ = checkpointer.restore(SMALL)
        os.kill(os.getpid(), signal.SIGTERM)
        assert not checkpointer.maybe_save(4, state)
        assert checkpointer.preempted


def test_sigterm_is_watched_by_all_and_only_while_they_are_open(tmp_path, handler):
    first, second = Checkpointer(tmp_path / "a"), Checkpointer(tmp_path / "b")
    assert signal.getsignal(signal.SIGTERM) is handler
    first.save(1, at(1))  # Without ``with`` it watches from the first save.
    assert signal.getsignal(signal.SIGTERM) is not handler
    with second:
        os.kill(os.getpid(), signal.SIGTERM)
        second.maybe_save(2, at(2))
    first.maybe_save(2, at(2))
    assert first.preempted
    assert second.preempted
    first.close()
    assert signal.getsignal(signal.SIGTERM) is handler
    with Checkpointer(tmp_path / "c") as third:  # An old signal is forgotten.
        third.maybe_save(1, at(1))
        assert not third.preempted


def test_reading_does_not_watch(tmp_path, handler):
    fill(tmp_path, [1])
    checkpointer = Checkpointer(tmp_path)
    checkpointer.restore(SMALL)
    checkpointer.latest()
    assert signal.getsignal(signal.SIGTERM) is handler


def test_outside_of_the_main_thread_it_says_that_it_cannot_watch(tmp_path, handler):
    caught = []

    def work():
        with pytest.warns(JfleetWarning, match="cannot watch for SIGTERM"):
            fill(tmp_path, [1])
        caught.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert caught
    assert Checkpointer(tmp_path).latest() == 1


# Several processes.


def last_line(text):
    """What a process printed; Gloo writes there too, not always in whole lines."""
    return json.loads(text.splitlines()[-1])


PAIR = """
    import json, os, signal
    rank, folder = jax.process_index(), sys.argv[1]
    from tests.test_save_processes import example
    import jax.numpy as jnp
    from jfleet.checkpointer import Checkpointer
    from jfleet._errors import CheckpointError
    from jfleet._checkpoint import commit
"""


@pytest.mark.multiprocess
def test_two_processes(tmp_path):
    script = (
        PAIR
        + """
    said = []
    with Checkpointer(folder, keep=2) as checkpointer:
        for step in range(1, 5):
            checkpointer.maybe_save(step, example(4, step), extra={"row": step})
        try:
            checkpointer.save(5, example(4, 5), extra=rank)
        except CheckpointError as error:
            said.append("must be the same in all 2" in str(error))
        try:
            checkpointer.save(5, example(4, 5), extra={1: 2} if rank else None)
        except (CheckpointError, TypeError) as error:
            said.append(type(error).__name__)
        said.append([checkpointer.steps(), checkpointer.latest()])
        state, extra = checkpointer.restore(example(4, 0))
        same = []
        for key in ("split", "whole", "bf16", "step"):
            a, b = state[key].addressable_shards, example(4, 4)[key].addressable_shards
            same += [np.array_equal(x.data, y.data) for x, y in zip(a, b)]
        said.append([all(same), extra])
        if rank == 1:  # One process fails in the background: both hear of it.
            def fail(*args):
                raise OSError(28, "no space here")
            commit.digest = fail
        checkpointer.save(6, example(4, 6))
        try:
            checkpointer.wait()
        except CheckpointError as error:
            said.append("of step 6" in str(error) and "no space here" in str(error))
    print(json.dumps(said))
    """
    )
    first, second = map(last_line, start.run(script, tmp_path / "run"))
    kinds = first.pop(1), second.pop(1)
    assert kinds == ("CheckpointError", "ConfigTypeError")
    assert first == second == [True, [[3, 4], 4], [True, {"row": 4}], True]
    assert folders(tmp_path / "run")[:2] == [name(3), name(4)]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("service", [True, False])
def test_sigterm_in_one_of_two_processes_stops_both_at_one_step(tmp_path, service):
    # Without JAX's service they hear of it when they save, which here is every 10.
    script = (
        PAIR
        + f"""
    if not {service}:
        from jax._src import distributed
        distributed.global_state.preemption_sync_manager.shutdown()
        distributed.global_state.preemption_sync_manager = None
    with Checkpointer(folder, every=10) as checkpointer:
        for step in range(1, 400):
            if rank == 1 and step == 12:
                os.kill(os.getpid(), signal.SIGTERM)
            checkpointer.maybe_save(step, example(4, step))
            np.asarray(jax.numpy.ones(2))
            if checkpointer.preempted:
                break
            __import__("time").sleep(0.02)
    print(json.dumps([step, checkpointer.latest()]))
    """
    )
    first, second = map(last_line, start.run(script, tmp_path / "run"))
    assert first == second
    step, latest = first
    assert step == latest
    assert 12 <= step < 399
    if not service:
        assert step == 20
