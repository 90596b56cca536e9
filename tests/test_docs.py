"""Every python block of the documents runs, in order, one process per document."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_python_blocks_run(document, tmp_path):
    blocks = BLOCK.findall(document.read_text())
    # A document may set up its devices late in the text; the run must start with it.
    setup = "import jax\njax.config.update('jax_num_cpu_devices', 8)\n"
    program = setup + "\n".join(b for b in blocks if "jax_num_cpu_devices" not in b)
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_readme_has_blocks():
    assert len(BLOCK.findall((ROOT / "README.md").read_text())) >= 3


def test_paths_in_the_documents_exist():
    for document in [*DOCUMENTS, ROOT / "CONTRIBUTING.md"]:
        for path in re.findall(
            r"`((?:jfleet|tests|docs|examples|benchmarks)/[\w./]+)`",
            document.read_text(),
        ):
            assert (ROOT / path).exists(), f"{document.name} names {path}"
