"""Runs the GPU kernels on a CPU through Pallas's interpreter."""

import jax
import jax.numpy as jnp

from pallas_kernels.gpu import chunk_kda, force_interpret_mode
from tests.kernels.oracle import Case
from tests.kernels.run_tpu import arguments


def forward_backward(case: Case, dtype, **options) -> dict[str, jax.Array]:
    """o, final and the gradients by name."""
    a, do, dfinal = arguments(case, dtype), jnp.asarray(case.do, dtype), jnp.asarray(case.dfinal, jnp.float32)
    with force_interpret_mode():
        return _run(a, do, dfinal, tuple(options.items()))


def _both(a, do, dfinal, options):
    (o, final), pull = jax.vjp(lambda a: chunk_kda(**a, **dict(options)), a)
    return {"o": o, "final": final, **pull((do, dfinal))[0]}


_run = jax.jit(_both, static_argnums=3)
