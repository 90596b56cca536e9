import jax
import jax.numpy as jnp
import pytest

from jfleet import optax_meta as meta
from jfleet._errors import ConfigError
from jfleet.optax_meta.recompute import POLICIES
from tests.optax_meta.simulate import assert_bits, assert_close, equations, noise

LAYERS, WIDTH, BATCH = 6, 32, 64
WEIGHTS = jnp.asarray(noise((LAYERS, WIDTH, WIDTH), 1) * 0.2, jnp.float32)
X = jnp.asarray(noise((BATCH, WIDTH), 2), jnp.float32)


def block(h, w, key):
    h = jnp.tanh(h @ w)
    keep = jax.random.bernoulli(key, 0.5, h.shape)
    return jnp.where(keep, 2 * h, 0.0)


def scanned(weights, x, key):
    def body(h, layer):
        return block(h, *layer), None

    keys = jax.random.split(key, LAYERS)
    h, _ = jax.lax.scan(body, x, (weights, keys))
    return jnp.mean(h**2)


def unrolled(weights, x, key):
    for w, k in zip(weights, jax.random.split(key, LAYERS), strict=True):
        x = block(x, w, k)
    return jnp.mean(x**2)


def nested(weights, x, key):
    return jax.jit(scanned)(weights, x, key) + jnp.sum(weights**2)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("loss", [scanned, unrolled, nested])
@pytest.mark.parametrize("policy", ["nothing_saveable", "dots_saveable"])
def test_b115_same_values_gradients_and_masks(loss, policy, impl):
    key = jax.random.key(3, impl=impl)
    want = jax.jit(jax.value_and_grad(loss))(WEIGHTS, X, key)
    wrapped = meta.recompute(loss, policy=policy)
    got = jax.jit(jax.value_and_grad(wrapped))(WEIGHTS, X, key)
    assert_close(got, want, rtol=1e-5, atol=1e-7)


def residual_bytes(loss):
    """Bytes that the backward pass takes from the forward pass."""
    _, pullback = jax.eval_shape(
        lambda w: jax.vjp(lambda w: loss(w, X, jax.random.key(0)), w), WEIGHTS
    )
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pullback))


@pytest.mark.parametrize("loss", [scanned, nested])
def test_scanned_blocks_keep_their_inputs_only(loss):
    """One activation per layer, instead of one per operation and layer."""
    plain, less = residual_bytes(loss), residual_bytes(meta.recompute(loss))
    dots = residual_bytes(meta.recompute(loss, policy="dots_saveable"))
    activation = BATCH * WIDTH * 4
    inputs = WEIGHTS.nbytes + X.nbytes
    assert less <= LAYERS * activation + 2 * inputs
    assert plain >= less + LAYERS * activation
    assert less + LAYERS * activation <= dots + activation
    assert dots < plain


def test_peak_memory_of_a_compiled_step_is_lower():
    def temporaries(loss):
        grad = jax.jit(jax.grad(loss))
        compiled = grad.lower(WEIGHTS, X, jax.random.key(0)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(meta.recompute(scanned)) < 0.8 * temporaries(scanned)


def count(function, name):
    jaxpr = jax.make_jaxpr(function)(WEIGHTS, X, jax.random.key(0)).jaxpr
    return sum(e.primitive.name == name for e, _ in equations(jaxpr))


def test_each_scan_body_is_wrapped_once():
    assert count(meta.recompute(scanned), "remat2") == 1
    assert count(meta.recompute(meta.recompute(scanned)), "remat2") == 1
    assert count(meta.recompute(nested), "remat2") == 1
    assert count(meta.recompute(unrolled), "remat2") == 1
    assert count(meta.recompute(scanned, blocks="whole"), "remat2") == 1


def test_a_loss_without_scan_is_refused_where_a_scan_was_asked_for():
    with pytest.raises(ConfigError, match="recompute_block"):
        meta.recompute(unrolled, blocks="scan")(WEIGHTS, X, jax.random.key(0))


def test_blocks_of_a_python_loop():
    def loss(weights, x, key):
        layer = meta.recompute_block(block)
        for w, k in zip(weights, jax.random.split(key, LAYERS), strict=True):
            x = layer(x, w, k)
        return jnp.mean(x**2)

    key = jax.random.key(1)
    want = jax.grad(unrolled)(WEIGHTS, X, key)
    assert_close(jax.grad(loss)(WEIGHTS, X, key), want, rtol=1e-5, atol=1e-8)
    assert residual_bytes(loss) < residual_bytes(unrolled) - LAYERS * BATCH * WIDTH * 4


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gives_the_gradient(policy):
    def loss(weights, x):
        h, _ = jax.lax.scan(lambda h, w: (jnp.sin(h @ w), None), x, weights)
        return jnp.mean(h)

    wrapped = meta.recompute(loss, policy=policy)
    got = jax.jit(jax.grad(wrapped))(WEIGHTS, X)
    assert_close(got, jax.jit(jax.grad(loss))(WEIGHTS, X), rtol=1e-5, atol=1e-8)


def test_other_arguments_and_results_pass_through():
    def loss(params, x, *, scale, name):
        def body(h, w):
            return h * w, h

        h, trail = jax.lax.scan(body, x, params["w"], reverse=True)
        assert isinstance(name, str)
        return h * scale, {"trail": trail, "n": 3}

    args = ({"w": jnp.arange(1.0, 4.0)}, jnp.asarray(2.0))
    more = {"scale": 0.5, "name": "x"}
    want, aux = loss(*args, **more)
    got, same = meta.recompute(loss)(*args, **more)
    assert_bits((got, same["trail"]), (want, aux["trail"]))
    grad = jax.grad(meta.recompute(loss), has_aux=True)(*args, **more)[0]
    assert_close(grad["w"], jax.grad(loss, has_aux=True)(*args, **more)[0]["w"])
