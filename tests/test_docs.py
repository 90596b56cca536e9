"""Every python block of the documents runs: in order, one namespace per document.

A block of ``text`` right below a block of python is what that block prints, compared as
doctest does it, with ``...`` for what differs from run to run. A block of python that
begins with ``# name.py`` is written to that file too, and in a block of ``console``,
the lines ``$ python -m jfleet ...`` run.
"""

import doctest
import importlib.util
import pathlib
import re
import shlex
import sys
import types
from typing import NamedTuple

import pytest

import jfleet
from jfleet import cli
from jfleet import mesh as meshes

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("**/*.md"))
DOCUMENTS = [ROOT / "README.md", *PAGES]
FENCE = re.compile(r"^```(\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TREE = re.compile(r"^```\{toctree\}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DIRECTIVE = re.compile(
    r"^\.\. (?:auto\w+|py:data):: jfleet\.(?:\w+\.)*(\w+)$", re.MULTILINE
)
FILE = re.compile(r"# (\w+\.py)\n")
COMMAND = re.compile(r"^\$ python -m jfleet (.*)$", re.MULTILINE)
LOOSELY = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Block(NamedTuple):
    language: str
    text: str
    line: int
    prints: str | None


def name_of(path):
    return str(path.relative_to(ROOT if path.parent == ROOT else DOCS))


def blocks_of(document):
    """The fenced blocks of a document that run, with what each should print."""
    text = document.read_text()
    for fence in FENCE.finditer(text):
        language, body = fence.groups()
        if language in ("python", "console"):
            after = FENCE.match(text, fence.end() + 2)
            prints = after[2] if after and after[1] == "text" else None
            yield Block(language, body, text.count("\n", 0, fence.start()) + 1, prints)


def run(block, document, namespace):
    if block.language == "python":
        # Blank lines in front, so that a traceback names the line of the document.
        code = compile("\n" * block.line + block.text, str(document), "exec")
        exec(code, namespace)
        if name := FILE.match(block.text):
            pathlib.Path(name[1]).write_text(block.text)
        return
    for arguments in COMMAND.findall(block.text):
        assert cli.main(shlex.split(arguments)) == 0, arguments


RUNNING = [document for document in DOCUMENTS if any(blocks_of(document))]


@pytest.mark.parametrize("document", RUNNING, ids=name_of)
def test_blocks_run(document, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(meshes, "_current", None)
    page = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", page)
    for block in blocks_of(document):
        capsys.readouterr()
        run(block, document, vars(page))
        printed = capsys.readouterr().out
        if block.prints is not None:
            where = f"{name_of(document)}, line {block.line}, prints:\n{printed}"
            same = doctest.OutputChecker().check_output(block.prints, printed, LOOSELY)
            assert same, where


def test_blocks_are_found():
    found = [block for page in DOCUMENTS for block in blocks_of(page)]
    assert len(found) > 60
    assert sum(block.prints is not None for block in found) > 30
    for document in DOCUMENTS:
        text = document.read_text()
        python = len(re.findall(r"^ *(```|~~~)+ *(python|py|\{code)", text, re.M))
        ours = [b for b in blocks_of(document) if b.language == "python"]
        assert python == len(ours), f"{name_of(document)}: a block that does not run"


def test_links_lead_somewhere():
    for document in [*DOCUMENTS, ROOT / "CONTRIBUTING.md"]:
        text = FENCE.sub("", document.read_text())
        for target, anchor in re.findall(r"\]\(([^)#:]*)(#[^)]*)?\)", text):
            file = document.parent / target if target else document
            assert file.exists(), f"{document.name} links to {target}"
            if anchor:
                assert anchor[1:] in anchors(file), f"{document.name}: {target}{anchor}"


def anchors(document):
    """The names of headings, as Sphinx and code hosts derive them."""
    heads = re.findall(r"^#+ (.*)$", FENCE.sub("", document.read_text()), re.MULTILINE)
    words = (re.sub(r"[^\w\- ]", "", head.lower()) for head in heads)
    return {word.replace(" ", "-") for word in words}


def test_paths_in_the_documents_exist():
    for document in [*DOCUMENTS, ROOT / "CONTRIBUTING.md"]:
        for path in re.findall(
            r"`((?:jfleet|tests|docs|examples|benchmarks)/[\w./]+)`",
            document.read_text(),
        ):
            assert (ROOT / path).exists(), f"{document.name} names {path}"


def test_every_page_is_in_the_contents():
    listed = set()
    for page in PAGES:
        for tree in TREE.findall(page.read_text()):
            names = [x for x in tree.split("\n") if x and not x.startswith(":")]
            listed |= {(page.parent / f"{n}.md").resolve() for n in names}
    assert listed == set(PAGES) - {DOCS / "index.md"}


def test_everything_public_is_in_the_api_pages():
    text = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    listed = DIRECTIVE.findall(text)
    assert len(listed) == len(set(listed))
    public = {*public_names(jfleet), *public_names(jfleet.optax_meta)}
    assert public <= set(listed), sorted(public - set(listed))


def public_names(module):
    """Names that are jfleet's own: neither modules nor what these import."""
    for name in dir(module):
        value = getattr(module, name)
        where = getattr(value, "__module__", None) or type(value).__module__
        if name[0] != "_" and (where.startswith("jfleet") or name in jfleet._LAZY):
            yield name


FIGURES = sorted(p for p in (DOCS / "figures").glob("*.py") if p.stem[0] != "_")


@pytest.mark.parametrize("script", FIGURES, ids=lambda p: p.stem)
def test_figures_are_up_to_date(script, monkeypatch):
    monkeypatch.syspath_prepend(str(script.parent))
    spec = importlib.util.spec_from_file_location(f"figure_{script.stem}", script)
    figure = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(figure)
    drawn = script.with_suffix(".svg").read_text()
    assert drawn == figure.draw(), f"run: python {script.relative_to(ROOT)}"
