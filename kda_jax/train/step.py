"""The loss, and one optimizer step as a pure function of the state."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from kda_jax import sharding
from kda_jax.config import RunConfig
from kda_jax.layers import collect_histograms, limit_experts
from kda_jax.layers.params import cast
from kda_jax.train.data import Batch
from kda_jax.train.optim import Schedule, balance_by_quantiles, update_router_biases
from kda_jax.train.qk_clip import clip_query_keys
from kda_jax.train.state import TrainState, merge


class Sums(NamedTuple):
    """Totals over the predicted tokens of some rows; a mean is taken once, over all of them."""

    nats: Float[Array, ""]
    tokens: Int[Array, ""]
    expert_counts: Int[Array, "layers E"] | None
    """Tokens sent to each expert; None for a model without experts."""
    max_logits: Float[Array, "layers H"] | None
    """Largest logit of each attention head; None for a model that reports none. This one is a maximum."""
    router_histogram: Int[Array, "layers E bins"] | None = None
    """What `optim.router_balance = "quantile"` needs; None where it is not asked for."""
    dropped: Int[Array, "layers"] | None = None
    """Choices of experts that were full; None without a capacity."""

    def plus(self, other: "Sums") -> "Sums":
        """Those of the rows of both."""
        maxima = None if self.max_logits is None else jnp.maximum(self.max_logits, other.max_logits)
        return jax.tree.map(jnp.add, self._replace(max_logits=None), other._replace(max_logits=None))._replace(max_logits=maxima)


class StepMetrics(NamedTuple):
    """What a step reports; read it late, so that the device does not wait."""

    loss: Float[Array, ""]
    """Mean over the predicted tokens, in nats."""
    tokens: Int[Array, ""]
    grad_norm: Float[Array, ""]
    """Before clipping."""
    learning_rate: Float[Array, ""]
    finite: Bool[Array, "leaves"]
    """For each parameter, in the order of `jax.tree.leaves(params)`, whether its gradient is finite."""
    skipped: Bool[Array, ""]
    """The gradient or the loss was not finite: parameters and moments are what they were."""
    expert_load: Float[Array, ""]
    """Tokens of the busiest expert over the mean, the worst layer's; 1 is balanced, 0 without experts."""
    max_logit: Float[Array, ""]
    """Largest logit of an attention head; 0 for a model that reports none."""
    dropped: Int[Array, ""]
    """Choices of experts that were full, over all layers (`train.expert_capacity`)."""


def next_token_loss(
    logits: Float[Array, "B T Z"], tokens: Int[Array, "B T1"], segment_ids: Int[Array, "B T1"]
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Sum of the cross-entropies of each token given those before it in its document, in nats and float32, and how many there are.

    This is the one place where tokens are shifted: logits at t, which have seen tokens up to t, are compared with token t + 1. Nothing is
    predicted across the edge of a segment, nor at padding.

    Args:
        logits: [B, T, Z] for tokens[:, :-1].
        tokens, segment_ids: [B, T + 1].
    """
    predicted = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] >= 0)
    logits = logits.astype(jnp.float32)
    # The token's own logit by a mask: to index a vocabulary that is split over devices would gather it.
    own = jnp.arange(logits.shape[-1]) == tokens[:, 1:, None]
    nats = jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(own, logits, 0.0), axis=-1)
    return jnp.sum(jnp.where(predicted, nats, 0.0)), jnp.sum(predicted, dtype=jnp.int32)


def make_forward(
    graphdef: nnx.GraphDef, compute_dtype: str, *, router_bins: int | None = None, expert_capacity: float | None = None
) -> Callable[[dict, dict, Batch], Sums]:
    """The loss of a batch as a function of (params, buffers, batch); parameters are cast to `compute_dtype` by name.

    `router_bins` asks for histograms of that many bins from the routers, `expert_capacity` limits the experts.
    """

    def forward(params: dict, buffers: dict, batch: Batch) -> Sums:
        model = merge(graphdef, cast(params, jnp.dtype(compute_dtype)), buffers)
        if router_bins is not None:
            collect_histograms(model, router_bins)
        limit_experts(model, expert_capacity)
        out = model(batch.tokens[:, :-1], segment_ids=batch.segment_ids[:, :-1])
        return Sums(*next_token_loss(out.logits, *batch), *map(out.aux.get, ("expert_counts", "max_logits", "router_histogram", "dropped")))

    return forward


def _summed_gradient(forward: Callable[[dict, dict, Batch], Sums], parts: int) -> Callable[[dict, dict, Batch], tuple[dict, Sums]]:
    """The gradient of the loss summed over a batch, and the sums, as a function of (params, buffers, batch), in `parts` parts."""

    def objective(params: dict, buffers: dict, batch: Batch) -> tuple[Array, Sums]:
        sums = forward(params, buffers, batch)
        return sums.nats, sums

    of_part = jax.grad(objective, has_aux=True)

    def gradient(params: dict, buffers: dict, batch: Batch) -> tuple[dict, Sums]:
        # Row i goes to part i mod `parts`: of rows that are split over devices, each device's share makes a share of every part.
        micro = jax.tree.map(lambda a: jnp.swapaxes(a.reshape(a.shape[0] // parts, parts, *a.shape[1:]), 0, 1), batch)
        shapes = jax.eval_shape(of_part, params, buffers, jax.tree.map(lambda a: a[0], micro))
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
        if zeros[1].max_logits is not None:
            zeros = zeros[0], zeros[1]._replace(max_logits=jnp.full_like(zeros[1].max_logits, -jnp.inf))

        def add(total, rows: Batch):
            grads, sums = of_part(params, buffers, rows)
            return (jax.tree.map(jnp.add, total[0], grads), total[1].plus(sums)), None

        return jax.lax.scan(add, zeros, micro)[0]

    return of_part if parts == 1 else gradient


def make_train_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    config: RunConfig,
    shardings: TrainState | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """The jitted step `(state, batch) -> (state, metrics)`. The state is donated: use the one returned.

    A batch is worked through in `train.micro_batches` parts. Losses and gradients are summed over the parts and divided once, by the number
    of tokens predicted in the whole batch, so the number of parts does not change the result.

    Args:
        shardings: of the state, from `state_shardings`, where there is a mesh; call the step under `jax.set_mesh` then.
    """
    bins = config.optim.router_bins if config.optim.router_balance == "quantile" else None
    forward = make_forward(graphdef, config.train.compute_dtype, router_bins=bins, expert_capacity=config.train.expert_capacity)
    gradient = _summed_gradient(forward, config.train.micro_batches)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        grads, sums = gradient(state.params, state.buffers, batch)
        tokens = jnp.maximum(sums.tokens, 1)
        grads = jax.tree.map(lambda g: g / tokens, grads)
        rate = schedule(state.step)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
        if config.optim.qk_clip is not None:
            params = clip_query_keys(params, sums.max_logits, config.optim.qk_clip)
        buffers = state.buffers
        if bins is not None:
            buffers = balance_by_quantiles(buffers, sums.router_histogram, config.model.num_experts_per_token)
        elif sums.expert_counts is not None and config.optim.router_bias_rate:
            buffers = update_router_biases(buffers, sums.expert_counts, config.optim)

        metrics = _metrics(grads, sums, tokens, rate)
        keep = lambda new, old: jnp.where(metrics.skipped, old, new)
        kept = jax.tree.map(keep, (params, buffers, opt_state), (state.params, state.buffers, state.opt_state))
        return TrainState(*kept, state.step + 1), metrics

    if shardings is None:
        return jax.jit(step, donate_argnums=0)
    out = shardings, sharding.replicated(jax.tree.leaves(shardings)[0].mesh)
    return jax.jit(sharding.automatic(step, out), donate_argnums=0, out_shardings=out)


def _metrics(grads: dict, sums: Sums, tokens: Array, rate: Any) -> StepMetrics:
    squares = jnp.stack([jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)])
    loss = sums.nats / tokens
    finite = jnp.isfinite(squares)
    load = jnp.zeros(())
    if sums.expert_counts is not None:
        counts = sums.expert_counts.astype(jnp.float32)
        load = jnp.max(jnp.max(counts, axis=-1) / jnp.maximum(jnp.mean(counts, axis=-1), 1.0))
    max_logit = jnp.zeros(()) if sums.max_logits is None else jnp.max(sums.max_logits).astype(jnp.float32)
    skipped = ~(jnp.all(finite) & jnp.isfinite(loss))
    dropped = jnp.zeros((), jnp.int32) if sums.dropped is None else jnp.sum(sums.dropped)
    norm, rate = jnp.sqrt(jnp.sum(squares)), jnp.asarray(rate, jnp.float32)
    return StepMetrics(loss, sums.tokens, norm, rate, finite, skipped, load, max_logit, dropped)
