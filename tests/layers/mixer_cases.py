"""One small mixer of every kind, built once, and one jitted forward for all."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kda_jax import layers

D, H, K, V = 12, 3, 8, 5  # keys wider than values: a transposed state cannot pass
_HEADS = {"hidden_size": D, "num_heads": H, "head_dim": K, "head_v_dim": V}
_LATENT = {"hidden_size": D, "num_heads": H, "kv_lora_rank": 7, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": V}

MIXERS = {
    "gpt2": functools.partial(layers.GPT2Attention, hidden_size=D, num_heads=H),
    "linear_modern": functools.partial(layers.LinearAttention, **_HEADS),
    "linear_original": functools.partial(layers.LinearAttention, variant="original", **_HEADS),
    "mamba2": functools.partial(layers.Mamba2, hidden_size=D, num_heads=2 * H, head_dim=V, state_size=K, num_groups=H),
    "deltanet": functools.partial(layers.DeltaNet, **_HEADS),
    "gated_deltanet": functools.partial(layers.GatedDeltaNet, num_v_heads=2 * H, **_HEADS),
    "kda": functools.partial(layers.KimiDeltaAttention, **_HEADS),
    "kda_k3": functools.partial(layers.KimiDeltaAttention, lower_bound=-5.0, full_rank_gate=True, **_HEADS),
    "mla": functools.partial(layers.MultiHeadLatentAttention, **_LATENT),
    "mla_k3": functools.partial(layers.MultiHeadLatentAttention, q_lora_rank=9, output_gate=True, **_LATENT),
}
RECURRENT = [name for name in MIXERS if name not in ("gpt2", "mla", "mla_k3")]
FAMILIES = [name for name in MIXERS if not name.endswith("_k3")]


def with_random_parameters(make):
    """The module with parameters of order one instead of its initial values, so that an ignored bias or scale shows."""
    graphdef, state = nnx.split(nnx.eval_shape(make))
    rng = np.random.default_rng(1)

    def draw(path, leaf):
        around = 1.0 if path[-2].key in ("scale", "D") else 0.0
        return jnp.asarray(around + 0.4 * rng.normal(size=leaf.shape), leaf.dtype)

    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(draw, state))


@functools.cache
def build(name):
    return with_random_parameters(lambda: MIXERS[name](rngs=nnx.Rngs(0)))


def parameters(mixer):
    """Nested dict of float64 arrays, for transcriptions in numpy."""
    return jax.tree.map(lambda a: np.asarray(a, np.float64), nnx.to_pure_dict(nnx.state(mixer)))


@jax.jit
def forward(mixer, x, cache=None, segment_ids=None):
    return mixer(x, cache=cache, segment_ids=segment_ids)


def random_input(B, T, seed=2):
    return jax.random.normal(jax.random.key(seed), (B, T, D))


def assert_close(got, want, rtol=1e-5):
    """Largest difference within rtol of the largest value."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    error, scale = np.abs(got - want).max(), np.abs(want).max()
    assert error <= rtol * scale, f"differs by {error:.2e}, the largest value is {scale:.2e}"


def assert_trees_close(got, want, rtol=1e-5):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert_close(a, b, rtol)
