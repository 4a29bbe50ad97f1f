"""Causal softmax attention in blocks: memory linear in the sequence, masks by token index."""

import functools
import typing
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kda_jax.ops.segments import segments
from kda_jax.ops.spec import need_floats, need_integers
from kda_jax.sharding import local_map

# Every block has this many query and key rows whatever the sequence length. With the block shapes fixed and the key blocks visited
# in order, tokens appended to a sequence leave the outputs before them unchanged to the bit. Accelerators want larger blocks.
BLOCK = 256
BLOCK_ACCELERATOR = 1024
_NEVER = 2**30  # index of a key that no query sees


class AttentionOutput(NamedTuple):
    o: Float[Array, "B T H V"]
    max_logit: Float[Array, "B T H"]
    """Largest scaled score of each query, float32; -inf where nothing is visible. A statistic: it has no gradient."""


class _Visibility(NamedTuple):
    """Key j is visible to query i iff start_i <= index_j <= index_i. A padding query has index -1, a padding key _NEVER."""

    query: Int[Array, "B T"]
    start: Int[Array, "B T"]
    key: Int[Array, "B S"]


class _Static(NamedTuple):
    scale: float
    precision: jax.lax.Precision
    block: int = BLOCK


@typing.no_type_check  # its own checks raise ValueError with the name and shape of the argument
def attention(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S HK K"],
    v: Float[Array, "B S HK V"],
    *,
    scale: float | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    q_index: Int[Array, "B T"] | None = None,
    start: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T H V"]:
    """Causal softmax attention: o_i = sum_j softmax_j(scale q_i . k_j) v_j over the visible j <= i.

    Vaswani et al., arXiv 1706.03762, eq. 1, with the online softmax of Milakov & Gimelshein (arXiv 1805.02867) over key blocks
    and the recomputing backward of FlashAttention (arXiv 2205.14135, algorithm 4). Two ways to call it:

    * a whole sequence (S = T): give `segment_ids` if rows are packed or padded;
    * new tokens against a cache of S slots, in which token number n of a row is slot n: give `q_index`, and `start` if the current
      sequence does not begin at slot 0.

    Args:
        q: [B, T, H, K].
        k: [B, S, HK, K]; H is a multiple of HK, and key head j serves query heads j r .. j r + r - 1, r = H / HK.
        v: [B, S, HK, V].
        scale: K**-0.5 if None.
        segment_ids: [B, T]; see `ops.segments`.
        q_index: [B, T] slot of each query token; -1 at padding. Slots after it are not read.
        start: [B, T] first slot of each query token's sequence; 0 if None.

    Returns:
        [B, T, H, V] in q's dtype. A query with nothing visible gives exactly 0, with zero gradients.

    Raises:
        ValueError: head counts or lengths that do not fit, or both `segment_ids` and `q_index`.

    Numerics: scores, softmax and sums are float32 (float64 for float64 inputs); products of 16-bit inputs run at the device's
        default precision and the probabilities are rounded to v's dtype before they meet v. Masks act before exp.
    """
    return attention_with_max_logit(q, k, v, scale=scale, segment_ids=segment_ids, q_index=q_index, start=start).o


@typing.no_type_check
def attention_with_max_logit(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S HK K"],
    v: Float[Array, "B S HK V"],
    *,
    scale: float | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    q_index: Int[Array, "B T"] | None = None,
    start: Int[Array, "B T"] | None = None,
) -> AttentionOutput:
    """`attention`, and max_j scale q_i . k_j over the visible j, by which QK-clip (`train.qk_clip`) tells logits that grow too large.

    The maximum falls out of the online softmax, so it costs nothing but its own B T H numbers. Arguments and errors as `attention`.
    """
    _check(q, k, v, dict(segment_ids=segment_ids, q_index=q_index, start=start))
    H, HK = q.shape[2], k.shape[2]
    if H % HK or v.shape[2] != HK:
        raise ValueError(f"q has {H} heads, k {HK}, v {v.shape[2]}; expected equal counts for k and v, dividing q's")
    visibility = _visibility(q, k, segment_ids, q_index, start)
    if segment_ids is not None:  # whatever padding holds, 0 times it must be 0
        q, k, v = (jnp.where((visibility.query >= 0)[..., None, None], x, 0) for x in (q, k, v))
    precision = jax.lax.Precision.HIGHEST if q.dtype.itemsize >= 4 else jax.lax.Precision.DEFAULT
    static = _Static(q.shape[-1] ** -0.5 if scale is None else scale, precision)
    q = q.reshape(*q.shape[:2], HK, H // HK, q.shape[-1])
    o, m = _on_devices(_one_token if q.shape[1] == 1 else _blocked, static, q, k, v, visibility)
    return AttentionOutput(o.reshape(*o.shape[:2], H, v.shape[-1]), jax.lax.stop_gradient(m).reshape(*o.shape[:2], H))


@typing.no_type_check
def _check(q: Array, k: Array, v: Array, indices: dict[str, Array | None]) -> None:
    """One sentence for an argument of another shape or dtype."""
    need_floats("attention", dict(q=q, k=k, v=v))
    need_integers("attention", indices)

    def need(ok, name, x, expected):
        if not ok:
            raise ValueError(f"attention: {name} has shape {x.shape}, expected {expected}")

    need(q.ndim == 4, "q", q, "[B, T, H, K]")
    B, T, _, K = q.shape
    need(k.ndim == 4 and (k.shape[0], k.shape[3]) == (B, K), "k", k, f"[{B}, S, HK, {K}]")
    need(v.ndim == 4 and v.shape[:2] == k.shape[:2], "v", v, f"[{B}, {k.shape[1]}, HK, V]")
    for name, x in indices.items():
        need(x is None or x.shape == (B, T), name, x, f"{(B, T)}")


def _on_devices(attend: Callable, static: "_Static", q: Array, k: Array, v: Array, visibility: "_Visibility") -> tuple[Array, Array]:
    """Each device's queries, in rows, time and heads, against all keys of its rows and heads: where time is split, keys are gathered."""
    group, member = ("heads", None) if k.shape[2] > 1 else (None, "heads")
    queries, keys = ("batch", "time", group, member, None), ("batch", "keys", group, None)
    names = queries, keys, keys, ("batch", "time"), ("batch", "time"), ("batch", "keys")

    def local(_, q, k, v, *visibility):
        return attend(static, q, k, v, _Visibility(*visibility))

    return local_map(local, (q, k, v, *visibility), names, (queries, queries[:-1]))


def _visibility(q, k, segment_ids, q_index, start) -> _Visibility:
    (B, T), S = q.shape[:2], k.shape[1]
    if q_index is not None:
        if segment_ids is not None:
            raise ValueError("segment_ids and q_index are both given; a call against a cache names its tokens by q_index alone")
        start = jnp.zeros((B, T), jnp.int32) if start is None else start
        return _Visibility(q_index, start, jnp.broadcast_to(jnp.arange(S), (B, S)))
    if start is not None:
        raise ValueError("start is given without q_index; expected both for a call against a cache")
    if S != T:
        raise ValueError(f"k has {S} tokens and q has {T}; expected equal lengths, or q_index for a call against a cache")
    if segment_ids is None:
        index = jnp.broadcast_to(jnp.arange(T), (B, T))
        return _Visibility(index, jnp.zeros_like(index), index)
    seg = segments(segment_ids)
    return _Visibility(jnp.where(seg.valid, seg.index, -1), seg.start, jnp.where(seg.valid, seg.index, _NEVER))


def _scores(static: _Static, q: Array, k: Array, visibility: _Visibility) -> Array:
    """Masked scores [B, G, r, Q, S] in float32, -inf where not visible."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    s = static.scale * jnp.einsum("bqgrk,bsgk->bgrqs", q, k, precision=static.precision, preferred_element_type=wide)
    key, query, start = visibility.key[:, None, :], visibility.query[:, :, None], visibility.start[:, :, None]
    return jnp.where(((start <= key) & (key <= query))[:, None, None], s, -jnp.inf)


def _finite(m: Array) -> Array:
    """A maximum fit to be subtracted: that of nothing is -inf, and -inf - -inf would be nan."""
    return jnp.where(jnp.isneginf(m), 0, m)


def _one_token(static: _Static, q: Array, k: Array, v: Array, visibility: _Visibility) -> tuple[Array, Array]:
    """All keys at once: for a single query row the scores are as small as one block row."""
    s = _scores(static, q, k, visibility)
    m = jax.lax.stop_gradient(jnp.max(s, axis=-1, keepdims=True))
    p = jnp.exp(s - _finite(m))
    total = jnp.sum(p, axis=-1)
    o = jnp.einsum("bgrqs,bsgv->bqgrv", p.astype(v.dtype), v, precision=static.precision, preferred_element_type=s.dtype)
    total = jnp.moveaxis(jnp.where(total == 0, 1, total), 3, 1)
    return (o / total[..., None]).astype(q.dtype), jnp.moveaxis(m[..., 0], 3, 1)


# The choice of the block size by platform is made inside both directions: outside, both choices' residuals would be kept.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocked(static: _Static, q: Array, k: Array, v: Array, visibility: _Visibility) -> tuple[Array, Array]:
    o, _, m = _on_platform(_forward, static, q, k, v, visibility)
    return o, m


def _blocked_forward(static: _Static, *args):
    o, lse, m = _on_platform(_forward, static, *args)
    return (o, m), (*args, o, lse)


def _blocked_backward(static: _Static, residuals, cotangents):
    do, _ = cotangents
    return (*_on_platform(_backward, static, *residuals, do), None)


_blocked.defvjp(_blocked_forward, _blocked_backward)


def _on_platform(f, static: _Static, *args):
    large = static._replace(block=BLOCK_ACCELERATOR)
    return jax.lax.platform_dependent(*args, cpu=functools.partial(f, static), default=functools.partial(f, large))


def _forward(static: _Static, q: Array, k: Array, v: Array, visibility: _Visibility):
    """o, and of each row [B, T, G, r] the log-sum-exp and the largest score."""
    keys, queries = _pad_keys(static.block, k, v, visibility), _query_blocks(static.block, q, visibility)
    blocks = jax.lax.map(lambda block: _query_block(static, *block, *keys), queries)
    return tuple(_from_blocks(x, q.shape[1]) for x in blocks)


def _query_block(static: _Static, q, query, start, k, v, key):
    """Attention of one block of queries over the key blocks it can see: o [B, Q, G, r, V], log-sum-exp and maximum [B, Q, G, r]."""
    B, Q, G, r, _ = q.shape
    wide = jnp.promote_types(q.dtype, jnp.float32)

    def body(j, carry):
        m, total, o = carry
        k_j, v_j, key_j = _key_block(static.block, j, k, v, key)
        s = _scores(static, q, k_j, _Visibility(query, start, key_j))
        new_m = jnp.maximum(m, jnp.max(s, axis=-1))
        p = jnp.exp(s - _finite(new_m)[..., None])
        keep = jnp.exp(m - _finite(new_m))
        pv = jnp.einsum("bgrqs,bsgv->bgrqv", p.astype(v.dtype), v_j, precision=static.precision, preferred_element_type=wide)
        return new_m, keep * total + jnp.sum(p, axis=-1), keep[..., None] * o + pv

    carry = jnp.full((B, G, r, Q), -jnp.inf, wide), jnp.zeros((B, G, r, Q), wide), jnp.zeros((B, G, r, Q, v.shape[-1]), wide)
    m, total, o = jax.lax.fori_loop(*_visible_blocks(static.block, query, start, key), body, carry)
    total = jnp.where(total == 0, 1, total)
    o, lse = o / total[..., None], _finite(m) + jnp.log(total)
    return jnp.moveaxis(o, 3, 1).astype(q.dtype), jnp.moveaxis(lse, 3, 1), jnp.moveaxis(m, 3, 1)


def _backward(static: _Static, q: Array, k: Array, v: Array, visibility: _Visibility, o: Array, lse: Array, do: Array):
    wide = lse.dtype
    delta = jnp.sum(do.astype(wide) * o.astype(wide), axis=-1)  # sum_j p_ij dp_ij, without the p
    keys = _pad_keys(static.block, k, v, visibility)
    queries = (*_query_blocks(static.block, q, visibility), *(_to_blocks(static.block, x, 0) for x in (do, delta, lse)))

    def body(carry, block):
        dq, *carry = _query_block_backward(static, carry, block, keys)
        return tuple(carry), dq

    start = jnp.zeros(keys[0].shape, wide), jnp.zeros(keys[1].shape, wide)
    (dk, dv), dq = jax.lax.scan(body, start, queries)
    T, S = q.shape[1], k.shape[1]
    return _from_blocks(dq, T), dk[:, :S].astype(k.dtype), dv[:, :S].astype(v.dtype)


def _query_block_backward(static: _Static, carry, block, keys):
    """dq of one block of queries, and what it adds to dk and dv (float32, updated in place)."""
    q, query, start, do, delta, lse = block
    k, v, key = keys
    einsum = functools.partial(jnp.einsum, precision=static.precision, preferred_element_type=lse.dtype)
    delta, lse = jnp.moveaxis(delta, 1, 3), jnp.moveaxis(lse, 1, 3)

    def body(j, carry):
        dq, dk, dv = carry
        k_j, v_j, key_j = _key_block(static.block, j, k, v, key)
        p = jnp.exp(_scores(static, q, k_j, _Visibility(query, start, key_j)) - lse[..., None])
        dp = einsum("bqgrv,bsgv->bgrqs", do, v_j)
        ds = (static.scale * p * (dp - delta[..., None])).astype(q.dtype)
        dq = dq + einsum("bgrqs,bsgk->bqgrk", ds, k_j)
        dk = _add_block(static.block, dk, j, einsum("bgrqs,bqgrk->bsgk", ds, q))
        dv = _add_block(static.block, dv, j, einsum("bgrqs,bqgrv->bsgv", p.astype(v.dtype), do))
        return dq, dk, dv

    dq, dk, dv = jax.lax.fori_loop(*_visible_blocks(static.block, query, start, key), body, (jnp.zeros(q.shape, lse.dtype), *carry))
    return dq.astype(q.dtype), dk, dv


def _visible_blocks(block: int, query: Array, start: Array, key: Array) -> tuple[Array, Array]:
    """Range of key blocks of which some query of this block sees something: causality and packing skip the rest."""
    blocks = key.reshape(key.shape[0], -1, block)
    low = jnp.min(blocks, axis=-1)
    high = jnp.max(jnp.where(blocks == _NEVER, -1, blocks), axis=-1)
    first = jnp.min(jnp.where(query < 0, _NEVER, start), axis=1, keepdims=True)
    seen = jnp.any((low <= jnp.max(query, axis=1, keepdims=True)) & (high >= first), axis=0)
    number = jnp.arange(seen.shape[0])
    return jnp.min(jnp.where(seen, number, seen.shape[0])), jnp.max(jnp.where(seen, number + 1, 0))


def _pad_keys(block: int, k: Array, v: Array, visibility: _Visibility) -> tuple[Array, Array, Array]:
    return _pad(block, k, 0), _pad(block, v, 0), _pad(block, visibility.key, _NEVER)


def _key_block(block: int, j: Array, *arrays: Array) -> list[Array]:
    return [jax.lax.dynamic_slice_in_dim(x, j * block, block, axis=1) for x in arrays]


def _add_block(block: int, total: Array, j: Array, addend: Array) -> Array:
    old = jax.lax.dynamic_slice_in_dim(total, j * block, block, axis=1)
    return jax.lax.dynamic_update_slice_in_dim(total, old + addend, j * block, axis=1)


def _query_blocks(block: int, q: Array, visibility: _Visibility) -> tuple[Array, Array, Array]:
    return _to_blocks(block, q, 0), _to_blocks(block, visibility.query, -1), _to_blocks(block, visibility.start, 0)


def _pad(block: int, x: Array, value: int) -> Array:
    widths = [(0, 0)] * x.ndim
    widths[1] = (0, -x.shape[1] % block)
    return jnp.pad(x, widths, constant_values=value)


def _to_blocks(block: int, x: Array, value: int) -> Array:
    """[B, T, ...] -> [blocks, B, block, ...]."""
    x = _pad(block, x, value)
    return jnp.moveaxis(x.reshape(x.shape[0], -1, block, *x.shape[2:]), 1, 0)


def _from_blocks(x: Array, T: int) -> Array:
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :T]
