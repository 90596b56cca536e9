"""Train a small language model with group sharding; save, reload elsewhere, go on.

    python examples/train_lm.py --demo
    python examples/train_lm.py --level p_g_os --steps 500 --data notes.txt --out run
    python examples/train_lm.py --resume run --level os --devices 4

On a machine without accelerators the devices are simulated on its CPU.
"""

import argparse
import functools
import sys
import zlib
from pathlib import Path

import corpus
import jax
import jax.numpy as jnp
import numpy as np
import optax
from decoder import Decoder, next_byte_losses
from demo import run_demo
from flax.training.train_state import TrainState
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.text import Text
from run_record import CheckFailed, RunRecord, UsageError

import jfleet

LEVELS = ("os", "os_g", "p_g_os")
SIMULATED_DEVICES = 8
HELD_OUT_ROWS = 32
SAMPLES = 4  # lines to write at the end
LOSS_TOLERANCE = 1e-6  # relative: another device count may add in another order
console = Console(highlight=False)


# What every JAX user writes. Nothing in this part knows how many devices there are.


def new_state(model: Decoder, length: int, learning_rate: float) -> TrainState:
    tokens = jnp.zeros((1, length), jnp.int32)
    params = model.init(jax.random.key(0), tokens)["params"]
    warm_up = optax.linear_schedule(0.0, learning_rate, 10)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(warm_up, b2=0.95))
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
    def loss_fn(params):
        return next_byte_losses(state.apply_fn, params, tokens).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


@jax.jit
def row_losses(state: TrainState, tokens: jax.Array) -> jax.Array:
    return next_byte_losses(state.apply_fn, state.params, tokens).mean(axis=1)


@functools.partial(jax.jit, static_argnums=2)
def generate(state: TrainState, rows: jax.Array, num_bytes: int) -> jax.Array:
    """Sample the bytes that follow each row, one at a time."""

    def one_more(i, carry):
        rows, text = carry
        logits = state.apply_fn({"params": state.params}, rows)[:, -1]
        key = jax.random.fold_in(jax.random.key(0), i)
        new = jax.random.categorical(key, logits / 0.7)
        rows = jnp.concatenate([rows[:, 1:], new[:, None]], axis=1)
        return rows, text.at[:, i].set(new)

    text = jnp.zeros((rows.shape[0], num_bytes), jnp.int32)
    return jax.lax.fori_loop(0, num_bytes, one_more, (rows, text))[1]


# What jfleet adds: a mesh, a layout for the state, a checkpoint.


def run(args: argparse.Namespace) -> None:
    before = RunRecord.read(args.resume) if args.resume else None
    if before:
        for name in ("width", "layers", "length"):
            setattr(args, name, getattr(before, name))
        args.data = args.data or before.data
    if args.out:
        RunRecord.check_output(args.out)
    text = corpus.load(args.data, length=args.length)
    devices = start_devices(args.devices)
    num_rows = rows_per_step(args.batch, len(devices))
    console.print(
        f"{len(devices)} {devices[0].platform.upper()} devices, level {args.level}; "
        f"{text.num_files} files, {len(text.train):,} bytes of {text.source}",
        soft_wrap=True,
    )

    mesh = jfleet.init(devices=devices)
    model = Decoder(width=args.width, num_layers=args.layers)
    create = functools.partial(new_state, model, args.length, args.learning_rate)
    shapes = jax.eval_shape(create)
    if before:  # the layout for these devices and this level, then the values
        layout = jfleet.group_sharded_parallel(shapes, level=args.level, mesh=mesh)
        state = jfleet.load_group_sharded_model(args.resume / "state", layout)
    else:  # born in its layout: no device ever holds the whole state
        print(jfleet.plan(shapes, args.level, mesh=mesh))
        state = jfleet.create_sharded(create, level=args.level, mesh=mesh)

    held_out = HeldOut(text, mesh)
    first = held_out.loss(state)
    gap = check_reload(before, state, held_out.crc, first) if before else None
    state = train(state, text, mesh, num_rows, args)
    last = held_out.loss(state)
    console.print(f"held-out loss {first:.4f} -> [bold]{last:.4f}[/] nats per byte")
    if args.sample:
        show_sample(state, text, mesh, args.sample)
    if args.out:
        jfleet.save_group_sharded_model(state, args.out / "state", overwrite=True)
        record = RunRecord(
            level=args.level,
            devices=len(devices),
            steps=int(state.step),
            width=args.width,
            layers=args.layers,
            length=args.length,
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


def rows_per_step(batch: int | None, num_devices: int) -> int:
    """Return ``batch``, or the first multiple of the devices from 16 up."""
    rows = batch or 16 + -16 % num_devices
    if rows % num_devices:
        raise UsageError(
            f"--batch must be a multiple of the {num_devices} devices, got {rows};"
            f" use --batch {rows + -rows % num_devices}"
        )
    return rows


class HeldOut:
    """The loss on rows that are never trained on; the same rows on any mesh."""

    def __init__(self, text: corpus.Corpus, mesh: jax.sharding.Mesh):
        rows = text.held_out_rows(HELD_OUT_ROWS)
        self.crc = zlib.crc32(text.held_out)
        self.num_rows = len(rows)
        padding = np.zeros((-len(rows) % mesh.size, rows.shape[1]), rows.dtype)
        self.batch = jfleet.shard_batch(np.concatenate([rows, padding]), mesh=mesh)

    def loss(self, state: TrainState) -> float:
        """Return the mean over rows, added up in double precision."""
        losses = np.asarray(row_losses(state, self.batch), np.float64)
        return float(losses[: self.num_rows].mean())


def train(
    state: TrainState,
    text: corpus.Corpus,
    mesh: jax.sharding.Mesh,
    num_rows: int,
    args: argparse.Namespace,
) -> TrainState:
    start = int(state.step)
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task("training", total=args.steps)
        for step in range(start, start + args.steps):
            rows = text.batch(step, num_rows)
            state, loss = train_step(state, jfleet.shard_batch(rows, mesh=mesh))
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


def show_sample(
    state: TrainState, text: corpus.Corpus, mesh: jax.sharding.Mesh, num_bytes: int
) -> None:
    """Print how the model goes on from a few places of the held-out text."""
    num_rows = mesh.size * -(-SAMPLES // mesh.size)
    rows = text.held_out_rows(num_rows)[:, :-1]
    written = generate(state, jfleet.shard_batch(rows, mesh=mesh), num_bytes)
    console.print("held-out text, and [bold]what the model writes next[/]:")
    for row, new in zip(rows[:SAMPLES], np.asarray(written)[:SAMPLES], strict=True):
        line = Text(f"  {as_line(row[-16:])} | ", style="dim")
        console.print(line.append(as_line(new), style="bold not dim"), soft_wrap=True)


def as_line(text: np.ndarray) -> str:
    """Return bytes as ASCII, with line ends and the like as escapes."""
    return repr(bytes(text.tolist()))[2:-1]


def fingerprint(state: TrainState) -> int:
    """Return a checksum of every bit of the state, wherever its parts lie."""
    checksum = 0
    for leaf in jax.tree.leaves(state):
        checksum = zlib.crc32(np.asarray(leaf).tobytes(), checksum)
    return checksum


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--demo", action="store_true", help="all three levels, saved and resumed")
    add("--level", choices=LEVELS, default="os_g", help="default: %(default)s")
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
