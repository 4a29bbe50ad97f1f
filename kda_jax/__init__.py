"""From GPT-2 to Kimi K3 in JAX: recurrences, layers, models, training. Submodules load when first used."""

import importlib

__version__ = "0.1.0"

_SUBMODULES = frozenset(
    "bench checkpoint config distributed errors generate hf layers memory models ops parity serve sharding testing tokenizer train "
    "versions".split()
)


def __getattr__(name: str):
    if name in _SUBMODULES:
        return importlib.import_module(f"kda_jax.{name}")
    if name == "load":
        return importlib.import_module("kda_jax.checkpoint").load
    raise AttributeError(f"module 'kda_jax' has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *_SUBMODULES, "load"})
