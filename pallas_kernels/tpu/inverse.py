"""(I + A)^-1 of the unit lower triangular matrices of a pack."""

from collections.abc import Generator

import jax
import jax.numpy as jnp

from pallas_kernels.tpu.plan import Plan, dot, to_block


def inverse(plan: Plan, a: jax.Array, constant) -> Generator[None, None, jax.Array]:
    """Strictly lower A in lane form [C, N] float32 -> (I + A)^-1 in lane form, in the operand type.

    Block doubling: with X the inverse of the s x s diagonal blocks and L the blocks that join them in pairs, X - X L X is the inverse of
    the 2s x 2s ones. No power of A is ever formed, so correlated keys do not blow it up. In bfloat16 one Newton step
    X + X (I - X - A X), its residual with A split in two terms, takes the error below the rounding of the result.
    """
    levels, eye, diagonal = constant["levels"], constant["eye"], constant["diagonal"]
    high = a.astype(plan.operand)
    block = to_block(plan, high, diagonal[...])
    x = eye[...] - a * levels[0]
    for n in range(1, levels.shape[0]):
        y = dot(plan, x, block)
        yield
        z = dot(plan, y, to_block(plan, x, diagonal[...]))
        yield
        x = x - z * levels[n]
    if plan.exact:
        return x
    x = x.astype(jnp.bfloat16)
    low = (a - high.astype(jnp.float32)).astype(jnp.bfloat16)
    product = dot(plan, jnp.concatenate([high, low], 0), to_block(plan, x, diagonal[...]))
    yield
    residual = eye[...] - x.astype(jnp.float32) - product[: plan.C] - product[plan.C :]
    correction = dot(plan, x, to_block(plan, residual, diagonal[...]))
    yield
    return (x.astype(jnp.float32) + correction).astype(jnp.bfloat16)
