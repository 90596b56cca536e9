"""A save in the background: the values of the call, and no error lost."""

import subprocess
import sys
import textwrap
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jfleet._checkpoint.manifest import read_manifest
from jfleet._errors import CheckpointError
from jfleet.save import load_group_sharded_model, save_group_sharded_model
from tests.save_helpers import (
    LEVELS,
    assert_same_bits,
    host,
    lay_out,
    make_mesh,
    mlp_batch,
    mlp_state,
    train_step,
)


@pytest.fixture(autouse=True)
def _in_background_on_every_python(monkeypatch):
    monkeypatch.setattr("jfleet._checkpoint.handle.CAN_FINISH_AT_EXIT", True)


@pytest.mark.parametrize("level", LEVELS)
def test_b84_donated_steps_do_not_change_what_is_saved(tmp_path, level):
    state = lay_out(mlp_state(sizes=(48, 480, 48)), make_mesh(8), level)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    step = jax.jit(train_step.__wrapped__, donate_argnums=0, out_shardings=shardings)
    for _ in range(3):
        state = step(state, mlp_batch())
    for repeat in range(10):
        first = int(state.step)
        before = host(state)
        handle = save_group_sharded_model(state, tmp_path / str(repeat), wait=False)
        for _ in range(3):
            state = step(state, mlp_batch())
        jax.block_until_ready(state)
        handle.wait()
        assert handle.done()
        loaded = load_group_sharded_model(tmp_path / str(repeat), state)
        assert_same_bits(host(loaded), before)
        assert read_manifest(tmp_path / str(repeat)).info["step"] == first
        assert int(state.step) == first + 3


def test_b84_large_arrays_and_host_arrays(tmp_path):
    mesh = make_mesh(8)
    negate = jax.jit(jnp.negative, donate_argnums=0)
    x = jax.device_put(
        np.arange(1 << 20, dtype=np.float32), NamedSharding(mesh, PartitionSpec("data"))
    )
    x = negate(negate(x))
    on_host = np.arange(1 << 20)
    small = jnp.ones(3, jnp.float8_e5m2)
    state = {"x": x, "host": on_host, "exotic": small}
    target = {**state, "x": jnp.zeros(1 << 20)}
    handle = save_group_sharded_model(state, tmp_path / "ckpt", wait=False)
    on_host[:] = -1
    for _ in range(4):
        x = negate(x)
    small.delete()
    handle.wait()
    target["exotic"] = jnp.zeros(3, jnp.float8_e5m2)
    loaded = load_group_sharded_model(tmp_path / "ckpt", target)
    np.testing.assert_array_equal(loaded["x"], np.arange(1 << 20, dtype=np.float32))
    np.testing.assert_array_equal(loaded["host"], np.arange(1 << 20))
    np.testing.assert_array_equal(np.asarray(loaded["exotic"], np.float32), np.ones(3))


@pytest.fixture
def slow_writer(monkeypatch):
    """Hold the background write until the test lets it go on."""
    gate = threading.Event()
    from jfleet._checkpoint import commit

    real = commit.digest

    def digest(*args):
        assert gate.wait(60)
        return real(*args)

    monkeypatch.setattr(commit, "digest", digest)
    yield gate
    gate.set()


def test_the_handle_and_the_next_call_wait(tmp_path, slow_writer):
    state = {"x": jnp.ones(3)}
    handle = save_group_sharded_model(state, tmp_path / "one", wait=False)
    assert not handle.done()
    assert "running" in repr(handle)
    assert not (tmp_path / "one" / "manifest.json").exists()
    threading.Timer(0.2, slow_writer.set).start()
    assert_same_bits(load_group_sharded_model(tmp_path / "one", state), state)
    assert handle.done()
    assert "done" in repr(handle)
    handle.wait()


@pytest.fixture
def broken_writer(monkeypatch):
    def write_manifest(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jfleet._checkpoint.commit.write_manifest", write_manifest)
    return monkeypatch


def test_b68_wait_raises_the_error_of_the_write(tmp_path, broken_writer):
    old, new = {"x": jnp.ones(3)}, {"x": jnp.zeros(3)}
    handle = save_group_sharded_model(new, tmp_path / "ckpt", wait=False)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="No space left") as caught:
            handle.wait()
    assert isinstance(caught.value.__cause__, OSError)
    # Seen once by the caller, it does not come up again.
    broken_writer.undo()
    save_group_sharded_model(old, tmp_path / "other")
    with pytest.raises(CheckpointError, match="interrupted save"):
        load_group_sharded_model(tmp_path / "ckpt", old)


@pytest.mark.parametrize("call", ["save", "load"])
def test_b68_an_error_nobody_waited_for_comes_up_in_the_next_call(
    tmp_path, broken_writer, call
):
    state = {"x": jnp.ones(3)}
    save_group_sharded_model(state, tmp_path / "ckpt", wait=False)

    def next_call():
        if call == "save":
            return save_group_sharded_model(state, tmp_path / "next")
        return load_group_sharded_model(tmp_path / "good", state)

    with pytest.raises(CheckpointError, match=r"ckpt could not be written.*No space"):
        next_call()
    assert not (tmp_path / "next").exists()
    broken_writer.undo()
    save_group_sharded_model(state, tmp_path / "good")
    next_call()


def test_b68_a_failed_overwrite_keeps_the_previous_checkpoint(tmp_path, monkeypatch):
    old, new = {"x": jnp.ones(3)}, {"x": jnp.zeros(3)}
    save_group_sharded_model(old, tmp_path / "ckpt")
    with monkeypatch.context() as patch:

        def fail(*args):
            raise OSError("gone")

        patch.setattr("jfleet._checkpoint.commit.digest", fail)
        handle = save_group_sharded_model(
            new, tmp_path / "ckpt", overwrite=True, wait=False
        )
        with pytest.raises(CheckpointError):
            handle.wait()
    assert_same_bits(load_group_sharded_model(tmp_path / "ckpt", new), old)


def test_a_python_that_cannot_finish_at_exit_waits(tmp_path, monkeypatch):
    monkeypatch.setattr("jfleet._checkpoint.handle.CAN_FINISH_AT_EXIT", False)
    handle = save_group_sharded_model({"x": jnp.ones(3)}, tmp_path / "c", wait=False)
    assert handle.done()
    assert read_manifest(tmp_path / "c").arrays == "arrays.0"


def run_python(script, *args):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=300,
    )


SETUP = f"""
    import sys
    sys.path[:0] = {[p for p in sys.path if p]!r}
    import jax
    jax.config.update("jax_platforms", "cpu")
    import jax.numpy as jnp
    from jfleet import save
    from jfleet._checkpoint import commit
    state = {{"x": jnp.arange(1 << 18), "y": jnp.ones(5)}}
"""


def test_b68_a_normal_exit_completes_the_save(tmp_path):
    script = (
        SETUP
        + """
    save.save_group_sharded_model(state, sys.argv[1], wait=False)
    """
    )
    result = run_python(script, tmp_path / "ckpt")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    target = {"x": jnp.zeros(1 << 18, int), "y": jnp.zeros(5)}
    loaded = load_group_sharded_model(tmp_path / "ckpt", target)
    np.testing.assert_array_equal(loaded["x"], np.arange(1 << 18))


def test_b68_an_exit_by_exception_completes_the_save_too(tmp_path):
    script = (
        SETUP
        + """
    save.save_group_sharded_model(state, sys.argv[1], wait=False)
    raise SystemExit(3)
    """
    )
    assert run_python(script, tmp_path / "ckpt").returncode == 3
    assert read_manifest(tmp_path / "ckpt").arrays == "arrays.0"


def test_b68_an_error_is_shown_at_exit(tmp_path):
    script = (
        SETUP
        + """
    def fail(*args):
        raise OSError("no more space")
    commit.write_manifest = fail
    save.save_group_sharded_model(state, sys.argv[1], wait=False)
    """
    )
    result = run_python(script, tmp_path / "ckpt")
    assert "could not be written" in result.stderr
    assert "no more space" in result.stderr


def test_saves_leave_no_threads(tmp_path):
    state = {"x": jnp.ones(3)}
    save_group_sharded_model(state, tmp_path / "first")
    before = threading.active_count()
    for i in range(3):
        handle = save_group_sharded_model(state, tmp_path / str(i), wait=False)
        handle.wait()
    assert threading.active_count() <= before
