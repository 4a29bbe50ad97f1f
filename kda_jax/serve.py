"""A stream of requests over a fixed number of slots: every request prefills into a free slot, all slots decode in one program.

    pool = SlotPool(model, slots=8, max_len=4096, prefixes=PrefixCache(capacity=32))
    for prompt in prompts:
        pool.submit(prompt, Sampling(max_new_tokens=100))
    for request in pool.run():
        print(request.tokens)

A slot is one row of a `models.HybridCache`. Slots do not see each other, and a slot is emptied before it is given to the next request, so
what a request gets does not depend on what else is in the pool. A `PrefixCache` keeps snapshots: a cache is a value, so a snapshot is a
copy of one row, exact at the token where it was taken and at no other.
"""

import dataclasses
import functools
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kda_jax.errors import UserError
from kda_jax.generate import Sampling, buckets, choose, compute_dtype
from kda_jax.models import HybridCache, LanguageModel


@dataclasses.dataclass
class Request:
    """A prompt on its way through the pool."""

    number: int
    """In the order of submission."""
    prompt: tuple[int, ...]
    sampling: Sampling
    tokens: list[int] = dataclasses.field(default_factory=list)
    """What has been drawn, without the stop token."""
    reused: int = 0
    """Tokens of the prompt whose prefill a snapshot saved."""
    done: bool = False


class PrefixCache:
    """Snapshots of one-row caches by the tokens that they have read; the least recently used goes first.

    Args:
        capacity: snapshots to keep.
        every: take one after each this many tokens of a prompt, and at its end.
    """

    def __init__(self, capacity: int, every: int = 512):
        if capacity < 1 or every < 1:
            raise ValueError(f"PrefixCache needs capacity >= 1 and every >= 1, got {capacity} and {every}")
        self.capacity, self.every = capacity, every
        self._snapshots: OrderedDict[tuple[int, ...], tuple[Array, HybridCache]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._snapshots)

    def longest(self, tokens: Sequence[int]) -> tuple[int, Array, HybridCache] | None:
        """(n, logits [1, Z] after them, cache) of the longest snapshot that is a beginning of `tokens`; None if there is none.

        A recurrent state has no positions to cut: only what was saved at token n can be resumed at n.
        """
        tokens = tuple(tokens)
        found = max((key for key in self._snapshots if tokens[: len(key)] == key), key=len, default=None)
        if found is None:
            return None
        self._snapshots.move_to_end(found)
        return len(found), *self._snapshots[found]

    def put(self, tokens: Sequence[int], logits: Float[Array, "1 Z"], cache: HybridCache) -> None:
        """Keep a cache that has read exactly `tokens`. It must not be donated afterwards."""
        self._snapshots[tuple(tokens)] = logits, cache
        self._snapshots.move_to_end(tuple(tokens))
        while len(self._snapshots) > self.capacity:
            self._snapshots.popitem(last=False)


class SlotPool:
    """Continuous batching: see the module.

    Args:
        model: from `models.build` or `kda_jax.load`.
        slots: requests that decode at a time.
        max_len: tokens of prompt and continuation that a slot holds.
        prefixes: snapshots to resume from and to add to; None for none.

    Raises:
        ValueError: more positions than the model has.
    """

    def __init__(self, model: LanguageModel, *, slots: int, max_len: int, prefixes: PrefixCache | None = None):
        self._model, self._max_len, self._prefixes = model, max_len, prefixes
        self._dtype = compute_dtype(model)
        self._cache = model.init_cache(slots, max_len, self._dtype)
        self._empty = model.init_cache(1, max_len, self._dtype)
        self._logits = jnp.zeros((slots, model.config.vocab_size), self._dtype)
        self._requests: list[Request | None] = [None] * slots
        self._waiting: deque[Request] = deque()
        self._count = 0

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> Request:
        """Queue a prompt; it joins as soon as a slot is free.

        Raises:
            ValueError: an empty prompt, a token outside the vocabulary, or more tokens than a slot holds.
        """
        Z = self._model.config.vocab_size
        if not prompt or min(prompt) < 0 or max(prompt) >= Z:
            raise ValueError(f"prompt must hold at least one token in 0..{Z - 1}, got {list(prompt)[:8]}")
        if len(prompt) + sampling.max_new_tokens > self._max_len:
            raise ValueError(
                f"the prompt ({len(prompt)} tokens) and max_new_tokens ({sampling.max_new_tokens}) exceed the {self._max_len} of a slot"
            )
        request = Request(self._count, tuple(prompt), sampling)
        self._count += 1
        self._waiting.append(request)
        return request

    def run(self) -> Iterator[Request]:
        """Work until nothing waits: requests as they finish. More may be submitted in between."""
        while self._waiting or any(self._requests):
            yield from self.step()

    def step(self) -> list[Request]:
        """Fill free slots, then draw one token in every slot: the requests that this finished."""
        for slot, request in enumerate(self._requests):
            if request is None and self._waiting:
                self._enter(slot, self._waiting.popleft())
        alive = np.array([request is not None for request in self._requests])
        if not alive.any():
            return []
        token, self._logits, self._cache = _decode(self._model, self._logits, jnp.asarray(alive), self._cache, self._choice())
        token, finished = np.asarray(token), []
        for slot, request in enumerate(self._requests):
            if request is None:
                continue
            stop = int(token[slot]) in request.sampling.stop_tokens
            if not stop:
                request.tokens.append(int(token[slot]))
            if stop or len(request.tokens) == request.sampling.max_new_tokens:
                request.done, self._requests[slot] = True, None
                finished.append(request)
        return finished

    def _enter(self, slot: int, request: Request) -> None:
        """Prefill a request, from the longest snapshot there is, into a slot that it has to itself."""
        logits, cache = self._prefill(request)
        self._cache = self._cache.put([slot], cache)  # every leaf of the row: nothing of the last request is left
        self._logits = self._logits.at[slot].set(logits[0])
        self._requests[slot] = request

    def _prefill(self, request: Request) -> tuple[Float[Array, "1 Z"], HybridCache]:
        prompt, every = request.prompt, len(request.prompt) if self._prefixes is None else self._prefixes.every
        found = None if self._prefixes is None else self._prefixes.longest(prompt)
        first, logits, cache = found or (0, None, self._empty)
        request.reused = first
        while first < len(prompt):
            stop = min(len(prompt), (first // every + 1) * every)
            for width in buckets(stop - first):
                piece = prompt[first : min(first + width, stop)]
                tokens, valid = np.zeros((2, 1, width), np.int32)
                tokens[0, : len(piece)], valid[0, : len(piece)] = piece, 1
                logits, cache = _read(self._model, tokens, valid, cache)
                first += len(piece)
            if self._prefixes is not None:
                self._prefixes.put(prompt[:first], logits, cache)
        return logits, cache

    def _choice(self) -> tuple[Array, ...]:
        """Keys and sampling parameters, one row per slot."""
        default = Sampling()
        rows = [(r.sampling, len(r.tokens)) if r else (default, 0) for r in self._requests]
        seeds = [s.seed if isinstance(s.seed, int) else s.seed[0] for s, _ in rows]
        column = lambda name, dtype: jnp.asarray([getattr(s, name) for s, _ in rows], dtype)
        numbers = jnp.asarray([number for _, number in rows], jnp.int32)
        return jnp.asarray(seeds), numbers, column("temperature", jnp.float32), column("top_k", jnp.int32), column("top_p", jnp.float32)


@functools.partial(jax.jit, donate_argnames=("logits", "cache"))
def _decode(
    model: LanguageModel, logits: Float[Array, "B Z"], alive: Bool[Array, "B"], cache: HybridCache, choice: tuple[Array, ...]
) -> tuple[Int[Array, "B"], Float[Array, "B Z"], HybridCache]:
    """Draw a token in every slot, each by its own request's rule, and read it; slots without a request read nothing."""
    seeds, numbers, *rule = choice
    keys = jax.vmap(lambda seed, number: jax.random.fold_in(jax.random.key(seed), number))(seeds, numbers)
    vocabulary = jnp.int32(model.config.vocab_size)
    one = lambda logits, key, *rule: choose(logits[None], key[None], (*rule, vocabulary))[0]
    token = jax.vmap(one)(logits, keys, *rule)
    out = model(token[:, None], cache=cache, segment_ids=alive[:, None].astype(jnp.int32))
    return token, out.logits[:, 0], out.cache


@jax.jit
def _read(
    model: LanguageModel, tokens: Int[Array, "1 T"], valid: Int[Array, "1 T"], cache: HybridCache
) -> tuple[Float[Array, "1 Z"], HybridCache]:
    """The logits after the last of some tokens, and the cache. The old cache stays alive: it may be somebody's snapshot."""
    out = model(tokens, cache=cache, segment_ids=valid)
    return out.logits[:, jnp.sum(valid) - 1], out.cache


def save_cache(cache: HybridCache, path: str | Path) -> None:
    """Write a cache, of any number of rows at any tokens, to a safetensors file."""
    from safetensors.numpy import save_file

    save_file({name: np.ascontiguousarray(leaf) for name, leaf in _named(cache).items()}, path)


def load_cache(path: str | Path, model: LanguageModel, max_len: int, dtype: Any = jnp.float32) -> HybridCache:
    """Read a cache that `save_cache` wrote from one of `model.init_cache(batch, max_len, dtype)`.

    Raises:
        UserError: the file is not there, or holds the cache of another model, length or dtype.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read as a cache ({error})") from error
    batch = found["length"].shape[0] if "length" in found else 1
    target = jax.eval_shape(lambda: model.init_cache(batch, max_len, dtype))
    wanted = {name: (leaf.shape, np.dtype(leaf.dtype)) for name, leaf in _named(target).items()}
    if {name: (leaf.shape, leaf.dtype) for name, leaf in found.items()} != wanted:
        raise UserError(f"{path} holds the cache of another model, of another max_len than {max_len}, or of another dtype")
    return jax.tree.unflatten(jax.tree.structure(target), [jnp.asarray(found[name]) for name in _named(target)])


def _named(cache: HybridCache) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(cache)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
