"""Golden vectors: what each algorithm must compute, as JSON under tests/data/vectors.

Arrays are ``{"shape", "data"}`` (flat, C order), ``{"shape", "seed", "scale"}`` (from a
small generator), ``{"shape", "fill"}``, or for large results ``{"shape", "digest"}``.
Non-finite numbers are strings. NumPy only.
"""

import dataclasses
import json
import pathlib

import numpy as np

FOLDER = pathlib.Path(__file__).parent.parent / "data" / "vectors"
NON_FINITE = ("nan", "inf", "-inf")


def lcg(seed, shape, scale):
    """Numbers in [-scale, scale), exact in float32: the top 24 bits of a 64-bit LCG."""
    state, mask = 2 * seed + 1, 2**64 - 1
    out = np.empty(int(np.prod(shape, dtype=np.int64)), np.float64)
    for i in range(out.size):
        state = (state * 6364136223846793005 + 1442695040888963407) & mask
        out[i] = ((state >> 40) - 2**23) / 2**23 * scale
    return out.reshape(shape)


def decode(node):
    """Replace encoded arrays by float64 arrays; keep digests."""
    if isinstance(node, list):
        return [decode(x) for x in node]
    if not isinstance(node, dict):
        return float(node) if node in NON_FINITE else node
    if "shape" not in node or "digest" in node:
        return node if "digest" in node else {k: decode(x) for k, x in node.items()}
    if "seed" in node:
        return lcg(node["seed"], node["shape"], node["scale"])
    if "fill" in node:
        return np.full(node["shape"], float(node["fill"]))
    return np.array([float(x) for x in node["data"]]).reshape(node["shape"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vector:
    name: str
    algorithm: str
    replicas: int
    hyper: dict
    options: dict
    only: str | None
    tolerance: dict
    params: dict
    steps: list
    expected: list

    def rates(self):
        """Learning rate of every step."""
        base = self.hyper.get("base", {})
        return [s.get("lr", self.hyper.get("lr", base.get("lr"))) for s in self.steps]


def load(path):
    raw = json.loads(path.read_text())
    known = {
        key: raw[key]
        for key in ("name", "algorithm", "replicas", "options", "tolerance")
    }
    return Vector(
        **known,
        hyper=raw["hyperparameters"],
        only=raw.get("only"),
        params=decode(raw["params"]),
        steps=decode(raw["steps"]),
        expected=decode(raw["expected"]),
    )


def load_all(folder=FOLDER):
    return [load(path) for path in sorted(pathlib.Path(folder).glob("*.json"))]


def mismatches(want, got, tolerance, where=""):
    """Differences in words; an empty list means equal within the tolerance."""
    if isinstance(want, dict) and "digest" in want:
        return _digest_mismatches(want["digest"], got, tolerance, where)
    if isinstance(want, dict):
        out = [f"{where}.{k}: missing" for k in want if k not in got]
        for key in want.keys() & got.keys():
            out += mismatches(want[key], got[key], tolerance, f"{where}.{key}")
        return out
    if isinstance(want, list):
        if len(want) != len(got):
            return [f"{where}: {len(got)} entries, expected {len(want)}"]
        rows = enumerate(zip(want, got, strict=True))
        return [
            m
            for i, (a, b) in rows
            for m in mismatches(a, b, tolerance, f"{where}[{i}]")
        ]
    want, got = np.asarray(want, np.float64), np.asarray(got, np.float64)
    if want.shape != got.shape:
        return [f"{where}: shape {got.shape}, expected {want.shape}"]
    close = np.isclose(got, want, **tolerance, equal_nan=True)
    return [] if close.all() else [f"{where}: {got!r}, expected {want!r}"]


def _digest_mismatches(digest, got, tolerance, where):
    flat = np.asarray(got, np.float64).ravel()
    if flat.size != digest["size"]:
        return [f"{where}: {flat.size} entries, expected {digest['size']}"]
    wide = {**tolerance, "atol": tolerance["atol"] * flat.size}
    rows = [
        ("sum", flat.sum(), digest["sum"], wide),
        ("abs_sum", np.abs(flat).sum(), digest["abs_sum"], wide),
        ("sum_squares", (flat * flat).sum(), digest["sum_squares"], wide),
        ("nonzero", np.count_nonzero(flat), digest["nonzero"], {"rtol": 0, "atol": 0}),
        *((f"[{i}]", flat[i], value, tolerance) for i, value in digest["at"]),
    ]
    return [
        f"{where}.{name}: {a!r}, expected {b!r}"
        for name, a, b, t in rows
        if not np.isclose(a, b, **t, equal_nan=True)
    ]
