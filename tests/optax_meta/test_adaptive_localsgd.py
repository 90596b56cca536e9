import itertools

import jax
import jax.numpy as jnp
import optax
import pytest

from jfleet import optax_meta as meta
from jfleet._errors import ConfigError
from jfleet.optax_meta.adaptive_localsgd import REASONS
from tests.optax_meta.simulate import AXIS, collectives, run_replicas

W = jnp.zeros(())


def syncs(tx, losses, num=4):
    """Steps after which the replicas met, and the last state."""
    losses = jnp.asarray(losses)
    runs = run_replicas(
        tx,
        W,
        lambda r, t, p: 1.0 * r,
        extra=lambda r, t: {"value": losses[t]},
        num=num,
    )
    out = list(itertools.islice(runs, len(losses)))
    met = [t for t, (_, s) in enumerate(out, start=1) if s.synced.all()]
    return met, jax.tree.map(lambda x: x[0], out[-1][1])


@pytest.mark.parametrize(
    ("form", "k0", "want"),
    [
        ("fleet", 9, [1, 2, 11, 14, 17, 20]),
        ("fleet", 16, [1, 2, 18]),
        ("paper", 9, [1, 2, 11, 20]),
        ("paper", 16, [1, 2, 18]),
    ],
)
def test_b39_its_own_start_values_count(form, k0, want):
    """The first window has k0 steps; afterwards the rule with a ratio of 1 applies."""
    tx = meta.adaptive_localsgd(
        optax.sgd(1e-3), k0, 2, learning_rate=1e-3, form=form, axis_name=AXIS
    )
    met, state = syncs(tx, [8.0] * 20)
    assert met == want
    assert int(state.k_steps) == {"fleet": {9: 3, 16: 4}, "paper": {9: 9, 16: 16}}[
        form
    ].get(k0)


@pytest.mark.parametrize(
    ("losses", "rate", "reason", "k"),
    [
        ([4.0, 4.0, 1.0], 0.1, 0, 1),
        ([4.0, 4.0, -1.0], 0.1, 1, 2),
        ([4.0, 4.0, float("nan")], 0.1, 1, 2),
        ([4.0, 4.0, float("inf")], 0.1, 1, 2),
        ([0.0, 4.0, 4.0], 0.1, 2, 2),
        ([4.0, 4.0, 1.0], 0.0, 3, 2),
        ([4.0, 4.0, 0.0], 0.1, 0, 1),
    ],
)
def test_what_cannot_be_used_keeps_the_period_and_says_why(losses, rate, reason, k):
    tx = meta.adaptive_localsgd(
        optax.sgd(0.1), 2, 1, learning_rate=rate, axis_name=AXIS
    )
    met, state = syncs(tx, losses)
    assert met == [1, 3]
    assert (int(state.reason), int(state.k_steps)) == (reason, k)
    assert len(REASONS) == 4


def test_the_first_loss_is_known_even_without_an_early_sync():
    tx = meta.adaptive_localsgd(optax.sgd(0.1), 3, 0, learning_rate=0.1, axis_name=AXIS)
    runs = run_replicas(
        tx, W, lambda r, t, p: p, extra=lambda r, t: {"value": 1.0 + r}, num=3
    )
    _, state = next(runs)
    assert state.start_loss.tolist() == [2.0, 2.0, 2.0]
    assert not state.synced.any()


def test_the_period_is_limited_and_not_rounded_up_by_noise():
    # The root of 0.045 / 0.005 is 3.0000002 in float32: the period is 3, not 4.
    rates = jnp.array([0.045, 0.005])

    def rate(count):
        return rates[count]

    tx = meta.adaptive_localsgd(
        optax.sgd(rate), 1, 1, learning_rate=rate, axis_name=AXIS
    )
    assert int(syncs(tx, [1.0, 1.0])[1].k_steps) == 3
    tx = meta.adaptive_localsgd(
        optax.sgd(0.1), 4, 0, learning_rate=0.1, max_k_steps=6, axis_name=AXIS
    )
    assert int(syncs(tx, [1.0, 1.0, 1.0, 100.0])[1].k_steps) == 6


def test_no_collective_between_synchronisations():
    tx = meta.adaptive_localsgd(optax.sgd(0.1), 4, learning_rate=0.1, axis_name=AXIS)
    seen = collectives(
        lambda g, s, p: tx.update(g, s, p, value=g), W, tx.init(W), W, num=4
    )
    assert seen
    assert all("cond" in inside for _, inside, _ in seen)


def test_a_missing_loss_is_named():
    tx = meta.adaptive_localsgd(optax.sgd(0.1), learning_rate=0.1)
    with pytest.raises(ConfigError, match="value must be the loss of this replica"):
        tx.update(W, tx.init(W), W)
