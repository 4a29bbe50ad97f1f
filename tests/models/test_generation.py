"""One forward for everything: any split of a sequence, any padding around it, equals the whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import (
    BUCKET,
    CONFIGS,
    LONG,
    ROWS,
    TOKENS,
    VOCAB,
    assert_bitwise,
    assert_close,
    build,
    empty_cache,
    forward,
    random_tokens,
    reference,
    rounding,
)

every_model = pytest.mark.parametrize("name", CONFIGS)


def continue_in(name, splits):
    """Logits and last cache of feeding TOKENS in pieces of the given lengths."""
    cache, logits, first = empty_cache(name), [], 0
    for n in splits:
        out = forward(build(name), jnp.asarray(TOKENS[:, first : first + n]), cache)
        logits.append(out.logits)
        cache, first = out.cache, first + n
    return np.concatenate(logits, axis=1), cache


def assert_same_cache(got, want, rtol=1e-5):
    """Leaf by leaf: counters equal, the rest to rtol."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jnp.integer):
            np.testing.assert_array_equal(a, b)
        else:
            assert_close(a, b, rtol)


@every_model
def test_any_split_equals_the_forward_without_cache_R047_R048(name):
    """Blocks, single tokens and blocks, blocks and single tokens: the logits of one call, and one cache leaf by leaf."""
    caches = []
    for splits in ([12] * 4, [1] * 12 + [12] * 3, [12, 1, 1, 12, 12] + [1] * 10):
        logits, cache = continue_in(name, splits)
        assert_close(logits, reference(name)[:, :48], max(1e-5, 2 * rounding(name)))
        np.testing.assert_array_equal(cache.length, [48] * ROWS)
        caches.append(cache)
    for cache in caches[1:]:
        assert_same_cache(cache, caches[0], max(1e-5, 2 * rounding(name)))


@pytest.mark.parametrize("splits", [[37, 63], [63, 37]])
def test_splits_off_the_chunk_grid_R048(splits):
    logits, cache = continue_in("kimi_linear", splits)
    assert_close(logits, reference("kimi_linear"))
    assert_same_cache(cache, continue_in("kimi_linear", [12] * 8 + [1] * 4)[1])


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_prompts_shorter_than_the_conv_then_decode_R043_R044(n):
    logits, _ = continue_in("kda", [n] + [1] * (8 - n))
    assert_close(logits, reference("kda")[:, :8])


LENGTHS = np.array([3, 7, 1, 10])


def pad(tokens, where):
    """(padded tokens, segment_ids) [ROWS, BUCKET]: row r keeps its first LENGTHS[r] tokens, the rest is padding with random ids."""
    padded, ids = np.array(random_tokens(ROWS, BUCKET, seed=9)), np.zeros((ROWS, BUCKET), np.int32)
    for r, n in enumerate(LENGTHS):
        between = np.sort(np.random.RandomState(r).permutation(BUCKET)[:n])
        slots = {"right": np.arange(n), "left": np.arange(BUCKET - n, BUCKET), "between": between}[where]
        padded[r, slots], ids[r, slots] = tokens[r, :n], 1
    return jnp.asarray(padded), jnp.asarray(ids)


@every_model
@pytest.mark.parametrize("where", ["left", "right", "between"])
def test_padded_prompts_of_unequal_length_equal_each_alone_R062_R068_R069(name, where):
    """Two padded calls, the second with padding too, then three decoded tokens, against each row in one call."""
    cache, seen, rows, rtol = empty_cache(name), np.zeros(ROWS, int), np.arange(ROWS), max(1e-5, 2 * rounding(name))
    for _ in range(2):
        padded, ids = pad(np.stack([np.roll(row, -n) for row, n in zip(TOKENS, seen, strict=True)]), where)
        out = forward(build(name), padded, cache, ids)
        cache = out.cache
        for r, n in enumerate(LENGTHS):
            assert_close(out.logits[r][np.asarray(ids[r]) > 0], reference(name)[r, seen[r] : seen[r] + n], rtol)
        seen += LENGTHS
    np.testing.assert_array_equal(cache.length, seen)
    for _ in range(3):
        out = forward(build(name), jnp.asarray(TOKENS[rows, seen][:, None]), cache)
        assert_close(out.logits[:, 0], reference(name)[rows, seen], rtol)
        cache, seen = out.cache, seen + 1


@every_model
def test_what_padding_holds_changes_no_bit_R041(name):
    padded, ids = pad(TOKENS, "between")
    other = jnp.where(ids > 0, padded, random_tokens(ROWS, BUCKET, seed=5))
    assert (other != padded).any()
    assert_bitwise(*(forward(build(name), tokens, empty_cache(name), ids) for tokens in (padded, other)))


@every_model
def test_a_padded_row_stands_still_while_others_go_on(name):
    """Id 0 with a cache is padding, also where it leads its row: that row's cache does not move, to the bit."""
    cache = continue_in(name, [12])[1]
    ids = jnp.asarray(np.array([[1], [0], [1], [0]]) * np.ones((1, BUCKET), np.int32))
    after = forward(build(name), jnp.asarray(TOKENS[:, 12:24]), cache, ids).cache
    np.testing.assert_array_equal(after.length, [24, 12, 24, 12])
    batch_axis = {"periods": 1}
    for part in cache._fields:
        still = functools.partial(jnp.take, indices=jnp.array([1, 3]), axis=batch_axis.get(part, 0))
        assert_bitwise(*(jax.tree.map(still, getattr(c, part)) for c in (after, cache)))


@every_model
def test_a_sequence_goes_on_in_the_next_call_while_new_ones_start_R036(name):
    """Call 1: 4 tokens of A, 8 of B. Call 2: 4 more of B, 8 of C. Then C's next. Each as its document alone, and so its positions."""
    model, alone = build(name), reference(name)
    A, B, C = (np.roll(np.arange(ROWS), n) for n in range(3))  # the row of TOKENS that each row's documents come from
    ids = jnp.asarray([[1] * 4 + [2] * 8] * ROWS)
    out1 = forward(model, jnp.asarray(np.concatenate([TOKENS[A, :4], TOKENS[B, :8]], axis=1)), empty_cache(name), ids)
    assert_close(out1.logits, np.concatenate([alone[A, :4], alone[B, :8]], axis=1))
    np.testing.assert_array_equal((out1.cache.length, out1.cache.start), ([12] * ROWS, [4] * ROWS))
    out2 = forward(model, jnp.asarray(np.concatenate([TOKENS[B, 8:12], TOKENS[C, :8]], axis=1)), out1.cache, ids)
    assert_close(out2.logits, np.concatenate([alone[B, 8:12], alone[C, :8]], axis=1))
    out3 = forward(model, jnp.asarray(TOKENS[C, 8:9]), out2.cache)
    assert_close(out3.logits, alone[C, 8:9])
    np.testing.assert_array_equal((out3.cache.length, out3.cache.start), ([25] * ROWS, [16] * ROWS))


@jax.jit
def weighted_gradients(model, tokens, segment_ids, weight):
    """Gradients of the sum of weight x logits over real tokens, and the logits."""

    def loss(model):
        logits = model(tokens, segment_ids=segment_ids).logits
        return jnp.sum(jnp.where((segment_ids > 0)[..., None], logits * weight, 0)), logits

    return jax.grad(loss, has_aux=True)(model)


@pytest.mark.parametrize("name", ["gpt2", "kimi_linear", "mamba2", "gated_deltanet"])
def test_packed_documents_equal_each_alone_logits_and_gradients_R033_R035_R036(name):
    """Documents of 7, 5, 6 and 3 tokens in one row with a padded tail, against one row each with padding."""
    model, lengths, T = build(name), (7, 5, 6, 3), 24
    weight = np.random.RandomState(3).standard_normal((ROWS, T, VOCAB)).astype(np.float32)
    alone_ids = np.array([[1] * n + [0] * (T - n) for n in lengths])
    alone = (TOKENS[:, :T], alone_ids, weight)
    packed = []
    for array in (*alone[:2], weight):
        row = np.concatenate([array[r, :n] for r, n in enumerate(lengths)])
        packed.append(np.zeros_like(array))
        packed[-1][0, : sum(lengths)] = row
    packed[1] = np.full((ROWS, T), -1)
    packed[1][0] = np.repeat([1, 2, 3, 4, 0], (*lengths, T - sum(lengths)))
    (grads, logits), (alone_grads, alone_logits) = (weighted_gradients(model, *map(jnp.asarray, case)) for case in (packed, alone))
    assert_close(logits[0, : sum(lengths)], np.concatenate([alone_logits[r, :n] for r, n in enumerate(lengths)]))
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(alone_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * max(1, np.abs(b).max()))
    assert sum(np.abs(g).max() > 0 for g in jax.tree.leaves(grads)) >= len(jax.tree.leaves(grads)) - 3  # all but the router's biases


def test_the_long_reference_spans_several_chunks():
    assert LONG > 64
