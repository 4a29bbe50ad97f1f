"""Rows to the devices that own their experts, and back: the all-to-all of expert parallelism (GShard, arXiv 2006.16668), none dropped.

Every device sorts its M rows by expert; a device owns consecutive experts, so what goes to one owner lies together. An owner has a slot
of M rows for each sender, which is all that could come:

    sender s    rows for owner 0 | rows for owner 1 | ...
    owner d     slot of sender 0: its rows for d, then room | slot of sender 1 | ...

Two ways to the same slots: a ragged all-to-all moves only rows; where there is none (CPUs) whole slots move.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def at_owners(
    compute: Callable[[Array, Array], Array], axes: tuple[str, ...], rows: Float[Array, "M D"], counts: Int[Array, "E"]
) -> Float[Array, "M D"]:
    """`compute` where the experts are. Call inside `jax.shard_map`, on each of P devices.

    Args:
        compute: (rows sorted by expert, rows of each owned expert) -> results, in the same order; zeros after the last row.
        axes: mesh axes over which the experts are split.
        rows: sorted by expert; rows of no expert last.
        counts: rows of each of all experts.

    Returns:
        the result of each row, zero for those of no expert.
    """
    table = jax.lax.all_gather(counts, axes)  # [P, E]: rows of each sender for each expert
    P, M = table.shape[0], rows.shape[0]
    here = jax.lax.axis_index(axes)
    owned = jax.lax.dynamic_index_in_dim(table.reshape(P, P, -1), here, axis=1, keepdims=False)  # [P, E/P]: for the experts here
    received = _send(axes, rows, table)
    expert = jax.vmap(lambda ends: jnp.searchsorted(ends, jnp.arange(M), side="right"))(jnp.cumsum(owned, axis=1)).reshape(-1)
    order = jnp.argsort(expert, stable=True)
    results = compute(received[order], jnp.sum(owned, axis=0))
    return _send_back(axes, jnp.zeros_like(results).at[order].set(results, unique_indices=True), table)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _send(axes: tuple[str, ...], rows: Float[Array, "M D"], table: Int[Array, "P E"]) -> Float[Array, "PM D"]:
    """Each row to the slot that its owner keeps for this device."""
    return jax.lax.platform_dependent(rows, table, cpu=functools.partial(_send_dense, axes), default=functools.partial(_send_ragged, axes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _send_back(axes: tuple[str, ...], slots: Float[Array, "PM D"], table: Int[Array, "P E"]) -> Float[Array, "M D"]:
    """The rows of each slot to the device that sent them, in its order. The transpose of `_send`."""
    return jax.lax.platform_dependent(
        slots, table, cpu=functools.partial(_send_back_dense, axes), default=functools.partial(_send_back_ragged, axes)
    )


_send.defvjp(lambda axes, rows, table: (_send(axes, rows, table), table), lambda axes, table, d: (_send_back(axes, d, table), None))
_send_back.defvjp(lambda axes, slots, table: (_send_back(axes, slots, table), table), lambda axes, table, d: (_send(axes, d, table), None))


def _sizes(table: Int[Array, "P E"]) -> tuple[Int[Array, "P P"], Int[Array, "P P"]]:
    """[s, d]: how many rows sender s has for owner d, and where among its rows they begin."""
    sizes = jnp.sum(table.reshape(table.shape[0], table.shape[0], -1), axis=-1)
    return sizes, jnp.cumsum(sizes, axis=1) - sizes


def _send_dense(axes: tuple[str, ...], rows: Array, table: Array) -> Array:
    M = rows.shape[0]
    sizes, starts = (x[jax.lax.axis_index(axes)] for x in _sizes(table))
    at = jnp.where(jnp.arange(M) < sizes[:, None], starts[:, None] + jnp.arange(M), M)
    slots = rows.at[at].get(mode="fill", fill_value=0)
    return jax.lax.all_to_all(slots, axes, 0, 0, tiled=True).reshape(-1, rows.shape[1])


def _send_back_dense(axes: tuple[str, ...], slots: Array, table: Array) -> Array:
    P = table.shape[0]
    M = slots.shape[0] // P
    sizes, starts = (x[jax.lax.axis_index(axes)] for x in _sizes(table))
    back = jax.lax.all_to_all(slots.reshape(P, M, -1), axes, 0, 0, tiled=True)
    owner = jnp.searchsorted(starts + sizes, jnp.arange(M), side="right")  # P for rows of no expert
    return back.at[owner, jnp.arange(M) - starts[jnp.minimum(owner, P - 1)]].get(mode="fill", fill_value=0)


def _send_ragged(axes: tuple[str, ...], rows: Array, table: Array) -> Array:
    P, M = table.shape[0], rows.shape[0]
    here = jax.lax.axis_index(axes)
    sizes, starts = _sizes(table)
    slots = jnp.zeros((P * M, rows.shape[1]), rows.dtype)
    slot = jnp.full((P,), here * M, starts.dtype)
    return jax.lax.ragged_all_to_all(rows, slots, starts[here], sizes[here], slot, sizes[:, here], axis_name=axes)


def _send_back_ragged(axes: tuple[str, ...], slots: Array, table: Array) -> Array:
    P = table.shape[0]
    M = slots.shape[0] // P
    here = jax.lax.axis_index(axes)
    sizes, starts = _sizes(table)
    rows, slot = jnp.zeros((M, slots.shape[1]), slots.dtype), M * jnp.arange(P, dtype=starts.dtype)
    return jax.lax.ragged_all_to_all(slots, rows, slot, sizes[:, here], starts[:, here], sizes[here], axis_name=axes)
