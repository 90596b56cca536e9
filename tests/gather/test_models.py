"""flax linen, flax nnx and equinox models, as their users write them."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax import lax

from jfleet._gather import early_gathers, gather_at_use, rewrite
from jfleet._hlo import collectives
from jfleet._tree import leaves_with_paths
from tests.gather import checks

tokens = jnp.arange(16 * 8).reshape(16, 8) % 64
bf16 = jnp.bfloat16


def cross_entropy(logits, tokens):
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


def is_stacked(path):
    return "Scan" in path or "blocks" in path or "Vmap" in path


def check(loss, params, tolerance=1e-5, x=tokens, activations=False):
    expected = checks.reference(loss, params, x)
    found = checks.Run(loss, params, x, checks.auto(), stacked=is_stacked)
    checks.assert_close((found.value, found.gradients), expected, tolerance)
    found.assert_gradients_are_shards()
    assert found.gathered()
    assert activations or not found.gathered_activations()
    assert "all-to-all" not in found.kinds()
    return found


# linen -------------------------------------------------------------------------------


class Block(nn.Module):
    dtype: object = None

    @nn.compact
    def __call__(self, x, _=None):
        y = nn.gelu(nn.Dense(64, dtype=self.dtype)(x))
        return x + nn.Dense(32, dtype=self.dtype)(y), None


def layers(block, axis=0, **options):
    return nn.scan(
        block,
        variable_axes={"params": axis},
        split_rngs={"params": True},
        length=3,
        **options,
    )


def linen(body, **options):
    """A model from a function of the embedded tokens."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = body(nn.Embed(64, 32, **options)(tokens))
            return nn.Dense(64)(x)

    return Model()


def attention(x):
    x = nn.LayerNorm()(nn.Conv(32, (3,))(x))
    return x + nn.MultiHeadDotProductAttention(4)(x, x)


def transformer_block(scope):
    class TransformerBlock(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            y = nn.RMSNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(4)(y, y)
            return x + nn.Dense(32)(nn.silu(nn.Dense(64)(nn.RMSNorm()(x)))), None

    return scope(TransformerBlock)


def rematted(x):
    block = nn.remat(Block, policy=jax.checkpoint_policies.dots_saveable)
    for _ in range(2):
        x, _ = block()(x, None)
    return x


def ensemble(x):
    members = nn.vmap(
        Block,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=(0, None),
    )
    return members()(jnp.stack([x] * 4), None)[0].mean(0)


def partitioned(x):
    init = nn.with_partitioning(nn.initializers.lecun_normal(), ("e", "v"))
    return nn.Dense(32, kernel_init=init)(x)


LINEN = {
    "conv, norm, attention": lambda: linen(attention),
    "scan": lambda: linen(lambda x: layers(Block)()(x, None)[0]),
    "scan over remat": lambda: linen(
        lambda x: layers(nn.remat(Block, prevent_cse=False))()(x, None)[0]
    ),
    "scan, dim 1": lambda: linen(lambda x: layers(Block, axis=1)()(x, None)[0]),
    "remat with policy": lambda: linen(rematted),
    "ensemble": lambda: linen(ensemble),
    "bf16 scan": lambda: linen(lambda x: layers(Block)(dtype=bf16)(x, None)[0]),
    "weight norm": lambda: linen(lambda x: nn.WeightNorm(nn.Dense(64))(x)),
    "recurrent": lambda: linen(lambda x: nn.GroupNorm(4)(nn.RNN(nn.LSTMCell(32))(x))),
    "general dense": lambda: linen(
        lambda x: nn.DenseGeneral(32, axis=(-2, -1))(nn.DenseGeneral((4, 8))(x))
    ),
    "boxed": lambda: linen(partitioned),
    "transformer": lambda: linen(
        lambda x: layers(
            transformer_block(lambda block: nn.remat(block, prevent_cse=False))
        )()(x, None)[0]
    ),
}


@pytest.mark.parametrize("name", LINEN)
def test_linen(name):
    model = LINEN[name]()
    params = model.init(jax.random.key(0), tokens)
    check(
        lambda p, t: cross_entropy(model.apply(p, t), t),
        params,
        tolerance=1e-2 if "bf16" in name else 1e-5,
    )


class Tied(nn.Module):
    def setup(self):
        self.table, self.block = nn.Embed(64, 32), Block()

    def __call__(self, tokens):
        return self.table.attend(self.block(self.table(tokens))[0])


def test_linen_tied_table():
    model = Tied()
    params = model.init(jax.random.key(0), tokens)
    check(lambda p, t: cross_entropy(model.apply(p, t), t), params)


class Noisy(nn.Module):
    @nn.compact
    def __call__(self, tokens, *, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Embed(64, 32)(tokens))
        return nn.Dense(64)(nn.Dropout(0.1, deterministic=not train)(x))


def test_linen_train_state():
    """The low-level form, around ``apply_fn``: parameters are found by path."""
    model, on = Noisy(), checks.auto()
    variables = model.init(jax.random.key(0), tokens, train=False)
    specs = jax.tree.map(lambda s: s.spec, checks.shardings(variables["params"], on))

    def specs_for(args, kwargs):
        by_path = {("0", "0", "params", *p): s for p, s in leaves_with_paths(specs)}
        return [by_path.get(p) for p, _ in leaves_with_paths((args, kwargs))]

    state = TrainState.create(
        apply_fn=rewrite(model.apply, specs_for, on, ("data",)),
        params=variables["params"],
        tx=optax.sgd(0.1),
    )

    def loss(params, apply_fn):
        logits, updated = apply_fn(
            {"params": params, "batch_stats": variables["batch_stats"]},
            tokens,
            train=True,
            mutable=["batch_stats"],
            rngs={"dropout": jax.random.key(2)},
        )
        return cross_entropy(logits, tokens), updated

    @jax.jit
    def step(state):
        gradients, updated = jax.grad(loss, has_aux=True)(state.params, state.apply_fn)
        return state.apply_gradients(grads=gradients), updated

    plain = state.replace(apply_fn=model.apply)
    placed = state.replace(
        params=jax.device_put(state.params, checks.shardings(state.params, on))
    )
    (actual, stats), (expected, expected_stats) = step(placed), step(plain)
    checks.assert_close(actual.params, expected.params, 1e-5)
    checks.assert_close(stats, expected_stats, 1e-5)
    logits = placed.apply_fn(
        {**variables, "params": placed.params}, tokens, train=False
    )
    checks.assert_close(logits, model.apply(variables, tokens, train=False), 1e-5)


# nnx ---------------------------------------------------------------------------------


class Layer(nnx.Module):
    def __init__(self, rngs, dtype=None):
        self.up = nnx.Linear(32, 64, rngs=rngs, dtype=dtype)
        self.down = nnx.Linear(64, 32, rngs=rngs, dtype=dtype)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


class NnxModel(nnx.Module):
    def __init__(self, kind):
        rngs = nnx.Rngs(0)
        self.kind = kind
        self.table = nnx.Embed(64, 32, rngs=rngs)
        self.head = nnx.Linear(32, 64, rngs=rngs)
        if kind.startswith("scan"):
            self.blocks = nnx.vmap(Layer)(rngs.split(3))
        elif kind == "attention":
            self.conv = nnx.Conv(32, 32, (3,), rngs=rngs)
            self.norm = nnx.LayerNorm(32, rngs=rngs)
            self.mix = nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs)
        elif kind == "recurrent":
            self.cell = nnx.RNN(nnx.LSTMCell(32, 32, rngs=rngs))
        elif kind == "noisy":
            self.norm = nnx.BatchNorm(32, rngs=rngs)
            self.drop = nnx.Dropout(0.1, rngs=rngs)
            self.calls = 0
        else:
            self.layers = nnx.List([Layer(rngs, bf16), Layer(rngs, bf16)])

    def __call__(self, tokens):
        x = self.table(tokens)
        if self.kind.startswith("scan"):
            layer = (
                nnx.remat(Layer.__call__) if "remat" in self.kind else Layer.__call__
            )
            call = nnx.scan(
                lambda x, block: layer(block, x),
                in_axes=(nnx.Carry, 0),
                out_axes=nnx.Carry,
            )
            x = call(x, self.blocks)
        elif self.kind == "attention":
            x = self.norm(self.conv(x))
            x = x + self.mix(x)
        elif self.kind == "recurrent":
            x = self.cell(x)
        elif self.kind == "noisy":
            self.calls += 1
            self.seen = nnx.Variable(jnp.float32(self.calls))
            x = self.drop(self.norm(x))
        else:
            for block in self.layers:
                x = nnx.remat(lambda block, x: block(x))(block, x)
            return self.table.attend(x)
        return self.head(x)


def place(model):
    state = nnx.state(model)
    placed = jax.device_put(state, checks.shardings(state, checks.auto(), is_stacked))
    nnx.update(model, placed)
    return model


def nnx_loss(model, tokens):
    return cross_entropy(model(tokens), tokens)


@pytest.mark.parametrize(
    "kind", ["scan", "scan, remat", "attention", "recurrent", "noisy", "list, bf16"]
)
def test_nnx(kind):
    """nnx.grad of the wrapped loss; what the model changes in itself comes back."""
    model, placed = NnxModel(kind), place(NnxModel(kind))
    batch = jax.device_put(tokens, checks.batch_sharding(checks.auto()))
    whole = jax.device_put(nnx.state(model), checks.whole_sharding(checks.auto()))
    nnx.update(model, whole)
    wrapped = gather_at_use(nnx_loss, placed)
    place_again = nnx.state(place(NnxModel(kind)), nnx.Param)
    expected = nnx.jit(nnx.value_and_grad(nnx_loss))(model, batch)
    step = nnx.jit(nnx.value_and_grad(wrapped))
    actual = step(placed, batch)
    tolerance = 1e-2 if "bf16" in kind else 1e-5
    checks.assert_close(jax.tree.leaves(actual), jax.tree.leaves(expected), tolerance)
    after, expected_after = nnx.state(placed), nnx.state(model)
    assert jax.tree.structure(after) == jax.tree.structure(expected_after)
    for a, e in zip(
        jax.tree.leaves(after), jax.tree.leaves(expected_after), strict=True
    ):
        if jnp.issubdtype(e.dtype, jax.dtypes.prng_key):
            a, e = jax.random.key_data(a), jax.random.key_data(e)
        checks.assert_close(a, e, 1e-5)
    for g, p in zip(
        jax.tree.leaves(actual[1]),
        jax.tree.leaves(nnx.state(placed, nnx.Param)),
        strict=True,
    ):
        # A parameter that is not used has zeros for a gradient, laid out by XLA.
        assert not g.any() or g.sharding.is_equivalent_to(p.sharding, p.ndim)
    for new, old in zip(
        jax.tree.leaves(nnx.state(placed, nnx.Param)),
        jax.tree.leaves(place_again),
        strict=True,
    ):
        assert new.sharding == old.sharding
    if kind == "noisy":
        assert placed.calls == model.calls == 1
        assert placed.seen[...] == 1
    compiled = step.lower(placed, batch).compile()
    gathers = [c for c in collectives(compiled) if c.kind == "all-gather"]
    assert gathers
    assert all(c.shape[:1] != (checks.BATCH,) for c in gathers)
    early = early_gathers(wrapped, placed, batch)
    assert all("cell" in note for note in early)
    assert bool(early) == (kind == "recurrent")


def test_nnx_shared_module_and_other_arguments():
    def loss(models, tokens, scale, *, mode):
        assert mode == "train"
        assert models["one"] is models["two"]
        y = models["one"](tokens) + models["two"](tokens)
        return cross_entropy(y, tokens) * scale, models["one"]

    model, placed = NnxModel("noisy"), place(NnxModel("noisy"))
    wrapped = gather_at_use(loss, {"one": placed, "two": placed})
    args = tokens, 2.0
    value, same = wrapped({"one": placed, "two": placed}, *args, mode="train")
    expected, _ = loss({"one": model, "two": model}, *args, mode="train")
    assert same is placed
    assert placed.calls == model.calls == 2
    np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_nnx_optimizer_step():
    def train(wrap):
        model = place(NnxModel("attention"))
        optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
        loss = wrap(nnx_loss, model)

        @nnx.jit
        def step(model, optimizer, tokens):
            value, gradients = nnx.value_and_grad(loss)(model, tokens)
            optimizer.update(model, gradients)
            return value

        return [float(step(model, optimizer, tokens)) for _ in range(3)]

    expected = train(lambda loss, model: loss)
    np.testing.assert_allclose(train(gather_at_use), expected, rtol=1e-5)
    assert expected[2] < expected[0]


# equinox -----------------------------------------------------------------------------

key = jax.random.key(0)


class Mixer(eqx.Module):
    table: eqx.nn.Embedding
    mix: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self):
        self.table = eqx.nn.Embedding(64, 32, key=key)
        self.mix = eqx.nn.MultiheadAttention(4, 32, key=key)
        self.norm = eqx.nn.LayerNorm(32)
        self.head = eqx.nn.Linear(32, 64, key=key)

    def __call__(self, tokens):
        x = jax.vmap(self.norm)(jax.vmap(self.table)(tokens))
        return jax.vmap(self.head)(x + self.mix(x, x, x))


class Stack(eqx.Module):
    table: eqx.nn.Embedding
    blocks: eqx.nn.MLP
    head: eqx.nn.Linear

    def __init__(self):
        self.table = eqx.nn.Embedding(64, 32, key=key)
        self.blocks = eqx.filter_vmap(lambda key: eqx.nn.MLP(32, 32, 64, 1, key=key))(
            jax.random.split(key, 3)
        )
        self.head = eqx.nn.Linear(32, 64, key=key)

    def __call__(self, tokens):
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        def layer(x, arrays):
            return jax.vmap(eqx.combine(arrays, static))(x), None

        x, _ = lax.scan(
            eqx.filter_checkpoint(layer), jax.vmap(self.table)(tokens), arrays
        )
        return jax.vmap(self.head)(x)


def equinox_loss(model, tokens):
    return cross_entropy(jax.vmap(model)(tokens), tokens)


@pytest.mark.parametrize("model", [Mixer, Stack])
def test_equinox_arrays(model):
    params, static = eqx.partition(model(), eqx.is_inexact_array)
    check(lambda p, t: equinox_loss(eqx.combine(p, static), t), params)


@pytest.mark.parametrize("model", [Mixer, Stack])
def test_equinox_module_as_it_is(model):
    """A module is a tree with functions among its leaves."""
    whole = model()
    arrays, static = eqx.partition(whole, eqx.is_array)
    shardings = checks.shardings(arrays, checks.auto(), is_stacked)
    placed = eqx.combine(jax.device_put(arrays, shardings), static)
    wrapped = gather_at_use(equinox_loss, placed)
    actual = eqx.filter_jit(eqx.filter_grad(wrapped))(placed, tokens)
    expected = eqx.filter_jit(eqx.filter_grad(equinox_loss))(whole, tokens)
    checks.assert_close(actual, expected, 1e-5)
