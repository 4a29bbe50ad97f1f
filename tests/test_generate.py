"""Generation: what is drawn, that rows do not see each other, and how often anything compiles."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kda_jax import generate as generation
from kda_jax import models
from kda_jax.generate import Sampling, buckets, choose, generate, in_order, stop_set, stream_text
from kda_jax.models import presets
from kda_jax.models.config import GPT2Config
from kda_jax.tokenizer import ByteTokenizer

GREEDY = Sampling(max_new_tokens=12, temperature=0.0)
PROMPTS = [[5, 9, 40, 2, 2, 7, 61], [11], list(range(30))]


def build(config):
    """A model whose weights are large enough for its choices to depend on the whole prompt."""
    return jax.jit(lambda: models.build(dataclasses.replace(config, initializer_range=0.2), nnx.Rngs(0)))()


@pytest.fixture(scope="module")
def gpt2():
    return build(GPT2Config(vocab_size=64, n_positions=256, n_embd=32, n_layer=2, n_head=2))


@pytest.fixture(scope="module")
def hybrid():
    return build(presets.tiny_hybrid())


@pytest.fixture(params=["gpt2", "hybrid"])
def model(request):
    return request.getfixturevalue(request.param)


def test_greedy_is_the_full_forward(model):
    """Prefill and n decode steps choose what the full forward over prompt and continuation chooses."""
    (tokens,) = generate(model, PROMPTS[:1], GREEDY)
    whole = PROMPTS[0] + tokens
    logits = jax.jit(lambda m, t: m(t).logits)(model, jnp.array([whole]))[0]
    np.testing.assert_array_equal(np.argmax(logits, -1)[len(PROMPTS[0]) - 1 : -1], tokens)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(12, 0.9, 20, 0.95, seed=3)], ids=["greedy", "sampled"])
def test_batch_is_one_by_one(model, sampling):
    """Prompts of 7, 1 and 30 tokens: each continuation is the one that the prompt gets alone."""
    together = generate(model, PROMPTS, sampling)
    assert together == [generate(model, [p], sampling)[0] for p in PROMPTS]
    assert len({tuple(t) for t in together}) == 3


def test_prefill_in_pieces(gpt2, monkeypatch):
    """A prompt longer than the largest bucket is read in pieces, beside one that ends in the first."""
    prompts = [[i % 64 for i in range(100)], [3, 4]]
    whole = generate(gpt2, prompts, GREEDY)
    monkeypatch.setattr(generation, "LARGEST_BUCKET", 32)
    assert generate(gpt2, prompts, GREEDY) == whole


@pytest.mark.parametrize(("length", "pieces"), [(1, [16]), (16, [16]), (17, [32]), (512, [512]), (513, [512, 16]), (1100, [512, 512, 128])])
def test_buckets(length, pieces):
    assert buckets(length) == pieces
    assert sum(pieces) >= length


def test_number_of_compilations(gpt2):
    """R162: prompts of any length and a hundred new tokens: one program per bucket, and one for decoding."""
    generation._prefill_piece.clear_cache()
    generation._decode.clear_cache()
    for length in (1, 5, 16, 20, 31, 40, 64, 90):
        generate(gpt2, [[1] * length], Sampling(max_new_tokens=100, temperature=0.5 + length / 100, seed=length))
    assert generation._prefill_piece._cache_size() == len({16, 32, 64, 128})
    assert generation._decode._cache_size() == 1


def test_stop_tokens_end_a_row_and_are_not_shown(gpt2):
    """R122: the row ends before the first stop token of any source; the other rows go on."""
    free = generate(gpt2, PROMPTS, GREEDY)
    stop = free[0][3]
    stopped = generate(gpt2, PROMPTS, dataclasses.replace(GREEDY, stop_tokens=stop_set([stop], None)))
    for row, whole in zip(stopped, free, strict=True):
        assert row == (whole[: whole.index(stop)] if stop in whole else whole)
    assert len(stopped[0]) <= 3


def test_stop_set_is_the_union():
    """R122: the config says 10, the tokenizer 11."""
    assert stop_set(10, [11], None) == {10, 11}


def test_seed(gpt2):
    sampled = Sampling(20, 1.0, seed=1)
    assert generate(gpt2, PROMPTS, sampled) == generate(gpt2, PROMPTS, sampled)
    assert generate(gpt2, PROMPTS, sampled) != generate(gpt2, PROMPTS, dataclasses.replace(sampled, seed=2))
    twice = generate(gpt2, [PROMPTS[0]] * 2, dataclasses.replace(sampled, seed=(1, 2)))
    assert twice[0] == generate(gpt2, [PROMPTS[0]], sampled)[0]
    assert twice[0] != twice[1]


def drawn(logits, n: int = 2000, *, temperature=1.0, top_k=0, top_p=1.0, vocab_size=None) -> np.ndarray:
    """Frequencies of `n` draws from one row of logits."""
    logits = jnp.asarray(logits, jnp.float32)
    keys = jax.random.split(jax.random.key(0), n)
    choice = (jnp.float32(temperature), jnp.int32(top_k), jnp.float32(top_p), jnp.int32(vocab_size or logits.size))
    tokens = choose(jnp.tile(logits, (n, 1)), keys, choice)
    return np.bincount(tokens, minlength=logits.size) / n


P = np.array([0.1, 0.4, 0.2, 0.3])


def test_choose_draws_from_the_softmax():
    np.testing.assert_allclose(drawn(np.log(P)), P, atol=0.04)
    np.testing.assert_allclose(drawn(np.log(P), temperature=0.5), P**2 / (P**2).sum(), atol=0.04)


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [1, 2, 3]),
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.65}, [1, 3]),
        ({"top_k": 2, "top_p": 0.5}, [1]),  # of the two kept, 0.4 and 0.3, the first has more than half
        ({"vocab_size": 2}, [0, 1]),
        ({"temperature": 0.0}, [1]),
    ],
)
def test_choose_limits(limits, kept):
    want = np.where(np.isin(np.arange(4), kept), P, 0)
    np.testing.assert_allclose(drawn(np.log(P), **limits), want / want.sum(), atol=0.04)


def test_equal_logits_keep_exactly_k():
    assert (drawn(np.zeros(8), top_k=3) > 0).sum() == 3


@pytest.mark.parametrize(
    ("prompts", "sampling", "sentence"),
    [
        ([[1, 64]], GREEDY, r"prompt 0 has token 64 at position 1, outside the vocabulary 0\.\.63"),
        ([[1], [-1]], GREEDY, "prompt 1 has token -1 at position 0"),
        ([[1], []], GREEDY, "prompt 1 is empty"),
        ([], GREEDY, "at least one prompt"),
        ([[1] * 250], GREEDY, r"longest prompt \(250 tokens\) and max_new_tokens \(12\) exceed the model's 256 positions"),
        ([[1]], Sampling(2, seed=(1, 2)), "seed has 2 values for 1 prompts"),
    ],
)
def test_refused_prompts(gpt2, prompts, sampling, sentence):
    with pytest.raises(ValueError, match=sentence):
        generate(gpt2, prompts, sampling)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"temperature": -1.0}, "temperature must be 0 or more"),
        ({"temperature": float("nan")}, "temperature must be 0 or more"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\]"),
        ({"top_k": -1}, "top_k must be 0"),
    ],
)
def test_refused_sampling(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        Sampling(**fields)


def test_fills_the_last_position(gpt2):
    assert len(generate(gpt2, [[1] * 244], GREEDY)[0]) == 12


def test_text_is_streamed_in_whole_characters(gpt2, monkeypatch):
    """Two bytes of one character come out together; a half character at the end as U+FFFD; end-of-text is no text."""
    steps = [[*pair] for pair in zip("né".encode() + b"!", [*"é".encode(), None], strict=False)] + [[b"!"[0], 0xC3]]
    monkeypatch.setattr(generation, "stream", lambda *args, **kwargs: iter(steps))
    rows = ["", ""]
    for pieces in stream_text(gpt2, ByteTokenizer(), ["a", ""], GREEDY):
        rows = [row + (piece or "") for row, piece in zip(rows, pieces, strict=True)]
    assert rows[0].startswith("né")
    assert rows[1] == "é�"


def test_printed_in_order():
    """The second prompt waits for the first to end."""
    steps = [["a", "x"], ["b", "y"], [None, "z"]]
    assert "".join(in_order(["1:", "2:"], steps)) == "1:ab\n\n2:xyz"
