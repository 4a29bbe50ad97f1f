"""Static facts of a call and the few value-level helpers the kernel bodies share.

Triton knows no slices or concatenations of values, so everything inside a chunk is whole [C, C] and [C, K] tiles and masks.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LOG2E = math.log2(math.e)
ZERO_LOG2 = -1.0e4  # log2 of a decay that is exactly zero: 2**-1e4 is 0 in float32, and sums of it stay finite


class Launch(NamedTuple):
    """How a kernel is launched; results differ by no more than the order of sums."""

    block: int  # columns of values, or channels of keys inside chunks, that a program takes at a time
    warps: int
    stages: int = 1  # chunks in flight in a walk


class Tuning(NamedTuple):
    """By kernel, in the order of a call: the fastest of sixty on an H200. With eight warps two hold the same rows: half as fast."""

    chunk: Launch = Launch(32, 4)
    walk: Launch = Launch(64, 4)
    decay: Launch = Launch(128, 4)
    walk_back: Launch = Launch(64, 4)
    values: Launch = Launch(128, 4)
    edges: Launch = Launch(64, 4, 2)
    channels: Launch = Launch(32, 4)


@dataclasses.dataclass(frozen=True)
class Plan:
    """One call: sizes, how it computes, and its tuning."""

    C: int
    K: int
    V: int
    HV: int
    group: int  # value heads per query head
    scale: float
    terms: int  # bfloat16 arrays that stand for a float32 one in products: 3 keep all its bits, 2 have a relative error of 2**-17
    interpret: bool
    tuning: Tuning

    @property
    def levels(self) -> int:
        return self.C.bit_length() - 1

    def block(self, name: str, width: int) -> int:
        """Of a kernel, of an axis of this width."""
        return min(getattr(self.tuning, name).block, width)


Terms = tuple[jax.Array, ...]  # what products take: bfloat16 arrays of which a float32 array is the sum


def terms(plan: Plan, x: jax.Array) -> Terms:
    """bfloat16 as it is, float32 as `plan.terms` bfloat16 arrays."""
    out = ()
    while x.dtype == jnp.float32 and len(out) < plan.terms - 1:
        out += (x.astype(jnp.bfloat16),)
        x = x - out[-1].astype(jnp.float32)
    return (*out, x.astype(jnp.bfloat16))


def once(plan: Plan, x: Terms | jax.Array) -> Terms:
    """A float32 x that bfloat16 inputs may round to one term, where the error shows in nothing."""
    if plan.terms == 3:
        return x if isinstance(x, tuple) else terms(plan, x)
    return x[:1] if isinstance(x, tuple) else (x.astype(jnp.bfloat16),)


def whole(x: Terms) -> jax.Array:
    return sum(part.astype(jnp.float32) for part in x)


def load(ref, *index) -> Terms:
    """Of an array of terms, which lie along its first axis."""
    return tuple(ref[n, *index] for n in range(ref.shape[0]))


def store(ref, x: Terms, *index) -> None:
    for n, part in enumerate(x):
        ref[n, *index] = part


def dot(plan: Plan, x: Terms | jax.Array, y: Terms | jax.Array, contract: tuple[int, int] = (1, 0), onto=None) -> jax.Array:
    """x . y over the named axes with float32 sums, added to `onto`; the products of small terms that no bit would notice are left out."""
    xs, ys = (z if isinstance(z, tuple) else terms(plan, z) for z in (x, y))
    pairs = [(a, b) for i, a in enumerate(xs) for j, b in enumerate(ys) if i + j < plan.terms]
    for a, b in reversed(pairs):
        product = lax.dot_general(a, b, (((contract[0],), (contract[1],)), ((), ())), preferred_element_type=jnp.float32)
        onto = product if onto is None else onto + product
    return onto


def log2_decay(g: jax.Array) -> jax.Array:
    """Log decay in base e -> base 2, finite."""
    return jnp.maximum(g.astype(jnp.float32) * LOG2E, ZERO_LOG2)


def square(plan: Plan) -> tuple[jax.Array, jax.Array]:
    """Row and column numbers [C, C]."""
    return lax.broadcasted_iota(jnp.int32, (plan.C, plan.C), 0), lax.broadcasted_iota(jnp.int32, (plan.C, plan.C), 1)


def masks(plan: Plan) -> np.ndarray:
    """[2 levels + 2, C, C] of 0 and 1. The first levels + 2 are spans: their products with log decays [C, K] sum those of the tokens t that
    token i decays through.

    At a level: in a later half of 2**level tokens from its first to i, in an earlier one from the token after i to its last; rows of later
    and columns of earlier halves so decayed make the products of the level's pairs. Then from the chunk's start to i, it included, and from
    the token after i to the chunk's end. Last, by level, the pairs: the smallest power-of-two block that holds tokens i and j has halves of
    2**level tokens.
    """
    i, t = np.arange(plan.C)[:, None], np.arange(plan.C)
    spans = [(i >> n == t >> n) & np.where((i >> n) & 1 == 1, t <= i, t > i) for n in range(plan.levels)]
    return np.stack([*spans, t <= i, t > i, *((i ^ t) >> n == 1 for n in range(plan.levels))])


def pairs(plan: Plan, masks, level) -> jax.Array:
    """[C, C] of 0 and 1, bfloat16, to multiply by: loaded for a third of the instructions that comparing indices takes."""
    return masks[plan.levels + 2 + level]
