"""Two ways to train: with a step of one's own, or with the step of a strategy.

Both offer the same to ``train_lm.py``: create a state, one to load into, a step, and
the forward function with the parameters to judge by.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import optax
from decoder import next_byte_losses
from flax.training.train_state import TrainState
from run_record import UsageError

import jfleet

OPTIMIZERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "adamw": (optax.adamw, {"b2": 0.95}),
    "adam": (optax.adam, {"b2": 0.95}),
    "sgd": (optax.sgd, {"momentum": 0.9}),
}
"""Factories and what they are given beside a learning rate."""
WARM_UP_STEPS = 10


def warm_up(learning_rate: float) -> optax.Schedule:
    return optax.linear_schedule(0.0, learning_rate, WARM_UP_STEPS)


class OwnStep:
    """A jitted step of one's own, on a TrainState that is laid out at a level."""

    def __init__(
        self,
        create: Callable[[], TrainState],
        step: Callable[[TrainState, jax.Array], tuple[TrainState, jax.Array]],
        level: str,
        mesh: Any,
    ):
        self.level = level
        self.rows_multiple = mesh.size
        self._create, self._step, self._mesh = create, step, mesh
        self._shapes = jax.eval_shape(create)

    def explain(self) -> str:
        """Say what lies where."""
        return str(jfleet.plan(self._shapes, self.level, mesh=self._mesh))

    def create(self) -> TrainState:
        """Return a state born in its layout: no device ever holds all of it."""
        return jfleet.create_sharded(self._create, level=self.level, mesh=self._mesh)

    def layout(self) -> TrainState:
        """Return what a checkpoint is loaded into: shapes, and where they lie."""
        return jfleet.group_sharded_parallel(
            self._shapes, level=self.level, mesh=self._mesh
        )

    def step(self, state: TrainState, rows: jax.Array) -> tuple[TrainState, jax.Array]:
        """Take one step."""
        return self._step(state, rows)

    def forward(self, state: TrainState) -> tuple[Callable[..., jax.Array], Any]:
        """Return the function and the parameters of the model."""
        return state.apply_fn, state.params


class StrategyStep:
    """What a strategy makes of a loss and an optimizer: ``minimize`` and ``create``."""

    def __init__(
        self,
        apply_fn: Callable[..., jax.Array],
        init: Callable[[], Any],
        optimizer: str,
        learning_rate: float,
        strategy: jfleet.DistributedStrategy,
        mesh: Any,
    ):
        factory, options = OPTIMIZERS[optimizer]
        base = jfleet.optimizer(
            factory, learning_rate=warm_up(learning_rate), **options
        )
        self._init, self._apply = init, apply_fn
        self._opt = jfleet.distributed_optimizer(
            base, strategy, mesh=mesh, params=jax.eval_shape(init)
        )
        self._step = self._opt.minimize(
            lambda params, tokens: next_byte_losses(apply_fn, params, tokens).mean()
        )
        resolution = self._opt.resolution
        merge, sharding = map(resolution.options, ("gradient_merge", "sharding"))
        micro_batches = merge.k_steps if merge else 1
        replicas = math.prod(mesh.shape[axis] for axis in resolution.data_axes)
        self.rows_multiple = replicas * micro_batches
        self.level = sharding.level if sharding else "none"

    def explain(self) -> str:
        """Say what runs, what does not, and why."""
        return self._opt.explain()

    def create(self) -> jfleet.TrainState:
        """Return a state born in its layout: no device ever holds all of it."""
        return self._opt.create(self._init)

    def layout(self) -> jfleet.TrainState:
        """Return what a checkpoint is loaded into."""
        return self.create()

    def step(
        self, state: jfleet.TrainState, rows: jax.Array
    ) -> tuple[jfleet.TrainState, jax.Array]:
        """Take one step."""
        state, metrics = self._step(state, rows)
        return state, metrics.loss

    def forward(self, state: jfleet.TrainState) -> tuple[Callable[..., jax.Array], Any]:
        """Return the function and the parameters, the mean of replicas that differ."""
        params = self._opt.params(state)
        return jfleet.gather_at_use(self._apply, {"params": params}), params


def read_strategy(file: Path, level: str | None) -> jfleet.DistributedStrategy:
    """Read what ``to_json`` wrote; a level that is given comes before the file's."""
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--strategy cannot read {str(file)!r}: {error}") from error
    try:
        strategy = jfleet.DistributedStrategy.from_json(text)
    except jfleet.JfleetError as error:
        raise UsageError(f"--strategy {file}: {error}") from error
    return strategy if level is None else at_level(strategy, level)


def at_level(
    strategy: jfleet.DistributedStrategy, level: str
) -> jfleet.DistributedStrategy:
    """Return the strategy with another level of sharding."""
    if strategy.is_set("sharding") and strategy.sharding is False:
        raise UsageError(
            f"--level {level} asks for sharding, which the strategy switches off; drop"
            " --level, or set sharding to true in the strategy"
        )
    if strategy.auto:
        raise UsageError(
            f"--level {level} is yours to choose or the strategy's auto's, not both;"
            " drop --level, or auto"
        )
    changed = strategy.copy()
    changed.sharding = True
    changed.sharding_configs = {"level": level}
    return changed
