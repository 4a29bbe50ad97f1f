"""The cache is a value: keep it and you can go back; empty a row and it is new; put rows in and take them out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import BUCKET, ROWS, TOKENS, assert_bitwise, assert_close, build, empty_cache, forward, random_tokens, reference

every_kind_of_cache = pytest.mark.parametrize("name", ["gpt2", "kimi_linear", "mamba2", "linear_attention"])


def after(name, n, cache=None, tokens=TOKENS):
    """The cache after one call on the first n <= BUCKET of `tokens`, padded to the bucket."""
    ids = jnp.asarray(np.tile(np.arange(BUCKET) < n, (ROWS, 1)), jnp.int32)
    return forward(build(name), jnp.asarray(tokens[:, :BUCKET]), empty_cache(name) if cache is None else cache, ids).cache


def next_logits(name, n, cache, tokens=TOKENS):
    return forward(build(name), jnp.asarray(tokens[:, n : n + 1]), cache).logits[:, 0]


@every_kind_of_cache
def test_rollback_is_the_cache_from_before_R053(name):
    """Eight drafted tokens, three accepted: go back, replay three; the next token's logits never saw the other five."""
    saved = after(name, 9)
    copy = jax.tree.map(jnp.copy, saved)
    drafted = np.concatenate([TOKENS[:, 9:12], np.asarray(random_tokens(ROWS, 9, seed=7))], axis=1)
    after(name, 8, saved, drafted)
    assert_bitwise(saved, copy)  # decoding ahead left it alone
    accepted = after(name, 3, saved, drafted)
    np.testing.assert_array_equal(accepted.length, [12] * ROWS)
    assert_close(next_logits(name, 12, accepted), reference(name)[:, 12])


def test_edit_and_continue_from_the_latest_snapshot_R050_R059():
    """Five turns, each keeping a shorter prefix of the last: resumed from the latest snapshot before it, equal to cold runs."""
    name, history, snapshots = "kimi_linear", TOKENS[:, :8], {0: empty_cache("kimi_linear")}
    resumed_from = []
    for turn, keep in enumerate((8, 6, 9, 5, 7)):
        history = np.concatenate([history[:, :keep], np.asarray(random_tokens(ROWS, 4, seed=20 + turn))], axis=1)
        snapshots = {n: cache for n, cache in snapshots.items() if n <= keep}
        n = max(snapshots)
        resumed_from.append(n)
        rest = np.pad(history[:, n:], ((0, 0), (0, BUCKET)))
        snapshots[keep] = after(name, keep - n, snapshots[n], rest)
        snapshots[keep + 3] = after(name, keep + 3 - n, snapshots[n], rest)
        cold = after(name, keep + 3, tokens=np.pad(history, ((0, 0), (0, BUCKET))))
        assert_close(*(next_logits(name, keep + 3, cache, history) for cache in (snapshots[keep + 3], cold)))
    assert resumed_from == [0, 0, 9, 0, 5]


@every_kind_of_cache
def test_a_reset_row_is_a_new_row_R056(name):
    """B after A in the same row equals B in a fresh cache, bit for bit, and the neighbours do not notice."""
    used = after(name, 9)
    cleaned = used.reset([1, 3])
    assert_bitwise(cleaned.take([1, 3]), empty_cache(name, 2))
    assert_bitwise(cleaned.take([0, 2]), used.take([0, 2]))
    other = np.asarray(random_tokens(ROWS, BUCKET, seed=4))
    assert_bitwise(after(name, 5, cleaned, other).take([1, 3]), after(name, 5, None, other).take([1, 3]))


@every_kind_of_cache
def test_rows_join_and_leave_a_running_batch_R066(name):
    """A prefilled prompt takes over row 1, decodes among the others, and is what it would have been alone."""
    running, prompts = after(name, 9), after(name, 5)
    joined = running.put([1], prompts.take([3]))
    assert_bitwise(joined.take([1]), prompts.take([3]))
    assert_bitwise(joined.take([0, 2, 3]), running.take([0, 2, 3]))
    rows, at = [0, 3, 2, 3], [9, 5, 9, 9]
    out = forward(build(name), jnp.asarray(TOKENS[rows, at][:, None]), joined)
    assert_close(out.logits[:, 0], reference(name)[rows, at])
    np.testing.assert_array_equal(out.cache.length, [10, 6, 10, 10])


@every_kind_of_cache
def test_a_cache_is_its_leaves_and_their_structure_R058(name):
    """Written to the host and rebuilt: turn 2 equals the one-shot prompt."""
    leaves, treedef = jax.tree.flatten(after(name, 7))
    rebuilt = jax.tree.unflatten(treedef, [jnp.asarray(np.asarray(leaf)) for leaf in leaves])
    assert_close(next_logits(name, 7, rebuilt), reference(name)[:, 7])


@pytest.mark.parametrize("rows", [[2], [-1], [0, 5]])
def test_a_row_out_of_range_raises_R054(rows):
    cache = build("kimi_linear").init_cache(2, 8)
    for use in (cache.take, cache.reset, lambda rows: cache.put(rows, cache)):
        with pytest.raises(ValueError, match=r"rows must be in 0\.\.1"):
            use(rows)


def test_put_wants_one_different_row_each():
    cache = build("kimi_linear").init_cache(2, 8)
    for rows in ([0, 0], [1]):
        with pytest.raises(ValueError, match="2 different row numbers"):
            cache.put(rows, cache)


@pytest.mark.parametrize("other", [(1, 9, jnp.float32), (1, 8, jnp.bfloat16)])
def test_put_refuses_a_cache_of_another_size_or_dtype(other):
    model = build("kimi_linear")
    with pytest.raises(ValueError, match="same max_len and dtype"):
        model.init_cache(2, 8).put([0], model.init_cache(*other))


@pytest.mark.parametrize("name", ["gpt2", "kimi_linear"])
def test_a_full_cache_says_so(name):
    """On the host in a sentence; inside jit, where nothing can be seen, the row turns NaN instead of forgetting quietly."""
    model, tokens = build(name), jnp.asarray(TOKENS[:, :BUCKET])
    cache = forward(model, tokens, empty_cache(name))[1]
    full = cache._replace(length=jnp.array([120, 117, 116, 12]))
    assert cache.capacity == 128
    with pytest.raises(ValueError, match="cache holds 128 tokens per row and this call would make 132"):
        model(tokens, cache=full)
    logits = forward(model, tokens, full).logits
    np.testing.assert_array_equal(np.isnan(logits).all((1, 2)), [True, True, False, False])


def test_a_model_without_attention_has_no_capacity():
    assert empty_cache("mamba2").capacity is None
    sizes = [[leaf.shape for leaf in jax.tree.leaves(build("mamba2").init_cache(1, max_len))] for max_len in (1, 1000)]
    assert sizes[0] == sizes[1]


def test_forward_refuses_what_does_not_fit():
    model, tokens = build("kimi_linear"), random_tokens(2, 6)
    cache = model.init_cache(3, 8)
    for call, sentence in [
        (lambda: model(tokens[0]), r"tokens must be integers \[B, T\]"),
        (lambda: model(tokens.astype(jnp.float32)), "dtype float32"),
        (lambda: model(tokens, segment_ids=tokens[:, :3]), r"segment_ids must be integers of the shape of tokens \(2, 6\)"),
        (lambda: model(tokens, cache=cache), "cache has 3 rows and tokens 2"),
        (lambda: model(tokens + 60), r"tokens must lie in 0\.\.63"),
        (lambda: model.init_cache(0, 8), "batch >= 1"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            call()


def test_gpt2_refuses_more_than_its_positions():
    """Where it can be seen a sentence; inside jit NaN, not the last position for all that follow."""
    model, tokens = build("gpt2"), random_tokens(1, 129)
    with pytest.raises(ValueError, match=r"129 tokens.*n_positions 128"):
        model(tokens)
    with pytest.raises(ValueError, match="n_positions"):
        model.init_cache(1, 129)
    packed = forward(model, tokens, None, jnp.array([[1] * 100 + [2] * 29]))  # positions count per sequence
    assert jnp.isfinite(packed.logits).all()
    assert jnp.isnan(forward(model, tokens, None, jnp.ones((1, 129), jnp.int32)).logits[0, 128]).all()
