"""Static facts of one kernel and the few value-level helpers every kernel body shares.

Heads are processed in packs. A pack holds P heads with P * C = N rows, so that the C x C matrices of a chunk fill whole 128-lane registers:

    block form  [N, N]   the P matrices of a pack on the diagonal of one matrix, zeros elsewhere: what a matmul takes
    lane form   [C, N]   the same P matrices side by side: what elementwise code and memory take (no zeros stored)

A product of P pairs of C x C matrices is one matmul `lane(X) @ block(Y) = lane(XY)`.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LANES = 128
STRIP = 16  # rows of a diagonal block whose decays share one anchor
LOG2E = math.log2(math.e)
TINY = 1.0e-24  # stands for beta = 0 where gradients are wanted, so that the prediction error y / beta exists
ZERO_LOG2 = -1.0e4  # log2 of a decay that is exactly zero: 2**-1e4 is 0 in float32, and sums of it stay finite


@dataclasses.dataclass(frozen=True)
class Plan:
    """Both kernels of a call and their grid steps: so many value heads of `C` tokens, `pack` heads side by side, `group` value heads per
    query head."""

    decay: str  # "none" | "head" | "channel" | "bounded" (per channel and never below -5 in natural log)
    delta: bool
    C: int
    K: int
    V: int
    heads: int  # of a step of the kernel at hand: the forward, until the backward takes its own number
    backward_heads: int
    pack: int
    group: int
    share: int  # value heads that every query head is repeated for beforehand, where no block of grouped heads is legal
    scale: float
    normalize: bool  # L2-normalise q and k, as one factor per token that meets their products
    reset: bool  # decays per channel with sequence starts given apart, as decays "head" of 0 or -inf
    gate: float | None  # the kernel computes g from logits: its lower bound, or 0.0 for the softplus form
    exact: bool  # float32 operands (six MXU passes) instead of bfloat16

    @property
    def N(self) -> int:
        return self.pack * self.C

    @property
    def channel(self) -> bool:
        """Decays per channel: the diagonal of the scores, which no decay touches, is kept apart."""
        return self.decay in ("channel", "bounded")

    @property
    def saved_terms(self) -> int:
        """Terms of a saved state or inverse; they lie side by side in lanes."""
        return 1 if self.exact else 2

    @property
    def operand(self):
        return jnp.float32 if self.exact else jnp.bfloat16


Terms = jax.Array | tuple[jax.Array, ...]  # an array, or bfloat16 arrays of which it is the sum


def terms(plan: Plan, x: Terms) -> tuple[jax.Array, ...]:
    """What a product takes of x: bfloat16 as it is, float32 as the sum of two bfloat16 arrays (relative error 2**-17)."""
    if isinstance(x, tuple):
        return x
    if plan.exact or x.dtype == jnp.bfloat16:
        return (x.astype(plan.operand),)
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)


def dot(plan: Plan, x: Terms, y: Terms, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """x . y over the named axes with float32 sums. A bfloat16 operand is taken as it is, a float32 one in two terms.

    Where one pass is enough the caller rounds the operand. The passes are one product with a longer contraction: hi hi + lo hi + hi lo.
    """
    xs, ys = terms(plan, x), terms(plan, y)
    pairs = [(a, b) for i, a in enumerate(xs) for j, b in enumerate(ys) if i + j < 2]
    x, y = (rows([pair[side] for pair in pairs], contract[side]) for side in (0, 1))
    precision = lax.Precision.HIGHEST if plan.exact else lax.Precision.DEFAULT
    return lax.dot_general(x, y, (((contract[0],), (contract[1],)), ((), ())), precision=precision, preferred_element_type=jnp.float32)


def round_once(plan: Plan, x: jax.Array) -> jax.Array:
    """One term where decays per channel have rounded operands already. Decays per head leave q and k exact: there it would show."""
    return x.astype(plan.operand) if plan.channel else x


def rows(parts: list[jax.Array], axis: int = 0) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def sums(plan: Plan, weights: jax.Array, transposed: jax.Array, x: jax.Array) -> jax.Array:
    """weights [R, C] @ x [C, K] for a 0/1 matrix and float32 x; the gradient of x is a sum of the same precision."""
    return dot(plan, weights, x)


sums.defvjp(
    lambda plan, weights, transposed, x: (dot(plan, weights, x), transposed),
    lambda plan, transposed, d: (None, None, dot(plan, transposed, d)),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def exp2(x: jax.Array, factor: float = 1.0) -> jax.Array:
    """2**x times a power of two, with the gradient taken to log decays in base e, as users give them: d/dg e^g = e^g."""
    return jnp.exp2(x) if factor == 1.0 else jnp.exp2(x) * factor


exp2.defvjp(lambda x, factor: (exp2(x, factor),) * 2, lambda factor, y, d: (d * y,))


@jax.custom_vjp
def log2_decay(g: jax.Array) -> jax.Array:
    """Log decay in base e -> base 2, finite; its gradient stays in base e (see exp2)."""
    return jnp.maximum(g * LOG2E, ZERO_LOG2)


log2_decay.defvjp(lambda g: (log2_decay(g), None), lambda _, d: (d,))


@jax.custom_vjp
def softplus(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


softplus.defvjp(lambda x: (softplus(x), x), lambda x, d: (d * jax.nn.sigmoid(x),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def split_rows(x: jax.Array, rows: int) -> list[jax.Array]:
    """[R, K] -> R / rows arrays; its gradient is one concatenation instead of a sum of padded arrays."""
    return [x[i : i + rows] for i in range(0, x.shape[0], rows)]


def side_by_side(x: tuple[jax.Array, ...]) -> jax.Array:
    return rows(list(x), 1)


def saved(plan: Plan, x: jax.Array) -> tuple[jax.Array, ...]:
    """The terms of a saved state or inverse."""
    width = x.shape[1] // plan.saved_terms
    return tuple(x[:, i * width : (i + 1) * width] for i in range(plan.saved_terms))


split_rows.defvjp(lambda x, rows: (split_rows(x, rows), None), lambda rows, _, d: (jnp.concatenate(d, 0),))


def to_block(plan: Plan, x: Terms, diagonal: jax.Array) -> tuple[jax.Array, ...]:
    """Lane form [C, N] -> block form [N, N], in terms; `diagonal` [N, N] is 1 on the pack's diagonal blocks."""
    return tuple(t if plan.pack == 1 else jnp.concatenate([t] * plan.pack, 0) * diagonal for t in terms(plan, x))


def to_lanes(plan: Plan, blocks: list[jax.Array]) -> jax.Array:
    """P arrays [C, N], the p-th right in lanes pC..(p+1)C, -> one [C, N]."""
    lane = lax.broadcasted_iota(jnp.int32, (plan.C, plan.N), 1)
    out = blocks[-1]
    for p in reversed(range(plan.pack - 1)):
        out = jnp.where(lane < (p + 1) * plan.C, blocks[p], out)
    return out


def spread(plan: Plan, columns: list[jax.Array]) -> jax.Array:
    """P columns [C, 1] -> [C, N], each over its head's lanes."""
    return to_lanes(plan, [jnp.broadcast_to(c, (plan.C, plan.N)) for c in columns])


def causal_masks(plan: Plan) -> tuple[jax.Array, jax.Array]:
    """(block [N, N]: i > j inside a diagonal block, or i >= j where the scores hold the diagonal; lanes [C, N]: i > j), boolean."""
    row, col = (lax.broadcasted_iota(jnp.int32, (plan.N, plan.N), d) for d in (0, 1))
    block = row > col if plan.channel else row >= col
    if plan.pack > 1:
        block &= (row ^ col) < plan.C  # not row // C: a division asks for the device when it is lowered
    i, j = (lax.broadcasted_iota(jnp.int32, (plan.C, plan.N), d) for d in (0, 1))
    return block, i > (j & (plan.C - 1))


def constants(plan: Plan) -> dict[str, np.ndarray]:
    """0/1 matrices the kernels read: `levels` [log2 C, C, N] of the inverse, `eye` [C, N], `diagonal` [N, N]."""
    i, j = np.arange(plan.C)[:, None], np.arange(plan.N)[None, :] % plan.C
    halves = [2**n for n in range(plan.C.bit_length() - 1)]
    levels = [(i // (2 * s) == j // (2 * s)) & (i // s % 2 == 1) & (j // s % 2 == 0) for s in halves]
    block = np.arange(plan.N) // plan.C
    return {
        "levels": np.stack(levels).astype(np.float32),
        "eye": (i == j).astype(np.float32),
        "diagonal": (block[:, None] == block[None, :]).astype(plan.operand),
    }
