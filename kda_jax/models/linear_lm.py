"""A language model whose every layer has the same recurrent mixer: the ladder from linear attention to KDA, one rung at a time."""

from flax import nnx

from kda_jax.layers import DeltaNet, GatedDeltaNet, KimiDeltaAttention, LinearAttention, Mamba2, SwiGLU
from kda_jax.models.block import Block
from kda_jax.models.config import LinearLMConfig
from kda_jax.models.decoder import Decoder


class LinearLM(Decoder):
    """Blocks of one recurrent mixer and a SwiGLU over `models.LinearLMConfig`. No positions: the recurrence carries order."""

    def __init__(self, config: LinearLMConfig, rngs: nnx.Rngs):
        super().__init__(config, [config.mixer] * config.num_hidden_layers, lambda _, rngs: _block(config, rngs), rngs)


def _block(config: LinearLMConfig, rngs: nnx.Rngs) -> Block:
    ffn = SwiGLU(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        initializer_range=config.initializer_range,
        rngs=rngs,
    )
    return Block(_mixer(config, rngs), ffn, hidden_size=config.hidden_size, rms_norm_eps=config.rms_norm_eps)


def _mixer(config: LinearLMConfig, rngs: nnx.Rngs) -> nnx.Module:
    conv = {"short_conv_kernel_size": config.short_conv_kernel_size}
    common = {
        "hidden_size": config.hidden_size,
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "rngs": rngs,
    }
    heads = {"num_heads": config.num_heads, "head_dim": config.head_dim, "head_v_dim": config.value_dim}
    match config.mixer:
        case "linear_attention":
            return LinearAttention(**heads, **common)
        case "deltanet":
            return DeltaNet(**heads, **conv, **common)
        case "gated_deltanet":
            return GatedDeltaNet(**heads, num_v_heads=config.value_heads, **conv, **common)
        case "kda":
            return KimiDeltaAttention(**heads, **conv, **common)
        case "mamba2":
            groups = {"num_groups": config.num_heads, "state_size": config.head_dim}
            return Mamba2(num_heads=config.value_heads, head_dim=config.value_dim, **groups, **conv, **common)
    raise ValueError(f"mixer {config.mixer!r} is unknown")
