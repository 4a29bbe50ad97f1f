"""One description per recurrence; tests, benchmarks and tables are generated from it."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Decay = Literal["none", "head", "channel"]


class RecurrenceOutput(NamedTuple):
    """What every recurrence returns, always both."""

    o: Array
    """[B, T, HV, V], dtype of v."""
    final_state: Array
    """[B, HV, K, V], float32 (float64 for float64 inputs)."""


class Inputs(NamedTuple):
    """Arguments of a recurrence after validation; g and beta are None where the op has none."""

    q: Array
    k: Array
    v: Array
    g: Array | None
    beta: Array | None


@dataclasses.dataclass(frozen=True)
class OpSpec:
    """A member of the family S_t = (I - beta k k^T [delta]) Diag(alpha_t) S_{t-1} + beta k v^T."""

    name: str
    equation: str
    """The recurrence in one line, with its source."""
    decays: tuple[Decay, ...]
    """Kinds of decay the op accepts."""
    delta: bool
    step: Callable[..., tuple[Array, Array]]
    """(state, q, k, v, [g], [beta], *, scale) -> (state, o): the definition."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the array arguments, in order."""
        return ("q", "k", "v") + (() if self.decays == ("none",) else ("g",)) + (("beta",) if self.delta else ())

    def arrays(self, inputs: Inputs) -> tuple[Array, ...]:
        """The arrays that this op takes, in the order it takes them."""
        return tuple(getattr(inputs, name) for name in self.arguments)

    def make_inputs(self, key: Array, *, B=2, T=100, H=2, HV=4, K=16, V=8, decay: Decay | None = None, dtype=jnp.float32) -> Inputs:
        """Ordinary random inputs: unit q and k, normal v, gates of about -1 nat, beta in (0, 1)."""
        keys = jax.random.split(key, 5)
        decay = self.decays[-1] if decay is None else decay
        normal = lambda i, *shape: jax.random.normal(keys[i], shape, jnp.float32)
        unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
        g = {"none": None, "head": -jnp.exp(normal(3, B, T, HV)), "channel": -jnp.exp(normal(3, B, T, HV, K))}[decay]
        beta = jax.nn.sigmoid(normal(4, B, T, HV)) if self.delta else None
        q, k, v = unit(normal(0, B, T, H, K)).astype(dtype), unit(normal(1, B, T, H, K)).astype(dtype), normal(2, B, T, HV, V).astype(dtype)
        return Inputs(q, k, v, g, beta)


REGISTRY: dict[str, OpSpec] = {}
"""Every recurrence by name, in the order of the ladder."""


def need_floats(op: str, arrays: dict[str, Any]) -> None:
    """Raises ValueError, with the name, for what is no array of floats of 16 to 64 bits: outputs have v's dtype, and integers truncate."""
    for name, x in arrays.items():
        need_array(op, name, x)
        if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 2:
            raise ValueError(f"{op}: {name} has dtype {x.dtype}, expected a float of 16, 32 or 64 bits")


def need_decays(op: str, g: Any) -> None:
    """Raises ValueError for log decays above zero, where they can be seen."""
    if not isinstance(g, (jax.Array, np.ndarray)) or isinstance(g, jax.core.Tracer):
        return
    with jax.ensure_compile_time_eval():  # inside jit, jnp would trace what is done to a constant
        largest = float(jnp.max(g, initial=-jnp.inf))
    if largest > 0:
        raise ValueError(f"{op}: g is a log decay and must be <= 0, but its largest value is {largest:g}")


def need_integers(op: str, arrays: dict[str, Any]) -> None:
    """Raises ValueError, with the name, for what is no array of integers. None passes."""
    for name, x in arrays.items():
        if x is not None:
            need_array(op, name, x)
            if not jnp.issubdtype(x.dtype, jnp.integer):
                raise ValueError(f"{op}: {name} has dtype {x.dtype}, expected integers")


def need_array(op: str, name: str, x: Any) -> None:
    """Raises ValueError for what has no shape and dtype: lists, numbers, None."""
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        raise ValueError(f"{op}: {name} is {'None' if x is None else f'a {type(x).__name__}'}, expected an array")


def register(spec: OpSpec) -> OpSpec:
    """Add `spec` to the registry; a name may be taken once."""
    if spec.name in REGISTRY:
        raise ValueError(f"a recurrence named {spec.name!r} exists already")
    REGISTRY[spec.name] = spec
    return spec


def share_heads(x: Float[Array, "B H K"], value_heads: int) -> Float[Array, "B HV K"]:
    """Repeat q or k heads for grouped value heads: head j serves value heads j r .. j r + r - 1."""
    return jnp.repeat(x, value_heads // x.shape[1], axis=1)
