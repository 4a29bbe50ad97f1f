"""GPU kernels: Kimi Delta Attention, forward and backward, through Pallas's Triton backend."""

from pallas_kernels.gpu.plan import Launch, Tuning
from pallas_kernels.gpu.recurrence import chunk_kda, force_interpret_mode, interpreting, refusal

__all__ = ["Launch", "Tuning", "chunk_kda", "force_interpret_mode", "interpreting", "refusal"]
