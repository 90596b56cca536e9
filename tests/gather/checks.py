"""What every rewritten function must satisfy, and the meshes to check it on."""

import functools
import math

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jfleet._gather import gather_at_use
from jfleet._hlo import collectives
from jfleet._tree import leaves_with_paths

BATCH = 16


@functools.cache
def mesh(shape=(8,), names=("data",), kind=AxisType.Auto):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


def auto():
    return mesh()


def explicit():
    return mesh(kind=AxisType.Explicit)


def two_axes(kind=AxisType.Auto):
    return mesh((2, 4), ("x", "y"), kind)


def spec(leaf, on, stacked=False):
    """The largest dim over the only axis, or the last two dims over two axes."""
    first = 1 if stacked else 0
    dims = range(first, leaf.ndim)
    whole = [None] * leaf.ndim
    if len(on.axis_names) == 2 and len(dims) == 2:
        return P(*whole[:first], *on.axis_names)
    ways = on.axis_names[0] if len(on.axis_names) == 1 else on.axis_names
    fitting = [d for d in dims if leaf.shape[d] % math.prod(on.shape.values()) == 0]
    if not fitting or leaf.size < 64:
        return P()
    dim = max(fitting, key=lambda d: (leaf.shape[d], -d))
    return P(*whole[:dim], ways)


def shardings(params, on, stacked=lambda path: False):
    """One NamedSharding a leaf; ``stacked(path)`` keeps dim 0 whole."""
    found = [
        NamedSharding(on, spec(leaf, on, stacked("/".join(path))))
        for path, leaf in leaves_with_paths(params)
    ]
    return jax.tree.unflatten(jax.tree.structure(params), found)


def batch_sharding(on):
    return NamedSharding(on, P(on.axis_names))


def whole_sharding(on):
    return NamedSharding(on, P())


def assert_close(actual, expected, tolerance):
    """Same trees of numbers, relative to the largest number of each leaf.

    A leaf of rounding errors (the gradient of a bias that cancels out) is measured
    against the largest leaf.
    """
    actual, expected = jax.device_get(actual), jax.device_get(expected)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(expected)]
    floor = max(1e-3 * max(np.abs(leaf).max(initial=0) for leaf in leaves), 1e-30)
    for a, e in zip(jax.tree.leaves(actual), leaves, strict=True):
        a, scale = np.asarray(a, np.float64), max(np.abs(e).max(initial=0), floor)
        np.testing.assert_allclose(a / scale, e / scale, rtol=0, atol=tolerance)


def reference(loss, params, x):
    """Value and gradients of the function as it stands, with parameters whole.

    The batch is split, so that low-precision sums are taken in the same order.
    """
    params = jax.device_put(params, whole_sharding(auto()))
    x = jax.device_put(x, batch_sharding(auto()))
    return jax.jit(jax.value_and_grad(loss))(params, x)


class Run:
    """The rewritten function, differentiated, compiled and run on placed inputs."""

    def __init__(self, loss, params, x, on, *, stacked=lambda path: False, **options):
        self.shardings = shardings(params, on, stacked)
        self.wrapped = gather_at_use(loss, self.shardings, **options)
        cotangent = options.get("mode") == "cotangent"
        placed = jax.device_put(
            params, whole_sharding(on) if cotangent else self.shardings
        )
        self.inputs = placed, jax.device_put(x, batch_sharding(on))
        lowered = jax.jit(jax.value_and_grad(self.wrapped)).lower(*self.inputs)
        self.stablehlo = lowered.as_text()
        compiled = lowered.compile()
        self.collectives = collectives(compiled)
        self.value, self.gradients = compiled(*self.inputs)

    def kinds(self):
        return {c.kind for c in self.collectives}

    def gathered(self):
        """Shapes that all-gathers make, without leading ones."""
        shapes = [c.shape for c in self.collectives if c.kind == "all-gather"]
        return [_without_ones(shape) for shape in shapes]

    def gathered_activations(self):
        return [shape for shape in self.gathered() if shape[:1] == (BATCH,)]

    def assert_gradients_are_shards(self, used=None):
        """Gradients lie where the parameters do; ``used`` names those to check."""
        pairs = zip(
            leaves_with_paths(self.gradients),
            jax.tree.leaves(self.shardings),
            strict=True,
        )
        for (path, gradient), sharding in pairs:
            if used is None or path[-1] in used:
                equal = gradient.sharding.is_equivalent_to(sharding, gradient.ndim)
                assert equal, (path, gradient.sharding, sharding)


def _without_ones(shape):
    while shape[:1] == (1,):
        shape = shape[1:]
    return shape
