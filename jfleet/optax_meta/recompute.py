"""Recompute activations in the backward pass instead of keeping them.

Values and gradients are the same, dropout masks included; peak memory is lower. What is
kept is decided by a policy of ``jax.checkpoint``, by name. Recomputing a whole loss at
once saves little, because all of it is alive when its backward pass starts. So the loss
is traced and each scanned block gets its own ``jax.checkpoint``; for blocks in a Python
loop there is ``recompute_block``.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core as jex

from jfleet._errors import ConfigError, ConfigTypeError
from jfleet.optax_meta import _common as common

POLICIES = {
    "nothing_saveable": jax.checkpoint_policies.nothing_saveable,
    "everything_saveable": jax.checkpoint_policies.everything_saveable,
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
    "dots_with_no_batch_dims_saveable": (
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ),
    "offload_dots": jax.checkpoint_policies.offload_dot_with_no_batch_dims(
        "device", "pinned_host"
    ),
}
BLOCKS = ("auto", "scan", "whole")
CALLS = ("jit", "pjit", "closed_call")
REMATS = ("checkpoint", "remat", "remat2")
Policy = str | Callable[..., Any]


def recompute(
    loss_fn: Callable[..., Any],
    *,
    policy: Policy = "nothing_saveable",
    blocks: str = "auto",
) -> Callable[..., Any]:
    """Wrap a loss (or any function) so that its backward pass recomputes.

    Args:
      loss_fn: a traceable function of any arguments.
      policy: what may be kept: a key of ``POLICIES``, or a policy of
        ``jax.checkpoint_policies``.
      blocks: ``"scan"`` gives the body of every ``jax.lax.scan`` in the loss its own
        ``jax.checkpoint`` (bodies that already have one are left alone); ``"whole"``
        wraps the loss as one; ``"auto"`` takes the first where there is a scan, else
        the second. A model that recomputes already is left alone by both.

    Returns:
      A function with the same arguments and results.

    Raises:
      ConfigError: if the policy is unknown, or ``blocks`` is ``"scan"`` and the loss
        has no scan.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> def loss(weights, x):
      ...     body = lambda h, w: (jnp.tanh(h * w), None)
      ...     return jax.lax.scan(body, x, weights)[0]
      >>> args = jnp.array([0.5, 2.0, 1.0]), jnp.asarray(1.0)
      >>> print(jax.grad(recompute(loss))(*args) == jax.grad(loss)(*args))
      [ True  True  True]

    References:
      Chen et al., `Training Deep Nets with Sublinear Memory Cost
      <https://arxiv.org/abs/1604.06174>`_, 2016
    """
    if not callable(loss_fn):
        raise ConfigTypeError(f"loss_fn must be a function, got {loss_fn!r}")
    chosen = policy_of(policy)
    common.check_choice("blocks", blocks, BLOCKS)

    @functools.wraps(loss_fn)
    def recomputed(*args, **kwargs):
        leaves, treedef = jax.tree.flatten((args, kwargs))
        where = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]
        arrays = [leaves[i] for i in where]

        def of_arrays(*arrays):
            filled = list(leaves)
            for i, x in zip(where, arrays, strict=True):
                filled[i] = x
            inner_args, inner_kwargs = treedef.unflatten(filled)
            return loss_fn(*inner_args, **inner_kwargs)

        if blocks == "whole":
            return jax.checkpoint(of_arrays, policy=chosen)(*arrays)
        closed, shape = jax.make_jaxpr(of_arrays, return_shape=True)(*arrays)
        if _has_scan(closed.jaxpr):
            out = _evaluate(closed, arrays, chosen)
            return jax.tree.structure(shape).unflatten(out)
        if _has_remat(closed.jaxpr):
            return of_arrays(*arrays)  # the model recomputes by itself
        if blocks == "scan":
            raise ConfigError(
                "blocks must be 'auto' or 'whole' for a loss without jax.lax.scan, got "
                "'scan'; or wrap its blocks with recompute_block"
            )
        return jax.checkpoint(of_arrays, policy=chosen)(*arrays)

    return recomputed


def recompute_block(
    block: Callable[..., Any],
    *,
    policy: Policy = "nothing_saveable",
    in_scan: bool = False,
    static_argnums: int | tuple[int, ...] = (),
) -> Callable[..., Any]:
    """Wrap one block of a model (a layer) so that its backward pass recomputes.

    Args:
      block: function of parameters and activations.
      policy: as for :func:`recompute`.
      in_scan: whether the block is the body of a scan, where the compiler needs no
        barrier against undoing the recomputation.
      static_argnums: arguments of the block that are no arrays.

    Example:
      >>> import jax.numpy as jnp
      >>> layer = recompute_block(lambda w, h: jnp.tanh(h @ w))
      >>> print(layer(jnp.eye(2), jnp.zeros((1, 2))))
      [[0. 0.]]
    """
    if not callable(block):
        raise ConfigTypeError(f"block must be a function, got {block!r}")
    return jax.checkpoint(
        block,
        policy=policy_of(policy),
        prevent_cse=not in_scan,
        static_argnums=static_argnums,
    )


def policy_of(policy: Policy) -> Callable[..., Any]:
    """Look up a policy by name."""
    if callable(policy):
        return policy
    common.check_choice("policy", policy, tuple(POLICIES))
    return POLICIES[policy]


def _has_scan(jaxpr: jex.Jaxpr) -> bool:
    """Whether there is a scan to work on, in the function or in what it calls."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "scan" and not _is_done(eqn):
            return True
        if name in CALLS and _has_scan(eqn.params["jaxpr"].jaxpr):
            return True
    return False


def _is_done(eqn: Any) -> bool:
    """A scan of one step, or one whose body recomputes already."""
    body = eqn.params["jaxpr"].jaxpr
    remats = any(e.primitive.name in REMATS for e in body.eqns)
    return remats or eqn.params["length"] <= 1


def _has_remat(jaxpr: jex.Jaxpr) -> bool:
    """Whether the function, or a scan or a call in it, recomputes already."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in REMATS:
            return True
        if name in (*CALLS, "scan") and _has_remat(eqn.params["jaxpr"].jaxpr):
            return True
    return False


def _evaluate(closed: jex.ClosedJaxpr, args: Sequence[Any], policy: Any) -> list[Any]:
    """Run a traced function, with every scan body under ``jax.checkpoint``."""
    jaxpr = closed.jaxpr
    values = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def read(atom):
        return atom.val if isinstance(atom, jex.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        inputs = [read(v) for v in eqn.invars]
        name = eqn.primitive.name
        if name == "scan" and not _is_done(eqn):
            outputs = _scan(eqn, inputs, policy)
        elif name in CALLS and _has_scan(eqn.params["jaxpr"].jaxpr):
            outputs = _evaluate(eqn.params["jaxpr"], inputs, policy)
        else:
            outputs = _run(eqn, inputs, jaxpr.debug_info)
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _run(eqn: Any, inputs: Sequence[Any], debug_info: Any) -> list[Any]:
    """Run a single equation as it is."""
    known = {}
    for v, x in zip(eqn.invars, inputs, strict=True):
        if not isinstance(v, jex.Literal):
            known.setdefault(v, x)
    jaxpr = jex.Jaxpr(
        (), list(known), list(eqn.outvars), [eqn], eqn.effects, debug_info=debug_info
    )
    return jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr, ()))(*known.values())


def _scan(eqn: Any, inputs: Sequence[Any], policy: Any) -> list[Any]:
    params = eqn.params
    num_consts, num_carry = _scan_counts(params)
    consts = inputs[:num_consts]
    init = inputs[num_consts : num_consts + num_carry]
    xs = inputs[num_consts + num_carry :]
    body = jex.jaxpr_as_fun(params["jaxpr"])

    def step(consts, carry, x):
        out = body(*consts, *carry, *x)
        return out[:num_carry], out[num_carry:]

    # Inside a scan the compiler cannot merge the two passes; no barrier is needed.
    step = jax.checkpoint(step, policy=policy, prevent_cse=False)
    carry, ys = jax.lax.scan(
        lambda carry, x: step(consts, carry, x),
        init,
        xs,
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys]


def _scan_counts(params: Any) -> tuple[int, int]:
    """Number of loop constants and of carried values; jax 0.12 keeps them in a tree."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry = [len(list(g.vals)) for g in params["ft_in"].unpack()][:2]
    return consts, carry
