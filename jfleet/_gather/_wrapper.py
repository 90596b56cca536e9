"""The wrapped function: trace, run on shards, give back what the user's returns."""

import dataclasses
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jfleet._errors import ConfigError, listing
from jfleet._gather._rewrite import Note, Rewriter
from jfleet._gather._specs import Dims, Fabric, Options, checked_dims, fabric_of
from jfleet._gather._trace import run_leaves
from jfleet._tree import Path, leaves_with_paths, path_str
from jfleet._types import PyTree

SpecsFor = Callable[[tuple[Any, ...], dict[str, Any]], PyTree]


@dataclasses.dataclass(frozen=True, slots=True, weakref_slot=True)
class GatherAtUse:
    """A function whose sharded inputs are gathered where they are used.

    Equal wrappers are interchangeable, so jit does not compile for each anew.
    """

    fn: Callable[..., Any]
    specs_for: SpecsFor
    mesh: Mesh | AbstractMesh
    options: Options

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.fn

    @property
    def __name__(self) -> str:
        return getattr(self.fn, "__name__", type(self.fn).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(args, kwargs, [])

    def run(self, args: tuple, kwargs: dict[str, Any], notes: list[Note]) -> Any:
        """Call the function and append notes on early gathers."""
        fabric = fabric_of(self.mesh, self.options)
        rewriter = Rewriter(fabric=fabric, options=self.options, notes=notes)
        nnx = _nnx_if_loaded()
        if nnx is not None and nnx.has_modules((args, kwargs)):
            return nnx.run(self, rewriter, args, kwargs)
        leaves, treedef = jax.tree.flatten((args, kwargs))
        dims, names = self.layout(fabric, args, kwargs)

        def function(leaves):
            args, kwargs = jax.tree.unflatten(treedef, leaves)
            return self.fn(*args, **kwargs)

        return run_leaves(rewriter, function, leaves, dims, names)

    def layout(
        self, fabric: Fabric, args: Any, kwargs: Any
    ) -> tuple[list[Dims | None], list[str]]:
        """Dims and name of each leaf of ``(args, kwargs)``; None for ordinary ones."""
        pairs = leaves_with_paths((args, kwargs))
        specs = _flat_specs(self.specs_for(args, kwargs), args, kwargs)
        names = [path_str(path[2:]) for path, _ in pairs]
        dims = [
            None if spec is None else _split_dims(fabric, spec, leaf, name)
            for spec, (_, leaf), name in zip(specs, pairs, names, strict=True)
        ]
        return dims, names


def _nnx_if_loaded() -> Any:
    """Flax is slow to import; without it no argument can be one of its modules."""
    if "flax.nnx" not in sys.modules:
        return None
    return importlib.import_module("jfleet._gather._nnx")


def states_of(tree: PyTree) -> PyTree:
    """The tree with the state of each nnx module in its place."""
    nnx = _nnx_if_loaded()
    return tree if nnx is None else nnx.states(tree)


def _split_dims(fabric: Fabric, spec: P, leaf: Any, name: str) -> Dims | None:
    dims = checked_dims(fabric, spec, leaf, name)
    return dims if fabric.split(dims) else None


def _flat_specs(specs: PyTree, args: Any, kwargs: Any) -> list[P | None]:
    treedef = jax.tree.structure((args, kwargs))
    if isinstance(specs, list) and len(specs) == treedef.num_leaves:
        return specs
    try:
        return treedef.flatten_up_to(specs)
    except ValueError as error:
        raise ConfigError(
            "specs_for must return a list with one PartitionSpec or None for each of "
            f"the {treedef.num_leaves} leaves of (args, kwargs), or a tree like it: "
            f"{error}"
        ) from error


def rewrite(
    fn: Callable[..., Any],
    specs_for: SpecsFor,
    mesh: Mesh | AbstractMesh,
    axes: Sequence[str],
    **options: Any,
) -> GatherAtUse:
    """Wrap a function so that its sharded inputs gather where they are used.

    Args:
        fn: any function of pytrees; leaves that are not sharded reach it untouched.
        specs_for: gets ``(args, kwargs)`` of a call and returns the ``PartitionSpec``
            of each leaf, ``None`` for ordinary ones: a flat list, or a tree like
            ``(args, kwargs)``. In place of an nnx module it gets that module's state.
            Give it value equality if the wrapper is a static argument of a jit.
        mesh: the mesh that the specs speak of.
        axes: gather over these axes; all others stay.
        **options: the other fields of ``Options``.

    Returns:
        A callable with the signature of ``fn``, with value equality and hash.

    Raises:
        ConfigError: an option is unknown, or does not fit the mesh.
    """
    known = {field.name for field in dataclasses.fields(Options)} - {"axes"}
    for name in options:
        if name not in known:
            raise ConfigError(f"options must be among {sorted(known)}, got {name!r}")
    if options.get("mode", "gather") not in ("gather", "cotangent"):
        raise ConfigError(
            f"mode must be 'gather' or 'cotangent', got {options['mode']!r}"
        )
    chosen = Options(axes=tuple(axes), **options)
    fabric_of(mesh, chosen)
    return GatherAtUse(fn, specs_for, mesh, chosen)


def early_gathers(fn: GatherAtUse, *args: Any, **kwargs: Any) -> list[str]:
    """List the parameters that are gathered before they are needed, and why.

    Runs nothing: arguments may be arrays or ``jax.ShapeDtypeStruct``.

    Args:
        fn: what `gather_at_use` returned.
        *args: arguments of a call.
        **kwargs: keyword arguments of a call.

    Returns:
        Lines such as ``"mlp/w: while: carry gathered before the loop"``; an empty list
        if every parameter stays a shard until the equation that needs it.
    """
    notes: list[Note] = []
    leaves, treedef = jax.tree.flatten((args, kwargs))
    kinds = (jax.Array, jax.ShapeDtypeStruct)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, kinds)]

    def call(values):
        full = list(leaves)
        for i, value in zip(places, values, strict=True):
            full[i] = value
        args, kwargs = jax.tree.unflatten(treedef, full)
        arrays = jax.tree.leaves(fn.run(args, kwargs, notes))
        return [a for a in arrays if isinstance(a, jax.Array)]

    jax.eval_shape(call, [leaves[i] for i in places])
    return list(dict.fromkeys(map(str, notes)))


@dataclasses.dataclass(frozen=True, slots=True)
class FirstArgument:
    """Specs for the first argument of a function, by path."""

    specs: tuple[tuple[Path, P], ...]

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[P | None]:
        wanted: dict[Path, P] = {("0", "0", *path): spec for path, spec in self.specs}
        paths = [path for path, _ in leaves_with_paths((args, kwargs))]
        if missing := sorted(wanted.keys() - set(paths)):
            names = listing(path_str(path[2:]) for path in missing)
            raise ConfigError(
                "the first positional argument must hold every parameter that the "
                f"shardings name, but has no {names}; pass the parameters by position, "
                "and the shardings of that argument itself"
            )
        return [wanted.get(path) for path in paths]
