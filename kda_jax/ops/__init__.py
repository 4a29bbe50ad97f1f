"""Recurrences and the functions around them: arrays in, arrays out."""

from kda_jax.ops.segments import Segments, segments
