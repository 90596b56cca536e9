"""The plan: a spec, a reason and a byte count for every array, before any exists.

``plan`` works on shapes and on a mesh that may be abstract, so a state far too big for
this machine can be planned on it. ``group_sharded_parallel`` only executes a plan.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jfleet._errors import ConfigError
from jfleet._layout import Decision, Policy, axes_size, entries_of, param_layouts
from jfleet._placing.match import ParamIndex, extra_decisions, optimizer_decisions
from jfleet._placing.padding import Padding, fit
from jfleet._plan_text import diff, table
from jfleet._states.adapters import EXTRA, OPT_STATE, PARAMS, Leaf, Parts, take_apart
from jfleet._states.policy import fits, kept_spec, make_policy
from jfleet._tree import dtype_bytes, num_elements, path_str
from jfleet._types import AxisName
from jfleet.optax_meta.sharding import ShardedTransformation

GRADS = "grads"
KINDS = (PARAMS, GRADS, OPT_STATE, EXTRA)
FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """What is planned for one array."""

    kind: str
    """``params``, ``grads``, ``opt_state`` or ``extra``."""
    path: str
    """Path of the array, joined with slashes."""
    shape: tuple[int, ...]
    """Shape of the whole array."""
    dtype: str
    """Type of its elements."""
    spec: PartitionSpec
    """The planned spec."""
    total_bytes: int
    """Bytes of the whole array."""
    device_bytes: int
    """Bytes on each device."""
    reason: str
    """Why it is laid out so."""
    stored_shape: tuple[int, ...]
    """Shape at rest: ``shape``, or larger where ``pad`` asked for it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """A layout for a whole state: one row per array. Equal plans compare equal."""

    level: str
    """``os``, ``os_g`` or ``p_g_os``."""
    mesh_shape: tuple[tuple[str, int], ...]
    """Axis names and sizes, in order."""
    axes: tuple[str, ...]
    """The axes that split the state."""
    rows: tuple[Row, ...]
    """One row per array."""
    policy: Policy | None = dataclasses.field(default=None, compare=False, repr=False)
    """What was asked for; absent from a plan that was read from JSON."""

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return num_elements([size for _, size in self.mesh_shape])

    def of_kind(self, kind: str) -> list[Row]:
        """Rows of one kind, in the order of the state."""
        if kind not in KINDS:
            raise ConfigError(f"kind must be one of {KINDS}, got {kind!r}")
        return [row for row in self.rows if row.kind == kind]

    def device_bytes(self, *kinds: str) -> int:
        """Bytes on each device, of some kinds or of the resting state.

        The resting state is everything but gradients, which live only during a step.
        """
        wanted = set(kinds or (PARAMS, OPT_STATE, EXTRA))
        return sum(row.device_bytes for row in self.rows if row.kind in wanted)

    def total_bytes(self, *kinds: str) -> int:
        """Bytes of the whole arrays, of some kinds or of the resting state."""
        wanted = set(kinds or (PARAMS, OPT_STATE, EXTRA))
        return sum(row.total_bytes for row in self.rows if row.kind in wanted)

    def whole(self, kind: str = OPT_STATE) -> list[Row]:
        """Rows of a kind that no axis splits, scalars left out."""
        return [r for r in self.of_kind(kind) if not any(r.spec) and r.shape]

    def diff(self, other: "Plan") -> list[str]:
        """Say in words how ``other`` differs from this plan, a line per difference."""
        return diff(self, other)

    def to_json(self) -> str:
        """Write the plan as JSON, to be read by ``from_json``."""
        return json.dumps(
            {
                "format": FORMAT_VERSION,
                "level": self.level,
                "mesh": [list(a) for a in self.mesh_shape],
                "axes": list(self.axes),
                "rows": [_row_to_json(row) for row in self.rows],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Read a plan that ``to_json`` wrote.

        Raises:
            ConfigError: not such a text, or one of another version.
        """
        return _plan_from_json(text)

    def __str__(self) -> str:
        return table(self)


def plan(
    state: Any,
    level: str,
    *,
    mesh: Any = None,
    axis: AxisName | None = None,
    optimizer_axis: AxisName | None = None,
    rules: Sequence[tuple[str, Any]] | Mapping[str, Any] = (),
    exclude: Sequence[str] = (),
    min_shard_size: int = 0,
    offload: bool = False,
    pad: bool = False,
    tx: Any = None,
) -> Plan:
    """Decide where every array of a state lives, without moving anything.

    Args:
        state: what ``group_sharded_parallel`` takes, of arrays or of
            ``jax.ShapeDtypeStruct``.
        level: ``os`` splits optimizer state, ``os_g`` gradients too, ``p_g_os``
            parameters too.
        mesh: a Mesh or AbstractMesh; default the one the state lives on, else
            ``init``'s.
        axis: mesh axis or axes to split over; see ``shard_axes`` for the default.
        optimizer_axis: axes for the optimizer state, if more than ``axis``: with a
            ``replica x shard`` mesh, ``("shard", "replica")`` splits it over both.
        rules: pairs (regular expression on the parameter path, PartitionSpec); the
            first that matches decides. A spec of None leaves the parameter whole.
        exclude: regular expressions; matching parameters stay whole.
        min_shard_size: arrays with fewer elements stay whole. 100_000 is a good value
            at ``p_g_os`` on many devices, where tiny gathers cost more than they save.
        offload: keep the optimizer state in pinned host memory.
        pad: store arrays that no dim lets split with their largest dim padded.
        tx: the optax transformation, where the state does not carry it; a state
            without optimizer state is planned with ``tx.init``.

    Returns:
        The plan.

    Raises:
        ConfigError: an unknown level, a bad axis, rule, size.
        PlacementError: a rule or a kept spec that does not fit.

    Example:
        >>> import jax, optax, jfleet
        >>> mesh = jax.sharding.AbstractMesh((8,), ("data",))
        >>> params = {"w": jax.ShapeDtypeStruct((512, 256), "float32")}
        >>> p = jfleet.plan({"params": params}, "os_g", mesh=mesh, tx=optax.adam(1e-3))
        >>> p.device_bytes("params"), p.device_bytes("opt_state")
        (524288, 131076)
    """
    parts = without_padding(take_apart(_with_opt_state(state, tx), tx))
    return plan_parts(
        parts,
        make_policy(
            parts,
            level,
            mesh=mesh,
            axis=axis,
            optimizer_axis=optimizer_axis,
            rules=rules,
            exclude=exclude,
            min_shard_size=min_shard_size,
            offload=offload,
            pad=pad,
        ),
    )


def _with_opt_state(state: Any, tx: Any) -> Any:
    """Give a mapping that lacks optimizer state an abstract one."""
    if tx is None or not isinstance(state, Mapping) or "opt_state" in state:
        return state
    return {**state, "opt_state": jax.eval_shape(tx.init, state["params"])}


def plan_parts(parts: Parts, policy: Policy) -> Plan:
    """Plan a state that was taken apart."""
    params = parts.of_kind(PARAMS)
    layouts = param_layouts([(p.path, p) for p in params], policy)
    index = ParamIndex(layouts)
    optimizer = parts.of_kind(OPT_STATE)
    extra = parts.of_kind(EXTRA)
    kept = {leaf.path: kept_spec(leaf, policy.mesh) for leaf in extra}
    kept = {k: s for k, s in kept.items() if any(s)}
    kept = {e.path: kept[e.path] for e in extra if fits(kept, e, policy.mesh)}
    stored_params = {x.path: x.stored_param for x in layouts}
    padding = Padding(layouts)

    def stored(leaf: Leaf) -> tuple[int, ...]:
        if leaf.kind == PARAMS:
            return stored_params[leaf.path]
        shapes = padding.shapes(leaf.path, optimizer=leaf.kind == OPT_STATE)
        return shapes[1] if shapes and leaf.shape == shapes[0] else leaf.shape

    decided = {
        PARAMS: [x.param for x in layouts],
        GRADS: [x.grad for x in layouts],
        OPT_STATE: optimizer_decisions([(x.path, x) for x in optimizer], index, policy),
        EXTRA: extra_decisions([(x.path, x) for x in extra], index, kept),
    }
    leaves = {PARAMS: params, GRADS: params, OPT_STATE: optimizer, EXTRA: extra}
    shapes = {kind: [stored(x) for x in leaves[kind]] for kind in KINDS}
    shapes[GRADS] = [x.shape for x in params]
    rows = [
        row
        for kind in KINDS
        for row in _rows(kind, leaves[kind], decided[kind], shapes[kind], policy)
    ]
    return Plan(
        level=policy.level,
        mesh_shape=tuple(policy.mesh.shape.items()),
        axes=policy.axes,
        rows=tuple(rows),
        policy=policy,
    )


def _rows(
    kind: str,
    leaves: Sequence[Leaf],
    decisions: Sequence[Decision],
    stored: Sequence[tuple[int, ...]],
    policy: Policy,
) -> list[Row]:
    rows = []
    sizes: dict[Any, int] = {}
    shards: dict[PartitionSpec, int] = {}
    for leaf, decision, at_rest in zip(leaves, decisions, stored, strict=True):
        dtype, spec, shape = leaf.dtype, decision.spec, leaf.shape
        if dtype not in sizes:
            sizes[dtype] = dtype_bytes(dtype)
        if spec not in shards:
            axes = [a for e in entries_of(spec, len(spec)) for a in e]
            shards[spec] = axes_size(policy.mesh, axes)
        size = sizes[dtype]
        rows.append(
            Row(
                kind,
                path_str(leaf.path),
                shape,
                str(dtype),
                spec,
                num_elements(shape) * size,
                num_elements(at_rest) * size // shards[spec],
                decision.reason,
                at_rest,
            )
        )
    return rows


def planned_rows(planned: Plan, parts: Parts) -> list[Row]:
    """Return the planned row of every leaf, in the order of ``parts.leaves``."""
    queues = {kind: iter(planned.of_kind(kind)) for kind in (PARAMS, OPT_STATE, EXTRA)}
    return [next(queues[leaf.kind]) for leaf in parts.leaves]


def without_padding(parts: Parts) -> Parts:
    """Cut the leaves of a state that rests padded to their logical shapes."""
    if not isinstance(parts.tx, ShardedTransformation) or not parts.tx.policy.pad:
        return parts
    layouts = param_layouts(
        [(p.path, p) for p in parts.of_kind(PARAMS)], parts.tx.policy
    )
    padding = Padding(layouts)
    leaves = []
    for leaf in parts.leaves:
        shapes = padding.shapes(leaf.path, optimizer=leaf.kind == OPT_STATE)
        if shapes is not None and leaf.shape == shapes[1]:
            leaf = dataclasses.replace(leaf, value=fit(leaf.value, shapes[0]))
        leaves.append(leaf)
    return dataclasses.replace(parts, leaves=tuple(leaves))


def _row_to_json(row: Row) -> list[Any]:
    spec = [list(e) for e in entries_of(row.spec, len(row.spec))]
    return [
        row.kind,
        row.path,
        list(row.shape),
        row.dtype,
        spec,
        row.total_bytes,
        row.device_bytes,
        row.reason,
        list(row.stored_shape),
    ]


def _row_from_json(row: list[Any]) -> Row:
    kind, path, shape, dtype, spec, total, device, reason, stored = row
    entries = [e[0] if len(e) == 1 else (tuple(e) or None) for e in spec]
    if kind not in KINDS or not all(isinstance(t, int) for t in (total, device)):
        raise ValueError(f"not a row: {row!r}")
    return Row(
        kind,
        path,
        tuple(shape),
        dtype,
        PartitionSpec(*entries),
        total,
        device,
        reason,
        tuple(stored),
    )


def _plan_from_json(text: str) -> Plan:
    try:
        data = json.loads(text)
        version = data["format"]
        if version != FORMAT_VERSION:
            raise ConfigError(
                f"this plan has format {version!r}; this jfleet reads format"
                f" {FORMAT_VERSION}"
            )
        return Plan(
            level=data["level"],
            mesh_shape=tuple((str(a), int(n)) for a, n in data["mesh"]),
            axes=tuple(data["axes"]),
            rows=tuple(_row_from_json(row) for row in data["rows"]),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"not a plan written by Plan.to_json: {error!r}") from error
