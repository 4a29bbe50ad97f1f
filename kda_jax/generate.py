"""Sampling text from a model: prefill in buckets, then one compiled step per token.

    for tokens in stream(model, prompts, Sampling(max_new_tokens=100)): ...
    texts = generate_text(model, tokenizer, ["Once upon a time"], Sampling(max_new_tokens=100))

Rows of a batch do not see each other: padding changes nothing, and each row draws from its own random key, so a prompt's continuation is
the same alone and in a batch of prompts of other lengths.
"""

import codecs
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kda_jax.models import HybridCache, LanguageModel
from kda_jax.tokenizer import Tokenizer

SMALLEST_BUCKET, LARGEST_BUCKET = 16, 512
CACHE_STEP = 256
"""Cache lengths are multiples of this, so that prompts of similar length share a compiled program."""


@dataclass(frozen=True)
class Sampling:
    """How to continue a prompt."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    """0 takes the most probable token."""
    top_k: int = 0
    """Choose among this many most probable tokens; 0 is all of them."""
    top_p: float = 1.0
    """Choose among the most probable tokens that together reach this probability."""
    seed: int | tuple[int, ...] = 0
    """One for all rows, or one per row. Equal prompts with equal seeds get equal continuations."""
    stop_tokens: frozenset[int] = frozenset()
    """A row ends before the first of these."""

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be 0 or more and finite, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (all tokens) or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        for seed in self.seed if isinstance(self.seed, tuple) else (self.seed,):
            if not 0 <= seed < 2**32:
                raise ValueError(f"seed must lie in 0..{2**32 - 1}, got {seed}")


def stop_set(*sources: int | Iterable[int] | None) -> frozenset[int]:
    """The union of what a model's config, its generation config and its tokenizer call the end: they do not always agree.

    Example:
        >>> sorted(stop_set(10, [11, 10], None))
        [10, 11]
    """
    return frozenset(i for s in sources if s is not None for i in ([s] if isinstance(s, int) else s))


def generate(
    model: LanguageModel, prompts: Sequence[Sequence[int]], sampling: Sampling, *, vocab_size: int | None = None
) -> list[list[int]]:
    """Continue prompts; the new tokens of each row, without stop tokens. Arguments and errors as `stream`."""
    rows: list[list[int]] = [[] for _ in prompts]
    for tokens in stream(model, prompts, sampling, vocab_size=vocab_size):
        for row, token in zip(rows, tokens, strict=True):
            if token is not None:
                row.append(token)
    return rows


def stream(
    model: LanguageModel, prompts: Sequence[Sequence[int]], sampling: Sampling, *, vocab_size: int | None = None
) -> Iterator[list[int | None]]:
    """Continue prompts, one token per row at a time; None for a row that has ended.

    Prompts are prefilled in pieces of at most LARGEST_BUCKET tokens, padded to a power of two, into a cache allocated once. Any number of
    prompts of any length therefore compile at most one program per bucket and one for decoding (per batch size and cache length).

    Args:
        model: from `models.build` or `kda_jax.load`.
        prompts: token ids, at least one per row; rows may differ in length.
        sampling: see `Sampling`.
        vocab_size: of the tokenizer, if the model's is padded beyond it; ids from there on are never drawn.

    Raises:
        ValueError: an empty prompt, a token outside the vocabulary, or more tokens than the model has positions for.
    """
    vocab_size = vocab_size or model.config.vocab_size
    _check_prompts(model, prompts, sampling, vocab_size)
    B, longest = len(prompts), max(map(len, prompts))
    capacity = -(-(longest + sampling.max_new_tokens) // CACHE_STEP) * CACHE_STEP
    if (positions := getattr(model.config, "n_positions", None)) is not None:
        capacity = min(capacity, positions)
    logits, cache = _prefill(model, prompts, model.init_cache(B, capacity, compute_dtype(model)))
    seeds = sampling.seed if isinstance(sampling.seed, tuple) else (sampling.seed,) * B
    keys = jnp.stack([jax.random.key(seed) for seed in seeds])
    stops = jnp.array(sorted(sampling.stop_tokens) or [-1], jnp.int32)
    top_k = jnp.int32(min(sampling.top_k, 2**31 - 1))
    choice = (jnp.float32(sampling.temperature), top_k, jnp.float32(sampling.top_p), jnp.int32(vocab_size))
    alive, pending = jnp.ones((B,), bool), None
    for number in range(sampling.max_new_tokens):
        token, alive, logits, cache = _decode(model, logits, alive, cache, keys, jnp.int32(number), stops, choice)
        if pending is not None:  # read one step late, while the next one runs
            yield (tokens := _seen(*pending))
            if not any(t is not None for t in tokens):
                return
        pending = token, alive
    yield _seen(*pending)


def generate_text(model: LanguageModel, tokenizer: Tokenizer, prompts: Sequence[str], sampling: Sampling) -> list[str]:
    """The continuations of `prompts` as text. An empty prompt starts a new document; the tokenizer's stop tokens end one."""
    rows = [""] * len(prompts)
    for pieces in stream_text(model, tokenizer, prompts, sampling):
        rows = [row + (piece or "") for row, piece in zip(rows, pieces, strict=True)]
    return rows


def stream_text(model: LanguageModel, tokenizer: Tokenizer, prompts: Sequence[str], sampling: Sampling) -> Iterator[list[str | None]]:
    """`stream` for text: pieces of whole characters, None for a row that has ended. Bytes that are not UTF-8 show as U+FFFD."""
    sampling = replace(sampling, stop_tokens=stop_set(sampling.stop_tokens, tokenizer.end_of_text, tokenizer.stop_tokens))
    ids = [tokenizer.encode(p).tolist() or [tokenizer.end_of_text] for p in prompts]
    decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in prompts]
    vocab_size = min(tokenizer.vocab_size, model.config.vocab_size)
    for tokens in stream(model, ids, sampling, vocab_size=vocab_size):
        yield [None if t is None else d.decode(tokenizer.decode_bytes([t])) for d, t in zip(decoders, tokens, strict=True)]
    tails = [d.decode(b"", final=True) for d in decoders]
    if any(tails):
        yield [tail or None for tail in tails]


def in_order(prompts: Sequence[str], pieces: Iterable[Sequence[str | None]]) -> Iterator[str]:
    """Prompts and their continuations one after another, as text to print: each while it grows, once those before it have ended."""
    waiting = list(prompts)
    row = 0
    for step in pieces:
        waiting = [text + (piece or "") for text, piece in zip(waiting, step, strict=True)]
        while step[row] is None and row < len(prompts) - 1:
            yield waiting[row] + "\n\n"
            waiting[row], row = "", row + 1
        yield waiting[row]
        waiting[row] = ""
    yield "\n\n".join(waiting[row:])


def compute_dtype(model: LanguageModel) -> Any:
    """The dtype that `model` computes in: that of its logits."""
    return jax.eval_shape(lambda m: m(jnp.zeros((1, 1), jnp.int32)).logits, model).dtype


def buckets(length: int) -> list[int]:
    """The padded lengths of the pieces in which a prompt of `length` tokens is prefilled.

    Example:
        >>> buckets(37), buckets(1100)
        ([64], [512, 512, 128])
    """
    whole, rest = divmod(length, LARGEST_BUCKET)
    last = [max(SMALLEST_BUCKET, 1 << (rest - 1).bit_length())] if rest else []
    return [LARGEST_BUCKET] * whole + last


def choose(logits: Float[Array, "B Z"], keys: Array, choice: tuple[Array, Array, Array, Array]) -> Int[Array, "B"]:
    """Draw a token per row.

    Args:
        logits: [B, Z].
        keys: [B] random keys.
        choice: (temperature, top_k, top_p, vocab_size), as arrays, so that other values do not compile again.
    """
    temperature, top_k, top_p, vocab_size = choice
    logits = jnp.where(jnp.arange(logits.shape[-1]) < vocab_size, logits.astype(jnp.float32), -jnp.inf)
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    scaled = logits / jnp.maximum(temperature, 1e-6)

    def restrict(scaled):
        order = jnp.argsort(-scaled, axis=-1)
        probability = jax.nn.softmax(jnp.take_along_axis(scaled, order, axis=-1), axis=-1)
        rank = jnp.arange(scaled.shape[-1])
        in_k = rank < jnp.where(top_k > 0, top_k, scaled.shape[-1])
        before = jnp.cumsum(probability * in_k, axis=-1) - probability * in_k  # of the tokens ranked higher
        kept = in_k & (before < top_p * jnp.sum(probability * in_k, axis=-1, keepdims=True))
        return jnp.where(jnp.take_along_axis(kept, jnp.argsort(order, axis=-1), axis=-1), scaled, -jnp.inf)

    scaled = jax.lax.cond((top_k > 0) | (top_p < 1), restrict, lambda x: x, scaled)
    drawn = jax.vmap(jax.random.categorical)(keys, scaled).astype(jnp.int32)
    return jnp.where(temperature > 0, drawn, greedy)


@functools.partial(jax.jit, donate_argnames=("logits", "cache"))
def _decode(
    model: LanguageModel,
    logits: Float[Array, "B Z"],
    alive: Bool[Array, "B"],
    cache: HybridCache,
    keys: Array,
    number: Int[Array, ""],
    stops: Int[Array, "n"],
    choice: tuple[Array, Array, Array, Array],
) -> tuple[Int[Array, "B"], Bool[Array, "B"], Float[Array, "B Z"], HybridCache]:
    """Draw token `number` from `logits`, then read it: (token, rows still going, logits of the next, cache)."""
    token = choose(logits, jax.vmap(jax.random.fold_in, (0, None))(keys, number), choice)
    alive = alive & ~jnp.isin(token, stops)
    out = model(token[:, None], cache=cache, segment_ids=alive[:, None].astype(jnp.int32))
    return token, alive, out.logits[:, 0], out.cache


@functools.partial(jax.jit, donate_argnames=("logits", "cache"))
def _prefill_piece(
    model: LanguageModel, tokens: Int[Array, "B T"], valid: Int[Array, "B T"], logits: Float[Array, "B Z"], cache: HybridCache
) -> tuple[Float[Array, "B Z"], HybridCache]:
    """Read some tokens of each row: the logits after each row's last one so far, and the cache."""
    out = model(tokens, cache=cache, segment_ids=valid)
    count = jnp.sum(valid, axis=1)
    last = jnp.take_along_axis(out.logits, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
    return jnp.where(count[:, None] > 0, last, logits), out.cache


def _prefill(model: LanguageModel, prompts: Sequence[Sequence[int]], cache: HybridCache) -> tuple[Float[Array, "B Z"], HybridCache]:
    logits = jnp.zeros((len(prompts), model.config.vocab_size), compute_dtype(model))
    first = 0
    for width in buckets(max(map(len, prompts))):
        tokens, valid = np.zeros((2, len(prompts), width), np.int32)
        for b, prompt in enumerate(prompts):
            piece = prompt[first : first + width]
            tokens[b, : len(piece)], valid[b, : len(piece)] = piece, 1
        logits, cache = _prefill_piece(model, tokens, valid, logits, cache)
        first += width
    return logits, cache


def _seen(token: Array, alive: Array) -> list[int | None]:
    return [int(t) if a else None for t, a in zip(np.asarray(token), np.asarray(alive), strict=True)]


def _check_prompts(model: LanguageModel, prompts: Sequence[Sequence[int]], sampling: Sampling, vocab_size: int) -> None:
    if not prompts:
        raise ValueError("prompts is empty: expected at least one prompt")
    if isinstance(sampling.seed, tuple) and len(sampling.seed) != len(prompts):
        raise ValueError(f"seed has {len(sampling.seed)} values for {len(prompts)} prompts")
    for b, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {b} is empty: expected at least one token")
        outside = [(i, t) for i, t in enumerate(prompt) if not 0 <= t < vocab_size]
        if outside:
            i, t = outside[0]
            raise ValueError(f"prompt {b} has token {t} at position {i}, outside the vocabulary 0..{vocab_size - 1}")
    longest = max(map(len, prompts))
    positions = getattr(model.config, "n_positions", None)
    if positions is not None and longest + sampling.max_new_tokens > positions:
        raise ValueError(
            f"the longest prompt ({longest} tokens) and max_new_tokens ({sampling.max_new_tokens}) exceed the model's {positions} positions"
        )
