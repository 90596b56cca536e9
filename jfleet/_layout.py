"""Where each array lives: one pure decision from path, shape and mesh to a spec.

Nothing here touches a device. A ``Policy`` is everything that was asked for; it is
hashable, so a transformation that carries one can be compared and cached.

Note [specs are canonical]: a spec never ends in ``None`` and never wraps a single axis
in a tuple. ``P("data", None)`` and ``P("data")`` mean the same but compare unequal, and
a jitted step compiles again when it meets the other spelling.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jfleet._errors import PlacementError, listing
from jfleet._tree import Path, num_elements, path_str
from jfleet._types import Level

Entries = tuple[tuple[str, ...], ...]
"""A spec spelled out: for every dim of the array, the mesh axes that split it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the user asked for, resolved against a mesh."""

    mesh: Mesh | AbstractMesh
    """The mesh; abstract when only planning."""
    level: Level
    """``os``, ``os_g`` or ``p_g_os``."""
    axes: tuple[str, ...]
    """Mesh axes that split the state."""
    optimizer_axes: tuple[str, ...]
    """Mesh axes that split the optimizer state; ``axes``, or more than those."""
    rules: tuple[tuple[str, PartitionSpec], ...] = ()
    """(regular expression on the parameter path, spec); the first match decides."""
    exclude: tuple[str, ...] = ()
    """Regular expressions; parameters whose path matches stay whole."""
    min_shard_size: int = 0
    """Arrays with fewer elements stay whole."""
    kept: tuple[tuple[Path, PartitionSpec], ...] = ()
    """Specs that parameters came with, such as tensor-parallel ones."""
    offload: bool = False
    """Whether the optimizer state rests in pinned host memory."""
    pad: bool = False
    """Whether arrays that no dim lets split are stored padded."""
    pads_params: bool = False
    """Whether parameters are padded as well; the forward function must cut them."""
    split_updates: bool = False
    """Whether updates come out split like the state. Then whoever adds them must pin
    the sum: adding shards and gathering the sum is cheaper than gathering updates."""
    logical: tuple[tuple[Path, tuple[int, ...]], ...] = ()
    """Shapes of the parameters without padding, once some are padded."""

    @property
    def splits_params(self) -> bool:
        """Whether parameters are split as well (ZeRO 3)."""
        return self.level == "p_g_os"

    @property
    def splits_grads(self) -> bool:
        """Whether gradients are split (ZeRO 2 and 3)."""
        return self.level != "os"


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """A spec and the reason for it, in words."""

    spec: PartitionSpec
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class ParamLayout:
    """The specs of one parameter and of what belongs to it."""

    path: Path
    shape: tuple[int, ...]
    """Shape without padding."""
    param: Decision
    grad: Decision
    optimizer: Decision
    stored_param: tuple[int, ...]
    """Shape in which the parameter is stored."""
    stored_optimizer: tuple[int, ...]
    """Shape in which its moments are stored."""

    @property
    def is_padded(self) -> bool:
        """Whether anything of it is stored larger than it is."""
        return self.stored_param != self.shape or self.stored_optimizer != self.shape


def is_explicit(mesh: Mesh | AbstractMesh) -> bool:
    """Whether the mesh has axes whose sharding is part of an array's type."""
    return AxisType.Explicit in mesh.axis_types


def canonical(entries: Iterable[Sequence[str]]) -> PartitionSpec:
    """Build the canonical spec from the axes of each dim.

    >>> canonical([("data",), ()])
    P('data',)
    """
    names = [e[0] if len(e) == 1 else (tuple(e) or None) for e in entries]
    while names and names[-1] is None:
        names.pop()
    return PartitionSpec(*names)


def entries_of(spec: PartitionSpec | None, num_dims: int) -> Entries:
    """Spell a spec out to one tuple of axes per dim.

    >>> entries_of(PartitionSpec("data"), 2)
    (('data',), ())
    """
    entries = [
        () if e is None else ((e,) if isinstance(e, str) else tuple(e))
        for e in (spec or ())
        if e is not PartitionSpec.UNCONSTRAINED
    ]
    return tuple(entries) + ((),) * (num_dims - len(entries))


def without_axes(spec: PartitionSpec, axes: Iterable[str]) -> PartitionSpec:
    """Drop ``axes`` from a spec."""
    drop = set(axes)
    return canonical(
        [a for a in e if a not in drop] for e in entries_of(spec, len(spec))
    )


def axes_size(mesh: Mesh | AbstractMesh, axes: Iterable[str]) -> int:
    """Number of devices along ``axes``."""
    size = 1
    for axis in axes:
        size *= mesh.shape[axis]
    return size


def check_spec(
    spec: PartitionSpec, shape: Sequence[int], mesh: Any, path: Path, origin: str
) -> None:
    """Raise PlacementError unless ``spec`` fits ``shape`` on ``mesh``.

    Raises:
        PlacementError: more entries than dims, an unknown axis, an axis used twice, or
            a dim that the axes do not divide. The text names path, shape, spec, mesh.
    """
    where = (
        f"{origin} gives parameter {path_str(path)!r} of shape {tuple(shape)} the spec"
        f" {spec} on mesh {dict(mesh.shape)}"
    )
    if len(spec) > len(shape):
        raise PlacementError(
            f"{where}, which has {len(spec)} entries for {len(shape)} dims; drop some"
        )
    seen: set[str] = set()
    for dim, axes in enumerate(entries_of(spec, len(shape))):
        for axis in axes:
            if axis not in mesh.shape:
                known = listing(mesh.shape)
                raise PlacementError(
                    f"{where}, but the mesh has no axis {axis!r}; use one of {known}"
                )
            if axis in seen:
                raise PlacementError(f"{where}, which uses axis {axis!r} twice")
            seen.add(axis)
        size = axes_size(mesh, axes)
        if shape[dim] % size:
            raise PlacementError(
                f"{where}, but {size} does not divide dim {dim} of size {shape[dim]};"
                " choose another dim or leave the parameter whole"
            )


def split(
    shape: Sequence[int],
    axes: Sequence[str],
    mesh: Any,
    *,
    base: PartitionSpec | None = None,
    min_shard_size: int = 0,
) -> Decision:
    """Add ``axes`` to ``base``: largest free dim that they divide, ties to the first.

    With several axes, one dim per axis is tried first (on a torus each gather and each
    reduction then runs along one direction), then all axes on one dim, then as many of
    the axes as fit. Dims that ``base`` already splits are used only when no other fits.
    """
    shape = tuple(shape)
    entries = entries_of(base, len(shape))
    axes = tuple(a for a in axes if mesh.shape[a] > 1)
    present = {a for e in entries for a in e}
    todo = tuple(a for a in axes if a not in present)
    if not axes:
        return Decision(canonical(entries), "one device along the axes: whole")
    if not todo:
        return Decision(canonical(entries), f"already split over {'+'.join(axes)}")
    if not shape:
        return Decision(canonical(entries), "scalar: whole")
    size = num_elements(shape)
    if size == 0:
        return Decision(canonical(entries), "no elements: whole")
    if size < min_shard_size:
        text = f"{size} elements, below min_shard_size {min_shard_size}: whole"
        return Decision(canonical(entries), text)
    for count in range(len(todo), 0, -1):
        for subset in itertools.combinations(todo, count):
            found = _place(shape, entries, subset, mesh)
            if found:
                return Decision(canonical(found[0]), found[1] + _left(todo, subset))
    width = axes_size(mesh, todo)
    return Decision(
        canonical(entries), f"no dim of {shape} is divisible by {width}: whole"
    )


def _left(todo: Sequence[str], subset: Sequence[str]) -> str:
    rest = [a for a in todo if a not in subset]
    return f"; nothing left that {'+'.join(rest)} divides" if rest else ""


def _place(
    shape: tuple[int, ...], entries: Entries, axes: Sequence[str], mesh: Any
) -> tuple[list[tuple[str, ...]], str] | None:
    """One dim per axis, else all axes on one dim; None when neither divides."""
    room = [
        size // axes_size(mesh, e) if size % axes_size(mesh, e) == 0 else 0
        for size, e in zip(shape, entries, strict=True)
    ]
    free = [d for d in range(len(shape)) if not entries[d]]
    taken = [d for d in range(len(shape)) if entries[d]]
    by_size = sorted(free, key=lambda d: -shape[d])
    if len(axes) > 1:
        for dims in itertools.combinations(by_size, len(axes)):
            for order in itertools.permutations(sorted(dims)):
                if all(
                    room[d] and room[d] % mesh.shape[a] == 0
                    for d, a in zip(order, axes, strict=True)
                ):
                    new = list(entries)
                    for d, a in zip(order, axes, strict=True):
                        new[d] = (*new[d], a)
                    text = ", ".join(
                        f"dim {d} over {a}" for d, a in zip(order, axes, strict=True)
                    )
                    return new, f"one dim per axis: {text}"
    width = axes_size(mesh, axes)
    for d in (*by_size, *sorted(taken, key=lambda d: -room[d])):
        if room[d] and room[d] % width == 0:
            new = list(entries)
            new[d] = (*new[d], *axes)
            shared = f", shared with {'+'.join(entries[d])}" if entries[d] else ""
            return new, f"dim {d} is the largest that {width} divides{shared}"
    return None


def param_layouts(
    leaves: Sequence[tuple[Path, Any]], policy: Policy
) -> list[ParamLayout]:
    """Decide the specs of every parameter, its gradient and its optimizer state.

    Args:
        leaves: (path, array or ShapeDtypeStruct) of every parameter.
        policy: what was asked for.

    Returns:
        One layout per leaf, in order.

    Raises:
        PlacementError: a rule or a kept spec that does not fit; a rule or an exclusion
            that matches no parameter.
    """
    rules = [(re.compile(p), p, spec) for p, spec in policy.rules]
    exclude = [(re.compile(p), p) for p in policy.exclude]
    kept = dict(policy.kept)
    logical = dict(policy.logical)
    used: set[str] = set()
    layouts = []
    for path, leaf in leaves:
        name = path_str(path)
        shape = logical.get(path, tuple(leaf.shape))
        base = kept.get(path, PartitionSpec())
        fixed = _fixed(name, path, shape, base, rules, exclude, policy, used)
        layouts.append(_param_layout(path, shape, base, fixed, policy))
    wanted = [("rule", p) for _, p, _ in rules] + [("exclude", p) for _, p in exclude]
    for kind, pattern in wanted if leaves else ():
        if pattern not in used:
            names = listing((path_str(p) for p, _ in leaves), limit=5)
            raise PlacementError(
                f"{kind} {pattern!r} matches no parameter; the paths are {names}"
            )
    return layouts


def _fixed(name, path, shape, base, rules, exclude, policy, used) -> Decision | None:
    """What an exclusion or a rule says about a parameter; None: nothing."""
    matched = None
    for regex, pattern in exclude:
        if regex.search(name):
            used.add(pattern)
            spec = without_axes(base, policy.optimizer_axes)
            matched = matched or Decision(spec, f"excluded by {pattern!r}: whole")
    for number, (regex, pattern, spec) in enumerate(rules, 1):
        if regex.search(name):
            used.add(pattern)
            if matched is None:
                check_spec(spec, shape, policy.mesh, path, f"rule {pattern!r}")
                spec = canonical(entries_of(spec, len(shape)))
                matched = Decision(spec, f"rule #{number} {pattern!r}")
    return matched


def _param_layout(path, shape, base, fixed, policy) -> ParamLayout:
    drop = {*policy.axes, *policy.optimizer_axes}
    if fixed is None:
        check_spec(base, shape, policy.mesh, path, "the array itself")
        small = {"min_shard_size": policy.min_shard_size}
        sharded = split(shape, policy.axes, policy.mesh, base=base, **small)
        wide = sharded
        if policy.optimizer_axes != policy.axes:
            wide = split(
                shape, policy.optimizer_axes, policy.mesh, base=sharded.spec, **small
            )
    else:
        sharded = wide = fixed
    stored_param = stored_optimizer = shape
    if policy.pad and fixed is None:
        stored_optimizer, wide = _padded(
            shape, policy.optimizer_axes, base, wide, policy
        )
        if policy.pads_params and policy.splits_params:
            stored_param, sharded = _padded(shape, policy.axes, base, sharded, policy)
    whole = without_axes(sharded.spec, drop)
    text = f"level {policy.level} keeps {{}} whole"
    if whole:
        text += f", split over {whole} as it came"
    param = sharded if policy.splits_params else Decision(whole, text.format("it"))
    grad = wide if policy.splits_grads else Decision(whole, text.format("gradients"))
    if stored_optimizer != shape:
        grad = Decision(whole, "padded only at rest: whole")
    return ParamLayout(path, shape, param, grad, wide, stored_param, stored_optimizer)


def _padded(shape, axes, base, decision, policy) -> tuple[tuple[int, ...], Decision]:
    """Pad the largest free dim to a multiple of the devices, if nothing else splits.

    Padding must not double an array: a dim shorter than the devices is left alone.
    """
    width = axes_size(policy.mesh, axes)
    entries = entries_of(base, len(shape))
    free = [d for d in range(len(shape)) if not entries[d]]
    is_split = any(a in axes for e in entries_of(decision.spec, len(shape)) for a in e)
    if is_split or not free or num_elements(shape) < max(policy.min_shard_size, 1):
        return shape, decision
    dim = max(free, key=lambda d: (shape[d], -d))
    if width < 2 or shape[dim] < width:
        return shape, decision
    size = -(-shape[dim] // width) * width
    stored = (*shape[:dim], size, *shape[dim + 1 :])
    new = list(entries)
    new[dim] = tuple(axes)
    text = f"dim {dim} padded from {shape[dim]} to {size}, which {width} divides"
    return stored, Decision(canonical(new), text)


def named_sharding(
    mesh: Any, spec: PartitionSpec, num_dims: int, memory_kind: str | None = None
) -> NamedSharding:
    """Return the NamedSharding of a canonical spec, spelled as jit returns it.

    Arrays on Explicit axes come out of jit with one entry per dim.
    """
    if is_explicit(mesh):
        spec = PartitionSpec(*spec, *[None] * (num_dims - len(spec)))
    return NamedSharding(mesh, spec, memory_kind=memory_kind)


def constrain(tree: Any, specs: Any, mesh: Any) -> Any:
    """Pin a tree of arrays to specs, on either kind of mesh.

    A spec of None leaves its array alone. Outside a trace arrays are moved at once.
    """

    def pin(x: Any, spec: PartitionSpec | None) -> Any:
        if spec is None:
            return x
        sharding = named_sharding(mesh, spec, x.ndim)
        if is_explicit(mesh):
            return jax.sharding.reshard(x, sharding)
        return jax.lax.with_sharding_constraint(x, sharding)

    return jax.tree.map(pin, tree, specs)
