"""What ``import jfleet`` costs beyond ``import jax``, in CPU seconds.

    python benchmarks/imports.py
    python benchmarks/imports.py --rounds 15 --json imports.json

Each round starts new interpreters, which import one after the other what stands in the
table and note the CPU time of each import; the median of the rounds is reported. A
round that is not counted writes bytecode to a folder of its own, as an installation
does. Orbax is what the first save or load imports.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import _bench

LIMIT = 0.3
ORDER = ("jax", "optax", "flax", "jfleet", "jfleet.save")
CODE = """
import importlib, json, sys, time
seconds = {}
for name in sys.argv[1:]:
    start = time.process_time()
    importlib.import_module(name)
    seconds[name] = time.process_time() - start
print(json.dumps(seconds))
"""


def measure(names: tuple[str, ...], rounds: int, cache: str) -> dict[str, float]:
    """Return the median of the CPU seconds of each import, in this order."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    env |= {"PYTHONPYCACHEPREFIX": cache}
    found = []
    for _ in range(rounds + 1):
        command = [sys.executable, "-c", CODE, *names]
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, check=True
        )
        found.append(json.loads(done.stdout))
    return {n: statistics.median(seconds[n] for seconds in found[1:]) for n in names}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        alone = measure(("jax", "jfleet"), args.rounds, cache)["jfleet"]
        in_turn = measure(ORDER, args.rounds, cache)
    rows = [[name, f"{seconds:.3f}"] for name, seconds in in_turn.items()]
    print(_bench.markdown(["import, one after the other", "CPU seconds"], rows))
    kept = alone <= LIMIT
    verdict = "kept" if kept else "MISSED"
    print(f"\n{verdict}: jfleet takes {alone:.3f} of {LIMIT} CPU seconds beyond jax")
    results = {"beyond_jax": alone, "in_turn": in_turn}
    _bench.write_json(args.json, results)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
