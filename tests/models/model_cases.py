"""Small models of every kind, each built once, and one jitted forward for all."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from kda_jax import models
from kda_jax.models import GPT2Config, LinearLMConfig

VOCAB = 64
CONFIGS = {
    "gpt2": GPT2Config(vocab_size=VOCAB, n_positions=128, n_embd=32, n_layer=3, n_head=4),
    "kimi_linear": models.presets.tiny_hybrid(),
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
    """The model with every parameter moved off its initial value, so that a bias or a norm weight that is ignored shows."""
    model = models.build(CONFIGS[name], nnx.Rngs(0))
    state = nnx.state(model)
    leaves, treedef = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    moved = [leaf + 0.1 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    nnx.update(model, jax.tree.unflatten(treedef, moved))
    return model


@jax.jit
def forward(model, tokens, cache=None, segment_ids=None):
    return model(tokens, cache=cache, segment_ids=segment_ids)


def random_tokens(*shape, seed=2):
    return jax.random.randint(jax.random.key(seed), shape, 0, VOCAB, jnp.int32)


def assert_close(got, want, rtol=1e-5):
    """Largest difference within rtol of the largest value."""
    error, scale = float(jnp.abs(got - want).max()), float(jnp.abs(want).max())
    assert error <= rtol * scale, f"differs by {error:.2e}, the largest value is {scale:.2e}"
