"""Static facts of a call and the few value-level helpers the kernel bodies share.

Triton knows no slices or concatenations of values, so everything inside a chunk is whole [C, C] and [C, K] tiles and masks made of iotas.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

LOG2E = math.log2(math.e)
ZERO_LOG2 = -1.0e4  # log2 of a decay that is exactly zero: 2**-1e4 is 0 in float32, and sums of it stay finite


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What may change the speed of a call but nothing else; for the H200's 132 SMs of 227 KiB shared memory."""

    walk_block: int = 64  # columns of the state that a program of a walk carries
    channel_block: int = 64  # key channels that the kernels inside chunks take at a time
    chunk_warps: int = 4
    walk_warps: int = 4
    walk_stages: int = 1  # chunks in flight
    values_warps: int = 4
    channels_warps: int = 4
    unroll: bool = False  # levels of the hierarchy as straight code


@dataclasses.dataclass(frozen=True)
class Plan:
    """One call: sizes, how it computes, and its tuning."""

    C: int
    K: int
    V: int
    HV: int
    group: int  # value heads per query head
    scale: float
    exact: bool  # float32 operands instead of bfloat16 ones
    interpret: bool
    tuning: Tuning

    @property
    def operand(self):
        return jnp.float32 if self.exact else jnp.bfloat16

    @property
    def terms(self) -> int:
        """Of a float32 array that products take."""
        return 1 if self.exact else 2

    @property
    def levels(self) -> int:
        return self.C.bit_length() - 1


Terms = tuple[jax.Array, ...]  # what products take: arrays of the operand type of which a float32 array is the sum


def terms(plan: Plan, x: jax.Array) -> Terms:
    """bfloat16 as it is, float32 as the sum of two bfloat16 arrays (relative error 2**-17) or, where products are exact, as it is."""
    if plan.exact or x.dtype == jnp.bfloat16:
        return (x.astype(plan.operand),)
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)


def whole(x: Terms) -> jax.Array:
    return sum(part.astype(jnp.float32) for part in x)


def load(ref, *index) -> Terms:
    """Of an array of terms, which lie along its first axis."""
    return tuple(ref[n, *index] for n in range(ref.shape[0]))


def store(ref, x: Terms, *index) -> None:
    for n, part in enumerate(x):
        ref[n, *index] = part


def dot(plan: Plan, x: Terms | jax.Array, y: Terms | jax.Array, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """x . y over the named axes with float32 sums; the product of two small terms is left out. Where one pass will do the
    caller rounds."""
    xs, ys = (z if isinstance(z, tuple) else terms(plan, z) for z in (x, y))
    precision = lax.Precision.HIGHEST if plan.exact else lax.Precision.DEFAULT
    product = lambda a, b: lax.dot_general(a, b, (((contract[0],), (contract[1],)), ((), ())), precision, jnp.float32)
    pairs = [(a, b) for i, a in enumerate(xs) for j, b in enumerate(ys) if i + j < 2]
    out = product(*pairs[-1])
    for pair in reversed(pairs[:-1]):
        out = out + product(*pair)
    return out


def masked_sum(plan: Plan, mask: jax.Array, x: Terms | jax.Array, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """mask . x: sums of a float32 x where a boolean mask says so."""
    return dot(plan, jnp.where(mask, 1.0, 0.0).astype(plan.operand), x, contract)


def once(plan: Plan, x: jax.Array) -> jax.Array:
    return x.astype(plan.operand)


def log2_decay(g: jax.Array) -> jax.Array:
    """Log decay in base e -> base 2, finite."""
    return jnp.maximum(g.astype(jnp.float32) * LOG2E, ZERO_LOG2)


def square(plan: Plan) -> tuple[jax.Array, jax.Array]:
    """Row and column numbers [C, C]."""
    return lax.broadcasted_iota(jnp.int32, (plan.C, plan.C), 0), lax.broadcasted_iota(jnp.int32, (plan.C, plan.C), 1)


def pairs_of_level(plan: Plan, level) -> jax.Array:
    """[C, C] boolean: i > j, and the smallest power-of-two block that holds both has halves of 2**level tokens."""
    i, j = square(plan)
    return (((i ^ j) >> level) == 1) & (i > j)


def spans_of_level(plan: Plan, level) -> jax.Array:
    """[C, C] boolean: the tokens t that i decays through at a level: in a later half from its first token to i, in an earlier one from the
    token after i to its last. Rows of later and columns of earlier halves, so decayed, make the products of `pairs_of_level`."""
    i, t = square(plan)
    later = ((i >> level) & 1) == 1
    return (((i ^ t) >> level) == 0) & jnp.where(later, t <= i, t > i)


def by_level(plan: Plan, body, carry):
    """carry = body(level, carry) for every level of the hierarchy."""
    if plan.tuning.unroll:
        for level in range(plan.levels):
            carry = body(level, carry)
        return carry
    return lax.fori_loop(0, plan.levels, body, carry)
