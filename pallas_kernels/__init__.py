"""Pallas kernels of kda_jax: arrays in, arrays out. Imports jax, pallas and numpy only."""
