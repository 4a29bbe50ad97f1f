import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax.ops.attention import BLOCK, attention_with_max_logit
from kda_jax.ops.attention import attention as eager_attention
from kda_jax.ops.mla import mla

attention = jax.jit(eager_attention, static_argnames="scale")
H, HK, K, V = 6, 3, 8, 5


def qkv(B, T, S=None, seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    shapes = (B, T, H, K), (B, S or T, HK, K), (B, S or T, HK, V)
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


def direct(q, k, v, visible, scale=K**-0.5):
    """The T x S form in float64; visible [B, T, S]. A row with nothing visible gives 0."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    p = np.exp(scale * np.einsum("bqhk,bshk->bqhs", q, k)) * visible[:, :, None]
    return np.einsum("bqhs,bshv->bqhv", p / np.maximum(p.sum(-1, keepdims=True), 1e-300), v)


def direct_jnp(q, k, v, visible):
    k, v = (jnp.repeat(x, H // HK, axis=2) for x in (k, v))
    s = jnp.where(visible[:, :, None], K**-0.5 * jnp.einsum("bqhk,bshk->bqhs", q, k), -1e30)
    return jnp.einsum("bqhs,bshv->bqhv", jax.nn.softmax(s, axis=-1), v)


def causal(T, S=None):
    return np.tril(np.ones((1, T, S or T), bool))


@pytest.mark.parametrize("T", [1, 2, 37, BLOCK, 2 * BLOCK + 44])
def test_equals_the_quadratic_form(T):
    q, k, v = qkv(2, T)
    np.testing.assert_allclose(attention(q, k, v), direct(q, k, v, causal(T)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("T", [1, BLOCK + 44])
def test_gradients_equal_those_of_the_quadratic_form(T):
    args = qkv(2, T)

    def loss(f):
        return jax.jit(jax.grad(lambda q, k, v: jnp.sum(jnp.sin(f(q, k, v))), argnums=(0, 1, 2)))

    expected = loss(lambda q, k, v: direct_jnp(q, k, v, causal(T)))(*args)
    for got, want in zip(loss(attention)(*args), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("T", [1, BLOCK + 44])
def test_largest_logit_of_each_query(T):
    """The same output and gradient, and the maximum of the visible scores; nothing visible is -inf, and the maximum has no gradient."""
    q, k, v = qkv(2, T)
    ids = np.where(np.arange(T) < T // 3, 1, 2)[None].repeat(2, 0)
    ids[1, T - T // 4 :] = -1
    ids = jnp.asarray(ids)

    def both(q):
        out = attention_with_max_logit(q, k, v, segment_ids=ids)
        return jnp.sum(jnp.sin(out.o)) + jnp.sum(jnp.where(jnp.isfinite(out.max_logit), out.max_logit, 0)), out

    (_, out), grad = jax.jit(jax.value_and_grad(both, has_aux=True))(q)
    alone = jax.jit(jax.grad(lambda q: jnp.sum(jnp.sin(eager_attention(q, k, v, segment_ids=ids)))))(q)
    np.testing.assert_array_equal(grad, alone)
    s = K**-0.5 * np.einsum("bqhk,bshk->bqhs", np.float64(q), np.repeat(np.float64(k), H // HK, axis=2))
    visible = causal(T) & (ids[:, :, None] == ids[:, None, :]) & (ids[:, None, :] > 0)
    np.testing.assert_allclose(out.max_logit, np.where(visible[:, :, None], s, -np.inf).max(-1), rtol=1e-5, atol=1e-6)


def test_R033_packed_and_padded_rows():
    """Every row equals its sequences alone, whatever the padding holds; padding gives exactly 0."""
    ids = np.array([[1, 1, 1, 2, 2, 3], [-1, -1, 1, 1, 1, 1], [1, 1, 0, 2, 0, 2], [-1] * 6, [0, 0, 1, 1, 1, 0]])
    valid = (ids > 0) | (np.arange(6) < 2) & (ids == 0)
    q, k, v = (jnp.where(valid[..., None, None], x, jnp.nan) for x in qkv(5, 6))
    o = attention(q, k, v, segment_ids=jnp.asarray(ids))
    for row in range(len(ids)):
        np.testing.assert_array_equal(o[row][~valid[row]], 0)
        for n in np.unique(ids[row][valid[row]]):
            mine = valid[row] & (ids[row] == n)
            alone = direct(*(x[row][mine][None] for x in (q, k, v)), causal(mine.sum()))
            np.testing.assert_allclose(o[row][mine], alone[0], rtol=1e-4, atol=1e-5)


def test_padding_gets_exactly_zero_gradient_and_never_nan():
    ids = jnp.array([[-1, -1, 1, 1], [-1, -1, -1, -1]])
    gradients = jax.jit(jax.grad(lambda *qkv: jnp.sum(attention(*qkv, segment_ids=ids)), argnums=(0, 1, 2)))(*qkv(2, 4))
    for g in gradients:
        assert np.all(np.isfinite(g))
        np.testing.assert_array_equal(g[0, :2], 0)
        np.testing.assert_array_equal(g[1], 0)
    assert np.any(gradients[2][0, 2:])


@pytest.mark.parametrize("T", [1, 2, 5])
def test_new_tokens_against_a_cache(T):
    """Unequal lengths, a sequence that starts late, padding, and garbage in the slots not yet filled."""
    S = BLOCK + 60
    q, k, v = qkv(3, T, S)
    length = np.array([0, 7, BLOCK + 10])
    q_index = length[:, None] + np.arange(T)
    q_index[1, -1] = -1  # padding
    start = np.zeros((3, T), int)
    start[2] = BLOCK - 3
    slot = np.arange(S)
    visible = (start[..., None] <= slot) & (slot <= q_index[..., None])
    k, v = (jnp.where((slot < length[:, None] + T)[..., None, None], x, 1e30) for x in (k, v))
    o = attention(q, k, v, q_index=jnp.asarray(q_index, jnp.int32), start=jnp.asarray(start, jnp.int32))
    np.testing.assert_allclose(o, direct(q, *(jnp.where(x == 1e30, 0, x) for x in (k, v)), visible), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(o[1, -1], 0)


def test_later_tokens_never_change_earlier_outputs_bit_for_bit():
    """Neither their values (causality) nor their number."""
    T, p = 2 * BLOCK, BLOCK + 31
    q, k, v = qkv(1, T)
    o = attention(q, k, v)
    changed = attention(*(x.at[:, p:].set(1e3) for x in (q, k, v)))
    np.testing.assert_array_equal(changed[:, :p], o[:, :p])
    assert np.any(np.asarray(changed[:, p:]) != o[:, p:])
    np.testing.assert_array_equal(attention(*(x[:, :p] for x in (q, k, v))), o[:, :p])


def test_memory_is_linear_in_the_sequence():
    """Forward and backward: twice the tokens, about twice the scratch memory (the quadratic form would need four times)."""

    def scratch(T):
        shapes = [jax.ShapeDtypeStruct(x, jnp.float32) for x in [(1, T, 2, 8)] * 3]
        f = jax.jit(jax.grad(lambda *qkv: jnp.sum(attention(*qkv)), argnums=(0, 1, 2)))
        return f.lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    assert scratch(16 * BLOCK) < 2.5 * scratch(8 * BLOCK)


def test_large_scores_stay_finite():
    q, k, v = qkv(1, 4)
    o = attention(100 * q, 100 * k, v)
    assert np.all(np.isfinite(o))
    np.testing.assert_allclose(o[:, 0], np.repeat(v[:, 0], H // HK, axis=1), rtol=1e-6)


def test_bfloat16_inputs_accumulate_in_float32():
    q, k, v = qkv(1, 300, dtype=jnp.bfloat16)
    o = attention(q, k, v)
    exact = direct(*(np.asarray(x, np.float32) for x in (q, k, v)), causal(300))
    assert o.dtype == jnp.bfloat16
    assert np.sqrt(np.mean((np.asarray(o, np.float64) - exact) ** 2) / np.mean(exact**2)) < 4e-3


def test_misfits_are_named():
    q, k, v = qkv(1, 4)
    with pytest.raises(ValueError, match="q has 6 heads, k 3, v 2"):
        attention(q, k, v[:, :, :2])
    with pytest.raises(ValueError, match="k has 3 tokens and q has 4"):
        attention(q, k[:, :3], v[:, :3])
    with pytest.raises(ValueError, match="segment_ids and q_index are both given"):
        attention(q, k, v, segment_ids=jnp.ones((1, 4), jnp.int32), q_index=jnp.zeros((1, 4), jnp.int32))


@pytest.mark.parametrize("T", [1, 7])
def test_R072_absorbed_equals_expanded_at_the_same_scale(T):
    """Rank 24, nope 16, extra 8, v 12; the scale is that of 16 + 8 dims whatever the rank."""
    R, N, P, heads, width = 24, 16, 8, 3, 12
    rng = np.random.default_rng(0)
    shapes = (2, T, heads, N), (2, T, heads, P), (2, T, R + P), (R, heads, N), (R, heads, width)
    q_nope, q_rope, latent, w_uk, w_uv = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    scale = (N + P) ** -0.5

    @jax.jit
    def absorbed(q_nope, q_rope, latent, w_uk, w_uv):
        o = mla(jnp.einsum("bthn,rhn->bthr", q_nope, w_uk), q_rope, latent, scale=scale)
        return jnp.einsum("bthr,rhv->bthv", o, w_uv)

    c, k_rope = latent[..., :R], jnp.broadcast_to(latent[:, :, None, R:], (2, T, heads, P))
    k = np.concatenate([np.einsum("btr,rhn->bthn", c, w_uk), k_rope], axis=-1)
    expanded = direct(np.concatenate([q_nope, q_rope], axis=-1), k, np.einsum("btr,rhv->bthv", c, w_uv), causal(T), scale)
    np.testing.assert_allclose(absorbed(q_nope, q_rope, latent, w_uk, w_uv), expanded, rtol=1e-4, atol=1e-5)


def test_mla_latent_width_is_checked():
    q = jnp.zeros((1, 2, 3, 4))
    with pytest.raises(ValueError, match=r"latent has shape \(1, 2, 7\); expected a last axis of 4 \+ 4 = 8"):
        mla(q, q, jnp.zeros((1, 2, 7)), scale=1.0)
