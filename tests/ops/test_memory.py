"""What the chunkwise form keeps for its backward: a state per group of chunks, never one per token."""

import jax
import pytest

from kda_jax import ops


def temporary_bytes(name, T, K, V):
    spec = ops.REGISTRY[name]
    inputs = spec.make_inputs(jax.random.key(0), B=1, T=T, H=4, HV=4, K=K, V=V)

    def both(arrays):
        o, pull = jax.vjp(lambda arrays: getattr(ops, name)(*arrays, implementation="xla").o, arrays)
        return pull(o)

    return jax.jit(both).lower(spec.arrays(inputs)).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("name", ["kda", "delta_rule"])
def test_memory_grows_with_tokens_not_with_states(name):
    """R151: 1024 more tokens cost a few arrays of width K, far less than a state for every 16, and twice that for 2048 more."""
    K = V = 128
    at = {T: temporary_bytes(name, T, K, V) for T in (1024, 2048, 4096)}
    state = 4 * K * V * 4  # bytes of one state of four heads
    assert at[2048] - at[1024] < 1024 / 16 * state
    assert at[4096] - at[2048] == pytest.approx(2 * (at[2048] - at[1024]), rel=0.05)
