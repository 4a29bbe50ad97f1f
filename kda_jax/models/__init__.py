"""Models and their configurations. Names load when first used, so reading a configuration does not import JAX."""

import importlib

_HOMES = {
    "build": "factory",
    "count": "counting",
    "Count": "counting",
    "GPT2": "gpt2",
    "LinearLM": "linear_lm",
    "KimiLinear": "kimi_linear",
    "KimiK3": "kimi_k3",
    "LanguageModel": "language_model",
    "ModelOutput": "language_model",
    "HybridCache": "cache",
    "ModelConfig": "config",
    "GPT2Config": "config",
    "LinearLMConfig": "config",
    "KimiLinearConfig": "config",
    "KimiK3Config": "config",
    "K3LinearAttentionConfig": "config",
    "LinearAttentionConfig": "config",
}

__all__ = ["presets", *_HOMES]


def __getattr__(name: str):
    if name == "presets":
        return importlib.import_module("kda_jax.models.presets")
    if name in _HOMES:
        return getattr(importlib.import_module(f"kda_jax.models.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'kda_jax.models' has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})
