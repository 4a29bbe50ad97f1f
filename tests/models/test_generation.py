"""One forward for everything: any split of a sequence, any padding around it, equals the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import CONFIGS, VOCAB, assert_close, build, forward, random_tokens

from kda_jax.models import HybridCache

every_model = pytest.mark.parametrize("name", CONFIGS)


def continue_in(model, tokens, splits, max_len=128):
    """Logits and last cache of feeding `tokens` in pieces of the given lengths."""
    cache, logits, first = model.init_cache(tokens.shape[0], max_len), [], 0
    for n in splits:
        out = forward(model, tokens[:, first : first + n], cache)
        logits.append(out.logits)
        cache, first = out.cache, first + n
    return jnp.concatenate(logits, axis=1), cache


def assert_same_cache(got: HybridCache, want: HybridCache, rtol=1e-5):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jnp.integer):
            np.testing.assert_array_equal(a, b)
        else:
            assert_close(a, b, rtol)


@every_model
def test_any_split_equals_the_forward_without_cache_R047_R048(name):
    """In one piece, in three, token by token: the same logits, and the same cache leaf by leaf."""
    model, tokens = build(name), random_tokens(2, 20)
    whole = forward(model, tokens).logits
    assert whole.shape == (2, 20, VOCAB)
    caches = []
    for splits in ([20], [9, 1, 10], [1] * 20):
        logits, cache = continue_in(model, tokens, splits)
        assert_close(logits, whole)
        np.testing.assert_array_equal(cache.length, [20, 20])
        caches.append(cache)
    for cache in caches[1:]:
        assert_same_cache(cache, caches[0])


@pytest.mark.parametrize("splits", [[37, 63], [64, 36], [1, 64, 35]])
def test_splits_off_the_chunk_grid_R048(splits):
    model, tokens = build("kimi_linear"), random_tokens(1, 100)
    whole, cache = continue_in(model, tokens, [100])
    logits, last = continue_in(model, tokens, splits)
    assert_close(logits, whole)
    assert_same_cache(last, cache)


@pytest.mark.parametrize("name", ["kimi_linear", "gated_deltanet", "mamba2"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_prompts_shorter_than_the_conv_then_decode_R043_R044(name, n):
    model, tokens = build(name), random_tokens(2, 8)
    logits, _ = continue_in(model, tokens, [n] + [1] * (8 - n))
    assert_close(logits, forward(model, tokens).logits)


LENGTHS = (3, 7, 1, 10)
BUCKET = 12


def pad(tokens, where):
    """(padded tokens, segment_ids): row r keeps its first LENGTHS[r] tokens, the rest of the bucket is padding with random ids."""
    noise = np.array(random_tokens(len(LENGTHS), BUCKET, seed=9))
    ids = np.zeros((len(LENGTHS), BUCKET), np.int32)
    for r, n in enumerate(LENGTHS):
        slots = {"right": np.arange(n), "left": np.arange(BUCKET - n, BUCKET), "between": np.sort(np.random.RandomState(r).permutation(BUCKET)[:n])}
        noise[r, slots[where]] = tokens[r, :n]
        ids[r, slots[where]] = 1
    return jnp.asarray(noise), jnp.asarray(ids)


@every_model
@pytest.mark.parametrize("where", ["left", "right", "between"])
def test_padded_prompts_of_unequal_length_equal_each_alone_R062_R068_R069(name, where):
    """Two padded calls (the second with padding too) and then three decoded tokens, against the plain forward of each row."""
    model, tokens = build(name), random_tokens(len(LENGTHS), BUCKET + 11)
    whole = forward(model, tokens).logits
    cache, seen = model.init_cache(len(LENGTHS), 64), np.zeros(len(LENGTHS), int)
    for _ in range(2):
        rest = np.stack([np.roll(row, -n) for row, n in zip(np.asarray(tokens), seen, strict=True)])
        padded, ids = pad(rest, where)
        out = forward(model, padded, cache, ids)
        cache = out.cache
        for r, n in enumerate(LENGTHS):
            assert_close(out.logits[r][np.asarray(ids[r]) > 0], whole[r, seen[r] : seen[r] + n])
        seen += LENGTHS
    np.testing.assert_array_equal(cache.length, seen)
    for _ in range(3):
        out = forward(model, jnp.take_along_axis(tokens, seen[:, None], axis=1), cache)
        assert_close(out.logits[:, 0], jnp.take_along_axis(whole, seen[:, None, None], axis=1)[:, 0])
        cache, seen = out.cache, seen + 1


@every_model
def test_what_padding_holds_changes_no_bit_R041(name):
    model, (padded, ids) = build(name), pad(np.asarray(random_tokens(len(LENGTHS), BUCKET)), "between")
    other = jnp.where(ids > 0, padded, random_tokens(len(LENGTHS), BUCKET, seed=5))
    a, b = (forward(model, t, model.init_cache(len(LENGTHS), 64), ids) for t in (padded, other))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_finished_rows_stand_still_while_others_decode():
    """id 0 with a cache is padding: the row's cache does not move, to the bit."""
    model, tokens = build("kimi_linear"), random_tokens(2, 5)
    cache = forward(model, tokens, model.init_cache(2, 16)).cache
    after = forward(model, tokens[:, :1], cache, jnp.array([[1], [0]])).cache
    np.testing.assert_array_equal(after.length, [6, 5])
    for x, y in zip(jax.tree.leaves(after.take([1])), jax.tree.leaves(cache.take([1])), strict=True):
        np.testing.assert_array_equal(x, y)


@every_model
def test_a_sequence_begun_in_one_call_goes_on_in_the_next_while_a_new_one_starts_R036(name):
    """Call 1: [doc A, start of doc B]; call 2: [rest of B, doc C]; then decode C. Each equals its document alone."""
    model, docs = build(name), random_tokens(3, 12)
    alone = forward(model, docs).logits
    first = jnp.concatenate([docs[:1, :4], docs[1:2, :8]], axis=1)
    second = jnp.concatenate([docs[1:2, 8:], docs[2:, :8]], axis=1)
    out1 = forward(model, first, model.init_cache(1, 64), jnp.array([[1] * 4 + [2] * 8]))
    out2 = forward(model, second, out1.cache, jnp.array([[2] * 4 + [3] * 8]))
    out3 = forward(model, docs[2:, 8:9], out2.cache)
    assert_close(out1.logits[0], jnp.concatenate([alone[0, :4], alone[1, :8]]))
    assert_close(out2.logits[0], jnp.concatenate([alone[1, 8:], alone[2, :8]]))
    assert_close(out3.logits[0, 0], alone[2, 8])
    np.testing.assert_array_equal((out3.cache.length, out3.cache.start), ([25], [16]))


@every_model
def test_packed_documents_equal_each_alone_logits_and_gradients_R033_R036(name):
    """Documents of 7, 4 and 6 tokens and a padded tail in one row, against three rows."""
    model, docs = build(name), random_tokens(3, 7)
    lengths = (7, 4, 6)
    packed = jnp.concatenate([docs[r, :n] for r, n in enumerate(lengths)] + [jnp.full(3, 5)])[None]
    ids = jnp.array([[1] * 7 + [2] * 4 + [3] * 6 + [0] * 3])
    rows = jnp.array([[1] * n + [-1] * (7 - n) for n in lengths])
    weight = jax.random.normal(jax.random.key(3), (17, VOCAB))

    @jax.jit
    def run(model, tokens, segment_ids):
        def loss(model):
            logits = model(tokens, segment_ids=segment_ids).logits
            real = jnp.nonzero((segment_ids > 0).reshape(-1), size=17)[0]
            logits = logits.reshape(-1, VOCAB)[real]
            return (logits * weight).sum(), logits

        return jax.grad(loss, has_aux=True, allow_int=True)(model)

    (grads, logits), (grads_alone, logits_alone) = run(model, packed, ids), run(model, docs, rows)
    assert_close(logits, logits_alone)
    compared = 0
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(grads_alone), strict=True):
        assert_close(a, b, rtol=3e-5)
        compared += float(jnp.abs(b).max()) > 0
    assert compared > len(jax.tree.leaves(grads)) / 2
