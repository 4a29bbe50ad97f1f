"""TPU kernels: the recurrence, forward and backward, for every decay with and without the delta rule; a few tokens in place; products of
groups of rows with matrices of their own."""

from pallas_kernels.tpu.decode import decode
from pallas_kernels.tpu.grouped import grouped_dot, grouped_outer
from pallas_kernels.tpu.recurrence import NO_TOKEN, chunk_kda_from_logits, chunk_recurrence, chunk_states
from pallas_kernels.tpu.tiles import refusal as vmem_refusal

__all__ = [
    "NO_TOKEN",
    "chunk_kda_from_logits",
    "chunk_recurrence",
    "chunk_states",
    "decode",
    "grouped_dot",
    "grouped_outer",
    "vmem_refusal",
]
