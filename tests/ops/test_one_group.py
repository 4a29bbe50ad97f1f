"""A group of chunks is one step of a loop. XLA dissolves a loop of one step, and the state it began with becomes a constant.

On CPUs the fusion of `x @ broadcast(0) + row sum` for YNNPACK reads uninitialised memory (jax 0.10 to 0.12), which once made outputs of
1e26 out of a forward pass alone; with its backward in the same program XLA fuses otherwise, and nothing showed. Backends without YNNPACK
always have such loops for short inputs; on a CPU they are made here by taking the groups of an accelerator.
"""

import jax
import pytest

from kda_jax import ops, sharding
from kda_jax.testing import assert_close


@pytest.mark.parametrize("name", ["kda", "gated_linear_attention"])
def test_the_forward_alone(name, monkeypatch, as_users):
    monkeypatch.setattr(sharding, "platform", lambda: "gpu")
    spec = ops.REGISTRY[name]
    arrays = spec.arrays(spec.make_inputs(jax.random.key(0), B=2, T=31, H=4, HV=4, K=32, V=32))
    found = jax.jit(lambda *a: getattr(ops, name)(*a, implementation="xla"), compiler_options=as_users)(*arrays)
    reference = getattr(ops, name)(*arrays, implementation="scan")
    assert_close("o", found.o, reference.o, 2e-6)
    assert_close("final state", found.final_state, reference.final_state, 2e-6)
