"""TPU kernels: the recurrence, forward and backward, for every decay with and without the delta rule."""

from pallas_kernels.tpu.recurrence import NO_TOKEN, chunk_kda_from_logits, chunk_recurrence

__all__ = ["NO_TOKEN", "chunk_kda_from_logits", "chunk_recurrence"]
