"""Train a small language model with group sharding; save, reload elsewhere, go on.

    python examples/train_lm.py --demo
    python examples/train_lm.py --level p_g_os --steps 500 --data notes.txt --out run
    python examples/train_lm.py --resume run --level os --devices 4
    python examples/train_lm.py --strategy examples/strategies/amp_gradient_merge.json

On a machine without accelerators the devices are simulated on its CPU.
"""

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import corpus
import jax
import jax.numpy as jnp
import optax
from decoder import Decoder, next_byte_losses
from demo import run_demo
from flax.training.train_state import TrainState
from judge import HeldOut, fingerprint, show_sample
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from run_record import CheckFailed, RunRecord, UsageError
from ways import (
    OPTIMIZERS,
    OwnStep,
    StrategyStep,
    at_level,
    read_strategy,
    warm_up,
)

import jfleet

LEVELS = ("os", "os_g", "p_g_os")
DEFAULT_LEVEL = "os_g"
SIMULATED_DEVICES = 8
LOSS_TOLERANCE = 1e-6  # relative: another device count may add in another order
console = Console(highlight=False)


# What every JAX user writes. Nothing in this part knows how many devices there are.


def init_params(model: Decoder, length: int) -> Any:
    tokens = jnp.zeros((1, length), jnp.int32)
    return model.init(jax.random.key(0), tokens)["params"]


def new_state(
    model: Decoder, length: int, learning_rate: float, optimizer: str = "adamw"
) -> TrainState:
    factory, options = OPTIMIZERS[optimizer]
    inner = factory(learning_rate=warm_up(learning_rate), **options)
    tx = optax.chain(optax.clip_by_global_norm(1.0), inner)
    params = init_params(model, length)
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
    def loss_fn(params):
        return next_byte_losses(state.apply_fn, params, tokens).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


# What jfleet adds: a mesh, a layout for the state, a checkpoint.


def run(args: argparse.Namespace) -> None:
    before = RunRecord.read(args.resume) if args.resume else None
    if before:
        continue_settings(args, before)
    if args.out:
        RunRecord.check_output(args.out)
    strategy = find_strategy(args, before)
    text = corpus.load(args.data, length=args.length)
    devices = start_devices(args.devices)
    mesh = jfleet.init(mesh_shape(args, strategy), devices=devices)
    way = choose_way(args, strategy, mesh)
    num_rows = rows_per_step(args.batch, way.rows_multiple)
    console.print(
        f"{len(devices)} {devices[0].platform.upper()} devices, level {way.level}; "
        f"{text.num_files} files, {len(text.train):,} bytes of {text.source}",
        soft_wrap=True,
    )
    if strategy is not None or not before:
        print(way.explain())

    if before:  # the layout for these devices and this level, then the values
        state = jfleet.load_group_sharded_model(args.resume / "state", way.layout())
    else:
        state = way.create()
    held_out = HeldOut(text, mesh)
    first = held_out.loss(*way.forward(state))
    gap = check_reload(before, state, held_out.crc, first) if before else None
    state = train(state, way.step, text, mesh, num_rows, args.steps)
    last = held_out.loss(*way.forward(state))
    console.print(f"held-out loss {first:.4f} -> [bold]{last:.4f}[/] nats per byte")
    if args.sample:
        show_sample(*way.forward(state), text, mesh, args.sample, console)
    if args.out:
        jfleet.save_group_sharded_model(state, args.out / "state", overwrite=True)
        record = RunRecord(
            level=way.level,
            devices=len(devices),
            steps=int(state.step),
            width=args.width,
            layers=args.layers,
            length=args.length,
            optimizer=args.optimizer,
            strategy=None if strategy is None else strategy.to_json(),
            mesh=args.mesh,
            data=[str(Path(file).absolute()) for file in args.data or ()],
            held_out_crc=held_out.crc,
            first_loss=first,
            last_loss=last,
            reload_gap=gap,
            fingerprint=fingerprint(state),
        )
        record.write(args.out)
        console.print(f"saved after {record.steps} steps to {args.out}")
    if not last < first:
        raise CheckFailed(f"the held-out loss did not fall: {first:.4f} -> {last:.4f}")


def continue_settings(args: argparse.Namespace, before: RunRecord) -> None:
    """Take from the earlier run what must not change, and what was not given."""
    for name in ("width", "layers", "length", "optimizer"):
        given, was = getattr(args, name), getattr(before, name)
        if given not in (args.defaults[name], was):
            raise UsageError(
                f"--{name} must be {was}, as in the run that --resume names, got"
                f" {given}; leave it out"
            )
        setattr(args, name, was)
    args.data = args.data or before.data
    args.mesh = args.mesh or before.mesh


def find_strategy(
    args: argparse.Namespace, before: RunRecord | None
) -> jfleet.DistributedStrategy | None:
    """Return that of --strategy, else that of the run that is continued, else None."""
    if args.strategy and before and before.strategy is None:
        raise UsageError(
            "--strategy cannot go on with a run that was trained without one, whose"
            " state has another form; leave it out, or start anew"
        )
    if args.strategy:
        return read_strategy(args.strategy, args.level)
    if before is None or before.strategy is None:
        return None
    strategy = jfleet.DistributedStrategy.from_json(before.strategy)
    return at_level(strategy, args.level) if args.level else strategy


def mesh_shape(
    args: argparse.Namespace, strategy: jfleet.DistributedStrategy | None
) -> dict[str, int]:
    """Return the mesh of --mesh, else that of the strategy, else one axis."""
    if args.mesh:
        return args.mesh
    if strategy is not None and strategy.is_set("hybrid_configs"):
        return strategy.mesh_shape()
    return {"data": -1}


def choose_way(
    args: argparse.Namespace,
    strategy: jfleet.DistributedStrategy | None,
    mesh: jax.sharding.Mesh,
) -> OwnStep | StrategyStep:
    model = Decoder(width=args.width, num_layers=args.layers)
    rate = args.learning_rate
    if strategy is None:
        create = functools.partial(new_state, model, args.length, rate, args.optimizer)
        return OwnStep(create, train_step, args.level or DEFAULT_LEVEL, mesh)
    init = functools.partial(init_params, model, args.length)
    return StrategyStep(model.apply, init, args.optimizer, rate, strategy, mesh)


def start_devices(count: int | None) -> list[jax.Device]:
    """Return the accelerators if there are any, else simulated CPU devices."""
    jax.config.update("jax_num_cpu_devices", count or SIMULATED_DEVICES)
    devices = jax.devices()
    if count and count > len(devices):
        raise UsageError(
            f"--devices must be at most {len(devices)} here, got {count}: this machine"
            f" has {len(devices)} of kind {devices[0].device_kind};"
            " set JAX_PLATFORMS=cpu to simulate more"
        )
    return devices[: count or len(devices)]


def rows_per_step(batch: int | None, multiple: int) -> int:
    """Return ``batch``, or the first fitting number of rows from 16 up."""
    rows = batch or 16 + -16 % multiple
    if rows % multiple:
        raise UsageError(
            f"--batch must be a multiple of {multiple}, the replicas times the micro"
            f" batches, got {rows}; use --batch {rows + -rows % multiple}"
        )
    return rows


def train(
    state: Any,
    step: Callable[[Any, jax.Array], tuple[Any, jax.Array]],
    text: corpus.Corpus,
    mesh: jax.sharding.Mesh,
    num_rows: int,
    num_steps: int,
) -> Any:
    start = int(state.step)
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task("training", total=num_steps)
        for i in range(start, start + num_steps):
            rows = jfleet.shard_batch(text.batch(i, num_rows), mesh=mesh)
            state, loss = step(state, rows)
            bar.update(task, advance=1, description=f"training loss {float(loss):.3f}")
    return state


def check_reload(
    before: RunRecord, state: TrainState, held_out_crc: int, loss: float
) -> float | None:
    """Compare the loaded state with what was saved; return the change in loss."""
    console.print(
        f"loaded step {before.steps}, saved on {before.devices} devices at level"
        f" {before.level}"
    )
    if fingerprint(state) != before.fingerprint:
        raise CheckFailed("the loaded state differs from the saved one")
    console.print("  every bit of the state is the same: yes")
    if held_out_crc != before.held_out_crc:
        console.print("  other held-out text than before: losses not compared")
        return None
    gap = loss - before.last_loss
    if not abs(gap) <= LOSS_TOLERANCE * before.last_loss:
        raise CheckFailed(
            f"the held-out loss was {before.last_loss!r} when saved and is {loss!r} now"
        )
    same = "exactly" if gap == 0 else f"to {abs(gap):.0e}"
    console.print(f"  held-out loss {loss:.6f}, the same {same}")
    return gap


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def axes(text: str) -> dict[str, int]:
    try:
        pairs = [pair.split("=") for pair in text.split(",")]
        return {name: int(size) for name, size in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must look like replica=2,shard=-1, got {text!r}"
        ) from None


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--demo", action="store_true", help="all three levels, saved and resumed")
    add("--level", choices=LEVELS, help="default: the strategy's, or os_g")
    add("--strategy", type=Path, metavar="FILE", help="JSON of a DistributedStrategy")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="default: %(default)s")
    add("--mesh", type=axes, metavar="AXIS=N,..", help="such as replica=2,shard=-1")
    add("--steps", type=positive, default=50, help="default: %(default)s")
    add("--devices", type=positive, help="default: all accelerators, or 8 simulated")
    add("--data", nargs="+", metavar="FILE", help="default: Python's library sources")
    add("--batch", type=positive, help="rows per step; default: 16")
    add("--length", type=positive, default=64, help="bytes per row; default: 64")
    add("--width", type=positive, default=256, help="default: %(default)s")
    add("--layers", type=positive, default=4, help="default: %(default)s")
    add("--learning-rate", type=float, default=2e-3, help="default: %(default)s")
    add("--sample", type=int, default=60, help="bytes to write at the end, per line")
    add("--out", type=Path, metavar="DIR", help="save the state here")
    add("--resume", type=Path, metavar="DIR", help="start from a run saved by --out")
    args = parser.parse_args(argv)
    args.defaults = vars(parser.parse_args([]))
    if args.demo and (args.strategy or args.level or args.resume):
        parser.error("--demo shows all levels: leave out --strategy, --level, --resume")
    if args.width % 8:
        parser.error(f"--width must be a multiple of 8, got {args.width}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        run_demo(args) if args.demo else run(args)
    except CheckFailed as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    except (UsageError, corpus.CorpusError, jfleet.JfleetError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
