"""The cache is a value: keep it and you can go back; empty a row and it is new; put rows in and take them out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_cases import CONFIGS, assert_close, build, forward, random_tokens

every_model = pytest.mark.parametrize("name", CONFIGS)


def assert_bitwise(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


@every_model
def test_rollback_is_the_cache_from_before_R053(name):
    """Eight drafted tokens, three accepted: go back and replay three; the next token's logits never saw the other five."""
    model, tokens = build(name), random_tokens(1, 20)
    saved = forward(model, tokens[:, :9], model.init_cache(1, 64)).cache
    copy = jax.tree.map(jnp.copy, saved)
    drafted = jnp.concatenate([tokens[:, 9:12], random_tokens(1, 5, seed=7)], axis=1)
    forward(model, drafted, saved)
    assert_bitwise(saved, copy)  # decoding ahead left it alone
    accepted = forward(model, tokens[:, 9:12], saved).cache
    out = forward(model, tokens[:, 12:13], accepted)
    assert_close(out.logits[:, 0], forward(model, tokens).logits[:, 12])


def test_edit_and_continue_from_the_latest_snapshot_R059():
    """Five turns, each resumed from a snapshot at or before a shorter prefix, equal to cold runs."""
    model = build("kimi_linear")
    history, snapshots = random_tokens(1, 8), {0: model.init_cache(1, 64)}
    for turn, keep in enumerate((8, 6, 9, 5, 7)):
        history = jnp.concatenate([history[:, :keep], random_tokens(1, 4, seed=20 + turn)], axis=1)
        snapshots = {n: cache for n, cache in snapshots.items() if n <= keep}
        n = max(snapshots)
        out = forward(model, history[:, n:], snapshots[n])
        snapshots[history.shape[1]] = out.cache
        snapshots[keep] = forward(model, history[:, n:keep], snapshots[n]).cache if keep > n else snapshots[n]
        assert_close(out.logits[:, -1], forward(model, history).logits[:, -1])


@every_model
def test_a_reset_row_is_a_new_row_R056(name):
    """B after A in the same row equals B in a fresh cache, bit for bit, and the neighbour does not notice."""
    model, a, b = build(name), random_tokens(2, 9), random_tokens(2, 5, seed=4)
    used = forward(model, a, model.init_cache(2, 32)).cache
    cleaned = used.reset([1])
    assert_bitwise(cleaned.take([1]), model.init_cache(1, 32))
    assert_bitwise(cleaned.take([0]), used.take([0]))
    assert_bitwise(forward(model, b, used.reset([0, 1])), forward(model, b, model.init_cache(2, 32)))


@every_model
def test_rows_join_and_leave_a_running_batch_R066(name):
    """A prompt is prefilled alone, joins row 1 of a batch, decodes there, and leaves with what it would have had alone."""
    model, tokens = build(name), random_tokens(3, 9)
    running = forward(model, tokens[:2], model.init_cache(2, 32)).cache
    alone = forward(model, tokens[2:, :5], model.init_cache(1, 32)).cache
    joined = running.put([1], alone)
    assert_bitwise(joined.take([1]), alone)
    assert_bitwise(joined.take([0]), running.take([0]))
    out = forward(model, jnp.stack([tokens[0, :1], tokens[2, 5:6]]), joined)
    assert_close(out.logits[1, 0], forward(model, tokens).logits[2, 5])
    assert_bitwise(out.cache.take([1, 0]).take([1]), out.cache.take([0]))


@pytest.mark.parametrize("rows", [[2], [-1], [0, 5]])
def test_a_row_out_of_range_raises_R054(rows):
    cache = build("kimi_linear").init_cache(2, 8)
    for use in (cache.take, cache.reset, lambda rows: cache.put(rows, cache.take([0] * len(rows)))):
        with pytest.raises(ValueError, match=r"rows must be in 0\.\.1"):
            use(rows)


def test_put_wants_one_different_row_each():
    cache = build("kimi_linear").init_cache(2, 8)
    for rows in ([0, 0], [1]):
        with pytest.raises(ValueError, match="2 different row numbers"):
            cache.put(rows, cache)


@every_model
def test_cache_survives_flattening_R058(name):
    """Leaves and structure are all there is: saved, rebuilt, turn 2 equals the one-shot prompt."""
    model, tokens = build(name), random_tokens(1, 12)
    leaves, treedef = jax.tree.flatten(forward(model, tokens[:, :7], model.init_cache(1, 32)).cache)
    rebuilt = jax.tree.unflatten(treedef, [jnp.asarray(np.asarray(leaf)) for leaf in leaves])
    assert_close(forward(model, tokens[:, 7:], rebuilt).logits, forward(model, tokens).logits[:, 7:])


@pytest.mark.parametrize("name", ["gpt2", "kimi_linear"])
def test_a_full_cache_says_so(name):
    """On the host in a sentence; inside jit, where nothing can be seen, the row turns NaN instead of forgetting quietly."""
    model, tokens = build(name), random_tokens(2, 6)
    cache = forward(model, tokens, model.init_cache(2, 8)).cache
    assert cache.capacity == 8
    with pytest.raises(ValueError, match="cache holds 8 tokens per row and this call would make 9"):
        model(tokens[:, :3], cache=cache)
    ids = jnp.array([[1, 1, 1], [1, 1, 0]])
    out = forward(model, tokens[:, :3], cache, ids)
    assert jnp.isnan(out.logits[0]).all()
    assert jnp.isfinite(out.logits[1, :2]).all()


def test_a_model_without_attention_has_no_capacity():
    model = build("gated_deltanet")
    cache = model.init_cache(1, 1)
    assert cache.capacity is None
    assert jnp.isfinite(forward(model, random_tokens(1, 20), cache).logits).all()


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
    with pytest.raises(ValueError, match="129 tokens.*n_positions 128"):
        model(tokens)
    with pytest.raises(ValueError, match="n_positions"):
        model.init_cache(1, 129)
    packed = forward(model, tokens, None, jnp.array([[1] * 100 + [2] * 29]))  # positions count per sequence
    assert jnp.isfinite(packed.logits).all()
    assert jnp.isnan(forward(model, tokens, None, jnp.ones((1, 129), jnp.int32)).logits[0, 128]).all()
