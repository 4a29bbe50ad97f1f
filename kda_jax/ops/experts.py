"""A mixture of experts as three grouped matrix products: no token is dropped, no expert computes more than it was given."""

import functools
import typing
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kda_jax.ops.routing import Routing, expert_counts

# Rows of one block of the "blocks" implementation: every expert's rows are padded to a multiple of it.
BLOCK_ROWS = 32


def swiglu(gate: Array, up: Array) -> Array:
    """silu(gate) * up (Shazeer, arXiv 2002.05202)."""
    return jax.nn.silu(gate) * up


@typing.no_type_check  # its own checks raise ValueError with the name and shape of the argument
def experts(
    x: Float[Array, "N D"],
    routing: Routing,
    w1: Float[Array, "E D F"],
    w3: Float[Array, "E D F"],
    w2: Float[Array, "E F D"],
    *,
    activation: Callable[[Array, Array], Array] = swiglu,
    implementation: Literal["ragged", "blocks"] | None = None,
) -> Float[Array, "N D"]:
    """y_n = sum_j weights[n, j] * E_{experts[n, j]}(x_n), with E_e(x) = activation(x w1_e, x w3_e) w2_e.

    Tokens are sorted by expert and each expert multiplies its own consecutive rows (MegaBlocks, arXiv 2211.15841).

    Args:
        x: [N, D].
        routing: from `ops.route`. An expert number outside 0 .. E-1 contributes nothing.
        w1, w3: [E, D, F], gate and up projections.
        w2: [E, F, D], down projection.
        activation: (gate [M, F], up [M, F]) -> [M, F].
        implementation: "ragged" = `jax.lax.ragged_dot`; "blocks" = batched products of fixed-size row blocks; None = "blocks" on
            CPU, where ragged_dot is a loop over experts, and "ragged" elsewhere, chosen when the program is lowered.

    Returns:
        [N, D] in x's dtype.

    Raises:
        ValueError: weights that do not fit, or an unknown implementation.

    Numerics: products in x's dtype with float32 sums; the weighted sum over a token's experts is float32, rounded once. Rows do not
        influence each other, and an expert without tokens gets a gradient of exactly zero.
    """
    (N, D), E = x.shape, w1.shape[0]
    if w1.shape[1] != D or w3.shape != w1.shape or w2.shape != (E, w1.shape[2], D):
        raise ValueError(f"w1 {w1.shape}, w3 {w3.shape}, w2 {w2.shape} do not fit x {x.shape}; expected (E, D, F) twice and (E, F, D)")
    chosen = routing.experts.reshape(-1)
    order = jnp.argsort(jnp.where((chosen >= 0) & (chosen < E), chosen, E), stable=True)
    group_sizes = expert_counts(routing.experts, E)
    rows = grouped_mlp(x[order // routing.experts.shape[1]], group_sizes, (w1, w3, w2), activation, implementation)
    y = jnp.zeros_like(rows).at[order].set(rows, unique_indices=True).reshape(N, -1, D)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.einsum("nk,nkd->nd", routing.weights.astype(wide), y.astype(wide), precision="highest").astype(x.dtype)


def grouped_mlp(
    rows: Float[Array, "M D"],
    group_sizes: Int[Array, "E"],
    weights: tuple[Float[Array, "E D F"], Float[Array, "E D F"], Float[Array, "E F D"]],
    activation: Callable[[Array, Array], Array] = swiglu,
    implementation: Literal["ragged", "blocks"] | None = None,
) -> Float[Array, "M D"]:
    """Expert e's MLP on its own rows: the first group_sizes[0] rows go to expert 0, the next to expert 1, and so on.

    `weights` is (w1, w3, w2). Rows after the last group give zero, so a device may hold fewer tokens, or none, than its buffer has
    rows. The rest is as in `experts`.
    """
    group_sizes = jax.lax.stop_gradient(group_sizes)
    weights = tuple(_freeze_unused(w, group_sizes > 0) for w in weights)
    choices = {"ragged": functools.partial(_ragged, activation), "blocks": functools.partial(_blocks, activation)}
    if implementation is None:
        return jax.lax.platform_dependent(rows, group_sizes, weights, cpu=choices["blocks"], default=choices["ragged"])
    if implementation not in choices:
        raise ValueError(f"implementation is {implementation!r}; expected 'ragged', 'blocks' or None")
    return choices[implementation](rows, group_sizes, weights)


@jax.custom_vjp
def _freeze_unused(w: Array, used: Array) -> Array:
    return w


# Whatever a grouped product leaves in the gradient of a group without rows, it is zero.
_freeze_unused.defvjp(lambda w, used: (w, used), lambda used, dw: (jnp.where(used[:, None, None], dw, 0), None))


def _ragged(activation: Callable, rows: Array, group_sizes: Array, weights: tuple[Array, Array, Array]) -> Array:
    w1, w3, w2 = weights
    precision = _precision(rows)
    wide = jnp.promote_types(rows.dtype, jnp.float32)

    def dot(x, w):
        return jax.lax.ragged_dot(x, w, group_sizes, precision=precision, preferred_element_type=wide).astype(x.dtype)

    used = (jnp.arange(rows.shape[0]) < jnp.sum(group_sizes))[:, None]
    rows = jnp.where(used, rows, 0)
    return jnp.where(used, dot(activation(dot(rows, w1), dot(rows, w3)), w2), 0)


def _blocks(activation: Callable, rows: Array, group_sizes: Array, weights: tuple[Array, Array, Array]) -> Array:
    """Pad every group to whole blocks of BLOCK_ROWS rows and multiply block by block, each with its expert's weights."""
    M, D = rows.shape
    E = group_sizes.shape[0]
    blocks = M // BLOCK_ROWS + min(E, M)  # enough for any sizes: at most one partly filled block per used expert
    ends = jnp.cumsum(group_sizes)
    blocks_end = jnp.cumsum(-(-group_sizes // BLOCK_ROWS))
    expert_of_block = jnp.minimum(jnp.searchsorted(blocks_end, jnp.arange(blocks), side="right"), E - 1)
    expert_of_row = jnp.minimum(jnp.searchsorted(ends, jnp.arange(M), side="right"), E - 1)
    # Row m stays at its distance from the start of its group; rows of no group go out of range and are dropped.
    first_block = blocks_end - -(-group_sizes // BLOCK_ROWS)
    slot = BLOCK_ROWS * first_block[expert_of_row] + jnp.arange(M) - (ends - group_sizes)[expert_of_row]
    slot = jnp.where(jnp.arange(M) < ends[-1], slot, blocks * BLOCK_ROWS)

    precision = _precision(rows)
    w1, w3, w2 = (w[expert_of_block] for w in weights)

    def dot(x, w):
        return jnp.einsum("nmd,ndf->nmf", x, w, precision=precision)

    x = jnp.zeros((blocks * BLOCK_ROWS, D), rows.dtype).at[slot].set(rows, mode="drop", unique_indices=True)
    x = x.reshape(blocks, BLOCK_ROWS, D)
    y = dot(activation(dot(x, w1), dot(x, w3)), w2)
    return y.reshape(-1, D).at[slot].get(mode="fill", fill_value=0)


def _precision(x: Array) -> jax.lax.Precision:
    return jax.lax.Precision.HIGHEST if x.dtype.itemsize >= 4 else jax.lax.Precision.DEFAULT
