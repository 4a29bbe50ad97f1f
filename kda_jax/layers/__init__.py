"""Flax NNX layers, one per paper noun. Mixers: `(x, *, cache, segment_ids) -> MixerOutput(y, cache)`."""

from kda_jax import versions

versions.require()  # before the first import of flax

from kda_jax.layers.attention_residual import AttentionResidual, DepthStream
from kda_jax.layers.caches import AttentionCache, LatentCache, MixerOutput, RecurrentCache
from kda_jax.layers.deltanet import DeltaNet
from kda_jax.layers.gated_deltanet import GatedDeltaNet
from kda_jax.layers.gpt2_attention import GPT2Attention
from kda_jax.layers.kimi_delta_attention import KimiDeltaAttention
from kda_jax.layers.latent_moe import LatentMoE
from kda_jax.layers.linear_attention import LinearAttention
from kda_jax.layers.mamba2 import Mamba2
from kda_jax.layers.mla import MultiHeadLatentAttention
from kda_jax.layers.mlp import MLP, SiTU, SwiGLU
from kda_jax.layers.moe import MoE, MoEOutput, RouterBias, collect_histograms, limit_experts
from kda_jax.layers.norms import GatedRMSNorm, LayerNorm, RMSNorm
from kda_jax.layers.short_conv import ShortConv
