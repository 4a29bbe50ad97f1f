"""Published counts, and that what is counted is what is there."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from model_cases import CONFIGS, build

from kda_jax import models
from kda_jax.models import presets


def test_gpt2_small_is_the_released_size():
    count = models.count(presets.gpt2_124m())
    assert count.total == count.active == 124_439_808
    assert count.active_without_embedding == 124_439_808 - 1024 * 768  # the tied table is the head; positions are only looked up
    assert count.cache_bytes_per_token == 36_864


def test_kimi_linear_48b_is_the_released_size():
    count = models.count(presets.kimi_linear_48b_a3b())
    assert count.total == 49_122_681_728
    assert count.active == 3_484_459_904
    assert count.active_without_embedding == 3_106_972_544
    assert count.cache_bytes_per_token == 8_064
    assert count.state_bytes == 41_943_040
    assert count.conv_bytes == 20 * 73_728


def kimi_formula(c):
    """Sum over the tensors of architecture.md 1.6, written out."""
    D, linear = c.hidden_size, c.linear_attn_config
    P, K, H = linear.num_heads * linear.head_dim, linear.head_dim, linear.num_heads
    kda = 4 * D * P + 3 * P * linear.short_conv_kernel_size + H + P + 2 * (D * K) + 2 * (K * P) + H * D + K
    qk, A = c.qk_nope_head_dim + c.qk_rope_head_dim, c.num_attention_heads
    latent = c.kv_lora_rank
    mla = D * A * qk + D * (latent + c.qk_rope_head_dim) + latent + latent * A * (c.qk_nope_head_dim + c.v_head_dim) + A * c.v_head_dim * D
    expert = 3 * D * c.moe_intermediate_size
    moe = (c.num_experts + c.num_shared_experts) * expert + c.num_experts * (D + 1)
    L, n_kda = c.num_hidden_layers, len(linear.kda_layers)
    dense = c.first_k_dense_replace
    total = n_kda * kda + (L - n_kda) * mla + dense * 3 * D * c.intermediate_size + (L - dense) * moe + (2 * L + 1) * D
    total += c.vocab_size * D * (1 if c.tie_word_embeddings else 2)
    return total, total - (L - dense) * (c.num_experts - c.num_experts_per_token) * expert


@pytest.mark.parametrize("config", [presets.tiny_hybrid(), presets.kimi_linear_tiny(), presets.kimi_linear_48b_a3b()])
def test_count_equals_the_formula_R096(config):
    count = models.count(config)
    assert (count.total, count.active) == kimi_formula(config)


@pytest.mark.parametrize("name", CONFIGS)
def test_count_equals_the_sum_of_leaf_sizes_R096(name):
    """And, for Kimi K3, the zeros that its checkpoints store behind the heads' values of every A_log: one for each of 4 KDA layers here."""
    model = build(name)
    zeros = 4 * (4 - 3) if name == "kimi_k3" else 0
    assert models.count(CONFIGS[name]).total == zeros + sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_count_equals_the_real_cache_R154(name, dtype):
    """Per token and per sequence apart, and their sum exactly the bytes of a cache."""
    count, cache = models.count(CONFIGS[name], dtype=dtype), build(name).init_cache(3, 40, dtype)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(cache)) == 3 * count.cache_bytes(40)
    assert (count.cache_bytes_per_token == 0) == (cache.capacity is None)
    assert (count.state_bytes == 0) == (name == "gpt2")


def test_flops_are_those_of_the_paper():
    """Kimi Linear, arXiv 2510.26692 eqs. 13 and 14: per head and token 6d^2 + 3Cd + C^2 for KDA, 2Td for softmax attention."""
    config = presets.kimi_linear_48b_a3b()
    count, d, C = models.count(config), 128, 64
    assert count.flops_base == 2 * count.active_without_embedding + 20 * 32 * (6 * d * d + 3 * C * d + C * C)
    assert count.flops_per_position == 7 * 32 * (192 + 128)
    gpt2 = models.count(presets.gpt2_124m())
    assert gpt2.flops_per_token(1024) == 2 * gpt2.active_without_embedding + 12 * 12 * 2 * 64 * 1024


@pytest.mark.parametrize("mixer", ["linear_attention", "mamba2", "deltanet", "gated_deltanet", "kda"])
def test_linear_lm_presets_are_of_one_size(mixer):
    """That of GPT-2 small to 1%, so that comparing them means something."""
    assert abs(models.count(presets.linear_lm(mixer)).total / 124_439_808 - 1) < 0.01


def test_a_tied_head_is_the_embedding_R115():
    """One table in the tree, and logits are norm(h) @ table.T; untied models have a head of their own."""
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(nnx.state(build("gpt2")))]
    assert sum("64" in str(leaf.shape) for leaf in jax.tree.leaves(nnx.state(build("gpt2")))) == 1
    assert not any("head" in name for name in names)
    x = jax.random.normal(jax.random.key(0), (1, 2, 32))
    for model, norm, table in [(build("gpt2"), "ln_f", "wte"), (build("kda"), "norm", "embed_tokens")]:
        assert jnp.allclose(model.head(x), getattr(model, norm)(x) @ getattr(model, table).embedding[...].T, atol=1e-5)
    assert build("kda").lm_head is None
    assert build("kimi_linear").lm_head.kernel.shape == (64, 64)
