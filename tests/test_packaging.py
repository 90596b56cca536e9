"""What is built and installed: complete, typed, light to import, and it trains.

The wheel is built and installed without a network, so the build backend of
pyproject.toml must be there. ``benchmarks/imports.py`` has the seconds of an import.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parent.parent
OFFLINE = ("--no-deps", "--no-index", "--disable-pip-version-check", "--quiet")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SUITE = (
    "tests/test_strategy.py",
    "tests/train_step/test_step.py::test_the_documented_snippet",
)
LATE = ("orbax", "tensorstore")
"""What ``import jfleet`` leaves to the first save or load."""


def run(*command, cwd, **environment):
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


def python(code, cwd, path):
    return run(sys.executable, "-c", code, cwd=cwd, PYTHONPATH=str(path))


def test_an_import_leaves_out_what_is_used_later(tmp_path):
    code = (
        "import json, sys, jax, optax, flax\n"
        "tops = lambda: {name.partition('.')[0] for name in sys.modules}\n"
        "before = tops(); import jfleet; after = tops()\n"
        "print(json.dumps([sorted(after), sorted(after - before)]))"
    )
    loaded, new = json.loads(python(code, tmp_path, ROOT))
    assert not set(loaded) & set(LATE)
    assert set(new) - sys.stdlib_module_names == {"jfleet"}


def test_the_metadata_says_what_is_needed():
    project = PYPROJECT["project"]
    needed = {name.partition(">")[0] for name in project["dependencies"]}
    assert needed == {"flax", "jax", "numpy", "optax", "orbax-checkpoint", "rich"}
    assert (ROOT / project["readme"]).exists()
    assert (ROOT / "jfleet" / "py.typed").read_text() == ""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel that pip builds from the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    build = (sys.executable, "-m", "pip", "wheel", "--no-build-isolation", *OFFLINE)
    run(*build, "--wheel-dir", folder, ROOT, cwd=folder)
    (found,) = folder.iterdir()
    return found


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
    """A folder into which the wheel is installed."""
    folder = tmp_path_factory.mktemp("site")
    install = (sys.executable, "-m", "pip", "install", *OFFLINE)
    run(*install, "--target", folder, wheel, cwd=folder)
    return folder


def sources(folder):
    """All files of a folder that belong to the project."""
    return {
        str(path.relative_to(ROOT))
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    (info,) = {name.split("/")[0] for name in names} - {"jfleet"}
    assert info.endswith(".dist-info")
    assert {name for name in names if name.startswith("jfleet/")} == sources("jfleet")
    assert {f"{info}/METADATA", f"{info}/licenses/LICENSE"} <= names
    assert "jfleet/py.typed" in names


@pytest.mark.slow
def test_the_sdist_holds_what_it_is_tested_and_built_from(wheel, tmp_path):
    hatchling = (sys.executable, "-m", "hatchling", "build", "-d", tmp_path)
    run(*hatchling, "-t", "sdist", cwd=ROOT)
    (archive,) = tmp_path.iterdir()
    with tarfile.open(archive) as files:
        files.extractall(tmp_path, filter="data")
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    inside = {
        str(path.relative_to(unpacked))
        for path in unpacked.rglob("*")
        if path.is_file()
    }
    for folder in ("jfleet", "tests", "docs", "examples", "benchmarks"):
        missing = sources(folder) - inside
        assert not missing, sorted(missing)
    assert {"conftest.py", "pyproject.toml", "Makefile", "README.md"} <= inside
    rebuild = (sys.executable, "-m", "pip", "wheel", "--no-build-isolation", *OFFLINE)
    again = tmp_path / "again"
    run(*rebuild, "--wheel-dir", again, unpacked, cwd=tmp_path)
    (second,) = again.iterdir()
    both = [zipfile.ZipFile(path).namelist() for path in (wheel, second)]
    assert sorted(both[0]) == sorted(both[1])


@pytest.mark.slow
def test_the_installed_wheel_passes_tests_elsewhere(site, tmp_path):
    """In a folder without a checkout, so that only the wheel can be imported."""
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("tests", "docs"):
        shutil.copytree(
            ROOT / name,
            tmp_path / name,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    where = python("import jfleet; print(jfleet.__file__)", tmp_path, site)
    assert pathlib.Path(where.strip()).is_relative_to(site)
    suite = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SUITE)
    assert "passed" in run(*suite, cwd=tmp_path, PYTHONPATH=str(site))


@pytest.mark.slow
def test_the_installed_wheel_knows_its_version_and_commands(site, tmp_path):
    version = python("import jfleet; print(jfleet.__version__)", tmp_path, site)
    assert version.strip() == PYPROJECT["project"]["version"]
    command = (sys.executable, "-m", "jfleet", "devices", "--json")
    found = run(*command, cwd=tmp_path, PYTHONPATH=str(site), JAX_NUM_CPU_DEVICES="3")
    assert json.loads(found)["num_devices"] == 3
