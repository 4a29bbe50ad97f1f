"""TPU kernels: `chunk_recurrence`, forward and backward, for every decay with and without the delta rule."""

from pallas_kernels.tpu.recurrence import chunk_recurrence

__all__ = ["chunk_recurrence"]
