"""Train a small model of text on all processes of a pod or cluster; save, resume.

Every process runs this script. Start it with ``python -m jfleet launch`` on one host,
with ``tpu_pod.sh`` on a Cloud TPU slice, or with ``slurm_gpu.sbatch`` under SLURM. Run
again with the same --out it goes on from the last checkpoint, on as many processes and
devices as there are then.
"""

import argparse
import pydoc_data.topics
import zlib
from pathlib import Path

import jax
import numpy as np
import optax
from etils import epath
from flax import linen as nn

import jfleet
from jfleet.processes import to_host

CONTEXT = 16  # bytes from which the next one is predicted
STRIDE = 7919  # bytes between two rows of a batch


class NextByte(nn.Module):
    """A model of one byte at a time."""

    width: int

    @nn.compact
    def __call__(self, text):
        """Return scores for the byte that follows each row of CONTEXT bytes."""
        x = nn.Embed(256, self.width // 4)(text).reshape(len(text), -1)
        return nn.Dense(256)(nn.gelu(nn.Dense(self.width)(x)))


def own_rows(text: np.ndarray, step: int, num_rows: int) -> np.ndarray:
    """Return this process's rows of a batch, which is the same for any split of it."""
    own = num_rows // jax.process_count()
    rows = np.arange(own) + own * jax.process_index() + num_rows * step
    starts = rows * STRIDE % (len(text) - CONTEXT)
    return text[starts[:, None] + np.arange(CONTEXT + 1)]


def train(args: argparse.Namespace) -> None:
    mesh = jfleet.init()  # connects the processes
    lead = jax.process_index() == 0
    text = np.frombuffer(Path(args.data).read_bytes(), np.uint8)
    model = NextByte(args.width)

    def loss_fn(params, rows):
        scores = model.apply({"params": params}, rows[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, rows[:, -1])
        return losses.mean()

    def new_params(key):
        return model.init(key, np.zeros((1, CONTEXT), np.uint8))["params"]

    strategy = jfleet.DistributedStrategy(clip=True, sharding=True)
    strategy.sharding_configs = {"level": args.level}
    opt = jfleet.distributed_optimizer(optax.adamw(3e-3), strategy, mesh=mesh)
    step = opt.minimize(loss_fn)
    state = opt.create(new_params, jax.random.key(0))

    folder = epath.Path(args.out) / "state"
    if (folder / "manifest.json").exists():  # what completes a save
        state = jfleet.load_group_sharded_model(folder, state)
    start = int(state.step)
    if lead:
        shape = " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
        print(f"{jax.process_count()} processes, mesh {shape}, from step {start}")
    for number in range(start, args.steps):
        rows = jfleet.shard_batch(own_rows(text, number, args.batch), mesh=mesh)
        state, metrics = step(state, rows)
        loss = float(metrics.loss)  # any process can read it
        if lead and (number + 1) % args.show_every == 0:
            print(f"step {number + 1}: loss {loss:.4f}")
        if (number + 1) % args.save_every == 0:
            jfleet.save_group_sharded_model(state, folder, overwrite=True, wait=False)
    if args.steps % args.save_every:
        jfleet.save_group_sharded_model(state, folder, overwrite=True)
    checksum = 0
    for leaf in jax.tree.leaves(to_host(state)):  # gathered: on every process
        checksum = zlib.crc32(leaf.tobytes(), checksum)
    if lead:
        print(f"done: step {int(state.step)}, checksum of the state {checksum:08x}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--out", required=True, metavar="DIR", help="folder that all processes see")
    add("--steps", type=int, default=200, help="where to end; default: %(default)s")
    add("--save-every", type=int, default=50, metavar="N", help="default: %(default)s")
    add("--show-every", type=int, default=20, metavar="N", help="default: %(default)s")
    add("--batch", type=int, default=256, help="rows of all processes together")
    add("--width", type=int, default=256, help="default: %(default)s")
    add("--level", default="os_g", help="os, os_g (default) or p_g_os")
    add("--data", default=pydoc_data.topics.__file__, help="default: Python's help")
    return parser.parse_args(argv)


if __name__ == "__main__":
    train(parse())
