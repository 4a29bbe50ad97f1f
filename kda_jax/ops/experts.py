"""A mixture of experts as three grouped matrix products: no token is dropped, no expert computes more than it was given."""

import functools
import typing
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Integer

from kda_jax.ops.dispatch import not_on, tpu_only
from kda_jax.ops.exchange import at_owners
from kda_jax.ops.routing import Routing, capacity, expert_counts, token_names
from kda_jax.ops.spec import need_floats, need_integers
from kda_jax.sharding import Shards, local_map, padded

# Rows of one block of the "blocks" implementation: every expert's rows are padded to a multiple of it. Each block copies its expert's
# weights, so where products are cheap blocks are large.
BLOCK_ROWS = 32
BLOCK_ROWS_GPU = 128
# Blocks multiplied at a time, which bounds the memory of those copies.
_BATCH = 64


def swiglu(gate: Array, up: Array) -> Array:
    """silu(gate) * up (Shazeer, arXiv 2002.05202)."""
    return jax.nn.silu(gate) * up


@typing.no_type_check  # its own checks raise ValueError with the name and shape of the argument
def experts(
    x: Float[Array, "*tokens D"],
    routing: Routing,
    w1: Float[Array, "E D F"],
    w3: Float[Array, "E D F"],
    w2: Float[Array, "E F D"],
    *,
    activation: Callable[[Array, Array], Array] = swiglu,
    capacity_factor: float | None = None,
    implementation: Literal["ragged", "blocks", "pallas_tpu"] | None = None,
) -> Float[Array, "*tokens D"]:
    """y_n = sum_j weights[n, j] * E_{experts[n, j]}(x_n), with E_e(x) = activation(x w1_e, x w3_e) w2_e.

    Tokens are sorted by expert and each expert multiplies its own consecutive rows (MegaBlocks, arXiv 2211.15841).

    Args:
        x: [N, D] or [B, T, D].
        routing: from `ops.route`, of the same tokens. An expert number outside 0 .. E-1 contributes nothing.
        w1, w3: [E, D, F], gate and up projections.
        w2: [E, F, D], down projection.
        activation: (gate [M, F], up [M, F]) -> [M, F].
        capacity_factor: the one that `limit` has applied to `routing`, so that owners keep room for no more than that; None for all.
        implementation: "pallas_tpu" = grouped products on a TPU, forward and backward; "ragged" = `jax.lax.ragged_dot`, whose gradient of
            the weights multiplies every row with every expert, on a TPU too; "blocks" = batched products of fixed-size row blocks. None
            = "pallas_tpu" on a TPU, "ragged" in programs for one that are lowered elsewhere without a mesh that says so, "blocks" on
            CPUs and GPUs, where ragged_dot multiplies every row with every expert in all directions.

    Returns:
        [N, D] or [B, T, D] in x's dtype.

    Raises:
        ValueError: weights that do not fit, or an unknown implementation.
        NotImplementedError: "pallas_tpu" does not apply; the message says why.

    Numerics: products in x's dtype with float32 sums; the weighted sum over a token's experts is float32, rounded once. Rows do not
        influence each other, and an expert without tokens gets a gradient of exactly zero.

    Sharding: a device owns consecutive experts, E padded to a multiple of their number with experts that nobody chooses. Each device
        sends its tokens to the owners of their experts and gets the results back; every device has room for all that could come, so
        none is dropped. FFN widths may be split as well.
    """
    need_floats("experts", dict(x=x, weights=routing.weights, w1=w1, w3=w3, w2=w2))
    need_integers("experts", dict(experts=routing.experts))
    if x.ndim not in (2, 3):
        raise ValueError(f"x has shape {x.shape}; expected [N, D] or [B, T, D]")
    if routing.experts.shape[:-1] != x.shape[:-1] or routing.weights.shape != routing.experts.shape:
        raise ValueError(
            f"routing has experts {routing.experts.shape} and weights {routing.weights.shape}; expected {x.shape[:-1]} and k in both"
        )
    routing = routing._replace(experts=routing.experts.astype(jnp.int32))  # what the arithmetic below needs: signed, room for E
    D, E = x.shape[-1], w1.shape[0]
    if w1.ndim != 3 or w1.shape[1] != D or w3.shape != w1.shape or w2.shape != (E, w1.shape[2], D):
        raise ValueError(f"w1 {w1.shape}, w3 {w3.shape}, w2 {w2.shape} do not fit x {x.shape}; expected (E, D, F) twice and (E, F, D)")
    more = ((0, padded("experts", E) - E), (0, 0), (0, 0))
    w1, w3, w2 = (jnp.pad(w, more) if more[0][1] else w for w in (w1, w3, w2))
    up, down, tokens = ("experts", "stored", "mlp"), ("experts", "mlp", "stored"), token_names(x)
    local = functools.partial(_experts, activation, implementation, E, capacity_factor)
    return local_map(local, (x, *routing, w1, w3, w2), (tokens, tokens, tokens, up, up, down), tokens)


def _experts(activation, implementation, E: int, factor: float | None, shards: Shards, x: Array, chosen: Array, weights: Array, *w: Array):
    """One device's tokens and experts; of E experts in all."""
    w1, w3, w2 = (shards.whole(part, "stored", axis) for part, axis in zip(w, (1, 1, 2), strict=True))
    k, D, owned = chosen.shape[-1], x.shape[-1], w1.shape[0]
    chosen = jnp.where((chosen >= 0) & (chosen < E), chosen, owned * shards.count("experts")).reshape(-1)
    apart = bool(shards.axes("experts")) and set(shards.axes("experts")) <= set(shards.axes("batch"))
    if not apart:  # every owner has these tokens, and adds what its experts make of them
        chosen = chosen - shards.index("experts") * owned
        chosen = jnp.where((chosen >= 0) & (chosen < owned), chosen, owned)
    order = jnp.argsort(chosen, stable=True)
    rows = x.reshape(-1, D)[order // k]
    compute = functools.partial(_gated, activation, implementation, w1, w3, w2)
    if apart:
        room = len(rows) if factor is None else min(len(rows), owned * capacity(len(rows), E, factor))
        rows = at_owners(compute, shards.axes("experts"), rows, expert_counts(chosen[:, None], owned * shards.count("experts")), room)
    else:
        rows = compute(rows, expert_counts(chosen[:, None], owned))
    y = jnp.zeros_like(rows).at[order].set(rows, unique_indices=True).reshape(-1, k, D)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y = jnp.einsum("nk,nkd->nd", weights.reshape(-1, k).astype(wide), y.astype(wide), precision="highest")
    y = shards.sum(y, "mlp") if apart else shards.sum(y, "mlp", "experts")
    return y.astype(x.dtype).reshape(x.shape)


def _gated(activation: Callable, implementation: str | None, w1: Array, w3: Array, w2: Array, rows: Array, group_sizes: Array) -> Array:
    """Rows sorted by expert through their experts."""
    dot = functools.partial(grouped_dot, group_sizes=group_sizes, implementation=implementation)
    return dot(activation(dot(rows, w1), dot(rows, w3)), w2)


def grouped_dot(
    x: Float[Array, "M D"],
    w: Float[Array, "E D F"],
    group_sizes: Integer[Array, "E"],
    implementation: Literal["ragged", "blocks", "pallas_tpu"] | None = None,
) -> Float[Array, "M F"]:
    """Each group of consecutive rows times its own matrix: the first group_sizes[0] rows times w[0], the next times w[1], and so on.

    Rows after the last group give zero, so a device may hold fewer rows, or none, than its buffer has room for. A group without rows
    gets a gradient of exactly zero. `implementation` as in `experts`.
    """
    if implementation not in ("ragged", "blocks", "pallas_tpu", None):
        raise ValueError(f"implementation is {implementation!r}; expected 'ragged', 'blocks', 'pallas_tpu' or None")
    group_sizes = group_sizes.astype(jnp.int32)  # signed: what follows negates them
    refused = _refused(x, w)
    if implementation == "pallas_tpu" and refused:
        raise NotImplementedError(f"grouped_dot: implementation 'pallas_tpu' does not apply: {refused}")
    if implementation is None and not (refused or not_on("tpu")):
        implementation = "pallas_tpu"
    return _grouped_dot(implementation, x, w, group_sizes)


def _refused(x: Array, w: Array) -> str | None:
    """Why the TPU kernels cannot take these matrices on any machine; None if they can."""
    if 0 in (*x.shape, *w.shape):
        return "there is nothing to compute"
    return "TPUs have no float64" if jnp.float64 in (x.dtype, w.dtype) else None


# The choice by platform is made inside both directions: outside, each platform's residuals would be kept on all of them.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_dot(implementation: str | None, x: Array, w: Array, group_sizes: Array) -> Array:
    return _on_platform(implementation, 0, x, w, group_sizes)


def _grouped_dot_backward(implementation: str | None, residuals: tuple[Array, Array, Array], dy: Array):
    # Together, or a scheduler leaves the gradients of weights for later and keeps what they are made of, rows of several layers.
    return *jax.lax.optimization_barrier(_on_platform(implementation, 1, *residuals, dy)), None


_grouped_dot.defvjp(lambda implementation, *args: (_grouped_dot(implementation, *args), args), _grouped_dot_backward)


def _on_platform(implementation: str | None, direction: int, *args: Array):
    """The product (direction 0) or its gradients (1) that `implementation` names, or the best where the program is lowered for."""
    ragged, small, large = (
        (product, functools.partial(_gradients, product))[direction]
        for product in (_ragged, functools.partial(_blocks, BLOCK_ROWS), functools.partial(_blocks, BLOCK_ROWS_GPU))
    )
    if implementation is None:
        return jax.lax.platform_dependent(*args, cpu=small, tpu=ragged, default=large)
    return {"ragged": ragged, "blocks": small, "pallas_tpu": (_pallas, _pallas_gradients)[direction]}[implementation](*args)


def _gradients(product: Callable, x: Array, w: Array, group_sizes: Array, dy: Array) -> tuple[Array, Array]:
    """dx and dw by JAX's own derivative of `product`."""
    dx, dw = jax.vjp(lambda x, w: product(x, w, group_sizes), x, w)[1](dy)
    return dx, jnp.where((group_sizes > 0)[:, None, None], dw, 0)


def _pallas(x: Array, w: Array, group_sizes: Array) -> Array:
    """The TPU kernels."""
    from pallas_kernels import tpu

    with tpu_only("grouped_dot"):
        return tpu.grouped_dot(*_kernel_types(x, w), group_sizes).astype(x.dtype)


def _pallas_gradients(x: Array, w: Array, group_sizes: Array, dy: Array) -> tuple[Array, Array]:
    from pallas_kernels import tpu

    with tpu_only("grouped_dot"):
        wide_x, wide_w, wide_dy = _kernel_types(x, w, dy)
        dx = tpu.grouped_dot(wide_dy, wide_w, group_sizes, transposed=True)
        return dx.astype(x.dtype), tpu.grouped_outer(wide_x, wide_dy, group_sizes).astype(w.dtype)


def _kernel_types(*arrays: Array) -> list[Array]:
    """All in bfloat16 if all are, else in float32."""
    dtype = jnp.bfloat16 if all(x.dtype == jnp.bfloat16 for x in arrays) else jnp.float32
    return [x.astype(dtype) for x in arrays]


def _ragged(x: Array, w: Array, group_sizes: Array) -> Array:
    used = (jnp.arange(x.shape[0]) < jnp.sum(group_sizes))[:, None]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    y = jax.lax.ragged_dot(jnp.where(used, x, 0), w, group_sizes, precision=_precision(x), preferred_element_type=wide)
    return jnp.where(used, y.astype(x.dtype), 0)


def _blocks(size: int, x: Array, w: Array, group_sizes: Array) -> Array:
    """Pad every group to whole blocks of `size` rows and multiply block by block, each with its group's matrix."""
    M, D = x.shape
    E = group_sizes.shape[0]
    blocks = M // size + min(E, M)  # enough for any sizes: at most one partly filled block per used group
    ends = jnp.cumsum(group_sizes)
    blocks_of_group = -(-group_sizes // size)
    blocks_end = jnp.cumsum(blocks_of_group)
    group_of_block = jnp.minimum(jnp.searchsorted(blocks_end, jnp.arange(blocks), side="right"), E - 1)
    group_of_row = jnp.minimum(jnp.searchsorted(ends, jnp.arange(M), side="right"), E - 1)
    # Row m stays at its distance from the start of its group; rows of no group go out of range and are dropped.
    slot = size * (blocks_end - blocks_of_group)[group_of_row] + jnp.arange(M) - (ends - group_sizes)[group_of_row]
    slot = jnp.where(jnp.arange(M) < ends[-1], slot, blocks * size)
    padded = jnp.zeros((blocks * size, D), x.dtype).at[slot].set(x, mode="drop", unique_indices=True)
    y = _block_product(padded.reshape(blocks, size, D), w, group_of_block)
    return y.reshape(blocks * size, -1).at[slot].get(mode="fill", fill_value=0)


@jax.custom_vjp
def _block_product(x: Float[Array, "n m D"], w: Float[Array, "E D F"], group: Int[Array, "n"]) -> Float[Array, "n m F"]:
    """x[i] w[group[i]], _BATCH blocks at a time. The gradient of w is summed over blocks in float32."""
    return jax.lax.map(lambda block: jnp.dot(block[0], w[block[1]], precision=_precision(x)), (x, group), batch_size=_BATCH)


def _block_product_backward(residuals: tuple[Array, Array, Array], dy: Array):
    x, w, group = residuals
    E, precision, wide = w.shape[0], _precision(x), jnp.promote_types(w.dtype, jnp.float32)
    dx = jax.lax.map(lambda block: jnp.dot(block[0], w[block[1]].T, precision=precision), (dy, group), batch_size=_BATCH)

    def add(dw, batch):
        x, dy, group = batch
        return dw.at[group].add(jnp.einsum("nmd,nmf->ndf", x, dy, precision=precision, preferred_element_type=wide), mode="drop"), None

    def batches(a, fill):
        a = jnp.pad(a, [(0, -len(a) % _BATCH)] + [(0, 0)] * (a.ndim - 1), constant_values=fill)
        return a.reshape(-1, _BATCH, *a.shape[1:])

    dw, _ = jax.lax.scan(add, jnp.zeros(w.shape, wide), (batches(x, 0), batches(dy, 0), batches(group, E)))
    return dx, dw.astype(w.dtype), None


_block_product.defvjp(lambda *args: (_block_product(*args), args), _block_product_backward)


def _precision(x: Array) -> jax.lax.Precision:
    return jax.lax.Precision.HIGHEST if x.dtype.itemsize >= 4 else jax.lax.Precision.DEFAULT
