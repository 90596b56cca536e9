"""Moments follow an optimizer that is wrapped in another way, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from jfleet._errors import JfleetWarning
from jfleet.checkpointer import Checkpointer
from tests.save_helpers import host

PARAMS = {"layers": {0: {"w": jnp.ones((4, 3))}, 1: {"w": jnp.ones((4, 3))}}}


def state_of(tx, seed):
    """A state with other values in every leaf."""
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.uniform(1, 9, jnp.shape(x)), jnp.asarray(x).dtype),
        state,
    )


def moved(tmp_path, old, new):
    stored, target = state_of(old, 0), state_of(new, 1)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, stored)
    with pytest.warns(JfleetWarning, match="does not fit this state everywhere"):
        loaded, _ = checkpointer.restore(target, strict=False)
    for got, want in zip(
        jax.tree.leaves(loaded.params), jax.tree.leaves(stored.params), strict=True
    ):
        assert (got == want).all()
    return stored, target, loaded, checkpointer.report


def adam_of(state):
    """The one state of Adam in an optimizer state."""
    is_adam = lambda x: isinstance(x, optax.ScaleByAdamState)  # noqa: E731
    (found,) = [
        x for x in jax.tree.leaves(state.opt_state, is_leaf=is_adam) if is_adam(x)
    ]
    return found


ADAM = optax.adam(1e-2)
WRAPPED = {
    "plain": ADAM,
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), ADAM),
    "decayed": optax.adamw(optax.constant_schedule(1e-2)),
    "merged": optax.MultiSteps(ADAM, 2).gradient_transformation(),
    "guarded": optax.apply_if_finite(ADAM, 3),
    "deep": optax.apply_if_finite(optax.chain(optax.identity(), ADAM), 3),
}
FAST = [("plain", "clipped"), ("clipped", "plain"), ("merged", "deep")]
PAIRS = [(a, b) for a in WRAPPED for b in WRAPPED if a != b and (a, b) not in FAST]


@pytest.mark.parametrize(
    ("old", "new"),
    [*FAST, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS)],
)
def test_adam_is_found_wherever_it_is(tmp_path, old, new):
    stored, _, loaded, report = moved(tmp_path, WRAPPED[old], WRAPPED[new])
    for got, want in zip(
        jax.tree.leaves(host(adam_of(loaded))),
        jax.tree.leaves(host(adam_of(stored))),
        strict=True,
    ):
        assert (got == want).all()
    adam = {p for p in report.fresh if "/mu/" in p or "/nu/" in p}
    assert not adam


def test_another_optimizer_is_new_and_its_moments_are_not_the_old_ones(tmp_path):
    momentum = optax.sgd(1e-2, momentum=0.9)
    _, target, loaded, report = moved(tmp_path, ADAM, momentum)
    assert {p.split("/")[2] for p in report.fresh} == {"trace"}
    assert {p.split("/")[2] for p in report.gone} == {"count", "mu", "nu"}
    for got, want in zip(
        jax.tree.leaves(loaded.opt_state),
        jax.tree.leaves(target.opt_state),
        strict=True,
    ):
        assert (got == want).all()


def test_counters_of_other_types_are_not_exchanged(tmp_path):
    schedule = optax.scale_by_schedule(optax.constant_schedule(1.0))
    _, target, loaded, report = moved(
        tmp_path, optax.chain(ADAM), optax.chain(schedule)
    )
    assert report.fresh == ("opt_state/0/count",)
    assert "opt_state/0/0/count" in report.gone
    assert loaded.opt_state[0].count == target.opt_state[0].count


def test_two_of_a_kind_keep_their_places(tmp_path):
    """Only what one and the same move explains is moved."""

    def labels(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "a" if "0" in str(path[1]) else "b", params
        )

    both = optax.partition({"a": ADAM, "b": optax.adam(1e-3)}, labels)
    stored, _, loaded, report = moved(
        tmp_path, both, optax.chain(both, optax.identity())
    )
    assert report.fresh == report.gone == ()
    for got, want in zip(
        jax.tree.leaves(loaded.opt_state),
        jax.tree.leaves(stored.opt_state),
        strict=True,
    ):
        assert (got == want).all()


@pytest.mark.slow
def test_nnx_pairs(tmp_path):
    def pair(tx, seed):
        model = nnx.Linear(3, 2, rngs=nnx.Rngs(seed))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    model, optimizer = pair(ADAM, 0)
    optimizer.update(model, nnx.grad(lambda m: m(jnp.ones((1, 3))).sum())(model))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, (model, optimizer))
    with pytest.warns(JfleetWarning, match="taken from 1/opt_state"):
        loaded, loaded_optimizer = checkpointer.restore(
            pair(WRAPPED["clipped"], 1), strict=False
        )[0]
    assert (loaded.kernel[...] == model.kernel[...]).all()
    assert checkpointer.report.fresh == checkpointer.report.gone == ()
    old = nnx.state(optimizer)["opt_state"][0]["mu"]
    new = nnx.state(loaded_optimizer)["opt_state"][1][0]["mu"]
    for got, want in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
        assert (got == want).all()
