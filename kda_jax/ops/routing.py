"""Which experts a token goes to, and with what weights."""

import typing
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kda_jax.sharding import Shards, local_map


class Routing(NamedTuple):
    experts: Int[Array, "*tokens k"]
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
    E = logits.shape[-1]
    if activation not in ("sigmoid", "softmax"):
        raise ValueError(f"activation is {activation!r}; expected 'sigmoid' or 'softmax'")
    if E % num_groups or not 1 <= top_groups <= num_groups:
        raise ValueError(f"num_groups={num_groups}, top_groups={top_groups} do not fit {E} experts; expected a divisor and a part of it")
    if not 1 <= top_k <= E // num_groups * top_groups:
        raise ValueError(f"top_k is {top_k}; expected 1 to {E // num_groups * top_groups}, the experts a token may choose from")
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    scores = jax.nn.sigmoid(logits) if activation == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    selection = jax.lax.stop_gradient(scores if bias is None else scores + bias)
    if top_groups < num_groups:
        selection = _keep_groups(selection, num_groups, top_groups)
    experts = jax.lax.top_k(selection, top_k)[1]
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if renormalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return Routing(experts.astype(jnp.int32), weights * scaling_factor)


def _keep_groups(selection: Array, num_groups: int, top_groups: int) -> Array:
    """-inf for the experts outside each token's best groups."""
    *tokens, E = selection.shape
    grouped = selection.reshape(*tokens, num_groups, E // num_groups)
    best_two = jax.lax.top_k(grouped, min(2, E // num_groups))[0].sum(axis=-1)
    chosen = jax.lax.top_k(best_two, top_groups)[1]
    keep = jnp.any(chosen[..., None] == jnp.arange(num_groups), axis=-2)
    return jnp.where(keep[..., None], grouped, -jnp.inf).reshape(selection.shape)


def expert_counts(experts: Int[Array, "*tokens k"], num_experts: int) -> Int[Array, "E"]:
    """Number of tokens each expert received, over all devices. Numbers outside 0 .. E-1, as padding has, are not counted."""

    def local(shards: Shards, experts: Array) -> Array:
        inside = jnp.where((experts >= 0) & (experts < num_experts), experts, num_experts)
        return shards.sum(jnp.zeros(num_experts, jnp.int32).at[inside].add(1, mode="drop"), "batch", "time")

    return local_map(local, (experts,), (token_names(experts),), (None,))


def token_names(x: Array) -> tuple[str | None, ...]:
    """Logical names of [N, D] or [B, T, D]: what is per token, flat or in rows."""
    return ("batch", "time", None) if x.ndim == 3 else ("batch", None)
