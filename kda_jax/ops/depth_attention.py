"""Attention over depth: each layer chooses among the outputs of earlier ones instead of receiving their sum."""

import functools
import typing

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@typing.no_type_check  # its own checks raise ValueError with the name and shape of the argument
def attention_residual(
    bank: Float[Array, "N *batch D"],
    prefix: Float[Array, "*batch D"],
    query: Float[Array, "D"],
    weight: Float[Array, "D"],
    *,
    count: int | Int[Array, ""] | None = None,
    eps: float = 1e-5,
) -> Float[Array, "*batch D"]:
    """h = sum_i a_i v_i over the rows v_i of `bank` and `prefix`, with a = softmax_i(query . RMSNorm(v_i)), for every token alone.

    Attention Residuals (Kimi Team, arXiv 2603.15031, eqs. 2-4; block form as in Kimi K3, arXiv 2607.24653, section 2.2). The keys are
    normalised, the values are not, and nothing is divided by sqrt(D). A query of zeros gives the *mean* of the sources, which is not the
    sum that an ordinary residual stream is.

    Args:
        bank: [N, ..., D], finished sources; a buffer of fixed size of which the first `count` rows are used.
        prefix: [..., D], the source that is still growing; always used.
        query: [D], the learned pseudo-query.
        weight: [D], scale of the keys' RMS norm.
        count: rows of the bank in use, 0 .. N; all if None. The others may hold anything, NaN included.
        eps: added to the mean of squares of a source.

    Returns:
        [..., D] in prefix's dtype.

    Raises:
        ValueError: shapes that do not fit.

    Numerics: norms, scores, softmax and the sum are float32 (float64 for float64 inputs), rounded once. The backward pass keeps the
        arguments and nothing else: no float32 copy of a source outlives the call.

    Example:
        >>> import jax.numpy as jnp
        >>> from kda_jax import ops
        >>> ops.attention_residual(jnp.array([[1.0, 1.0]]), jnp.array([3.0, 5.0]), jnp.zeros(2), jnp.ones(2)).tolist()
        [2.0, 3.0]
    """
    if bank.ndim != prefix.ndim + 1 or bank.shape[1:] != prefix.shape:
        raise ValueError(f"bank has shape {bank.shape} and prefix {prefix.shape}; expected (N, *prefix.shape)")
    for name, x in (("query", query), ("weight", weight)):
        if x.shape != prefix.shape[-1:]:
            raise ValueError(f"{name} has shape {x.shape}; expected {prefix.shape[-1:]}, the width of prefix")
    count = jnp.asarray(bank.shape[0] if count is None else count, jnp.int32)
    return _mix(eps, bank, prefix, query, weight, count)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(eps: float, bank: Array, prefix: Array, query: Array, weight: Array, count: Array) -> Array:
    sources = _Sources(eps, bank, prefix, query, weight, count)
    return sources.total(sources.probability).astype(prefix.dtype)


class _Sources:
    """The bank and the prefix with what every source needs in both directions. Pairs are (bank's [N, ...], prefix's [...])."""

    def __init__(self, eps: float, bank: Array, prefix: Array, query: Array, weight: Array, count: Array):
        wide = jnp.promote_types(prefix.dtype, jnp.float32)
        used = (jnp.arange(bank.shape[0]) < count).reshape(-1, *[1] * prefix.ndim)
        self.values = jnp.where(used, bank, 0).astype(wide), prefix.astype(wide)
        self.key_query = query.astype(wide) * weight.astype(wide)
        self.rate = [jax.lax.rsqrt(jnp.mean(jnp.square(v), axis=-1) + eps) for v in self.values]
        self.dot = [v @ self.key_query for v in self.values]
        scores = [r * d for r, d in zip(self.rate, self.dot, strict=True)]
        scores[0] = jnp.where(used[..., 0], scores[0], -jnp.inf)
        largest = jnp.maximum(jnp.max(scores[0], axis=0, initial=-jnp.inf), scores[1])
        weights = [jnp.exp(s - largest) for s in scores]
        total = jnp.sum(weights[0], axis=0) + weights[1]
        self.probability = [w / total for w in weights]

    def total(self, factor: list[Array]) -> Array:
        """sum_i factor_i v_i."""
        bank, prefix = self.values
        return jnp.einsum("n...,n...d->...d", factor[0], bank) + factor[1][..., None] * prefix


def _mix_backward(eps: float, residuals: tuple[Array, ...], dh: Array):
    """With s_i = r_i v_i.w, w = query * weight, r_i = (mean v_i^2 + eps)^-1/2: ds_i = a_i (dh.v_i - dh.h), and

    dv_i = a_i dh + ds_i (r_i w - r_i^3 (v_i.w) v_i / D),    dw = sum_i ds_i r_i v_i.
    """
    bank, prefix, query, weight, _ = residuals
    sources = _Sources(eps, *residuals)
    dh, D = dh.astype(sources.key_query.dtype), prefix.shape[-1]
    a = sources.probability
    da = [jnp.sum(dh * v, axis=-1) for v in sources.values]
    mean = jnp.sum(a[0] * da[0], axis=0) + a[1] * da[1]
    ds = [p * (d - mean) for p, d in zip(a, da, strict=True)]
    scaled = [s * r for s, r in zip(ds, sources.rate, strict=True)]

    def dv(i: int) -> Array:
        own = scaled[i] * jnp.square(sources.rate[i]) * sources.dot[i] / D
        return a[i][..., None] * dh + scaled[i][..., None] * sources.key_query - own[..., None] * sources.values[i]

    dw = sources.total(scaled).reshape(-1, D).sum(axis=0)
    dquery, dweight = dw * weight.astype(dw.dtype), dw * query.astype(dw.dtype)
    return dv(0).astype(bank.dtype), dv(1).astype(prefix.dtype), dquery.astype(query.dtype), dweight.astype(weight.dtype), None


_mix.defvjp(lambda eps, *args: (_mix(eps, *args), args), _mix_backward)
