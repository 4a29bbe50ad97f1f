"""The TPU kernels behind every op: lowered on this CPU, interpreted against the chunkwise form, refused with a reason."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.pallas import tpu as pltpu

from kda_jax import ops
from kda_jax.testing import assert_close

CASES = [pytest.param(spec, decay, id=f"{name}-{decay}") for name, spec in ops.REGISTRY.items() for decay in spec.decays]


@pytest.mark.parametrize(("spec", "decay"), CASES)
def test_every_op_lowers_for_a_tpu(spec, decay):
    """R164: forward and backward, with segments, without a TPU and without libtpu."""
    inputs = spec.make_inputs(jax.random.key(0), T=70, decay=decay, dtype=jnp.bfloat16)
    ids = jnp.repeat(jnp.array([[1, 2], [1, 1]]), 35, axis=1)

    def both(*arrays):
        out, pull = jax.vjp(lambda *a: getattr(ops, spec.name)(*a, segment_ids=ids, implementation="pallas_tpu"), *arrays)
        return out, pull(out)

    exported = export.export(jax.jit(both), platforms=["tpu"])(*spec.arrays(inputs))
    assert exported.mlir_module().count("tpu_custom_call") >= 2


def test_packed_rows_in_interpret_mode():
    inputs = ops.REGISTRY["kda"].make_inputs(jax.random.key(1), B=1, T=40, H=1, HV=2)
    ids = jnp.array([[1] * 17 + [2] * 15 + [0] * 8])
    with pltpu.force_tpu_interpret_mode():
        kernel = ops.kda(*inputs, segment_ids=ids, chunk_size=16, implementation="pallas_tpu")
    plain = ops.kda(*inputs, segment_ids=ids, implementation="xla")
    assert_close("o", kernel.o, plain.o, 1e-6)
    assert_close("final state", kernel.final_state, plain.final_state, 1e-6)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_fused_entry_in_interpret_mode(lower_bound):
    """Gate, norm, sigmoid, sequence starts and padding inside the kernel: the same call, the same result."""
    q, k, v, x, beta = ops.REGISTRY["kda"].make_inputs(jax.random.key(1), B=1, T=40, H=1, HV=2)
    ids = jnp.array([[1] * 17 + [2] * 15 + [0] * 8])
    arrays = (3 * q, 2 * k, v, 2 + x, 4 * beta - 2, jnp.array([0.1, -0.3]), 0.1 * x[0, 0])

    def call(implementation):
        return ops.kda_from_logits(*arrays, lower_bound=lower_bound, segment_ids=ids, chunk_size=16, implementation=implementation)

    with pltpu.force_tpu_interpret_mode():
        kernel = call("pallas_tpu")
    plain = call("xla")
    assert_close("o", kernel.o, plain.o, 2e-6)
    assert_close("final state", kernel.final_state, plain.final_state, 2e-6)


def from_logits(name):
    """(call, arrays by name) of a layer's whole path; keys far from unit length."""
    q, k, v, g, beta = ops.REGISTRY["gated_delta_rule"].make_inputs(jax.random.key(3), B=1, T=40, H=1, HV=2)
    arrays = {"q": 3 * q, "k": 0.2 * k, "v": v, "beta_logits": 4 * beta - 2}
    if name == "gated_delta_rule":
        arrays |= {"x": 1 + g, "A_log": jnp.array([0.1, -0.3]), "dt_bias": jnp.array([0.5, 0.0])}
    return getattr(ops, f"{name}_from_logits"), arrays


@pytest.mark.parametrize("name", ["delta_rule", "gated_delta_rule"])
def test_from_logits_is_the_separate_functions(name):
    call, a = from_logits(name)
    beta = jax.nn.sigmoid(a["beta_logits"])
    gate = () if name == "delta_rule" else (ops.gdn_gate(a["x"], a["A_log"], a["dt_bias"]),)
    want = getattr(ops, name)(ops.l2_norm(a["q"]), ops.l2_norm(a["k"]), a["v"], *gate, beta)
    jax.tree.map(np.testing.assert_array_equal, call(**a), want)


@pytest.mark.parametrize("name", ["delta_rule", pytest.param("gated_delta_rule", marks=pytest.mark.slow)])
def test_norms_inside_the_kernel(name):
    """1 / |q| and 1 / |k| as factors of products: values and gradients of every argument, sequence starts and padding included."""
    call, arrays = from_logits(name)
    ids = jnp.array([[1] * 17 + [2] * 15 + [0] * 8])

    def both(a, implementation):
        out, pull = jax.vjp(lambda a: call(**a, segment_ids=ids, chunk_size=16, implementation=implementation), a)
        return {"o": out.o, "state": out.final_state, **pull(jax.tree.map(jnp.cos, out))[0]}

    with pltpu.force_tpu_interpret_mode():
        kernel = both(arrays, "pallas_tpu")
    plain = both(arrays, "xla")
    for result in plain:
        assert_close(result, kernel[result], plain[result], 3e-6)


def test_what_does_not_fit_in_vmem_is_a_sentence():
    """R170: blocks are sized beforehand; too large a call is explained, and refused by name."""
    x, beta = jax.ShapeDtypeStruct((1, 256, 16, 256), jnp.float32), jax.ShapeDtypeStruct((1, 256, 16), jnp.float32)
    words = r"8 heads of chunk_size 64, K 256, V 256 need about \d+ MiB of VMEM in the TPU kernels, which take 60"
    assert re.match(words, ops.explain("kda", x, x, x, x, beta).reasons["pallas_tpu"])
    with pytest.raises(NotImplementedError, match=words):
        ops.explain("kda", x, x, x, x, beta, implementation="pallas_tpu")


def test_refusals_say_why():
    inputs = ops.REGISTRY["kda"].make_inputs(jax.random.key(2), B=1, T=4, H=1, HV=1)
    with pytest.raises(NotImplementedError, match="kda: implementation 'pallas_tpu' does not apply: this process computes on cpu"):
        ops.kda(*inputs, implementation="pallas_tpu")
    with pytest.raises(NotImplementedError, match="it takes a chunk_size of 16, 32, 64 or 128, got 8"):
        ops.kda(*inputs, chunk_size=8, implementation="pallas_tpu")
    wide = ops.REGISTRY["kda"].make_inputs(jax.random.key(2), B=1, T=4, H=1, HV=1, K=300)
    with pytest.raises(NotImplementedError, match="it takes K and V up to 256, got 300 and 8"):
        ops.kda(*wide, implementation="pallas_tpu")
