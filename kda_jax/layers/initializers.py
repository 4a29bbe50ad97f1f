"""How the layers' parameters begin (Kimi Linear and fla; Mamba's dt is that of arXiv 2312.00752, section 3.6)."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


def linear(
    in_features: int,
    out_features: int,
    axes: tuple[str | None, str | None],
    *,
    initializer_range: float,
    rngs: nnx.Rngs,
    use_bias: bool = False,
    split: tuple[int, ...] | None = None,
) -> nnx.Linear:
    """y = x kernel (+ bias): kernel [in, out] ~ N(0, initializer_range^2), bias 0.

    Args:
        axes: logical names of the kernel's axes, kept as metadata `axes` on the parameters (see `kda_jax.sharding`).
        split: where the kernel is several matrices side by side, the widths of their columns, a pattern that repeats: `(K,)` for heads
            of width K. Kept as metadata `split`, for optimizers that treat a weight as a matrix (see `kda_jax.train.muon`).
    """
    return nnx.Linear(
        in_features,
        out_features,
        use_bias=use_bias,
        kernel_init=nnx.initializers.normal(initializer_range),
        kernel_metadata={"axes": axes, "split": split},
        bias_metadata={"axes": axes[1:]},
        rngs=rngs,
    )


def normal(shape: tuple[int, ...], axes: tuple[str | None, ...], *, initializer_range: float, rngs: nnx.Rngs) -> nnx.Param:
    """A parameter ~ N(0, initializer_range^2) with logical axis names."""
    return nnx.Param(initializer_range * jax.random.normal(rngs.params(), shape), axes=axes)


def log_uniform(key: Array, shape: tuple[int, ...], low: float, high: float) -> Float[Array, "..."]:
    """log of U(low, high], never of 0: how A_log begins."""
    return jnp.log(high - (high - low) * jax.random.uniform(key, shape))


def inverse_softplus_of_time_step(key: Array, shape: tuple[int, ...], low: float = 1e-3, high: float = 0.1) -> Float[Array, "..."]:
    """softplus^-1(dt) with dt log-uniform in [low, high], at least 1e-4: how dt_bias begins."""
    dt = jnp.exp(jax.random.uniform(key, shape) * (math.log(high) - math.log(low)) + math.log(low))
    dt = jnp.maximum(dt, 1e-4)
    return dt + jnp.log(-jnp.expm1(-dt))
