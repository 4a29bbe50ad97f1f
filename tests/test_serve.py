"""Slots and snapshots: a request gets what it would get alone, whatever shares the pool and whatever was in its slot before."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kda_jax import models
from kda_jax.errors import UserError
from kda_jax.generate import Sampling, generate
from kda_jax.models import LinearLMConfig, presets
from kda_jax.serve import PrefixCache, SlotPool, load_cache, save_cache

RANDOM = np.random.default_rng(0)
PROMPTS = [RANDOM.integers(0, 64, n).tolist() for n in (7, 1, 30, 12, 16, 3)]
GREEDY = Sampling(max_new_tokens=6, temperature=0.0)


@pytest.fixture(scope="module")
def model():
    config = dataclasses.replace(presets.tiny_hybrid(), initializer_range=0.2)
    return jax.jit(lambda: models.build(config, nnx.Rngs(0)))()


@pytest.fixture(scope="module")
def alone(model):
    return [generate(model, [prompt], GREEDY)[0] for prompt in PROMPTS]


def test_a_stream_through_two_slots(model, alone):
    """Six requests of different lengths through two slots: each gets what it gets alone; one of them joins while others run."""
    pool = SlotPool(model, slots=2, max_len=64)
    requests = [pool.submit(prompt, dataclasses.replace(GREEDY, max_new_tokens=3 + i % 4)) for i, prompt in enumerate(PROMPTS[:5])]
    finished = []
    for request in pool.run():
        finished.append(request)
        if len(requests) < len(PROMPTS):
            requests.append(pool.submit(PROMPTS[5], GREEDY))
    assert sorted(r.number for r in finished) == list(range(6))
    for request, expected in zip(requests, alone, strict=True):
        assert request.done
        assert request.tokens == expected[: request.sampling.max_new_tokens]


def test_a_slot_is_emptied_between_requests_R056(model):
    """B after A in one slot equals B in a fresh pool, bit for bit: the row of the cache and the logits."""
    used, fresh = SlotPool(model, slots=1, max_len=64), SlotPool(model, slots=1, max_len=64)
    used.submit(PROMPTS[2], GREEDY)
    list(used.run())
    for pool in (used, fresh):
        pool.submit(PROMPTS[0], GREEDY)
        pool.step()
    for a, b in zip(jax.tree.leaves((used._cache, used._logits)), jax.tree.leaves((fresh._cache, fresh._logits)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_two_stop_tokens_R122(model, alone):
    stops = frozenset({alone[0][2], alone[0][4]})
    pool = SlotPool(model, slots=2, max_len=64)
    request = pool.submit(PROMPTS[0], dataclasses.replace(GREEDY, stop_tokens=stops))
    list(pool.run())
    assert request.tokens == alone[0][: min(alone[0].index(stop) for stop in stops)]


def test_sampling_is_each_request_s_own(model):
    """A sampled request draws the same beside greedy ones as alone."""
    sampled = Sampling(max_new_tokens=6, temperature=0.9, top_k=20, top_p=0.95, seed=3)
    pool = SlotPool(model, slots=3, max_len=64)
    requests = [pool.submit(PROMPTS[0], sampled), pool.submit(PROMPTS[2], GREEDY), pool.submit(PROMPTS[0], sampled)]
    list(pool.run())
    assert requests[0].tokens == requests[2].tokens == generate(model, [PROMPTS[0]], sampled)[0]


def test_prefixes_R050_R059(model):
    """Turns of a conversation resume from the longest snapshot and equal cold runs; a prefix without one is read again."""
    prefixes = PrefixCache(capacity=8, every=16)
    pool, cold = (SlotPool(model, slots=1, max_len=96, prefixes=p) for p in (prefixes, None))
    turns = [PROMPTS[2], PROMPTS[2] + PROMPTS[3], PROMPTS[2] + PROMPTS[4], PROMPTS[2][:20] + PROMPTS[0], PROMPTS[0]]
    reused = []
    for turn in turns:
        found, expected = pool.submit(turn, GREEDY), cold.submit(turn, GREEDY)
        list(pool.run()), list(cold.run())
        assert found.tokens == expected.tokens
        reused.append(found.reused)
    assert reused == [0, 30, 30, 16, 0]  # the edit at token 20 goes back to the snapshot at 16: a state cannot be cut
    assert len(prefixes) <= 8


def test_snapshots_are_dropped_in_turn(model):
    cache, row = PrefixCache(capacity=2), model.init_cache(1, 1)
    for token in (1, 2, 1, 3):
        cache.longest([token]) or cache.put([token], jnp.zeros((1, 1)), row)
    assert cache.longest([2]) is None
    assert cache.longest([1, 9])[0] == 1


def test_a_cache_on_disk(model, tmp_path):
    """Saved at any token, read back to the bit; another model's or length's is refused."""
    cache = model.init_cache(1, 64)
    cache = jax.tree.map(lambda x: (jnp.arange(x.size).reshape(x.shape) % 7).astype(x.dtype), cache)
    save_cache(cache, tmp_path / "x.safetensors")
    found = load_cache(tmp_path / "x.safetensors", model, 64)
    assert jax.tree.structure(found) == jax.tree.structure(cache)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(cache), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    with pytest.raises(UserError, match="of another max_len than 32"):
        load_cache(tmp_path / "x.safetensors", model, 32)
    with pytest.raises(UserError, match="cannot be read as a cache"):
        load_cache(tmp_path / "none", model, 64)


@pytest.mark.parametrize(
    ("prompt", "sampling", "sentence"),
    [([], GREEDY, "at least one token"), ([64], GREEDY, r"in 0\.\.63"), ([1] * 60, GREEDY, "exceed the 64 of a slot")],
)
def test_refusals(model, prompt, sampling, sentence):
    with pytest.raises(ValueError, match=sentence):
        SlotPool(model, slots=1, max_len=64).submit(prompt, sampling)


@pytest.mark.slow
def test_time_per_token_does_not_depend_on_the_context():
    """A stack of KDA layers after 65,536 tokens and after 1,024: the same program, processor time within 1.1."""
    config = LinearLMConfig(
        mixer="kda", vocab_size=256, hidden_size=128, num_hidden_layers=3, num_heads=4, head_dim=32, intermediate_size=256
    )
    model = models.build(config, nnx.Rngs(0))
    step = jax.jit(lambda m, t, c: m(t, cache=c))
    read = jax.jit(lambda m, t, c: m(t, cache=c).cache)
    caches = {}
    for context in (1024, 65_536):
        cache = model.init_cache(1, context + 64)
        for _ in range(context // 1024):
            cache = read(model, jnp.zeros((1, 1024), jnp.int32), cache)
        assert int(cache.length[0]) == context
        caches[context] = cache
    token, seconds = jnp.zeros((1, 1), jnp.int32), {1024: [], 65_536: []}
    for cache in caches.values():
        jax.block_until_ready(step(model, token, cache).logits)
    assert step._cache_size() == 1
    for _ in range(30):
        for context, cache in caches.items():
            start = time.process_time()
            for _ in range(10):
                jax.block_until_ready(step(model, token, cache).logits)
            seconds[context].append(time.process_time() - start)
    assert min(seconds[65_536]) <= 1.1 * min(seconds[1024]), {k: min(v) for k, v in seconds.items()}
