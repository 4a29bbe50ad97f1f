"""GPT-2 (Radford et al. 2019): pre-norm blocks of softmax attention and MLP, learned positions, head tied to the embedding."""

import math

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from kda_jax.layers import MLP, GPT2Attention, LayerNorm
from kda_jax.models.cache import HybridCache
from kda_jax.models.config import GPT2Config
from kda_jax.models.decoder import embedding
from kda_jax.models.inputs import Inputs, concrete
from kda_jax.models.language_model import LanguageModel
from kda_jax.models.stack import BlockOutput, Stack


class GPT2Block(nnx.Module):
    """x + Attn(ln_1(x)), then x + MLP(ln_2(x)). Names are those of the released checkpoints."""

    def __init__(self, config: GPT2Config, rngs: nnx.Rngs):
        D, eps, spread = config.n_embd, config.layer_norm_epsilon, config.initializer_range
        residual = spread / math.sqrt(2 * config.n_layer)  # of c_proj, so that the sum over 2L branches keeps its variance
        init = {"initializer_range": spread, "residual_initializer_range": residual, "rngs": rngs}
        self.ln_1 = LayerNorm(D, eps=eps, axis="embed")
        self.attn = GPT2Attention(hidden_size=D, num_heads=config.n_head, **init)
        self.ln_2 = LayerNorm(D, eps=eps, axis="embed")
        self.mlp = MLP(hidden_size=D, intermediate_size=config.inner_size, **init)

    @property
    def mixer(self) -> nnx.Module:
        return self.attn

    def __call__(self, x: Float[Array, "B T D"], *, cache=None, segment_ids: Int[Array, "B T"] | None = None) -> BlockOutput:
        mixed = self.attn(self.ln_1(x), cache=cache, segment_ids=segment_ids)
        x = x + mixed.y
        return BlockOutput(x + self.mlp(self.ln_2(x)), mixed.cache, None)

    def init_cache(self, batch: int, max_len: int, dtype):
        return self.attn.init_cache(batch, max_len, dtype)


class GPT2(LanguageModel):
    """GPT-2 over `models.GPT2Config`. A token's position counts within its own sequence, so packed and padded rows need no care."""

    def __init__(self, config: GPT2Config, rngs: nnx.Rngs):
        self.config = config
        spread = config.initializer_range
        self.wte = embedding(config.vocab_size, config.n_embd, "vocab", initializer_range=spread, rngs=rngs)
        self.wpe = embedding(config.n_positions, config.n_embd, None, initializer_range=spread, rngs=rngs)
        self.h = Stack(["gpt2"] * config.n_layer, lambda _, rngs: GPT2Block(config, rngs), remat=config.remat, rngs=rngs)
        self.ln_f = LayerNorm(config.n_embd, eps=config.layer_norm_epsilon, axis="embed")

    @property
    def stack(self) -> Stack:
        return self.h

    def embed(self, inputs: Inputs) -> Float[Array, "B T D"]:
        _check_positions(inputs, self.config.n_positions)
        return self.wte(inputs.tokens) + self.wpe(inputs.position)

    def head(self, x: Float[Array, "B T D"]) -> Float[Array, "B T Z"]:
        return self.wte.attend(self.ln_f(x))

    def init_cache(self, batch: int, max_len: int, dtype=jnp.float32) -> HybridCache:
        """As `LanguageModel.init_cache`; raises ValueError where max_len exceeds n_positions."""
        if max_len > self.config.n_positions:
            raise ValueError(f"max_len must be at most n_positions {self.config.n_positions}, got {max_len}: GPT-2 has no more positions")
        return super().init_cache(batch, max_len, dtype)


def _check_positions(inputs: Inputs, n_positions: int) -> None:
    """Refuse a sequence of more than n_positions tokens where its length can be seen; elsewhere its logits are NaN from there on."""
    if concrete(inputs.position):
        longest = int(np.max(inputs.position)) + 1
    else:
        longest = inputs.position.shape[1] if inputs.segment_ids is None else 0
    if longest > n_positions:
        raise ValueError(f"a sequence of {longest} tokens is longer than GPT-2's n_positions {n_positions}")
