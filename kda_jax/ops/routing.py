"""Which experts a token goes to, and with what weights."""

import math
import typing
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer

from kda_jax.ops.spec import need_floats
from kda_jax.sharding import Shards, constrain, local_map


class Routing(NamedTuple):
    """experts [..., k] and weights [..., k]: where each token goes, and how much each answer counts."""

    experts: Integer[Array, "*tokens k"]
    """Chosen experts of each token, best biased score first; int32."""
    weights: Float[Array, "*tokens k"]
    """Combine weights, float32."""


@typing.no_type_check  # its own checks raise ValueError with the name and shape of the argument
def route(
    logits: Float[Array, "*tokens E"],
    bias: Float[Array, "E"] | None = None,
    *,
    top_k: int,
    renormalize: bool,
    scaling_factor: float,
    activation: Literal["sigmoid", "softmax"] = "sigmoid",
    num_groups: int = 1,
    top_groups: int = 1,
) -> Routing:
    """Choose `top_k` experts by score + bias and weigh them by score alone.

    DeepSeek-V3, arXiv 2412.19437, eqs. 13-16 (bias-based balancing: arXiv 2408.15664); Kimi K3, arXiv 2607.24653, eq. 13. Three
    independent steps: select with the bias, divide by the selected sum (+ 1e-20) if `renormalize`, multiply by `scaling_factor`.

    Args:
        logits: [N, E] or [B, T, E]; compute them in float32.
        bias: [E], added for the selection only. It gets no gradient: a balancing rule moves it.
        top_k: experts per token.
        renormalize: make the selected scores of a token sum to 1 before scaling.
        scaling_factor: multiplies the weights, renormalised or not.
        activation: scores = sigmoid(logits) or softmax(logits).
        num_groups: experts are E / num_groups consecutive ones per group; a group's score is the sum of its two best.
        top_groups: groups a token may choose from.

    Returns:
        Routing. Equal biased scores: the lower expert number wins.

    Raises:
        ValueError: sizes that do not fit each other, or an unknown activation.

    Example:
        >>> import jax.numpy as jnp
        >>> from kda_jax import ops
        >>> ops.route(jnp.array([[2.0, 1.0, 0.0, -1.0]]), top_k=2, renormalize=True, scaling_factor=1.0).experts.tolist()
        [[0, 1]]
    """
    _check(logits, bias, top_k, activation, num_groups, top_groups)
    logits = constrain(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), *token_names(logits))
    scores = jax.nn.sigmoid(logits) if activation == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    selection = jax.lax.stop_gradient(scores if bias is None else scores + bias)

    def choose(_: Shards, selection: Array) -> Array:
        if top_groups < num_groups:
            selection = _keep_groups(selection, num_groups, top_groups)
        return jax.lax.top_k(selection, top_k)[1]

    experts = _by_token(choose, selection)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if renormalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return Routing(experts.astype(jnp.int32), weights * scaling_factor)


def _check(logits, bias, top_k: int, activation: str, num_groups: int, top_groups: int) -> None:
    """One sentence for every way the arguments of `route` can be wrong."""
    need_floats("route", dict(logits=logits, **({} if bias is None else {"bias": bias})))
    if logits.ndim not in (2, 3):
        raise ValueError(f"logits has shape {logits.shape}; expected [N, E] or [B, T, E]")
    E = logits.shape[-1]
    if bias is not None and bias.shape != (E,):
        raise ValueError(f"bias has shape {bias.shape}; expected {(E,)}")
    if activation not in ("sigmoid", "softmax"):
        raise ValueError(f"activation is {activation!r}; expected 'sigmoid' or 'softmax'")
    if E % num_groups or not 1 <= top_groups <= num_groups:
        raise ValueError(f"num_groups={num_groups}, top_groups={top_groups} do not fit {E} experts; expected a divisor and a part of it")
    if not 1 <= top_k <= E // num_groups * top_groups:
        raise ValueError(f"top_k is {top_k}; expected 1 to {E // num_groups * top_groups}, the experts a token may choose from")


def _by_token(f: Callable[[Shards, Array], Array], x: Array) -> Array:
    """`f` on every device's own tokens: partitioned by the compiler, a top-k gathers those of all devices."""
    return local_map(f, (x,), (token_names(x),), token_names(x))


def _keep_groups(selection: Array, num_groups: int, top_groups: int) -> Array:
    """-inf for the experts outside each token's best groups."""
    *tokens, E = selection.shape
    grouped = selection.reshape(*tokens, num_groups, E // num_groups)
    best_two = jax.lax.top_k(grouped, min(2, E // num_groups))[0].sum(axis=-1)
    chosen = jax.lax.top_k(best_two, top_groups)[1]
    keep = jnp.any(chosen[..., None] == jnp.arange(num_groups), axis=-2)
    return jnp.where(keep[..., None], grouped, -jnp.inf).reshape(selection.shape)


def expert_counts(experts: Integer[Array, "*tokens k"], num_experts: int) -> Int[Array, "E"]:
    """Number of tokens each expert received, over all devices. Numbers outside 0 .. E-1, as padding has, are not counted."""

    def local(shards: Shards, experts: Array) -> Array:
        experts = experts.astype(jnp.int32)  # num_experts fits
        inside = jnp.where((experts >= 0) & (experts < num_experts), experts, num_experts)
        return shards.sum(jnp.zeros(num_experts, jnp.int32).at[inside].add(1, mode="drop"), "batch", "time")

    return local_map(local, (experts,), (token_names(experts),), (None,))


class Limited(NamedTuple):
    routing: Routing
    """With -1 in the place of experts that were full."""
    dropped: Int[Array, ""]
    """Choices that found their expert full, over all devices."""


def limit(routing: Routing, num_experts: int, capacity_factor: float) -> Limited:
    """Give every expert at most `capacity` of a device's n tokens, the first that choose it (Switch Transformer, arXiv 2101.03961, eq. 3).

        capacity = ceil(n k / E * capacity_factor)

    A choice beyond that contributes nothing: such a token has its other experts, the shared ones and the residual. From E / k on, nothing
    can be dropped.

    Args:
        routing: from `route`; numbers outside 0 .. E-1 take no place.
        num_experts: E.
        capacity_factor: room over the mean load.
    """

    def local(shards: Shards, experts: Array) -> tuple[Array, Array]:
        chosen = experts.reshape(-1).astype(jnp.int32)  # num_experts and -1 fit
        real = (chosen >= 0) & (chosen < num_experts)
        chosen = jnp.where(real, chosen, num_experts)
        order = jnp.argsort(chosen, stable=True)
        counts = jnp.zeros(num_experts + 1, jnp.int32).at[chosen].add(1)
        place = jnp.zeros_like(chosen).at[order].set(jnp.arange(chosen.size) - (jnp.cumsum(counts) - counts)[chosen[order]])
        kept = place < capacity(chosen.size, num_experts, capacity_factor)
        dropped = shards.sum(jnp.sum(real & ~kept, dtype=jnp.int32), "batch", "time")
        return jnp.where(real & kept, chosen, -1).reshape(experts.shape), dropped

    names = token_names(routing.experts)
    experts, dropped = local_map(local, (routing.experts,), (names,), (names, ()))
    return Limited(routing._replace(experts=experts), dropped)


def capacity(choices: int, num_experts: int, capacity_factor: float) -> int:
    """Tokens of a device that one expert takes, of n k `choices`."""
    return math.ceil(choices / num_experts * capacity_factor)


def token_names(x: Array) -> tuple[str | None, ...]:
    """Logical names of [N, D] or [B, T, D]: what is per token, flat or in rows."""
    return ("batch", "time", None) if x.ndim == 3 else ("batch", None)


@typing.no_type_check  # its own checks raise ValueError with the name and shape of the argument
def bias_histogram(
    logits: Float[Array, "*tokens E"],
    bias: Float[Array, "E"],
    valid: Bool[Array, "*tokens"] | None = None,
    *,
    top_k: int,
    activation: Literal["sigmoid", "softmax"] = "sigmoid",
    bins: int = 1000,
) -> Int[Array, "E bins"]:
    """How many tokens would choose each expert from which bias on: the statistics of Quantile Balancing, one integer sum over all tokens.

    Kimi K3, arXiv 2607.24653, appendix C. A token's cutoff alpha is its (top_k + 1)-th best score + bias; it chooses expert j as soon as
    j's bias exceeds r_j = alpha - score_j. The r_j lie in [min(bias) - 1, max(bias) + 1], which is cut into equal bins.

    Args:
        logits: [..., E].
        bias: [E], with which these tokens were routed.
        valid: [...], False at padding, which is not counted.
        top_k: experts per token, fewer than E.
        activation: as in `route`.
        bins: of the histogram.

    Returns:
        int32 [E, bins]. Histograms of parts of a batch add up, over devices and micro-batches alike.

    Raises:
        ValueError: top_k leaves no expert to compare with.
    """
    E = logits.shape[-1]
    if not top_k < E:
        raise ValueError(f"top_k is {top_k} of {E} experts; expected fewer, there is nothing to balance otherwise")
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    scores = jax.nn.sigmoid(logits) if activation == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    scores = jax.lax.stop_gradient(scores)
    cutoff = _by_token(lambda _, biased: jax.lax.top_k(biased, top_k + 1)[0][..., -1:], scores + bias)
    low, width = _bins(bias, bins)
    slot = jnp.clip(jnp.floor((cutoff - scores - low) / width), 0, bins - 1).astype(jnp.int32)
    if valid is not None:
        slot = jnp.where(valid[..., None], slot, bins)  # out of range: dropped

    def local(shards: Shards, slot: Array) -> Array:
        return shards.sum(jnp.zeros((E, bins), jnp.int32).at[jnp.arange(E), slot].add(1, mode="drop"), "batch", "time")

    return local_map(local, (slot,), (token_names(slot),), (None, None))


def quantile_bias(histogram: Int[Array, "E bins"], bias: Float[Array, "E"], top_k: int) -> Float[Array, "E"]:
    """The bias at which every expert would have been chosen by the same number of these tokens, less its mean.

    Kimi K3, arXiv 2607.24653, appendix D: of each expert the top_k / E quantile of its r, the first bin whose cumulative count reaches
    q = tokens * top_k / E, linearly interpolated inside it.

    Args:
        histogram: from `bias_histogram`, summed over all tokens of a step.
        bias: [E], the one it was made with.
        top_k: experts per token.

    Returns:
        [E], in bias's dtype: the bias of the next step. Without a single token it is `bias`.
    """
    E, bins = histogram.shape
    low, width = _bins(bias, bins)
    tokens = jnp.sum(histogram[0])
    target = tokens.astype(jnp.float32) * (top_k / E)
    reached = jnp.cumsum(histogram, axis=-1)
    first = jnp.argmax(reached >= jnp.ceil(target), axis=-1)[:, None]
    inside = jnp.take_along_axis(histogram, first, axis=-1)
    before = jnp.take_along_axis(reached, first, axis=-1) - inside
    found = low + width * (first + (target - before) / jnp.maximum(inside, 1))[:, 0]
    return jnp.where(tokens > 0, found - jnp.mean(found), bias).astype(bias.dtype)


def _bins(bias: Float[Array, "E"], bins: int) -> tuple[Array, Array]:
    """(lower edge of the first bin, width of a bin)."""
    low, high = jnp.min(bias) - 1, jnp.max(bias) + 1
    return low, (high - low) / bins
