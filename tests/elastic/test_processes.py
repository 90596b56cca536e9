"""Save with some processes, resume with others, another strategy, another mesh."""

import warnings

import numpy as np
import pytest

from jfleet._errors import JfleetWarning
from jfleet._tree import leaves_with_paths
from jfleet.checkpointer import Checkpointer
from tests.elastic import table
from tests.processes import start
from tests.save_helpers import assert_laid_out_as

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

PAIRS = [
    ("p_g_os", "os_g"),
    ("local", "amp_os_g"),
    ("amp_os_g", "local_amp"),
    ("fp16", "fp16"),
]

COMMON = """
import warnings
warnings.simplefilter("ignore")
from jfleet.checkpointer import Checkpointer
from tests.elastic import table
folder, old, new, step_rows = sys.argv[1:]
assert jax.device_count() == 4 and jax.process_count() == 2
"""
SAVE = (
    COMMON
    + """
state = table.scrambled(table.created(old, 4, 0), 1)
with Checkpointer(folder) as checkpointer:
    checkpointer.save(7, state)
"""
)
LOAD = (
    COMMON
    + """
from jfleet._tree import leaves_with_paths
target = table.created(new, 4, 2)
checkpointer = Checkpointer(folder)
loaded, _ = checkpointer.restore(target, strict=False)
assert jax.tree.structure(loaded) == jax.tree.structure(target)
want = np.load(step_rows)
likes = dict(leaves_with_paths(target))
for path, array in leaves_with_paths(loaded):
    like = likes[path]
    assert array.sharding == like.sharding, path
    for shard in array.addressable_shards:
        part = np.atleast_1d(want["/".join(path)])
        part = part[shard.index] if array.ndim else part[0]
        assert np.asarray(shard.data).tobytes() == part.tobytes(), path
rows = table.rows_for(4)
half = rows.shape[0] // 2
mine = rows[jax.process_index() * half :][:half]
after, metrics = table.step_of(new, 4)(loaded, mine)
assert np.isfinite(float(metrics.loss))
print(sorted(checkpointer.report.fresh), sorted(checkpointer.report.gone))
"""
)


def wanted(state, target, new):
    """What every leaf must be after the load, by path."""
    source, before = table.values_of(state), table.values_of(target)
    meaning = table.kinds_of(target)
    want = table.expected(source, before, new)
    return {
        path: before[m] if want[m] is None else np.asarray(want[m])
        for path, m in meaning.items()
    }


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_two_processes_save_and_one_loads(tmp_path, old, new):
    start.run(SAVE, tmp_path / "run", old, new, "-")
    state = table.scrambled(table.created(old, 4, 0), 1)
    target = table.created(new, 8, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", JfleetWarning)
        loaded, _ = Checkpointer(tmp_path / "run").restore(target, strict=False)
    assert_laid_out_as(loaded, target)
    want = wanted(state, target, new)
    for path, value in leaves_with_paths(loaded):
        name = "/".join(path)
        np.testing.assert_array_equal(np.asarray(value), want[name], err_msg=name)


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_one_process_saves_and_two_load(tmp_path, old, new):
    state = table.scrambled(table.created(old, 8, 0), 1)
    with Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(7, state)
    target = table.created(new, 4, 2)
    values = wanted(state, target, new)
    # NumPy's files know no bfloat16: its bits do.
    bits = {
        n: v.view(np.uint16) if v.dtype.itemsize == 2 else v for n, v in values.items()
    }
    np.savez(tmp_path / "want.npz", **bits)
    said = start.run(LOAD, tmp_path / "run", old, new, tmp_path / "want.npz")
    # Gloo writes to the standard output too, not always in whole lines.
    first, second = (text.splitlines()[-1] for text in said)
    assert first == second
