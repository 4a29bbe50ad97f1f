"""Runs the TPU kernels on a CPU: the interpreter with NaN in every fresh buffer and race detection."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu import chunk_recurrence


def interpreted():
    return pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True, out_of_bounds_reads="raise"))


def arguments(case, dtype) -> dict[str, jax.Array]:
    """The differentiable arguments of a case, q, k, v in `dtype`."""
    names = [n for n in ("q", "k", "v", "g", "beta", "initial_state") if getattr(case, n) is not None]
    return {n: jnp.asarray(getattr(case, n), dtype if n in "qkv" else jnp.float32) for n in names}


def forward(case, dtype, **options) -> tuple[jax.Array, jax.Array]:
    with interpreted():
        return jax.jit(lambda a: chunk_recurrence(**a, **options))(arguments(case, dtype))


def forward_backward(case, dtype, **options) -> dict[str, jax.Array]:
    """o, final and the gradients by name."""

    def both(a, do, dfinal):
        (o, final), pull = jax.vjp(lambda a: chunk_recurrence(**a, **options), a)
        return {"o": o, "final": final, **pull((do, dfinal))[0]}

    with interpreted():
        return jax.jit(both)(arguments(case, dtype), jnp.asarray(case.do, dtype), jnp.asarray(case.dfinal, jnp.float32))
