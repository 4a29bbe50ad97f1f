"""MXFP4 weights of a release: two 4-bit numbers per byte, one power of two per 32 of them."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8, UInt16

from kda_jax import sharding
from kda_jax.hf.files import Tensor
from kda_jax.hf.forms import At, Shape
from kda_jax.hf.problems import BadTensor

GROUP = 32
"""Consecutive inputs that share a scale."""
BFLOAT16 = np.dtype(jnp.bfloat16)
_CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_NAN, _BIAS = 255, 127


class Packed(NamedTuple):
    """An E2M1 matrix [out, in] and its E8M0 scales, read as bfloat16, in which every product of the two is exact."""

    name: str
    packed: Tensor
    """uint8 [out, in / 2]."""
    scale: Tensor
    """uint8 [out, in / 32]: value 2^(s - 127)."""
    shape: Shape
    dtype: np.dtype = BFLOAT16

    @property
    def file(self):
        return self.packed.file

    @property
    def expansion(self) -> int:
        return 2 * self.dtype.itemsize

    def reading(self, dtype: np.dtype) -> "Packed":
        """The tensor, to be read as float32 if that is `dtype`: no less exact, and without a cast."""
        return self._replace(dtype=dtype) if dtype == np.float32 else self

    def __getitem__(self, at: At) -> np.ndarray:
        """Whole groups are read, and what was not asked for is cut off. In memory it is the transpose."""
        rows, columns = at
        start, stop, _ = columns.indices(self.shape[1])
        first, last = start // GROUP, -(-stop // GROUP)
        scale = self.scale[rows, slice(first, last)]
        if np.any(scale == _NAN):
            raise BadTensor(f"{self.name} has a scale of {_NAN}, which is not a number")
        values = unpack(self.packed[rows, slice(first * GROUP // 2, last * GROUP // 2)], scale, self.dtype)
        return values[:, start - first * GROUP : stop - first * GROUP]


def pair(packed: Tensor, scale: Tensor | None, problems: list[str]) -> list[Packed]:
    """The weight of the two tensors, or none and a problem."""
    name = packed.name.removesuffix("_packed")
    if scale is None:
        problems.append(f"{packed.name} has no {name}_scale beside it")
        return []
    fits = len(packed.shape) == len(scale.shape) == 2 and packed.shape[0] == scale.shape[0]
    if not fits or packed.shape[1] * 2 != scale.shape[1] * GROUP:
        problems.append(
            f"{packed.name} has shape {packed.shape} and its scale {scale.shape}: expected (out, in / 2) and (out, in / {GROUP})"
        )
        return []
    return [Packed(name, packed, scale, (packed.shape[0], 2 * packed.shape[1]))]


def unpack(packed: np.ndarray, scale: np.ndarray, dtype: Any = BFLOAT16) -> np.ndarray:
    """The numbers [out, in] of uint8 [out, in / 2] and uint8 [out, in / 32], transposed in memory (OCP Microscaling Formats 1.0, 5.3.3).

    Exact for every scale but 255, which stands for no number: the product of the two is a bfloat16, or beyond its range and so infinity.

    Args:
        dtype: bfloat16 or float32.

    Example:
        >>> import numpy as np
        >>> unpack(np.full((1, 16), 0x2B, np.uint8), np.full((1, 1), 126, np.uint8))[0, :2].tolist()
        [-0.75, 0.5]
    """
    with sharding.no_mesh(), jax.default_device(_host()):
        return np.asarray(_unpack(packed.view(np.uint16).T, scale.T, dtype)).T


@functools.partial(jax.jit, static_argnames="dtype")
def _unpack(words: UInt16[Array, "words out"], scale: UInt8[Array, "groups out"], dtype: Any) -> Float[Array, "inputs out"]:
    """Compiled, for a table in NumPy and a transpose take several times as long; of integers, for XLA on a CPU takes subnormals as zero."""
    code = words.reshape(-1, GROUP // 4, 1, words.shape[1]) << jnp.arange(12, -1, -4, dtype=jnp.uint16)[:, None]
    s = scale.astype(jnp.uint16)[:, None, None]
    number = (code >> 6) & 0x1C0  # of its four highest bits: exponent and fraction, where those of a bfloat16 are
    half = jnp.where(s > 1, (s - 1) << 7, (s + 1) << 5)  # 0.5 times the scale
    rest = jnp.maximum(number + ((s - 1) << 7), number >> 1)  # the second where the scale is 0 and the product subnormal
    bits = jnp.where(number > 64, jnp.minimum(rest, 0x7F80), jnp.where(number == 64, half, 0)) | (code & 0x8000)
    if dtype == jnp.float32:
        bits = bits.astype(jnp.uint32) << 16
    return jax.lax.bitcast_convert_type(bits, dtype).reshape(-1, words.shape[1])


def _host() -> jax.Device | None:
    """The CPU, or the default device where JAX_PLATFORMS leaves it out."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def pack(x: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """(packed, scale) of a matrix that `unpack` gives back to the bit; None if there is no such pair."""
    if x.shape[-1] % GROUP:
        return None
    grouped = x.astype(np.float32).reshape(*x.shape[:-1], -1, GROUP)
    largest = np.max(np.abs(grouped), axis=-1)
    exponent = np.where(largest > 0, np.frexp(largest)[1] - 3, 0)  # the largest number becomes 4 to 7
    with np.errstate(over="ignore"):
        scaled = np.ldexp(grouped, -exponent[..., None])
    code = np.searchsorted(_CODES[:8], np.abs(scaled))
    exact = np.all(_CODES[np.minimum(code, 7)] == np.abs(scaled))
    if not exact or np.any(exponent + _BIAS < 0) or np.any(exponent + _BIAS >= _NAN):
        return None
    code = (code | (np.signbit(scaled) << 3)).reshape(x.shape).astype(np.uint8)
    return code[..., ::2] | code[..., 1::2] << 4, (exponent + _BIAS).astype(np.uint8)
