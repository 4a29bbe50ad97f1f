"""From a configuration to a model."""

from flax import nnx

from kda_jax.models.config import GPT2Config, KimiLinearConfig, LinearLMConfig, ModelConfig
from kda_jax.models.gpt2 import GPT2
from kda_jax.models.kimi_linear import KimiLinear
from kda_jax.models.language_model import LanguageModel
from kda_jax.models.linear_lm import LinearLM

_MODELS: dict[type, type[LanguageModel]] = {GPT2Config: GPT2, LinearLMConfig: LinearLM, KimiLinearConfig: KimiLinear}


def build(config: ModelConfig, rngs: nnx.Rngs) -> LanguageModel:
    """The model that `config` describes, with fresh float32 parameters.

    For a model that does not fit one device, build it abstractly, `nnx.eval_shape(lambda: build(config, nnx.Rngs(0)))`, which
    allocates nothing, or inside `jax.jit` with shardings.

    Args:
        config: one of the dataclasses of `models.config`; see `models.presets`.
        rngs: source of the initial weights.

    Example:
        >>> from flax import nnx
        >>> from kda_jax import models
        >>> model = models.build(models.presets.tiny_hybrid(), nnx.Rngs(0))
        >>> model(jnp.zeros((1, 5), jnp.int32)).logits.shape
        (1, 5, 64)
    """
    if type(config) not in _MODELS:
        raise ValueError(f"config must be one of {', '.join(c.__name__ for c in _MODELS)}, got {type(config).__name__}")
    return _MODELS[type(config)](config, rngs)
