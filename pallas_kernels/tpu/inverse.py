"""(I + A)^-1 of the unit lower triangular matrices of a pack."""

from collections.abc import Generator

import jax
import jax.numpy as jnp

from pallas_kernels.tpu.plan import Plan, dot, rows, terms, to_block


def inverse(plan: Plan, a: jax.Array, constant) -> Generator[None, None, jax.Array]:
    """Strictly lower A in lane form [C, N] float32 -> (I + A)^-1 in lane form, float32.

    Block doubling: with X the inverse of the s x s diagonal blocks and L the blocks that join them in pairs, X - X L X is the inverse of
    the 2s x 2s ones. No power of A is ever formed, so correlated keys do not blow it up. In bfloat16 one Newton step
    X + X (I - X - A X), its residual with A in two terms, leaves the square of the error of one-pass products.
    """
    levels, eye, diagonal = constant["levels"], constant["eye"], constant["diagonal"]
    once = lambda x: to_block(plan, x.astype(plan.operand), diagonal[...])
    block = once(a)
    x = eye[...] - a * levels[0]
    for n in range(1, levels.shape[0]):
        y = dot(plan, x.astype(plan.operand), block)
        yield
        z = dot(plan, y.astype(plan.operand), once(x))
        yield
        x = x - z * levels[n]
    if plan.exact:
        return x
    x = x.astype(jnp.bfloat16)
    product = dot(plan, rows(list(terms(plan, a))), once(x))
    yield
    x32 = x.astype(jnp.float32)
    residual = eye[...] - x32 - product[: plan.C] - product[plan.C :]
    correction = dot(plan, x, once(residual))
    yield
    return x32 + correction
