"""The pre-norm block of every model but GPT-2: x + Mix(norm(x)), then + FFN(norm(.))."""

from typing import Any

from flax import nnx
from jaxtyping import Array, Float, Int

from kda_jax.layers import MLP
