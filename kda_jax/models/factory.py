"""From a configuration to a model."""

import functools
from collections.abc import Callable

import jax
from flax import nnx
from jaxtyping import Array

from kda_jax.models.config import GPT2Config, KimiK3Config, KimiLinearConfig, LinearLMConfig, ModelConfig
from kda_jax.models.gpt2 import GPT2
from kda_jax.models.kimi_k3 import KimiK3
from kda_jax.models.kimi_linear import KimiLinear
from kda_jax.models.language_model import LanguageModel
from kda_jax.models.linear_lm import LinearLM

_MODELS: dict[type, type[LanguageModel]] = {
    GPT2Config: GPT2,
    LinearLMConfig: LinearLM,
    KimiLinearConfig: KimiLinear,
    KimiK3Config: KimiK3,
}


def build(config: ModelConfig, rngs: nnx.Rngs) -> LanguageModel:
    """The model that `config` describes, with fresh float32 parameters.

    A model that does not fit one device is built inside `jax.jit` with shardings of its own, or not at all:
    `nnx.eval_shape(lambda: build(config, nnx.Rngs(0)))` allocates nothing.

    Args:
        config: one of the dataclasses of `models.config`; see `models.presets`.
        rngs: source of the initial weights.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from kda_jax import models
        >>> model = models.build(models.presets.tiny_hybrid(), nnx.Rngs(0))
        >>> model(jnp.zeros((1, 5), jnp.int32)).logits.shape
        (1, 5, 64)
    """
    if type(config) not in _MODELS:
        raise ValueError(f"config must be one of {', '.join(c.__name__ for c in _MODELS)}, got {type(config).__name__}")
    key = rngs.params()
    if isinstance(key, jax.core.Tracer):
        return _MODELS[type(config)](config, nnx.Rngs(key))
    return _constructor(config, jax.default_backend())(key)


@functools.cache
def _constructor(config: ModelConfig, backend: str) -> Callable[[Array], LanguageModel]:
    """key -> model, compiled as one program; on CPU without optimisation, for to optimise dozens of draws takes longer than to run them."""
    options = {"xla_backend_optimization_level": 0} if backend == "cpu" else None
    return jax.jit(lambda key: _MODELS[type(config)](config, nnx.Rngs(key)), compiler_options=options)
