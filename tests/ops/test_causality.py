"""Causality to the bit: what stands at positions >= p, gates included, never changes anything before p."""

import jax
import jax.numpy as jnp
import pytest

from kda_jax import ops, testing
from kda_jax.ops.spec import Inputs

CASES = [pytest.param(spec, decay, id=f"{name}-{decay}") for name, spec in ops.REGISTRY.items() for decay in spec.decays]
KERNELS = [pytest.param(*case.values, "pallas_tpu", id=f"{case.id}-pallas_tpu", marks=pytest.mark.slow) for case in CASES]
GPU = pytest.param(ops.REGISTRY["kda"], "channel", "pallas_gpu", id="kda-channel-pallas_gpu")
ROWS = [pytest.param(*case.values, name, id=f"{case.id}-{name}") for case in CASES for name in ("scan", "xla")]
ROWS += [*KERNELS, GPU]


@pytest.mark.parametrize(("spec", "decay", "implementation"), ROWS)
def test_the_future_is_invisible(spec, decay, implementation, as_users):
    """Leaks through anchors: outputs before p and the gradients of a loss on them, for p inside and on chunk edges."""
    T, call = 130, getattr(ops, spec.name)
    inputs = spec.make_inputs(jax.random.key(0), B=1, T=T, decay=decay)
    other = spec.make_inputs(jax.random.key(1), B=1, T=T, decay=decay)
    do = jax.random.normal(jax.random.key(2), inputs.v.shape)

    def run(inputs, p):
        past = jnp.arange(T)[None, :, None, None] < p
        with testing.runnable(implementation):
            o, pull = jax.vjp(lambda x: call(*spec.arrays(x), implementation=implementation).o, inputs)
            return o, pull(jnp.where(past, do, 0))[0]

    run = jax.jit(run, compiler_options=as_users)
    for p in (5, 64, 77, 128):
        past = jnp.arange(T) < p
        mixed = Inputs(
            *(None if x is None else jnp.where(past.reshape(1, T, *(1,) * (x.ndim - 2)), x, y) for x, y in zip(inputs, other, strict=True))
        )
        (o, gradients), (o_mixed, gradients_mixed) = run(inputs, p), run(mixed, p)
        assert bool(jnp.all(o[:, :p] == o_mixed[:, :p]))
        for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(gradients_mixed), strict=True):
            assert bool(jnp.all(a[:, :p] == b[:, :p]))


@pytest.mark.parametrize("chunk_size", [pytest.param(16, marks=pytest.mark.slow), 64])
@pytest.mark.parametrize(("spec", "decay", "implementation"), [row for row in ROWS if row.values[-1] != "scan"])
def test_appending_tokens_never_changes_the_prefix(spec, decay, implementation, chunk_size, as_users):
    call = getattr(ops, spec.name)
    inputs = spec.make_inputs(jax.random.key(3), B=1, T=300, decay=decay)

    def run(inputs):
        with testing.runnable(implementation):
            return call(*spec.arrays(inputs), chunk_size=chunk_size, implementation=implementation).o

    run = jax.jit(run, compiler_options=as_users)
    whole = run(inputs)
    for T in (2, 63, 65, 200):
        prefix = run(Inputs(*(None if x is None else x[:, :T] for x in inputs)))
        assert bool(jnp.all(prefix == whole[:, :T])), f"T = {T}"
