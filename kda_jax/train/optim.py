"""Learning-rate schedules, optimizers, and the rule that balances experts."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from kda_jax.config import ModelConfig, OptimConfig
from kda_jax.layers.params import decay_mask, is_matrix
from kda_jax.models.placement import axes
from kda_jax.ops.routing import quantile_bias
from kda_jax.train.muon import scale_by_muon
from kda_jax.train.state import by_layer, flatten, shapes, splits, unflatten

Schedule = Callable[[Any], Any]


def make_schedule(config: OptimConfig, steps: int) -> Schedule:
    """Learning rate as a function of the number of steps done before.

    Warm-up is linear and starts above zero, so that no step is lost: step 0 runs at peak / (warmup_steps + 1). Then "cosine" (Loshchilov
    & Hutter, arXiv 1608.03983) or "wsd", warm-up, stable, decay (MiniCPM, arXiv 2404.06395).

    Raises:
        ValueError: warm-up and decay do not fit into `steps`.
    """
    peak, final, warmup = config.learning_rate, config.learning_rate * config.final_fraction, config.warmup_steps
    decay = round(config.decay_fraction * steps) if config.schedule == "wsd" else steps - warmup
    if warmup + decay > steps or warmup >= steps:
        raise ValueError(
            f"optim.warmup_steps ({warmup}) and the decay ({max(decay, 0)} steps) do not fit into train.steps ({steps}): "
            "lower optim.warmup_steps, or raise train.steps"
        )
    warm = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    if config.schedule == "cosine":
        return optax.join_schedules([warm, optax.cosine_decay_schedule(peak, decay, alpha=config.final_fraction)], [warmup])
    parts = [warm, optax.constant_schedule(peak), optax.linear_schedule(peak, final, max(decay, 1))]
    return optax.join_schedules(parts, [warmup, steps - decay])


def make_optimizer(config: OptimConfig, model: ModelConfig) -> optax.GradientTransformation:
    """Clipping, AdamW (Loshchilov & Hutter, arXiv 1711.05101) or Muon with it, weight decay; without the rate, which the step applies.

    Weight decay goes by the names of the parameters, not by their rank: stacking layers adds an axis to a norm's scale too. So does
    Muon: it takes the matrices; convolutions, norms, gates, biases, embeddings and the head go to Adam.

    Args:
        config: which of the two, and its constants.
        model: tells Muon where the heads are.
    """
    scale = _adam(config)
    if config.algorithm == "muon":
        abstract = shapes(model)
        muon = scale_by_muon(
            momentum=config.momentum,
            update_rms=config.update_rms,
            splits=splits(abstract),
            axes=axes(abstract),
            compute_dtype=config.newton_schulz_dtype,
            moment_dtype=config.first_moment_dtype,
        )
        scale = optax.partition({"muon": muon, "adam": scale}, _algorithms)
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        scale,
        optax.add_decayed_weights(config.weight_decay, mask=lambda params: decay_mask(params, config.no_decay)),
    )


def _algorithms(params: dict) -> dict:
    return jax.tree_util.tree_map_with_path(lambda path, _: "muon" if is_matrix(path) else "adam", params)


def _adam(config: OptimConfig) -> optax.GradientTransformation:
    """Adam, whose moments are stored in the dtypes of `config` and computed in float32."""
    adam = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)

    def stored(state: optax.ScaleByAdamState, first: str, second: str) -> optax.ScaleByAdamState:
        to = lambda tree, dtype: jax.tree.map(lambda x: x.astype(dtype), tree)
        return state._replace(mu=to(state.mu, first), nu=to(state.nu, second))

    def init(params: Any) -> optax.ScaleByAdamState:
        return stored(adam.init(params), config.first_moment_dtype, config.second_moment_dtype)

    def update(grads: Any, state: optax.ScaleByAdamState, params: Any = None) -> tuple[Any, optax.ScaleByAdamState]:
        updates, state = adam.update(grads, stored(state, "float32", "float32"), params)
        return updates, stored(state, config.first_moment_dtype, config.second_moment_dtype)

    return optax.GradientTransformation(init, update)


def router_bias_update(counts: Int[Array, "*layers E"], rate: float, center: bool) -> Float[Array, "*layers E"]:
    """What to add to the routers' selection bias so that busy experts are chosen less: `rate * sign(mean(counts) - counts)`.

    The auxiliary-loss-free balancing of DeepSeek-V3 (arXiv 2408.15664, algorithm 1). The bias takes part in the selection only, so it has
    no gradient and no weight decay.

    Args:
        counts: tokens sent to each expert since the last update.
        rate: step size.
        center: subtract the update's mean over the experts. That keeps the mean of the bias at 0; a common shift selects the same experts.
    """
    load = counts.astype(jnp.float32)
    update = rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)
    return update - jnp.mean(update, axis=-1, keepdims=True) if center else update


def update_router_biases(buffers: dict, counts: Int[Array, "layers E"], config: OptimConfig) -> dict:
    """Apply `router_bias_update` to every `e_score_correction_bias` among the model's buffers.

    Args:
        buffers: nested dict of arrays. A bias is [E] in an unrolled layer and [repeats, E] in scanned periods.
        counts: in the order of the layers, as `ModelOutput.aux["expert_counts"]`.
    """
    flat = flatten(buffers)
    biases = {name: leaf for name, leaf in flat.items() if name.endswith("e_score_correction_bias")}
    updates = by_layer(biases, router_bias_update(counts, config.router_bias_rate, config.center_router_bias))
    return unflatten(buffers, flat | {name: biases[name] + update for name, update in updates.items()})


def balance_by_quantiles(buffers: dict, histogram: Int[Array, "layers E bins"], top_k: int) -> dict:
    """Put every `e_score_correction_bias` where `ops.quantile_bias` says.

    Args:
        buffers: as in `update_router_biases`.
        histogram: in the order of the layers, as `ModelOutput.aux["router_histogram"]`, of all tokens of the step.
        top_k: experts per token.
    """
    flat = flatten(buffers)
    biases = {name: leaf for name, leaf in flat.items() if name.endswith("e_score_correction_bias")}
    one = functools.partial(quantile_bias, top_k=top_k)
    new = {name: (jax.vmap(one) if own.ndim == 3 else one)(own, biases[name]) for name, own in by_layer(biases, histogram).items()}
    return unflatten(buffers, flat | new)
