"""How an equation passes the split of its operands on to its results.

A rule gets the equation, the dims of its operands and the sizes of the mesh axes. It
says how the operands must be split, how the results are, and over which axes a result
is only a part of a sum, so that the devices must add their parts.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jfleet._planning.tiles import Dims, merge, reshaped, whole, without

Sizes = Mapping[str, int]


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a rule says."""

    ins: Sequence[Dims]
    """How the operands must be split."""
    outs: Sequence[Dims]
    """How the results are."""
    summed: tuple[str, ...] = ()
    """Axes over which the results are parts of a sum, a maximum, ..."""


Rule = Callable[[Any, Sequence[Dims], Sizes], Outcome]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for some primitives."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def outcome(eqn: Any, dims: Sequence[Dims], sizes: Sizes) -> Outcome:
    """Apply the rule of an equation; unknown ones work element by element, or whole."""
    found = RULES.get(eqn.primitive.name)
    if found is not None:
        return found(eqn, dims, sizes)
    return (elementwise if is_elementwise(eqn) else _needs_whole)(eqn, dims, sizes)


def is_elementwise(eqn: Any) -> bool:
    """All operands have the shape of the result, but for dims of size one."""
    if eqn.primitive.name in RULES:
        return False
    shapes = [v.aval.shape for v in eqn.invars if v.aval.shape]
    return all(
        len(s) == v.aval.ndim
        and all(n in (1, m) for n, m in zip(s, v.aval.shape, strict=True))
        for s in shapes
        for v in eqn.outvars
    )


def _needs_whole(eqn: Any, dims: Sequence[Dims], sizes: Sizes) -> Outcome:
    return Outcome(
        [whole(len(d)) for d in dims], [whole(v.aval.ndim) for v in eqn.outvars]
    )


def elementwise(eqn: Any, dims: Sequence[Dims], sizes: Sizes) -> Outcome:
    """All operands have one shape; scalars and dims of size one are repeated."""
    shape = eqn.outvars[0].aval.shape
    shapes = [v.aval.shape for v in eqn.invars]
    ranked = sorted((-v.aval.size, i) for i, v in enumerate(eqn.invars) if len(dims[i]))
    both = merge([dims[i] for _, i in ranked]) if ranked else whole(len(shape))

    def own(i: int) -> Dims:
        pairs = zip(shapes[i], shape, both, strict=True) if shapes[i] else ()
        return tuple(e if n == m else () for n, m, e in pairs)

    return Outcome(list(map(own, range(len(dims)))), [both] * len(eqn.outvars))


def _keep(dims: Dims, cut: Sequence[int]) -> Dims:
    """Some dims must be whole."""
    return tuple(() if i in cut else entry for i, entry in enumerate(dims))


def _changed(eqn: Any) -> list[int]:
    """Dims whose size differs between the first operand and the result."""
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    return [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]


@rule("broadcast_in_dim")
def _broadcast(eqn, dims, sizes):
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    out: list[tuple[str, ...]] = [()] * len(new)
    for i, d in enumerate(eqn.params["broadcast_dimensions"]):
        if old[i] == new[d]:
            out[d] = dims[0][i]
    return Outcome(dims, [tuple(out)])


@rule("reshape")
def _reshape(eqn, dims, sizes):
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    out = reshaped(old, dims[0], new, sizes)
    lost = {a for e in dims[0] for a in e} - {a for e in out for a in e}
    return Outcome([without(dims[0], lost)], [out])


@rule("squeeze")
def _squeeze(eqn, dims, sizes):
    drop = {d % len(dims[0]) for d in eqn.params["dimensions"]}
    kept = tuple(e for i, e in enumerate(dims[0]) if i not in drop)
    return Outcome([_keep(dims[0], list(drop))], [kept])


@rule("expand_dims")
def _expand(eqn, dims, sizes):
    out = list(dims[0])
    for d in sorted(eqn.params["dimensions"]):
        out.insert(d, ())
    return Outcome(dims, [tuple(out)])


@rule("stack")
def _stack(eqn, dims, sizes):
    both = merge(dims)
    axis = eqn.params["axis"]
    return Outcome([both] * len(dims), [(*both[:axis], (), *both[axis:])])


@rule("transpose")
def _transpose(eqn, dims, sizes):
    return Outcome(dims, [tuple(dims[0][i] for i in eqn.params["permutation"])])


@rule("rev")
def _rev(eqn, dims, sizes):
    kept = _keep(dims[0], eqn.params["dimensions"])
    return Outcome([kept], [kept])


@rule("slice", "dynamic_slice", "pad")
def _slice(eqn, dims, sizes):
    kept = _keep(dims[0], _changed(eqn))
    return Outcome([kept, *map(_scalar, dims[1:])], [kept])


def _scalar(dims: Dims) -> Dims:
    return whole(len(dims))


@rule("dynamic_update_slice")
def _update_slice(eqn, dims, sizes):
    shape, part = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
    cut = [i for i, (a, b) in enumerate(zip(shape, part, strict=True)) if a != b]
    both = _keep(merge([_keep(dims[0], cut), _keep(dims[1], cut)]), cut)
    return Outcome([both, both, *map(_scalar, dims[2:])], [both])


@rule("split")
def _split(eqn, dims, sizes):
    kept = _keep(dims[0], [eqn.params["axis"]])
    return Outcome([kept], [kept] * len(eqn.outvars))


@rule("concatenate")
def _concatenate(eqn, dims, sizes):
    both = _keep(merge(dims), [eqn.params["dimension"]])
    return Outcome([both] * len(dims), [both])


@rule(
    *(f"reduce_{n}" for n in ("sum", "max", "min", "prod", "and", "or", "xor")),
    *("argmax", "argmin", "reduce"),
)
def _reduce(eqn, dims, sizes):
    axes = eqn.params.get("axes", eqn.params.get("dimensions"))
    num = len(eqn.outvars)
    ranked = merge([d for d in dims[:num]])
    if eqn.primitive.name in ("argmax", "argmin"):
        ranked = _keep(ranked, axes)
    out = tuple(e for i, e in enumerate(ranked) if i not in axes)
    summed = tuple(a for i in axes for a in ranked[i])
    return Outcome([ranked] * num + [()] * (len(dims) - num), [out] * num, summed)


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def _cumulative(eqn, dims, sizes):
    kept = _keep(dims[0], [eqn.params["axis"]])
    return Outcome([kept], [kept])


@rule("sort")
def _sort(eqn, dims, sizes):
    both = _keep(merge(dims), [eqn.params["dimension"]])
    return Outcome([both] * len(dims), [both] * len(eqn.outvars))


@rule("top_k", "approx_top_k")
def _top_k(eqn, dims, sizes):
    kept = _keep(dims[0], [len(dims[0]) - 1])
    return Outcome([kept], [kept] * len(eqn.outvars))


def dot_roles(eqn: Any) -> tuple[Any, Any, list[int], list[int]]:
    """Contracted pairs, batch pairs and the free dims of both operands of a dot."""
    (contract, batch) = eqn.params["dimension_numbers"]
    free = [
        [
            d
            for d in range(eqn.invars[side].aval.ndim)
            if d not in contract[side] and d not in batch[side]
        ]
        for side in (0, 1)
    ]
    return contract, batch, free[0], free[1]


@rule("dot_general")
def _dot(eqn, dims, sizes):
    contract, batch, left, right = dot_roles(eqn)
    sides = [list(dims[0]), list(dims[1])]
    for a, b in (*zip(*batch, strict=True), *zip(*contract, strict=True)):
        [entry] = merge([(sides[0][a],), (sides[1][b],)])
        sides[0][a] = sides[1][b] = entry
    used = {a for d in batch[0] for a in sides[0][d]}
    for places in _claims(eqn, dims, contract, left, right):
        side, d = places[0]
        if used.intersection(sides[side][d]):
            for side, d in places:
                sides[side][d] = ()
        used.update(sides[side][d])
    out = [sides[0][d] for d in (*batch[0], *left)] + [sides[1][d] for d in right]
    summed = tuple(a for d in contract[0] for a in sides[0][d])
    return Outcome([tuple(s) for s in sides], [tuple(out)], summed)


def _claims(eqn, dims, contract, left, right) -> list[list[tuple[int, int]]]:
    """Dims that an axis may split, as (operand, dim); the largest operand's first."""
    sizes = [v.aval.size for v in eqn.invars[:2]]
    found = []
    for a, b in zip(*contract, strict=True):
        split = [sizes[s] for s, d in ((0, a), (1, b)) if dims[s][d]]
        found.append((max(split, default=0), [(0, a), (1, b)]))
    found += [(sizes[0], [(0, d)]) for d in left]
    found += [(sizes[1], [(1, d)]) for d in right]
    return [places for _, places in sorted(found, key=lambda c: -c[0])]


@rule("conv_general_dilated")
def _conv(eqn, dims, sizes):
    numbers = eqn.params["dimension_numbers"]
    lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    grouped = eqn.params["feature_group_count"] * eqn.params["batch_group_count"] > 1
    rows = dims[0][lhs[0]]
    inner = () if grouped else merge([(dims[0][lhs[1]],), (dims[1][rhs[1]],)])[0]
    if set(inner) & set(rows):
        inner = ()
    features = () if grouped else dims[1][rhs[0]]
    if set(features) & {*rows, *inner}:
        features = ()
    if eqn.params["batch_group_count"] > 1:
        rows = ()
    left, right, result = (list(whole(len(s))) for s in (lhs, rhs, out))
    left[lhs[0]], left[lhs[1]] = rows, inner
    right[rhs[0]], right[rhs[1]] = features, inner
    result[out[0]], result[out[1]] = rows, features
    return Outcome([tuple(left), tuple(right)], [tuple(result)], tuple(inner))


@rule("gather")
def _gather(eqn, dims, sizes):
    """Rows picked by indices: split as the indices are, and as what is not picked."""
    numbers, cut = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    table, indices = eqn.invars[0].aval, dims[1]
    batching = list(getattr(numbers, "operand_batching_dims", ()))
    paired = dict(
        zip(getattr(numbers, "start_indices_batching_dims", ()), batching, strict=True)
    )
    rows = [indices[i] or dims[0][paired[i]] if i in paired else indices[i]
            for i in range(len(indices) - 1)]  # fmt: skip
    full = [i for i in range(table.ndim) if cut[i] == table.shape[i]]
    operand = tuple(
        rows[next(k for k, v in paired.items() if v == i)]
        if i in batching
        else dims[0][i]
        for i in range(table.ndim)
    )
    used = {a for e in rows for a in e}
    operand = tuple(
        e if i in batching or not used.intersection(e) else ()
        for i, e in enumerate(operand)
    )
    kept = [
        i
        for i in range(table.ndim)
        if i not in numbers.collapsed_slice_dims and i not in batching
    ]
    out: list[tuple[str, ...]] = [()] * eqn.outvars[0].aval.ndim
    places = [i for i in range(len(out)) if i not in numbers.offset_dims]
    for place, entry in zip(places, rows, strict=True):
        out[place] = entry
    for place, i in zip(numbers.offset_dims, kept, strict=True):
        out[place] = operand[i] if i in full else ()
    # Each device looks up what it has, and zeros for the rest.
    picked = [i for i in range(table.ndim) if i not in full and i not in batching]
    summed = tuple(a for i in picked for a in operand[i])
    return Outcome([operand, (*rows, ())], [tuple(out)], summed)


@rule("scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul",
      "scatter-min", "scatter_min", "scatter-max", "scatter_max")  # fmt: skip
def _scatter(eqn, dims, sizes):
    """Where rows of updates are split, each device adds its own: a part of a sum."""
    numbers = eqn.params["dimension_numbers"]
    target, updates = eqn.invars[0].aval, eqn.invars[2].aval
    batching = list(getattr(numbers, "operand_batching_dims", ()))
    pairs = list(
        zip(
            getattr(numbers, "scatter_indices_batching_dims", ()),
            batching,
            strict=True,
        )
    )
    windows = numbers.update_window_dims
    places = [i for i in range(updates.ndim) if i not in windows]
    rows = [
        merge([(dims[1][k],), (dims[2][place],)])[0] for k, place in enumerate(places)
    ]
    used = {a for e in rows for a in e}
    kept = [
        i
        for i in range(target.ndim)
        if i not in numbers.inserted_window_dims and i not in batching
    ]
    out: list[tuple[str, ...]] = [()] * target.ndim
    update: list[tuple[str, ...]] = [()] * updates.ndim
    for place, i in zip(windows, kept, strict=True):
        if updates.shape[place] == target.shape[i]:
            [entry] = merge([(dims[2][place],), (dims[0][i],)])
            update[place] = out[i] = () if used.intersection(entry) else entry
    for place, entry in zip(places, rows, strict=True):
        update[place] = entry
    for k, i in pairs:
        out[i] = rows[k]
    for i in numbers.inserted_window_dims:
        out[i] = () if used.intersection(dims[0][i]) else dims[0][i]
    matched = {k for k, _ in pairs}
    summed = tuple(a for k, e in enumerate(rows) if k not in matched for a in e)
    return Outcome([tuple(out), (*rows, ()), tuple(update)], [tuple(out)], summed)


@rule("reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window",
      "reduce_precision_window", "select_and_scatter_add",
      "select_and_gather_add")  # fmt: skip
def _window(eqn, dims, sizes):
    sizes_ = eqn.params.get("window_dimensions", ())
    cut = [i for i, n in enumerate(sizes_) if n != 1]
    ranked = [d for d in dims if d]
    both = _keep(merge(ranked), cut)
    return Outcome([both if d else () for d in dims], [both] * len(eqn.outvars))


@rule("iota", "random_seed", "random_wrap", "random_unwrap", "random_fold_in",
      "random_bits", "random_clone", "axis_index", "rng_bit_generator",
      "threefry2x32", "create_token", "partition_id")  # fmt: skip
def _made_whole(eqn, dims, sizes):
    return _needs_whole(eqn, dims, sizes)
