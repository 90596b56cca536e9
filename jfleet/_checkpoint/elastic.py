"""What of a checkpoint fits a state of another strategy, optimizer or mesh.

Used with ``strict=False``. In this order a wanted leaf gets

1. the stored leaf of the same name, its element type converted, and from another number
   of replicas their mean, which every new replica gets;
2. for the optimizer state, the stored leaf that lies elsewhere only because a strategy
   wraps the optimizer: master weights, a loss scale, clipping. One step from the old
   place to the new one must explain all of it;
3. for parameters, float32 masters and anchors, the stored copy of that parameter with
   the most bits: a master that was left as it is would undo the load in the next step.

What is in neither is ``fresh`` (as in the given state) or ``gone``. NamedTuples of
different types never exchange values, whatever their fields are called.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from jfleet._checkpoint.leaves import Leaf
from jfleet._checkpoint.manifest import Entry, Manifest, dtype_of
from jfleet._checkpoint.matching import (
    Difference,
    convertible,
    entry_path,
    entry_type,
    fits,
    leaf_type,
    missing,
    other_type,
    owners_differ,
    same_shape,
    unexpected,
)
from jfleet._tree import Path, path_str

_COPIES = ("master", "anchor")
"""Fields of optimizer states that hold parameters."""


def match_elastic(
    manifest: Manifest, leaves: Sequence[Leaf]
) -> tuple[dict[str, Entry], list[Difference]]:
    """Find a stored leaf for as many leaves of a state as possible.

    Returns:
        Stored entries by name of the wanted leaf, and all differences by path.
    """
    found = _Search(manifest, leaves)
    found.same_name()
    found.other_place()
    found.copies_of_params()
    return found.matches, sorted(found.differences(), key=lambda d: d.path)


class _Search:
    def __init__(self, manifest: Manifest, leaves: Sequence[Leaf]):
        self.stored = {_path(entry): entry for entry in manifest.entries}
        self.wanted = {leaf.path: leaf for leaf in leaves}
        self.matches: dict[str, Entry] = {}
        self.used: set[Path] = set()

    def take(self, leaf: Leaf, entry: Entry) -> None:
        self.matches[leaf.name] = entry
        self.used.add(_path(entry))

    def open_leaves(self) -> list[Leaf]:
        return [x for x in self.wanted.values() if x.name not in self.matches]

    def same_name(self) -> None:
        for path, leaf in self.wanted.items():
            entry = self.stored.get(path)
            if entry is not None and _can_become(entry, leaf):
                self.take(leaf, entry)

    def other_place(self) -> None:
        """Match optimizer states that are wrapped in another way."""
        leaves = {leaf.path: leaf for leaf in self.open_leaves()}
        entries = {p: e for p, e in self.stored.items() if p not in self.used}
        for head in sorted({h for h in map(_head, leaves) if h is not None}):
            here = {p: x for p, x in leaves.items() if _head(p) == head}
            there = {p: x for p, x in entries.items() if _head(p) == head}
            for leaf, entry in _best_move(here, there, len(head)):
                self.take(leaf, entry)

    def copies_of_params(self) -> None:
        """Give parameters and their copies the most exact stored values."""
        sources = self._param_sources()
        params = _params(self.wanted)
        for leaf in self.wanted.values():
            param = _copied_param(leaf.path, params.values())
            if leaf.path in params:
                self._improve(leaf, sources.get(params[leaf.path]))
            elif leaf.name not in self.matches and param in sources:
                entry = sources[param]
                if same_shape(entry, leaf):
                    self.take(leaf, entry)

    def _improve(self, leaf: Leaf, entry: Entry | None) -> None:
        if entry is None or not same_shape(entry, leaf):
            return
        now = self.matches.get(leaf.name)
        if now is None or (now.dtype != leaf.dtype_name and _wider(entry, now)):
            self.take(leaf, entry)

    def _param_sources(self) -> dict[Path, Entry]:
        """For each stored parameter, its master if there is one, else itself."""
        params = _params(self.stored)
        sources = {param: self.stored[path] for path, param in params.items()}
        for path, entry in self.stored.items():
            param = _copied_param(path, params.values(), ("master",))
            if param is not None and _wider(entry, sources[param]):
                sources[param] = entry
        return sources

    def differences(self) -> Iterator[Difference]:
        told = set(self.used)
        for path, leaf in self.wanted.items():
            entry, same = self.matches.get(leaf.name), self.stored.get(path)
            if entry is None and (same is None or path in self.used):
                yield missing(leaf)
            elif entry is None and same is not None:
                told.add(path)
                yield other_type(same, leaf)
            elif entry is not None and entry is not same:
                text = (
                    f"wanted as {leaf_type(leaf)}, taken from {entry_path(entry)},"
                    f" {entry_type(entry)}"
                )
                yield Difference(path=path_str(path), text=text, fates=("converted",))
            elif entry is not None and not fits(entry, leaf):
                yield other_type(entry, leaf)
        for path, entry in self.stored.items():
            if path not in told:
                yield unexpected(entry)


def _path(entry: Entry) -> Path:
    return tuple(map(str, entry.path))


def _can_become(entry: Entry, leaf: Leaf) -> bool:
    """True for the same thing, whatever its element type and number of replicas."""
    if owners_differ(entry, leaf):
        return False
    return fits(entry, leaf) or convertible(entry, leaf)


def _wider(entry: Entry, other: Entry) -> bool:
    return dtype_of(entry.dtype).itemsize > dtype_of(other.dtype).itemsize


def _head(path: Path) -> Path | None:
    """The steps that lead to the optimizer state a leaf is in; None outside of one."""
    if "opt_state" in path:
        return path[: path.index("opt_state") + 1]
    return path[:1] if path[:1] == ("1",) else None


def _params(paths: Iterable[Path]) -> dict[Path, Path]:
    """Paths of parameters in their state: below ``params``, or in a pair."""
    found = {}
    for path in paths:
        if _head(path) is not None:
            continue
        if "params" in path:
            found[path] = path[path.index("params") + 1 :]
        elif path[:1] == ("0",):
            found[path] = path[1:]
    return found


def _copied_param(
    path: Path, params: Iterable[Path], fields: Sequence[str] = _COPIES
) -> Path | None:
    """The parameter that a leaf of an optimizer state is a copy of, if it is one."""
    if _head(path) is None:
        return None
    known = set(params)
    for index, step in enumerate(path):
        if step in fields and path[index + 1 :] in known:
            return path[index + 1 :]
    return None


def _is_wrapper(step: str) -> bool:
    """True for steps into what a wrapper wraps, or along a chain."""
    return step.isdecimal() or step.startswith("inner")


def _places(paths: Iterable[Path], start: int) -> set[Path]:
    """Every place where a wrapped optimizer may begin."""
    places = set()
    for path in paths:
        end = start
        places.add(path[:end])
        while end < len(path) and _is_wrapper(path[end]):
            end += 1
            places.add(path[:end])
    return places


def _best_move(
    here: Mapping[Path, Leaf], there: Mapping[Path, Entry], start: int
) -> list[tuple[Leaf, Entry]]:
    """The pairs of the one move that explains most; of equals, the shortest."""
    best: list[tuple[Leaf, Entry]] = []
    moves = [
        (new, old) for new in _places(here, start) for old in _places(there, start)
    ]
    for new, old in sorted(moves, key=lambda m: (len(m[0]) + len(m[1]), m)):
        pairs = []
        for path, leaf in here.items():
            rest = path[len(new) :]
            entry = there.get(old + rest) if path[: len(new)] == new else None
            named = any(not _is_wrapper(step) for step in rest)
            if entry is not None and named and _can_become(entry, leaf):
                pairs.append((leaf, entry))
        if len(pairs) > len(best):
            best = pairs
    return best
