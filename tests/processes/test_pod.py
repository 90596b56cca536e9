"""The training script for pods and clusters, with two processes on this host."""

import os
import re
import signal
import stat
import subprocess
import sys

import pytest

from jfleet import cli
from tests.processes import start

pytestmark = pytest.mark.multiprocess

POD = start.ROOT / "examples" / "pod"
TRAIN = POD / "train.py"
TINY = "--width 32 --batch 32 --save-every 3 --show-every 1".split()
DONE = re.compile(r"done: step (\d+), checksum of the state (\w{8})\n")
FIRST_PORT = 65535 - 2**12 + 1  # JAX adds the job's number modulo 2**12


def slurm(rank, job, nodes="127.0.0.1"):
    """What srun tells one task of two."""
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
    }


def free_job():
    """A job whose port is free."""
    return start.free_port(range(FIRST_PORT, FIRST_PORT + 4096)) - FIRST_PORT


@pytest.fixture
def launch(capfd):
    """Run a script in processes; return its exit code and what process 0 wrote."""

    def run(script, *words, processes=2, devices=2):
        options = ["--processes", processes, "--devices-per-process", devices]
        command = ["launch", *options, "--grace", 1, script, *words]
        capfd.readouterr()
        code = cli.main([str(word) for word in command])
        out, err = capfd.readouterr()
        lines = [x[4:] for x in out.splitlines(True) if x.startswith("[0] ")]
        return code, "".join(x for x in lines if "[Gloo]" not in x), err

    return run


def test_under_slurm(tmp_path):
    job = free_job()
    envs = [
        start.clean_environment(JAX_NUM_CPU_DEVICES="2", **slurm(rank, job))
        for rank in range(2)
    ]
    command = [TRAIN, "--out", tmp_path / "run", *TINY, "--steps", 4]
    with start.started(command, envs) as running:
        (first, err), (second, _) = start.outputs_of(running)
        assert [p.returncode for p in running] == [0, 0], err
    assert first.startswith("2 processes, mesh data=4, from step 0\n")
    losses = [float(x) for x in re.findall(r"step \d: loss (\d+\.\d+)\n", first)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert DONE.search(first)[1] == "4"
    assert second == ""
    assert (tmp_path / "run" / "state" / "manifest.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("level", ["os_g", "p_g_os"])
def test_killed_and_started_again_it_ends_in_the_same_bits(launch, tmp_path, level):
    words = [*TINY, "--steps", 8, "--level", level]
    code, whole, _ = launch(TRAIN, "--out", tmp_path / "whole", *words)
    assert (code, DONE.search(whole)[1]) == (0, "8")

    folder, victim = tmp_path / "killed", tmp_path / "victim.py"
    victim.write_text(
        f"import os, signal, sys, time\nsys.path.insert(0, {str(POD)!r})\n"
        "import jax, train\n"
        f"saved = {str(folder / 'state' / 'manifest.json')!r}\n"
        "rows = train.own_rows\n"
        "def own_rows(text, step, num_rows):\n"
        "    if step == 5 and jax.process_index() == 1:\n"
        "        while not os.path.exists(saved):\n"
        "            time.sleep(0.05)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return rows(text, step, num_rows)\n"
        "train.own_rows = own_rows\n"
        "train.train(train.parse())\n"
    )
    code, text, err = launch(victim, "--out", folder, *words)
    assert code == 128 + signal.SIGKILL
    assert "process 1 of 2" in err
    assert "step 5: loss" in text
    assert not DONE.search(text)

    code, text, _ = launch(TRAIN, "--out", folder, *words)
    assert code == 0
    assert "from step 3\n" in text
    assert DONE.search(text)[0] == DONE.search(whole)[0]


@pytest.mark.slow
def test_it_goes_on_with_another_number_of_processes(launch, tmp_path):
    def losses(text):
        return [float(x) for x in re.findall(r"loss (\d+\.\d+)\n", text)]

    words = [*TINY, "--level", "p_g_os"]
    _, whole, _ = launch(TRAIN, "--out", tmp_path / "a", *words, "--steps", 6)
    launch(TRAIN, "--out", tmp_path / "b", *words, "--steps", 3)
    code, text, _ = launch(
        TRAIN, "--out", tmp_path / "b", *words, "--steps", 6, processes=1, devices=8
    )
    assert code == 0
    assert text.startswith("1 processes, mesh data=8, from step 3\n")
    # Four digits are shown, and sums of eight and of four parts differ in the last bit.
    assert losses(text) == pytest.approx(losses(whole)[3:], abs=2e-4)


@pytest.mark.parametrize("name", ["tpu_pod.sh", "slurm_gpu.sbatch"])
def test_the_shell_scripts_are_valid(name):
    subprocess.run(["bash", "-n", POD / name], check=True)


def program(path, text):
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.slow
def test_the_batch_script(tmp_path, monkeypatch):
    """With an srun that starts both tasks here."""
    tasks = [slurm(rank, free_job()) for rank in range(2)]
    program(
        tmp_path / "srun",
        "import os, subprocess, sys\n"
        "words = sys.argv[1:]\n"
        "assert words[:2] == ['--label', '--kill-on-bad-exit=1'], words\n"
        "print('ids', os.environ.get('JAX_LOCAL_DEVICE_IDS'), flush=True)\n"
        f"running = [subprocess.Popen(words[2:], env=dict(os.environ, **task))\n"
        f"           for task in {tasks}]\n"
        "sys.exit(max(abs(p.wait(200)) for p in running))\n",
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("SLURM_SUBMIT_DIR", str(start.ROOT))
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "1")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    words = ["--out", tmp_path / "run", *TINY, "--steps", "2"]
    done = subprocess.run(
        ["bash", POD / "slurm_gpu.sbatch", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=start.TIMEOUT_SECS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "ids 0,1,2,3\n" in done.stdout
    assert DONE.search(done.stdout)[1] == "2"


@pytest.mark.slow
def test_the_pod_script(tmp_path, monkeypatch):
    """With a gcloud whose two hosts are folders here."""
    identities = [
        {k: v for k, v in env.items() if k.startswith("JAX_")}
        for env in start.environments(2, 2)
    ]
    hosts = [tmp_path / f"host{rank}" for rank in range(2)]
    for host in hosts:
        host.mkdir()
    program(
        tmp_path / "gcloud",
        "import os, shutil, subprocess, sys\n"
        "words = sys.argv[1:]\n"
        "assert words[:3] == ['compute', 'tpus', 'tpu-vm'], words\n"
        "assert words[words.index('--zone') + 1] == 'z', words\n"
        "assert '--worker=all' in words\n"
        f"hosts, identities = {list(map(str, hosts))}, {identities}\n"
        "if words[3] == 'scp':\n"
        "    name, where = words[5].split(':')\n"
        "    assert name == 'pod'\n"
        "    for host in hosts:\n"
        "        shutil.copy(words[4], os.path.join(host, where))\n"
        "    sys.exit()\n"
        "assert words[3:5] == ['ssh', 'pod'], words\n"
        "command = ['bash', '-c', words[words.index('--command') + 1]]\n"
        "running = [subprocess.Popen(command, cwd=h, env=dict(os.environ, **e))\n"
        "           for h, e in zip(hosts, identities)]\n"
        "sys.exit(max(abs(p.wait(200)) for p in running))\n",
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("INSTALL", "true")  # what is needed is there
    monkeypatch.setenv("PYTHONPATH", ".")  # only the copy
    words = ["--out", tmp_path / "a run", *TINY, "--steps", "2"]
    done = subprocess.run(
        ["bash", POD / "tpu_pod.sh", "pod", "z", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=start.TIMEOUT_SECS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert DONE.search(done.stdout)[1] == "2"
    assert (tmp_path / "a run" / "state" / "manifest.json").exists()
    usage = subprocess.run(
        ["bash", POD / "tpu_pod.sh", "pod"], capture_output=True, text=True, check=False
    )
    assert usage.returncode == 2
    assert "usage:" in usage.stderr
