"""Small models of every kind, each built once, one jitted forward for all, and what it gives for the same random tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kda_jax import models
from kda_jax.models import GPT2Config, LinearLMConfig

VOCAB = 64
CONFIGS = {
    "gpt2": GPT2Config(vocab_size=VOCAB, n_positions=128, n_embd=32, n_layer=3, n_head=4),
    "kimi_linear": models.presets.tiny_hybrid(),
    "kimi_k3": models.presets.tiny_k3(),
} | {
    mixer: LinearLMConfig(
        mixer=mixer,
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=3,
        num_heads=2,
        num_v_heads=4 if mixer in ("mamba2", "gated_deltanet") else None,
        head_dim=16,
        expand_v=0.5,  # keys wider than values: a transposed state cannot pass (R049)
        intermediate_size=48,
    )
    for mixer in ("linear_attention", "mamba2", "deltanet", "gated_deltanet", "kda")
}


@functools.cache
def build(name):
    return filled(CONFIGS[name])


def filled(config):
    """A model with every parameter away from its initial value, so that a bias or a norm weight that is ignored shows.

    Filled on the host: compiling random numbers for a hundred parameters would take longer than the tests.
    """
    graphdef, state = nnx.split(nnx.eval_shape(lambda: models.build(config, nnx.Rngs(0))))
    rng = np.random.RandomState(0)

    def fill(path, leaf):
        noise, last = rng.standard_normal(leaf.shape), jax.tree_util.keystr(path)
        if "A_log" in last:
            value = np.log(4) + 0.5 * noise
        elif "dt_bias" in last:
            value = noise - 4
        elif "query" in last:
            value = noise * leaf.shape[-1] ** -0.5
        elif "scale" in last or "['D']" in last:
            value = 1 + 0.1 * noise
        elif "bias" in last:
            value = 0.1 * noise
        else:
            value = noise * leaf.shape[-2] ** -0.5 if "embedding" not in last else 0.5 * noise
        return jnp.asarray(value, leaf.dtype)

    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(fill, state))


@jax.jit
def forward(model, tokens, cache=None, segment_ids=None):
    """Every new shape is a compilation per model, so the tests share four: [ROWS, LONG] without cache; with one [ROWS, BUCKET], the
    same with segment ids, and [ROWS, 1]."""
    return model(tokens, cache=cache, segment_ids=segment_ids)


ROWS, BUCKET, LONG = 4, 12, 100


def random_tokens(*shape, seed=2):
    return jnp.asarray(np.random.RandomState(seed).randint(0, VOCAB, shape), jnp.int32)


TOKENS = np.array(random_tokens(ROWS, LONG))


@functools.cache
def reference(name):
    """Logits [ROWS, LONG, VOCAB] of TOKENS in one call without cache. By causality also those of every beginning of a row."""
    return np.array(forward(build(name), jnp.asarray(TOKENS)).logits)


@functools.cache
def empty_cache(name, rows=ROWS):
    model = build(name)  # kept for all: not inside jit, where its parameters would be tracers
    return jax.jit(lambda: model.init_cache(rows, 128))()


@functools.cache
def rounding(name):
    """What one rounding of every parameter does to the logits, relative to the largest: two orders of summation agree no better.

    Most models are far below 1e-5. Kimi K3's at their first weights are not: means of small sources, normalised.
    """
    graphdef, state = nnx.split(build(name))
    logits = jax.jit(lambda state: nnx.merge(graphdef, state)(jnp.asarray(TOKENS)).logits)
    rng = np.random.RandomState(3)
    up_or_down = lambda x: np.asarray(x) * (1 + np.float32(2.0**-23) * rng.choice(np.float32([-1, 1]), x.shape))
    rounded = jax.tree.map(lambda x: up_or_down(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, state)
    return float(np.abs(np.asarray(logits(rounded)) - reference(name)).max() / np.abs(reference(name)).max())


def assert_close(got, want, rtol=1e-5):
    """Largest difference within rtol of the largest value."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    error, scale = np.abs(got - want).max(), np.abs(want).max()
    assert error <= rtol * scale, f"differs by {error:.2e}, the largest value is {scale:.2e}"


def assert_bitwise(got, want):
    """Two trees of the same structure and the same bits."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
