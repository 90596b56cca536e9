"""Gather sharded parameters where a function uses them, by rewriting its jaxpr.

The function is traced once; its jaxpr is then walked. A sharded parameter stays a
shard through everything that only moves, casts or scales it, and is gathered by the
first equation that needs it, inside scanned and rematerialised blocks too, in the
dtype that equation wants. Its gradient comes back as a shard.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jfleet._errors import ConfigError, ConfigTypeError
from jfleet._gather._specs import Mode, dims_of
from jfleet._gather._wrapper import (
    FirstArgument as FirstArgument,
)
from jfleet._gather._wrapper import (
    GatherAtUse as GatherAtUse,
)
from jfleet._gather._wrapper import (
    early_gathers as early_gathers,
)
from jfleet._gather._wrapper import (
    rewrite as rewrite,
)
from jfleet._gather._wrapper import states_of
from jfleet._tree import Path, leaves_with_paths, path_str
from jfleet._types import PyTree


def gather_at_use(
    fn: Callable[..., Any],
    shardings: PyTree,
    *,
    axes: Sequence[str] | None = None,
    mode: Mode = "gather",
    embedding: Sequence[str] | None = None,
    stepwise: bool = True,
    regather: bool = True,
    hoist_bytes: int = 2**28,
) -> GatherAtUse:
    """Gather the sharded parameters of a function where it uses them.

    Values and gradients are those of ``fn``; only where arrays live, and when they
    travel, changes. Differentiate, map and compile the result like ``fn`` itself.

    Args:
        fn: a function whose first argument holds the parameters: a pytree, or a
            flax.nnx module. Its other arguments may be anything.
        shardings: the ``NamedSharding`` of each parameter, or the placed parameters
            themselves. Leaves without a ``NamedSharding`` are left alone.
        axes: mesh axes to gather over, all that the shardings use by default. Name
            them if some, such as a tensor-parallel axis, must stay.
        mode: ``"gather"`` for sharded parameters (level ``p_g_os``); ``"cotangent"``
            for whole parameters whose gradients shall be shards at the place where
            they arise, inside scanned blocks too (level ``os_g``).
        embedding: the mesh axes over which the batch is split. A table of which only
            the feature dim is split is then looked up in its shard, and never
            gathered. ``None`` gathers it like any other parameter.
        stepwise: gather and scatter one mesh axis at a time, which gives each axis of
            a torus its own collective.
        regather: gather again in the backward pass. ``False`` keeps the gathered
            weights instead: more memory, a third less traffic.
        hoist_bytes: a weight that every iteration of a loop uses is gathered once,
            before the loop, up to this size, unless the loop body is rematerialised.

    Call it outside of jit, where the parameters know where they lie; the result works
    inside and outside.

    Returns:
        A callable with the signature of ``fn``.

    Raises:
        ConfigError: shardings, axes and mesh do not fit together.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        >>> mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
        >>> w = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("data")))
        >>> loss = gather_at_use(lambda w, x: ((x @ w) ** 2).mean(), w)
        >>> jax.jit(jax.grad(loss))(w, jnp.ones((16, 8))).sharding == w.sharding
        True

    References:
        Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion
        Parameter Models, 2020, https://arxiv.org/abs/1910.02054
    """
    if not callable(fn):
        raise ConfigTypeError(
            f"fn must be a function, got {type(fn).__qualname__}; wrap the function and"
            " not its result: gather_at_use(loss_fn, params)(params, batch)"
        )
    found = [(path, s) for path, s in _shardings(shardings) if s is not None]
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(shardings))
    if not found and traced:
        raise ConfigError(
            "shardings must be of placed arrays, got tracers: inside jit an array does"
            " not know where it lies; call gather_at_use outside and use the result"
            " inside"
        )
    if not found:
        raise ConfigError(
            "shardings must hold at least one NamedSharding, or an array placed with "
            "one; place the parameters on a mesh first"
        )
    mesh = found[0][1].mesh
    for path, sharding in found:
        if sharding.mesh != mesh:
            raise ConfigError(
                f"all shardings must be on one mesh, got {dict(sharding.mesh.shape)} "
                f"for {path_str(path)!r} and {dict(mesh.shape)} for "
                f"{path_str(found[0][0])!r}; place all parameters on the same mesh"
            )
    if axes is None:
        used = {a for _, s in found for e in dims_of(s.spec, len(s.spec)) for a in e}
        axes = [axis for axis in mesh.axis_names if axis in used]
    return rewrite(
        fn,
        FirstArgument(tuple((path, P(*s.spec)) for path, s in found)),
        mesh,
        axes,
        mode=mode,
        embedding=None if embedding is None else tuple(embedding),
        stepwise=stepwise,
        regather=regather,
        hoist_bytes=hoist_bytes,
    )


def _shardings(tree: PyTree) -> list[tuple[Path, NamedSharding | None]]:
    pairs = leaves_with_paths(states_of(tree))
    for path, leaf in pairs:
        if isinstance(leaf, P):
            raise ConfigTypeError(
                f"shardings must be NamedSharding, got {leaf!r} for "
                f"{path_str(path)!r}; use jax.sharding.NamedSharding(mesh, spec)"
            )
    return [(path, _sharding(leaf)) for path, leaf in pairs]


def _sharding(leaf: Any) -> NamedSharding | None:
    sharding = leaf if isinstance(leaf, jax.sharding.Sharding) else None
    sharding = sharding or getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None
