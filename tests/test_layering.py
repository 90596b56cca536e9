"""Imports follow the table of CONTRIBUTING.md; files and functions stay small."""

import ast
import pathlib

import pytest

PACKAGE = pathlib.Path(__file__).parent.parent / "jfleet"

# A file may import only from a lower row. A folder stands for its files, which may
# import from one another.
ROWS = [
    ["_errors", "_types"],
    ["_tree", "_settings", "_hlo"],
    ["_layout", "_plan_text", "processes"],
    ["strategy", "mesh", "_gather"],
    ["_placing"],
    ["optax_meta", "optimizer"],
    ["_states"],
    ["_resolving"],
    ["resolver", "plan"],
    ["_step"],
    ["train_step"],
    ["distributed"],
    ["group_sharded", "_logical"],
    ["_planning"],
    ["_tuning"],
    ["_checkpoint"],
    ["save", "export"],
    ["checkpointer"],
    ["_html"],
    ["_commands"],
    ["cli", "__init__"],
    ["__main__"],
]
ROW_OF = {name: row for row, names in enumerate(ROWS) for name in names}
MAX_FILE_LINES = 400
FENCED = {"orbax": {"_checkpoint"}, "argparse": {"cli", "_commands"}}

FILES = sorted(PACKAGE.rglob("*.py"))


def room(path: pathlib.Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported_modules(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "use absolute imports"
            if node.module == "jfleet":
                yield from (f"jfleet.{alias.name}" for alias in node.names)
            else:
                yield node.module


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_come_from_lower_rows(path):
    here = room(path)
    assert here in ROW_OF, f"{here} has no row in tests/test_layering.py"
    for module in imported_modules(ast.parse(path.read_text())):
        parts = module.split(".")
        if parts[0] == "jfleet" and len(parts) > 1 and parts[1] != here:
            there = parts[1]
            assert ROW_OF[there] < ROW_OF[here], f"{here} imports {there}"
        if parts[0] in FENCED:
            assert here in FENCED[parts[0]], (
                f"{parts[0]} is only for {FENCED[parts[0]]}"
            )


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_file_is_short(path):
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES


@pytest.mark.parametrize(
    "name",
    [
        "strategy",
        "_types",
        "_settings/checks",
        "_settings/options",
        "_settings/placement_options",
        "_settings/fleet_names",
    ],
)
def test_strategies_need_no_jax(name):
    text = (PACKAGE / f"{name}.py").read_text()
    names = {m.split(".")[0] for m in imported_modules(ast.parse(text))}
    assert not names & {"jax", "optax", "flax", "numpy"}
