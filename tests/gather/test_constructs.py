"""Every construct: same values and gradients, weights gathered, gradients as shards."""

import functools

import pytest

from jfleet._gather import early_gathers
from tests.gather import checks, constructs

EVERY_ITERATION = "gathered before the loop, every iteration uses it"
EARLY = {
    "lax.map": [f"a: scan: {EVERY_ITERATION}"],
    "scan, captured": [f"{w}: scan: {EVERY_ITERATION}" for w in "ab"],
    "scan, captured in bf16": [f"{w}: scan: {EVERY_ITERATION}" for w in "ab"],
    "fori_loop": [f"{w}: scan: {EVERY_ITERATION}" for w in "ab"],
    "while": [f"{w}: while: {EVERY_ITERATION}" for w in "ab"],
    "scan, weight as carry": ["a: scan: carry gathered before the loop"],
    "while, weight as carry": ["a: while: carry gathered before the loop"],
}
# Where XLA itself moves activations: a loop over the batch, a gradient in the loss, a
# weight computed from another one, whose cotangent is not ours to lay out.
MOVES_ACTIVATIONS = {"lax.map", "gradient inside", "softmax of a weight"}
# Where the cotangent of a part of a split dim goes back to another device.
CUTS_A_SPLIT_DIM = {"split", "flattened together", "gradient inside"}
# Types of Explicit axes refuse these with or without the rewrite.
NOT_EXPLICIT = {
    "custom_vjp",
    "custom_vjp in bf16",
    "lax.map",
    "scan, captured",
    "fori_loop",
    "scan over layer numbers",
    "dynamic_index_in_dim",
    "scan in a scan over steps",
}
SOME = [
    "two layers",
    "tied table",
    "concatenate",
    "split dim",
    "cast up and move",
    "where",
    "weight decay",
    "custom_jvp",
    "the same jit twice",
    "checkpoint returns a cast weight",
    "cond returns the weight",
    "scan, captured and rematerialised",
    "scan, weight as carry",
    "while",
    "gradient inside",
    "jvp inside",
]


def case(name):
    """The loss, its inputs and whether layers are stacked."""
    if name in constructs.STACKED:
        return constructs.STACKED[name], *constructs.stacked_inputs(), True
    loss = (constructs.GATHERED | constructs.ON_SHARDS)[name]
    return loss, *constructs.inputs(), False


@functools.cache
def expected(name):
    loss, params, x, _ = case(name)
    return checks.reference(loss, params, x)


def tolerance(name):
    """One bit of bf16, where that is what the construct computes in."""
    return 1e-2 if "bf16" in name or "custom_jvp" in name or "cast" in name else 1e-5


def used(name):
    """Parameters with a gradient; the others have zeros, laid out by XLA."""
    _, gradients = expected(name)
    return [key for key, g in gradients.items() if abs(g).max() > 0]


def run(name, on, **options):
    loss, params, x, stacked = case(name)
    found = checks.Run(loss, params, x, on, stacked=lambda path: stacked, **options)
    actual = found.value, found.gradients
    checks.assert_close(actual, expected(name), tolerance(name))
    found.assert_gradients_are_shards(used(name))
    return found


@pytest.mark.parametrize("name", [*constructs.GATHERED, *constructs.STACKED])
def test_weights_are_gathered_at_their_use(name):
    found = run(name, checks.auto())
    assert found.gathered()
    if name not in MOVES_ACTIVATIONS:
        assert not found.gathered_activations()
    if name not in CUTS_A_SPLIT_DIM:
        assert "all-to-all" not in found.kinds()
    assert early_gathers(found.wrapped, *found.inputs) == EARLY.get(name, [])


@pytest.mark.parametrize("name", constructs.ON_SHARDS)
def test_nothing_is_gathered_where_shards_will_do(name):
    found = run(name, checks.auto())
    assert found.gathered() == []


@pytest.mark.parametrize("name", [*SOME, *constructs.STACKED, *constructs.ON_SHARDS])
def test_cotangents_are_split_at_their_use(name):
    found = run(name, checks.auto(), mode="cotangent")
    assert early_gathers(found.wrapped, *found.inputs) == []


@pytest.mark.parametrize("name", [*SOME, *constructs.STACKED])
def test_two_axes(name):
    run(name, checks.two_axes())


@pytest.mark.parametrize(
    "name",
    [
        n
        for n in [*SOME, *constructs.STACKED, *constructs.ON_SHARDS]
        if n not in NOT_EXPLICIT
    ],
)
def test_explicit_axes(name):
    run(name, checks.explicit())


@pytest.mark.parametrize("name", ["two layers", "scan, checkpoint, bf16", "split dim"])
def test_two_explicit_axes(name):
    run(name, checks.two_axes(checks.AxisType.Explicit))


@pytest.mark.parametrize("name", ["two layers", "scan, captured", "scan", "checkpoint"])
def test_gathered_weights_may_be_kept(name):
    kept = run(name, checks.auto(), regather=False)
    again = run(name, checks.auto())
    assert len(kept.gathered()) <= len(again.gathered())
