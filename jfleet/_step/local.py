"""The local region: every replica takes the gradient of its own rows.

``shard_map`` over the local axes; the rest of the mesh stays with the compiler. What
leaves the region is the gradient after the boundary's one reduction; where replicas
keep parameters or residuals of their own, one gradient per replica, in a replica dim.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jfleet._errors import ConfigError
from jfleet._layout import canonical
from jfleet._step import reduce, replicas
from jfleet._step.layout import Layout
from jfleet._step.loss import LossForm, Window, check_aux, window
from jfleet.optax_meta import _collectives as collectives
from jfleet.optax_meta import _common as common

Axes = tuple[str, ...]


class Gradient(NamedTuple):
    """What goes from the local region, or the global batch, to the update."""

    grads: Any  # of the scaled loss, reduced; own ones have a replica dim
    loss: Any  # array; a spec where the region is described
    found_inf: Any  # None, or of the 16-bit reduction, where there is one
    model_state: Any
    replica_state: Any
    aux: Any


def local_gradient(
    layout: Layout,
    axes: Axes,
    form: LossForm,
    wrap: Callable[[Any], Callable[[Callable], Callable]],
    state: Any,
    batch: Any,
    rng: Any,
    scale: Any,
) -> Gradient:
    """Run the local region over ``axes``.

    Args:
        layout: of the state.
        axes: mesh axes that become manual.
        form: the loss.
        wrap: turns a loss of (params, batch, rng) into that of the strategy, given the
            parameters of one replica.
        state: the training state.
        batch: the global batch, rows split over the data axes.
        rng: a random key or None.
        scale: the loss scale.
    """
    setup = layout.setup
    region = _Region(layout, axes, form, wrap)
    own = canonical([setup.own_axes])
    lead = own if setup.own_params else P()
    rows = canonical([axes])
    grads_out = jax.tree.map(region.grad_spec, state.params, layout.grads)
    per_replica = own if region.own else P()
    mapped = jax.shard_map(
        region.run,
        mesh=setup.mesh,
        in_specs=(
            lead,
            lead,
            jax.tree.map(lambda x: rows if x.ndim else P(), batch),
            P(),
            P(),
            _residual_specs(state.replica_state, rows),
        ),
        out_specs=Gradient(
            grads=grads_out,
            loss=per_replica,
            found_inf=P(),
            model_state=lead,
            replica_state=_residual_specs(state.replica_state, rows),
            aux=per_replica,
        ),
        axis_names=set(axes),
        check_vma=False,
    )
    return mapped(
        state.params, state.model_state, batch, rng, scale, state.replica_state
    )


def _residual_specs(replica_state: Any, rows: P) -> Any:
    return jax.tree.map(lambda x: rows if x.ndim else P(), replica_state)


class _Region:
    """What one replica does."""

    def __init__(self, layout: Layout, axes: Axes, form: LossForm, wrap: Callable):
        self.layout, self.axes, self.form, self.wrap = layout, axes, form, wrap
        self.setup = layout.setup
        self.own = self.setup.own_axes
        self.others = tuple(a for a in axes if a not in self.own)

    def grad_spec(self, param: Any, spec: P) -> P:
        """How a reduced gradient leaves the region."""
        num_dims = param.ndim - self.setup.own_params
        entries = reduce.scattered_spec(spec, num_dims, self.others)
        return canonical([self.own, *entries] if self.own else entries)

    def run(self, params, model_state, batch, rng, scale, replica_state) -> Gradient:
        setup = self.setup
        lead = setup.own_params
        if lead:
            params, model_state = (
                replicas.squeeze(t, replicas.everywhere(t, True))
                for t in (params, model_state)
            )
        if rng is not None:
            rng = jax.random.fold_in(rng, jax.lax.axis_index(self.axes))
        wrap = self.wrap(params)

        def loss(params, model_state, rows, key):
            fn = wrap(lambda p, b, k: self.form(p, model_state, b, k))
            return self.form.read(fn(params, rows, key))

        sums = window(
            loss,
            params,
            model_state,
            batch,
            rng,
            scale=scale,
            num_micro=setup.num_micro,
            pin=self.layout.pin_grads_inside,
        )
        check_aux(sums.aux, "where every replica has a loss of its own")
        grads, value = self._normalised(sums)
        grads, found, replica_state = self._reduced(grads, replica_state)
        model_state = self._common_state(sums.model_state)
        aux = jax.tree.map(self._common_aux, sums.aux)
        out = Gradient(grads, value, found, model_state, replica_state, aux)
        return self._with_dims(out)

    def _normalised(self, sums: Window) -> tuple[Any, jax.Array]:
        """Gradient and loss whose mean over the replicas is that of the window."""
        setup = self.setup
        if sums.weight is None:
            value = sums.total / setup.num_micro
            value = collectives.pmean(value, self.others)
            if not setup.averages or setup.num_micro == 1:
                return sums.grads, value
            return jax.tree.map(lambda g: g / setup.num_micro, sums.grads), value
        if not setup.averages:
            raise ConfigError(
                "gradient_merge_configs['avg'] is False, but loss_fn returns (total, "
                "weight), which is always divided by the whole weight; set avg=True "
                "or return the mean"
            )
        # Over replicas that go their own way nothing is summed.
        over = self.others if setup.own_params else self.axes
        weight = collectives.psum(sums.weight, over)
        share = setup.size(over) / jnp.where(weight == 0, 1, weight)
        grads = jax.tree.map(
            lambda g: g * share.astype(jnp.promote_types(g.dtype, jnp.float32)),
            sums.grads,
        )
        return grads, collectives.pmean(sums.total * share, self.others)

    def _reduced(self, grads: Any, replica_state: Any) -> tuple[Any, Any, Any]:
        specs, done = self.layout.grads, self.setup.reducer_axes
        flat_specs = jax.tree.leaves(specs)
        reducer = self.setup.reducer(
            lambda g, i: reduce.sum_leaf(g, flat_specs[i], done)
        )
        if reducer is None:
            return reduce.mean(grads, specs, self.others), None, None
        before = jax.tree.map(lambda x: x[0] if x.ndim else x, replica_state)
        grads, after = reducer.update(grads, before)
        rest = tuple(a for a in self.others if a not in done)
        kept = jax.tree.map(lambda s: _only(s, rest), specs)
        # A step is skipped everywhere or nowhere.
        found = collectives.pany(after.found_inf, (*rest, *self.own) or None)
        after = after._replace(
            found_inf=found,
            num_skipped=before.num_skipped + found,
            residual=common.select(found, before.residual, after.residual),
        )
        after = jax.tree.map(
            lambda new, old: new[None] if old.ndim else new, after, replica_state
        )
        return reduce.mean(grads, kept, rest), found, after

    def _common_state(self, model_state: Any) -> Any:
        over = self.others if self.setup.own_params else self.axes
        return collectives.pmean(model_state, over)

    def _common_aux(self, x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return collectives.pmean(x, self.others)
        return collectives.psum(x, self.others)

    def _with_dims(self, out: Gradient) -> Gradient:
        if not self.own:
            return out
        everywhere = replicas.everywhere
        grads, loss, aux = (
            replicas.expand(t, everywhere(t, True))
            for t in (out.grads, out.loss, out.aux)
        )
        model_state = replicas.expand(
            out.model_state, everywhere(out.model_state, self.setup.own_params)
        )
        return out._replace(grads=grads, loss=loss, aux=aux, model_state=model_state)


def _only(spec: P, axes: Axes) -> P:
    return canonical(
        [a for a in entry if a in axes]
        for entry in reduce.scattered_spec(spec, len(spec), axes)
    )
