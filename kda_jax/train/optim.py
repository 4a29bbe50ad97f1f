"""Learning-rate schedules, AdamW, and the rule that balances experts."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from kda_jax.config import OptimConfig
from kda_jax.layers.params import decay_mask

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


def make_optimizer(config: OptimConfig) -> optax.GradientTransformation:
    """Clipped AdamW (Loshchilov & Hutter, arXiv 1711.05101) without its learning rate, which the train step applies.

    Weight decay goes by the names of the parameters, not by their rank: stacking layers adds an axis to a norm's scale too.
    """
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps, mu_dtype=jnp.float32),
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask),
    )


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
    leaves, tree = jax.tree_util.tree_flatten_with_path(buffers)
    names = [[str(getattr(key, "key", key)) for key in path] for path, _ in leaves]
    biases = [i for i, name in enumerate(names) if name[-1] == "e_score_correction_bias"]
    stacked = [i for i in biases if "periods" in names[i]]
    first = [i for i in biases if "prologue" in names[i]]
    last = [i for i in biases if i not in stacked and i not in first]
    update = router_bias_update(counts, config.router_bias_rate, config.center_router_bias)
    new = [leaf for _, leaf in leaves]
    for row, i in enumerate(first):
        new[i] += update[row]
    repeats = new[stacked[0]].shape[0] if stacked else 0
    middle = len(first) + repeats * len(stacked)
    for position, i in enumerate(stacked):
        new[i] += update[len(first) + position : middle : len(stacked)]
    for row, i in enumerate(last):
        new[i] += update[middle + row]
    return tree.unflatten(new)
