"""Parameters, floating-point operations and cache bytes of a model, read off the model itself without allocating it."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from kda_jax.layers.caches import RecurrentCache
from kda_jax.models.config import KimiK3Config, KimiLinearConfig, ModelConfig
from kda_jax.models.factory import build
from kda_jax.models.language_model import LanguageModel

_DELTA_RULE = ("DeltaNet", "GatedDeltaNet", "KimiDeltaAttention")
_CHUNK = 64


class Count(NamedTuple):
    """What a model costs. Bytes are for one sequence."""

    total: int
    """Parameters as the release counts them: with the zeros that it stores behind each A_log (2,208 of K3's 2.8 trillion)."""
    active: int
    """Parameters that one token uses: all but the experts it is not sent to."""
    active_without_embedding: int
    """`active` less the tables that are only looked up (input embedding unless tied to the head, learned positions)."""
    flops_base: int
    """Floating-point operations of a forward per token that do not depend on the context: 2 per active parameter, recurrences."""
    flops_per_position: int
    """Those of softmax attention per token and per token of context, averaged over a causal sequence."""
    cache_bytes_per_token: int
    """Cache that grows with each token: attention layers only."""
    state_bytes: int
    """Recurrent states, float32, whatever the context."""
    conv_bytes: int
    """Histories of the short convolutions."""
    counter_bytes: int
    """Lengths and starts."""

    @property
    def cache_bytes_per_sequence(self) -> int:
        """Cache that a sequence takes before its first token."""
        return self.state_bytes + self.conv_bytes + self.counter_bytes

    def cache_bytes(self, max_len: int) -> int:
        """Size of `model.init_cache(1, max_len, dtype)`."""
        return self.cache_bytes_per_sequence + max_len * self.cache_bytes_per_token

    def flops_per_token(self, context: int) -> int:
        """Forward operations per token of a sequence of `context` tokens; training takes three times as many."""
        return self.flops_base + context * self.flops_per_position


def count(config: ModelConfig, *, dtype=jnp.bfloat16) -> Count:
    """Count the model that `config` describes.

    Args:
        config: any model configuration; the released sizes take a second or two and no memory.
        dtype: of the cache (attention entries and conv histories).

    Example:
        >>> from kda_jax import models
        >>> models.count(models.presets.gpt2_124m()).total
        124439808
    """
    model = nnx.eval_shape(lambda: build(config, nnx.Rngs(0)))
    sizes = {jax.tree_util.keystr(path): math.prod(leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(model))}
    total = sum(sizes.values()) + _padding(config)
    active = total - _idle(config, sizes)
    tied = getattr(config, "tie_word_embeddings", True)
    tables = ["wpe"] if tied else ["wpe", "embed_tokens"]
    looked_up = sum(n for path, n in sizes.items() if any(f"'{name}'" in path for name in tables))
    used = active - looked_up
    recurrent, per_position = _mixer_flops(config, model)
    return Count(total, active, used, 2 * used + recurrent, per_position, *_cache_bytes(model, dtype))


def _idle(config: ModelConfig, sizes: dict[str, int]) -> int:
    """Parameters of the experts that a token is not sent to."""
    if not isinstance(config, KimiLinearConfig):
        return 0
    routed = sum(n for path, n in sizes.items() if "'experts'" in path)
    return routed // config.num_experts * (config.num_experts - config.num_experts_per_token)


def _padding(config: ModelConfig) -> int:
    """Zeros that a checkpoint stores behind the heads' values of each A_log."""
    if not isinstance(config, KimiK3Config) or config.linear_attn_config.A_log_entries is None:
        return 0
    linear = config.linear_attn_config
    return len(linear.kda_layers) * (linear.A_log_entries - linear.num_heads)


def _mixer_flops(config: ModelConfig, model: LanguageModel) -> tuple[int, int]:
    """(per token, per token and token of context) of the mixers besides their projections.

    A recurrence with keys of K, values of V and chunks of C (arXiv 2510.26692 eq. 13, there with K = V): 6KV + C(2K + V) + C^2 per
    token and head with the delta rule, 4KV + C(K + V) without. Softmax attention (eq. 14): K + V per token and token of context,
    which is half of the full square, since it is causal.
    """
    base = per_position = 0
    for mixer, cache in _mixers(model):
        if isinstance(cache, RecurrentCache):
            HV, K, V = cache.state.shape[-3:]
            delta = type(mixer).__name__ in _DELTA_RULE
            base += HV * (6 * K * V + _CHUNK * (2 * K + V) + _CHUNK**2 if delta else 4 * K * V + _CHUNK * (K + V))
        elif isinstance(config, KimiLinearConfig):
            qk_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
            per_position += config.num_attention_heads * (qk_dim + config.v_head_dim)
        else:
            per_position += 2 * config.n_embd
    return base, per_position


def _mixers(model: LanguageModel):
    """(mixer, its abstract cache) of every layer."""
    stack, cache = model.stack, _abstract_cache(model, jnp.float32)
    repeats = {"prologue": 1, "periods": stack.layout.repeats, "epilogue": 1}
    for part, n in repeats.items():
        for block, entry in zip(getattr(stack, part), getattr(cache, part), strict=True):
            yield from [(block.mixer, entry)] * n


def _cache_bytes(model: LanguageModel, dtype) -> tuple[int, int, int, int]:
    """(per token, states, conv histories, counters)."""
    cache = _abstract_cache(model, dtype)
    per_token = states = convs = 0
    counters = _nbytes([cache.length, cache.start])
    for entry in cache.prologue + cache.periods + cache.epilogue:
        if isinstance(entry, RecurrentCache):
            states += _nbytes(entry.state)
            convs += _nbytes(entry.conv)
        else:
            counters += _nbytes([entry.length, entry.start])
            per_token += _nbytes(entry) - _nbytes([entry.length, entry.start])
    return per_token, states, convs, counters


def _abstract_cache(model: LanguageModel, dtype):
    return jax.eval_shape(lambda model: model.init_cache(1, 1, dtype), model)


def _nbytes(tree) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
