"""What every mixer must do, whatever it computes: split, pad, pack, stay causal, keep its dtypes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from mixer_cases import FAMILIES, MIXERS, RECURRENT, assert_close, assert_trees_close, build, forward, random_input

from kda_jax.layers import params

T = 10
CAPACITY = 15  # of every cache, so that a mixer is compiled once per number of tokens
every_mixer = pytest.mark.parametrize("name", MIXERS)
every_family = pytest.mark.parametrize("name", FAMILIES)


def run_pieces(mixer, x, cache, sizes):
    ys = []
    for piece in jnp.split(x, np.cumsum(sizes)[:-1], axis=1):
        y, cache, _ = forward(mixer, piece, cache)
        ys.append(y)
    return jnp.concatenate(ys, axis=1), cache


@every_mixer
def test_R048_any_split_equals_the_whole(name):
    """R043, R044, R047, R048: prefill in pieces, a piece shorter than the window, and one token at a time; outputs and final caches."""
    mixer, x = build(name), random_input(2, T)
    whole = forward(mixer, x)
    assert whole.cache is None
    caches = []
    for sizes in ([5, 5], [1, 1, 5, 1, 1, 1], [1] * T):
        y, cache = run_pieces(mixer, x, mixer.init_cache(2, CAPACITY), sizes)
        assert_close(y, whole.y)
        caches.append(cache)
    for cache in caches[1:]:
        assert_trees_close(cache, caches[0])
    assert_trees_close(jax.tree.map(jnp.zeros_like, caches[0]), mixer.init_cache(2, CAPACITY))


# Five valid tokens in every row but the last two: a packed pair of five, and nothing at all.
IDS = np.array(
    [
        [-1, -1, -1, -1, -1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, -1, -1, -1, -1, -1],
        [-1, 1, 1, -1, 1, -1, -1, 1, 1, -1],
        [1, 1, 1, 1, 1, 2, 2, 2, 2, 2],
        [-1] * 10,
    ]
)


def padded_batch():
    """Two sequences of five tokens; the five rows of IDS with the first in it (the last row of a pair: the second) and noise as padding."""
    pair = random_input(2, 5, seed=3)
    rows = np.array(random_input(len(IDS), T, seed=4)) * 100
    rows[IDS == 1] = np.tile(pair[0], (4, 1))
    rows[IDS == 2] = pair[1]
    return pair, jnp.asarray(rows), jnp.asarray(IDS)


def check_padded(out, alone, fresh, mixer, before):
    """Rows of IDS against the sequences alone: `alone` continues `before`, `fresh` begins empty."""
    for row in range(4):
        assert_close(out.y[row][IDS[row] == 1], alone.y[0])
    assert_close(out.y[3][IDS[3] == 2], fresh.y[1])
    for leaf, want, old in zip(*map(jax.tree.leaves, (out.cache, alone.cache, before)), strict=True):
        for row in range(3):
            assert_close(leaf[row], want[0])
        np.testing.assert_array_equal(leaf[4], old[0])


@every_mixer
def test_R068_padding_changes_nothing_and_packed_equals_separate(name):
    """R036, R041, R062, R068: left, right and inside padding, a packed row, an empty row."""
    mixer = build(name)
    pair, rows, ids = padded_batch()
    empty = mixer.init_cache(2, CAPACITY)
    alone = forward(mixer, pair, empty)
    many = mixer.init_cache(len(IDS), CAPACITY)
    out = forward(mixer, rows, many, ids)
    check_padded(out, alone, alone, mixer, empty)
    if name in RECURRENT:
        assert_close(out.cache.state[3], alone.cache.state[1])
        np.testing.assert_array_equal(out.y[IDS < 0], 0)
    else:
        np.testing.assert_array_equal(out.cache.length, [5, 5, 5, 10, 0])
        np.testing.assert_array_equal(out.cache.start, [0, 0, 0, 5, 0])


@every_mixer
def test_R069_padding_is_honoured_when_the_cache_has_a_state(name):
    mixer = build(name)
    pair, rows, ids = padded_batch()
    before = forward(mixer, random_input(2, 5, seed=5), mixer.init_cache(2, CAPACITY)).cache
    fresh = forward(mixer, pair, mixer.init_cache(2, CAPACITY))
    out = forward(mixer, rows, jax.tree.map(lambda a: a[jnp.zeros(len(IDS), int)], before), ids)
    check_padded(out, forward(mixer, pair, before), fresh, mixer, before)


@every_mixer
def test_what_padding_holds_does_not_matter_bit_for_bit(name):
    """R041: also for everything after the padding."""
    mixer = build(name)
    _, rows, ids = padded_batch()
    other = jnp.where((ids > 0)[..., None], rows, -7.0)
    one, two = (forward(mixer, x, mixer.init_cache(len(IDS), CAPACITY), ids) for x in (rows, other))
    np.testing.assert_array_equal(one.y[IDS > 0], two.y[IDS > 0])
    jax.tree.map(np.testing.assert_array_equal, one.cache, two.cache)


@every_mixer
def test_causal_bit_for_bit(name):
    mixer, x = build(name), random_input(2, T)
    y = forward(mixer, x).y
    for p in (1, 4, 9):
        changed = forward(mixer, x.at[:, p:].add(3.0)).y
        np.testing.assert_array_equal(changed[:, :p], y[:, :p])
        assert np.any(np.asarray(changed[:, p]) != y[:, p])


@jax.jit
def gradient(mixer, x, weight, segment_ids):
    """Of a weighted sum of sin(y), with respect to the parameters and x; and y."""

    def loss(mixer, x):
        y = mixer(x, segment_ids=segment_ids).y
        return jnp.sum(jnp.sin(y) * weight), y

    return jax.grad(loss, argnums=(0, 1), has_aux=True)(mixer, x)


@every_family
def test_R026_padding_adds_nothing_to_any_gradient(name):
    """The same two sequences, padded everywhere or only behind, packed or not: the same gradients; at zero inputs finite ones."""
    mixer = build(name)
    pair, rows, ids = padded_batch()
    weight = random_input(2, 5, seed=6)
    plain_ids, weights = np.where(np.arange(T) < 5, 1, -1) * np.ones_like(IDS), []
    for where in (IDS, plain_ids):
        spread = np.zeros(rows.shape, np.float32)
        spread[where == 1] = np.tile(weight[0], (np.sum(where == 1) // 5, 1))
        weights.append(spread)
    weights[0][IDS == 2] = weight[1]
    plain = jnp.zeros_like(rows).at[:4, :5].set(pair[0]).at[4, :5].set(pair[1])
    weights[1][4, :5] = weight[1]
    (got_params, got_x), y = gradient(mixer, rows, jnp.asarray(weights[0]), ids)
    (want_params, want_x), _ = gradient(mixer, plain, jnp.asarray(weights[1]), jnp.asarray(plain_ids))
    assert_close(y[IDS > 0], forward(mixer, rows, mixer.init_cache(len(IDS), CAPACITY), ids).y[IDS > 0])
    for row in range(4):
        assert_close(got_x[row][IDS[row] == 1], want_x[0, :5])
    assert_close(got_x[3][IDS[3] == 2], want_x[4, :5])
    np.testing.assert_array_equal(got_x[IDS < 0], 0)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(want_params))
    for got, want in zip(jax.tree.leaves(got_params), jax.tree.leaves(want_params), strict=True):
        assert np.abs(got - want).max() <= 1e-5 * largest
    assert all(np.any(leaf) for leaf in jax.tree.leaves(want_params))
    for leaf in jax.tree.leaves(gradient(mixer, jnp.zeros_like(rows), jnp.asarray(weights[0]), ids)[0]):
        assert np.all(np.isfinite(leaf))


@every_family
def test_R013_bfloat16_inputs_keep_a_float32_state(name):
    mixer = build(name)
    graphdef, state = nnx.split(mixer)
    low = nnx.merge(graphdef, params.cast(state, jnp.bfloat16))
    x = random_input(2, 5)
    y, cache, _ = forward(low, x.astype(jnp.bfloat16), mixer.init_cache(2, CAPACITY, jnp.bfloat16))
    exact = forward(mixer, x, mixer.init_cache(2, CAPACITY)).y
    assert y.dtype == jnp.bfloat16
    assert_close(y, exact, rtol=4e-2)
    if name in RECURRENT:
        assert cache.state.dtype == jnp.float32
        assert cache.conv is None or cache.conv.dtype == jnp.bfloat16
    else:
        assert cache[0].dtype == jnp.bfloat16


@pytest.mark.parametrize("name", ["gpt2", "mla"])
def test_R054_tokens_beyond_the_capacity_are_dropped_not_clipped(name):
    mixer = build(name)
    x = random_input(2, 5)
    full = mixer.init_cache(2, CAPACITY)
    for _ in range(CAPACITY // 5):
        full = forward(mixer, x, full).cache
    over = forward(mixer, x, full).cache
    for before, after in zip(full[:-2], over[:-2], strict=True):
        np.testing.assert_array_equal(after, before)
    np.testing.assert_array_equal(over.length, CAPACITY + 5)
