"""The command line, in this process where that is possible."""

import json
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import types
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jfleet
from jfleet import _commands, cli
from jfleet._checkpoint.manifest import FILE_NAME
from jfleet._commands import devices, launch
from jfleet.save import save_group_sharded_model
from tests.processes import start


def run(*words):
    """Run a command; return its exit code, that of a usage error too."""
    try:
        return cli.main([str(word) for word in words])
    except SystemExit as exit_:
        return exit_.code


class TestFrontDoor:
    def test_every_command_is_listed(self, capsys):
        assert run("--help") == 0
        text = capsys.readouterr().out
        for name in _commands.NAMES:
            assert re.search(rf"^    {name}  ", text, re.MULTILINE)

    def test_version(self, capsys):
        assert run("--version") == 0
        assert capsys.readouterr().out == f"jfleet {jfleet.__version__}\n"

    @pytest.mark.parametrize("words", [[], ["lunch"], ["devices", "--yaml"]])
    def test_bad_usage(self, words, capsys):
        assert run(*words) == 2
        assert "usage: python -m jfleet" in capsys.readouterr().err

    def test_a_reader_that_goes_away(self):
        command = [sys.executable, "-m", "jfleet", "devices", "--json"]
        env = start.clean_environment()
        with subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            process.stdout.close()
            text = process.stderr.read()
            assert (process.wait(60), text) == (1, b"")


class TestDevices:
    def test_json(self, capsys):
        assert run("devices", "--json") == 0
        found = json.loads(capsys.readouterr().out)
        rows = found.pop("devices")
        assert found == {"platform": "cpu", "num_devices": 8, "num_processes": 1}
        assert [row["id"] for row in rows] == list(range(8))
        assert rows[3]["process"] == 0
        assert (rows[3]["kind"], rows[3]["memory_bytes"]) == ("cpu", None)

    def test_table(self, capsys):
        assert run("devices") == 0
        text = capsys.readouterr().out
        assert "8 devices of platform cpu, processes: 1" in text
        assert text.count("unknown") == 16

    def test_memory_where_the_platform_tells(self, monkeypatch, capsys):
        known = dict(platform="gpu", device_kind="X1 [80]")

        def stats():
            return {"bytes_limit": 3 << 30, "bytes_in_use": 1536}

        def broken():
            raise AssertionError("belongs to another process")

        found = [
            types.SimpleNamespace(id=0, process_index=0, memory_stats=stats, **known),
            types.SimpleNamespace(id=1, process_index=1, memory_stats=broken, **known),
        ]
        monkeypatch.setattr(jax, "devices", lambda: found)
        assert run("devices", "--json") == 0
        first, second = json.loads(capsys.readouterr().out)["devices"]
        assert (first["memory_bytes"], first["used_bytes"]) == (3 << 30, 1536)
        assert (second["memory_bytes"], second["used_bytes"]) == (None, None)
        assert run("devices") == 0
        text = capsys.readouterr().out
        assert "X1 [80]" in text
        assert "3.00 GiB" in text
        assert "1.50 KiB" in text

    def test_only_the_first_process_writes(self, monkeypatch, capsys):
        found = {"platform": "cpu", "num_devices": 0, "num_processes": 2, "devices": []}
        monkeypatch.setattr(devices, "describe", lambda: found)
        monkeypatch.setattr(jax, "process_index", lambda: 1)
        assert run("devices") == 0
        assert capsys.readouterr().out == ""

    def test_no_devices(self, monkeypatch, capsys):
        def fail():
            raise RuntimeError("no backend 'npu'")

        monkeypatch.setattr(jax, "devices", fail)
        assert run("devices") == 1
        assert "no backend 'npu'; set JAX_PLATFORMS" in capsys.readouterr().err


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    params = {
        "layer": {"kernel": jnp.ones((16, 32)), "bias": jnp.ones(32, jnp.bfloat16)},
        "[b]head": jnp.ones((3,)),
    }
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1.0))
    state = state.replace(step=7)
    state = jfleet.group_sharded_parallel(
        state, "p_g_os", mesh=jfleet.new_group([0, 1])
    )
    folder = tmp_path_factory.mktemp("cli") / "ckpt"
    save_group_sharded_model(state, folder)
    return folder


@pytest.fixture(scope="module")
def odd_checkpoint(tmp_path_factory):
    """Leaves that are no plain arrays."""
    tied = jnp.ones(3)
    state = {
        "keys": jax.random.split(jax.random.key(0, impl="rbg"), 4),
        "tied": {"a": tied, "b": tied},
        "list": [1, 2.5, float("nan"), 1j, "[red]x", True],
        "apply": len,
        "empty": np.zeros((0, 4), np.int16),
    }
    folder = tmp_path_factory.mktemp("cli") / "odd"
    save_group_sharded_model(state, folder)
    return folder


def leaves_of(text):
    return {leaf["path"]: leaf for leaf in json.loads(text)["leaves"]}


class TestInspect:
    def test_json(self, checkpoint, capsys):
        assert run("inspect", checkpoint, "--json") == 0
        text = capsys.readouterr().out
        found = json.loads(text)
        assert (found["step"], found["level"]) == (7, "p_g_os")
        assert (found["num_devices"], found["num_processes"]) == (8, 1)
        assert found["meshes"] == [{"data": 2}]
        assert found["state"].endswith("TrainState")
        assert found["jax"] == jax.__version__
        files = [
            f for f in checkpoint.rglob("*") if f.is_file() and f.name != FILE_NAME
        ]
        assert found["file_bytes"] == sum(f.stat().st_size for f in files)
        assert found["array_bytes"] == 16 * 32 * 4 + 32 * 2 + 3 * 4 + 4
        assert found["num_arrays"] == 4
        leaf = leaves_of(text)["params/layer/kernel"]
        assert (leaf["shape"], leaf["dtype"]) == ([16, 32], "float32")
        assert (leaf["bytes"], leaf["kind"]) == (2048, "array")
        assert (leaf["spec"], leaf["mesh"]) == ([None, "data"], {"data": 2})

    def test_table(self, checkpoint, capsys):
        assert run("inspect", checkpoint) == 0
        text = capsys.readouterr().out
        assert "step 7, level p_g_os" in text
        assert "mesh data=2; saved by 1 processes with 8 devices" in text
        assert "4 arrays, 2.08 KiB" in text
        lines = [
            re.split(r"\s*│\s?", line) for line in text.splitlines() if "│" in line
        ]
        rows = {cells[1]: [c.strip() for c in cells[2:-1]] for cells in lines}
        assert rows["params"] == ["", "", "2.07 KiB", ""]
        assert rows["  layer"] == ["", "", "2.06 KiB", ""]
        want = ["float32", "(16, 32)", "2.00 KiB", "P(None, 'data')"]
        assert rows["    kernel"] == want
        assert rows["    bias"] == ["bfloat16", "(32,)", "64 B", "P('data')"]
        assert rows["  [b]head"] == ["float32", "(3,)", "12 B", "P()"]

    def test_leaves_that_are_no_plain_arrays(self, odd_checkpoint, capsys):
        assert run("inspect", odd_checkpoint, "--json") == 0
        found = leaves_of(capsys.readouterr().out)
        assert (found["keys"]["shape"], found["keys"]["bytes"]) == ([4], 4 * 16)
        assert (found["tied/b"]["same_as"], found["tied/b"]["bytes"]) == ("tied/a", 0)
        values = [found[f"list/{i}"]["value"] for i in range(6)]
        assert values == [1, 2.5, "nan", "1j", "[red]x", True]
        assert found["apply"]["kind"] == "static"
        assert (found["empty"]["shape"], found["empty"]["bytes"]) == ([0, 4], 0)
        assert run("inspect", odd_checkpoint) == 0
        text = capsys.readouterr().out
        for words in ("key rbg", "same as tied/a", "'[red]x'", "static", "(0, 4)"):
            assert words in text

    def test_neither_arrays_nor_devices_are_needed(self, checkpoint, tmp_path):
        alone = tmp_path / "ckpt"
        alone.mkdir()
        shutil.copy(checkpoint / FILE_NAME, alone)
        done = subprocess.run(
            [sys.executable, "-m", "jfleet", "inspect", alone],
            env=start.clean_environment(JAX_PLATFORMS="not_a_platform"),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert "params" in done.stdout

    def test_what_is_no_checkpoint(self, tmp_path, capsys):
        (tmp_path / "file").write_text("x")
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "file").write_text("x")
        (tmp_path / "cut" / "arrays.0").mkdir(parents=True)
        for name, why in {
            "nothing": "does not exist",
            "file": "is a file",
            "other": "holds no checkpoint",
            "cut": "interrupted save",
        }.items():
            assert run("inspect", tmp_path / name) == 1
            assert why in capsys.readouterr().err
        assert run("inspect", "") == 2

    @pytest.mark.parametrize(
        "damage",
        [
            lambda body: body.update(entries=body["entries"][:1]),
            lambda body: body["entries"][0].update(mesh=5, crc=True),
            lambda body: body["entries"][0].update(dtype="float99", crc=True),
            lambda body: body["entries"][0].update(kind="key", dtype="x", crc=True),
            lambda body: body["entries"][0].update(same_as="gone", crc=True),
            lambda body: body["entries"][0].update(spec=[{}], crc=True),
            lambda body: body.update(format=99),
            lambda body: body.clear(),
        ],
        ids=["checksum", "mesh", "dtype", "key", "tied", "spec", "format", "empty"],
    )
    def test_damage(self, checkpoint, tmp_path, capsys, damage):
        body = json.loads((checkpoint / FILE_NAME).read_text())
        damage(body)
        renewed = [entry.pop("crc", False) for entry in body.get("entries", [])]
        if any(renewed):  # what no checksum finds
            rest = {k: v for k, v in body.items() if k not in ("format", "crc32")}
            text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
            body["crc32"] = zlib.crc32(text.encode())
        (tmp_path / FILE_NAME).write_text(json.dumps(body))
        assert run("inspect", tmp_path) == 1
        error = capsys.readouterr().err
        assert "is damaged" in error or "has format 99" in error


def script(tmp_path, text):
    path = tmp_path / "script.py"
    path.write_text("import os, signal, subprocess, sys, time\n" + text)
    return path


def is_running(pid):
    """False for what nobody has buried yet, too."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def assert_gone(pids):
    for _ in range(200):
        if not any(map(is_running, pids)):
            return
        time.sleep(0.05)
    raise AssertionError([pid for pid in pids if is_running(pid)])


def pids_in(text):
    return [int(pid) for pid in re.findall(r"pid=(\d+)", text)]


SHOW_PID = "print(f'pid={os.getpid()}', flush=True)\n"
RANK = "rank = int(os.environ['JAX_PROCESS_ID'])\n"


class TestLaunch:
    def test_output_and_arguments_are_passed_on(self, tmp_path, capfd):
        path = script(
            tmp_path,
            "sys.stdout.buffer.write(b'caf\\xc3\\xa9 \\xff no end')\n"
            "print(*sys.argv[1:], repr(sys.stdin.read()), file=sys.stderr)\n",
        )
        words = ["--processes", 2, path, "--processes", "7", "a b"]
        assert run("launch", *words) == 0
        out, err = capfd.readouterr()
        assert sorted(out.splitlines()) == [f"[{i}] café \ufffd no end" for i in (0, 1)]
        assert sorted(err.splitlines()) == [
            f"[{i}] --processes 7 a b ''" for i in (0, 1)
        ]

    def test_the_exit_code_of_the_first_that_fails(self, tmp_path, capfd):
        path = script(
            tmp_path, SHOW_PID + RANK + "time.sleep(600) if rank != 1 else sys.exit(5)"
        )
        assert run("launch", "--processes", 3, path) == 5
        out, err = capfd.readouterr()
        (pid,) = pids_in(next(x for x in out.splitlines() if x.startswith("[1]")))
        assert err == (
            f"jfleet launch: process 1 of 3 (pid {pid}) ended with exit code 5;"
            " ending processes 0, 2\n"
        )
        assert len(pids_in(out)) >= 1
        assert_gone(pids_in(out))

    def test_a_process_that_is_killed_and_one_that_does_not_listen(
        self, tmp_path, capfd
    ):
        ready = tmp_path / "ready"
        path = script(
            tmp_path,
            SHOW_PID + RANK + f"ready = {str(ready)!r}\n"
            "if rank == 0:\n"
            "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "    open(ready, 'w').close()\n"
            "    time.sleep(600)\n"
            "while not os.path.exists(ready):\n"
            "    time.sleep(0.01)\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n",
        )
        assert run("launch", "--processes", 2, "--grace", 0.2, path) == 128 + 9
        out, err = capfd.readouterr()
        assert re.fullmatch(
            r"jfleet launch: process 1 of 2 \(pid \d+\) ended with signal 9"
            r" \(SIGKILL\); ending process 0\n"
            r"jfleet launch: process 0 did not end within 0.2 s; sending SIGKILL\n",
            err,
        )
        assert len(pids_in(out)) == 2
        assert_gone(pids_in(out))

    def test_one_that_ends_well_does_not_end_the_others(self, tmp_path, capfd):
        other = tmp_path / "first"
        path = script(
            tmp_path,
            RANK + f"other = {str(other)!r}\n"
            "if rank == 0:\n"
            "    open(other, 'w').close()\n"
            "    sys.exit()\n"
            "while not os.path.exists(other):\n"
            "    time.sleep(0.01)\n"
            "time.sleep(0.3)\n"
            "print('done')\n",
        )
        assert run("launch", "--processes", 2, path) == 0
        assert capfd.readouterr() == ("[1] done\n", "")

    def test_what_a_process_has_started_ends_with_it(self, tmp_path, capfd):
        path = script(
            tmp_path,
            "child = subprocess.Popen(['sleep', '600'])\n"
            "print(f'pid={child.pid}', flush=True)\n",
        )
        assert run("launch", "--processes", 2, path) == 0
        pids = pids_in(capfd.readouterr().out)
        assert len(pids) == 2
        assert_gone(pids)

    @pytest.mark.parametrize(
        ("number", "code"),
        [
            (signal.SIGINT, 130),
            (signal.SIGTERM, 143),
            pytest.param(
                signal.SIGKILL,
                -9,
                marks=pytest.mark.skipif(
                    sys.platform != "linux", reason="needs Linux's parent-death signal"
                ),
            ),
        ],
    )
    def test_a_signal_to_launch_ends_all(self, tmp_path, number, code):
        path = script(tmp_path, SHOW_PID + "time.sleep(600)\n")
        command = ["-m", "jfleet", "launch", "--processes", 2, path]
        with start.started(command, [start.clean_environment()]) as (launcher,):
            pids = [
                pid for _ in range(2) for pid in pids_in(launcher.stdout.readline())
            ]
            assert len(pids) == 2
            launcher.send_signal(number)
            _, err = launcher.communicate(timeout=60)
            assert launcher.returncode == code
        assert_gone(pids)
        if number != signal.SIGKILL:
            assert f"got {number.name}, ending processes 0, 1" in err

    def test_a_second_signal_ends_at_once(self, tmp_path):
        path = script(
            tmp_path,
            "signal.signal(signal.SIGTERM, lambda *_: print('no', flush=True))\n"
            + SHOW_PID
            + "while True: time.sleep(600)\n",
        )
        command = ["-m", "jfleet", "launch", "--processes", 1, "--grace", 300, path]
        with start.started(command, [start.clean_environment()]) as (launcher,):
            pids = pids_in(launcher.stdout.readline())
            launcher.send_signal(signal.SIGTERM)
            assert launcher.stdout.readline() == "[0] no\n"
            launcher.send_signal(signal.SIGTERM)
            launcher.communicate(timeout=60)
            assert launcher.returncode == 143
        assert_gone(pids)

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--processes", "0", "x.py"], "--processes must be at least 1, got 0"),
            (["--processes", "two", "x.py"], "invalid int value: 'two'"),
            (["x.py"], "required: --processes"),
            (["--processes", "2"], "required: script"),
            (
                ["--processes", "2", "--devices-per-process", "0", "x.py"],
                "--devices-per-process must be at least 1, got 0",
            ),
            (["--processes", "2", "no.py"], "'no.py' must be a Python file"),
            (["--processes", "2", "."], "'.' must be a Python file"),
            (
                ["--processes", "2", "--port", "70000", "x.py"],
                "--port must lie in 1..65535, got 70000",
            ),
            (
                ["--processes", "2", "--grace", "-1", "x.py"],
                "--grace must be at least 0 seconds, got -1",
            ),
        ],
    )
    def test_bad_usage(self, tmp_path, monkeypatch, capsys, words, message):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "x.py").write_text("")
        assert run("launch", *words) == 2
        assert message in capsys.readouterr().err

    def test_a_port_in_use(self, tmp_path, capsys):
        path = script(tmp_path, "")
        with start.socket.socket() as used:
            used.bind(("127.0.0.1", 0))
            used.listen()
            port = used.getsockname()[1]
            assert run("launch", "--processes", 1, "--port", port, path) == 2
        assert f"--port {port} cannot be used" in capsys.readouterr().err
        assert run("launch", "--processes", 1, "--port", port, path) == 0

    def test_what_a_process_is_told(self):
        flags = "--xla_force_host_platform_device_count=8 --xla_dump_to=x"
        old = {"XLA_FLAGS": flags, "PATH": "p"}
        new = launch.environment(old, 1, 4, None, 1234)
        assert (new["XLA_FLAGS"], new["PATH"]) == (flags, "p")
        assert new["JAX_COORDINATOR_ADDRESS"] == "127.0.0.1:1234"
        assert new["JAX_COORDINATOR_BIND_ADDRESS"] == "127.0.0.1:1234"
        assert (new["JAX_NUM_PROCESSES"], new["JAX_PROCESS_ID"]) == ("4", "1")
        assert new["JAX_LOCAL_DEVICE_IDS"] == "1"
        assert new["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] == "gloo"
        assert "JAX_NUM_CPU_DEVICES" not in new
        new = launch.environment(old, 1, 4, 3, 1234)
        assert new["JAX_LOCAL_DEVICE_IDS"] == "3,4,5"
        assert new["JAX_NUM_CPU_DEVICES"] == "3"
        assert new["XLA_FLAGS"] == "--xla_dump_to=x"
        assert old["XLA_FLAGS"] == flags
