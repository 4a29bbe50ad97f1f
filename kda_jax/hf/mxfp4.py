"""MXFP4 weights of a release: two 4-bit numbers per byte, one power of two per 32 of them."""

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from kda_jax.hf.forms import At, Shape, Stored
from kda_jax.hf.problems import BadTensor

GROUP = 32
"""Consecutive inputs that share a scale."""
BFLOAT16 = np.dtype(jnp.bfloat16)
_CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_NAN, _BIAS = 255, 127


class Packed(NamedTuple):
    """An E2M1 matrix [out, in] and its E8M0 scales, read as bfloat16, in which every product of the two is exact."""

    name: str
    packed: Stored
    """uint8 [out, in / 2]."""
    scale: Stored
    """uint8 [out, in / 32]: value 2^(s - 127)."""
    shape: Shape
    dtype: np.dtype = BFLOAT16

    @property
    def file(self):
        return self.packed.file

    def __getitem__(self, at: At) -> np.ndarray:
        """Whole groups are read, and what was not asked for is cut off."""
        rows, columns = at
        start, stop, _ = columns.indices(self.shape[1])
        first, last = start // GROUP, -(-stop // GROUP)
        scale = self.scale[rows, slice(first, last)]
        if np.any(scale == _NAN):
            raise BadTensor(f"{self.name} has a scale of 255, which is not a number")
        values = unpack(self.packed[rows, slice(first * GROUP // 2, last * GROUP // 2)], scale)
        return values[:, start - first * GROUP : stop - first * GROUP]


def pair(packed: Stored, scale: Stored | None, problems: list[str]) -> list[Packed]:
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


def unpack(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """bfloat16 [out, in] of uint8 [out, in / 2] and uint8 [out, in / 32] (OCP Microscaling Formats 1.0, section 5.3.3).

    Exact: a 4-bit number times a power of two is a bfloat16 unless it is below its range, where it is rounded to nearest even.

    Example:
        >>> import numpy as np
        >>> unpack(np.full((1, 16), 0x2B, np.uint8), np.full((1, 1), 126, np.uint8))[0, :2].tolist()
        [-0.75, 0.5]
    """
    at = np.repeat(scale.astype(np.uint16) << 8, GROUP // 2, axis=-1) | packed
    return np.take(_pairs(), at).view(BFLOAT16)


@functools.cache
def _pairs() -> np.ndarray:
    """256 * scale + byte -> the two numbers, that of the low nibble first, as the 32 bits of a pair of bfloat16."""
    byte, scale = np.arange(256), np.ldexp(1.0, np.arange(256) - _BIAS)
    pairs = np.stack([_CODES[byte & 15], _CODES[byte >> 4]], axis=-1)
    with np.errstate(over="ignore"):
        return (pairs * scale[:, None, None]).astype(BFLOAT16).reshape(-1).view(np.uint32)


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
