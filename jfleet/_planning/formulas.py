"""What is known of a step without its loss: state, gradients, their reduction.

Without a loss nobody knows how often a parameter is used, or what is kept for the
backward pass. Here every parameter is used once going forward and once going back, and
activations are left out.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jfleet._layout import entries_of
from jfleet._planning import kinds
from jfleet._planning.memory import ClassBytes, StepMemory, at_rest, bytes_of
from jfleet._planning.program import Exchange, group_size
from jfleet._planning.tiles import axes_of
from jfleet._planning.tracing import TracedStep
from jfleet._planning.traffic import StepTraffic, Transfer, sync_interval, traffic_of
from jfleet._step.setup import Setup
from jfleet._tree import dtype_bytes, leaves_with_paths, num_elements, path_str
from jfleet.optax_meta import dgc_compressed_paths
from jfleet.optax_meta._dgc_plan import num_kept


@dataclasses.dataclass(frozen=True, slots=True)
class _Param:
    """One parameter and where it and its gradient lie."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    param: tuple[str, ...]
    moved: tuple[str, ...]
    grad: tuple[str, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the whole array."""
        return num_elements(self.shape) * dtype_bytes(self.dtype)


def _params(traced: TracedStep) -> list[_Param]:
    layout = traced.layout
    assert layout is not None

    def axes(spec: Any) -> tuple[str, ...]:
        return tuple(
            a for a in axes_of(entries_of(spec, len(spec))) if traced.sizes[a] > 1
        )

    specs = (layout.params, layout.moved, layout.grads)
    trees = [jax.tree.leaves(tree) for tree in specs]
    return [
        _Param(path_str(path), leaf.shape, leaf.dtype, *map(axes, found))
        for (path, leaf), *found in zip(
            leaves_with_paths(traced.params), *trees, strict=True
        )
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]


class Formulas:
    """Traffic and memory of a strategy, parameter by parameter."""

    def __init__(self, traced: TracedStep):
        assert traced.setup is not None
        self.traced, self.sizes = traced, traced.sizes
        self.setup: Setup = traced.setup
        self.params = _params(traced)
        self.data = self._wide(self.setup.data_axes)
        self.own = self._wide(self.setup.own_axes)
        self.local = self._wide(traced.local_axes)
        amp = self.setup._options("amp")
        self.compute = None if amp is None else jnp.dtype(amp.dtype)
        dgc = self.setup._options("dgc")
        self.dgc = dgc
        names = (
            ()
            if dgc is None
            else dgc_compressed_paths(traced.params, min_size=dgc.min_size)
        )
        self.compressed = set(names)

    def _wide(self, axes: Any) -> tuple[str, ...]:
        return tuple(a for a in self.sizes if a in axes and self.sizes[a] > 1)

    # Traffic -------------------------------------------------------------------------

    def traffic(self) -> StepTraffic:
        """Collectives of one step."""
        found: dict[Any, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for p in self.params:
            for exchange, count, share in self._exchanges(p):
                if exchange.group_size > 1:
                    total = found[dataclasses.replace(exchange, bytes=0), count, share]
                    total[0] += count
                    total[1] += count * exchange.bytes
        return traffic_of(
            (
                Transfer(
                    kind=e.kind,
                    axes=e.axes,
                    what=e.memory_kind,
                    dtype=e.dtype,
                    group_size=e.group_size,
                    count=count,
                    bytes=total,
                    in_loop=self.setup.num_micro > 1 and times > 1,
                    in_conditional=share < 1,
                    share=share,
                )
                for (e, times, share), (count, total) in found.items()
            ),
            complete=False,
        )

    def _exchanges(self, p: _Param) -> Iterator[tuple[Exchange, int, float]]:
        """What is sent for one parameter: each with how often, in which share."""
        micro = self.setup.num_micro
        yield from self._gathers(p, micro)
        if self.dgc is not None and p.name in self.compressed:
            yield from self._sparse(p)
        elif not self.setup.own_params and self.dgc is not None:
            yield self._exchange("all-reduce", self.own, p.bytes, kinds.UPDATES), 1, 1.0
        yield from self._reductions(p, micro)
        if self.setup.own_params:
            meets = self._exchange(
                "all-reduce", self.own, self._shard(p), kinds.UPDATES
            )
            yield meets, 1, 1 / sync_interval(self.traced)
        if p.moved and not p.param:
            gathered = self._exchange("all-gather", p.moved, p.bytes, kinds.UPDATES)
            yield gathered, 1, 1.0

    def _exchange(self, kind, axes, size, what, dtype="float32") -> Exchange:
        return Exchange(
            kind=kind,
            axes=axes,
            group_size=group_size(axes, self.sizes),
            bytes=int(size),
            dtype=dtype,
            memory_kind=what,
        )

    def _shard(self, p: _Param) -> int:
        return p.bytes // group_size(p.param, self.sizes)

    def _gathers(self, p: _Param, micro: int) -> Iterator[tuple[Exchange, int, float]]:
        """At p_g_os: before each use; once, where the loss sees whole parameters."""
        early = tuple(a for a in p.param if a in self.local)
        late = tuple(a for a in p.param if a not in self.local)
        if early:
            once = self._exchange("all-gather", early, p.bytes, kinds.GATHERED)
            yield once, 1, 1.0
        if late:
            uses = 3 if "recompute" in self.setup.resolution else 2
            size, dtype = p.bytes, str(p.dtype)
            if self.compute is not None and self.compute.itemsize < p.dtype.itemsize:
                size = num_elements(p.shape) * self.compute.itemsize
                dtype = str(self.compute)
            each = self._exchange("all-gather", late, size, kinds.GATHERED, dtype)
            yield each, uses * micro, 1.0

    def _reductions(
        self, p: _Param, micro: int
    ) -> Iterator[tuple[Exchange, int, float]]:
        """From parts of a gradient on every device to where it belongs."""
        outer = tuple(a for a in self.local if a not in self.own)
        inner = tuple(a for a in self.data if a not in self.local)
        size, dtype = p.bytes, str(p.dtype)
        # The loop over micro batches reduces what is not left to its end.
        yield from self._all_reduce(p, inner, size, dtype, micro)
        size //= group_size([a for a in inner if a in p.grad], self.sizes)
        reducer = self.setup._options("fp16_allreduce")
        if reducer is not None and p.dtype.itemsize == 4:
            size, dtype = size // 2, reducer.dtype
        for axis in (a for a in p.grad if a in outer):
            yield (
                self._exchange("reduce-scatter", (axis,), size, kinds.GRADS, dtype),
                1,
                1.0,
            )
            size //= self.sizes[axis]
        rest = tuple(a for a in outer if a not in p.grad)
        yield self._exchange("all-reduce", rest, size, kinds.GRADS, dtype), 1, 1.0

    def _all_reduce(self, p, axes, size, dtype, times):
        """A product is reduced along the axes that cut it first."""
        first = tuple(a for a in axes if a in (p.grad or p.moved))
        rest = tuple(a for a in axes if a not in first)
        if not first or len(p.shape) < 2:
            first, rest = axes, ()
        yield self._exchange("all-reduce", first, size, kinds.GRADS, dtype), times, 1.0
        size //= group_size(first, self.sizes)
        yield self._exchange("all-reduce", rest, size, kinds.GRADS, dtype), times, 1.0

    def _sparse(self, p: _Param) -> Iterator[tuple[Exchange, int, float]]:
        """Values and indices of the largest entries, at the final sparsity."""
        assert self.dgc is not None
        kept = num_kept(num_elements(p.shape), self.dgc.sparsity[-1])
        size = 4 * kept * group_size(self.own, self.sizes)
        for dtype in ("float32", "int32"):
            yield (
                self._exchange("all-gather", self.own, size, kinds.UPDATES, dtype),
                1,
                1.0,
            )

    # Memory --------------------------------------------------------------------------

    def memory(self) -> StepMemory:
        """State exactly; of a step, what the strategy alone says."""
        grads = self._gradients()
        largest = max((p.bytes for p in self.params if p.param), default=0)
        rows = [*at_rest(self.traced), grads]
        if largest:
            text = "at least the largest parameter, whole"
            rows.append(_row(kinds.GATHERED, largest, text))
        total = sum(bytes_of(a, self.sizes) for a in self.traced.arguments)
        donated = sum(
            bytes_of(a, self.sizes) for a in self.traced.arguments if a.donated
        )
        return StepMemory(
            classes=tuple(rows),
            arguments_bytes=total,
            output_bytes=total,
            donated_bytes=donated,
            live_bytes=grads.bytes + largest,
            temporary_bytes=grads.bytes + largest,
            complete=False,
        )

    def _gradients(self) -> ClassBytes:
        whole = bool(self.local)
        total = 0
        for p in self.params:
            split = () if whole else p.grad or p.moved
            total += p.bytes // group_size(split, self.sizes)
        text = "one gradient per parameter, " + (
            "whole on every device until it is reduced"
            if whole
            else "split as the optimizer state is"
        )
        return _row(kinds.GRADS, total, text)


def _row(kind: str, size: int, text: str) -> ClassBytes:
    return ClassBytes(
        kind=kind, bytes=size, most_bytes=size, whole_bytes=None, formula=text
    )
