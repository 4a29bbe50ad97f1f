import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax.ops.short_conv import short_conv as eager_short_conv

short_conv = jax.jit(eager_short_conv, static_argnames="activation")
B, T, D, W = 2, 9, 5, 4


def assert_rounding(got, want):
    """Equal up to float32 rounding: compiled at another length, a sum of W products may fuse differently."""
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def conv_by_hand(x, weight, bias, history):
    """One row: x [T, D], history [W-1, D]."""
    window = np.concatenate([history, x])
    return np.stack([sum(window[t + j] * weight[:, j] for j in range(weight.shape[1])) + bias for t in range(len(x))])


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(0)
    arrays = rng.normal(size=(B, T, D)), rng.normal(size=(D, W)), rng.normal(size=D), rng.normal(size=(B, W - 1, D))
    return tuple(jnp.asarray(a, jnp.float32) for a in arrays)


def test_definition_with_history_and_bias(inputs):
    x, weight, bias, history = inputs
    y, final = short_conv(x, weight, bias, initial_state=history, activation=None)
    for b in range(B):
        np.testing.assert_allclose(y[b], conv_by_hand(x[b], weight, bias, history[b]), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(final, x[:, -(W - 1) :])
    assert_rounding(short_conv(x, weight, bias, initial_state=history).y, jax.nn.silu(y))


@pytest.mark.parametrize("first", [1, 2, 3, 4, 5])
def test_R044_any_split_equals_the_whole(inputs, first):
    """R043, R044: history shorter than the window, too; the final state is that of the whole."""
    x, weight, bias, history = inputs
    whole = short_conv(x, weight, bias, initial_state=history)
    a = short_conv(x[:, :first], weight, bias, initial_state=history)
    b = short_conv(x[:, first:], weight, bias, initial_state=a.final_state)
    assert_rounding(jnp.concatenate([a.y, b.y], axis=1), whole.y)
    np.testing.assert_array_equal(b.final_state, whole.final_state)


PADDED = [[-1, -1, 1, 1, 1], [1, 1, 1, -1, -1], [1, -1, 1, -1, 1], [-1] * 5, [1, 1, -1, -1, -1]]
PACKED = [[1, 1, 1, 2, 2, 3, 3, 3, 3], [1, 1, 1, 1, 1, 1, 1, 2, 0], [1, 0, 1, 2, 0, 2, 2, 3, 0]]


def test_R068_padding_anywhere_equals_no_padding(inputs):
    """Whatever the padding holds. All rows in one call; the rows without padding before a token also in a call of their own."""
    _, weight, bias, history = inputs
    ids = np.array(PADDED)
    x = np.random.default_rng(1).normal(size=(*ids.shape, D)).astype(np.float32)
    x[ids < 0] = np.nan
    history = np.repeat(history[:1], len(ids), axis=0)
    for rows in (slice(None), np.array([1, 3, 4])):
        out = short_conv(jnp.asarray(x[rows]), weight, bias, initial_state=history[rows], segment_ids=jnp.asarray(ids[rows]))
        for row, y, final in zip(np.arange(len(ids))[rows], *out, strict=True):
            expected = short_conv(jnp.asarray(x[row][ids[row] > 0])[None], weight, bias, initial_state=history[:1])
            assert_rounding(y[ids[row] > 0], expected.y[0])
            np.testing.assert_array_equal(y[ids[row] < 0], 0)
            np.testing.assert_array_equal(final, expected.final_state[0])


def test_R036_packed_equals_separate(inputs):
    _, weight, bias, history = inputs
    ids = np.array(PACKED)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(*ids.shape, D)), jnp.float32)
    history = jnp.repeat(history[:1], len(ids), axis=0)
    out = short_conv(x, weight, bias, initial_state=history, segment_ids=jnp.asarray(ids))
    for row, y, final in zip(range(len(ids)), *out, strict=True):
        for n in range(1, ids[row].max() + 1):
            mine = ids[row] == n
            alone = short_conv(x[row][mine][None], weight, bias, initial_state=history[:1] if n == 1 else None)
            assert_rounding(y[mine], alone.y[0])
        np.testing.assert_array_equal(final, alone.final_state[0])


def test_R068_gradients_of_a_padded_row_equal_those_without(inputs):
    x, weight, bias, _ = inputs
    ids = jnp.array([[-1, 1, -1, 1, 1]])

    def loss(x, weight, bias, segment_ids):
        y, final = short_conv(x, weight, bias, segment_ids=segment_ids)
        return jnp.sum(jnp.sin(y)) + jnp.sum(final**2)

    real = x[:1, :3]
    padded = jnp.zeros((1, 5, D)).at[:, [1, 3, 4]].set(real)
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    got, expected = gradient(padded, weight, bias, ids), gradient(real, weight, bias, None)
    np.testing.assert_allclose(got[0][:, [1, 3, 4]], expected[0], rtol=1e-6)
    np.testing.assert_array_equal(got[0][:, [0, 2]], 0)
    for a, b in zip(got[1:], expected[1:], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_sum_is_float32_and_history_keeps_its_dtype(inputs):
    x, weight, _, history = inputs
    x, weight, history = (a.astype(jnp.bfloat16) for a in (x, weight, history))
    y, final = short_conv(x, weight, initial_state=history.astype(jnp.float32), activation=None)
    exact = short_conv(*(a.astype(jnp.float32) for a in (x, weight)), initial_state=history.astype(jnp.float32), activation=None)
    assert (y.dtype, final.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(y, exact.y.astype(jnp.bfloat16))


def test_misfits_are_named(inputs):
    x, weight, _, history = inputs
    with pytest.raises(ValueError, match=r"initial_state has shape \(2, 2, 5\); expected \(2, 3, 5\)"):
        short_conv(x, weight, initial_state=history[:, 1:])
