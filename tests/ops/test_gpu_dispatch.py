"""The GPU kernels behind `ops.kda`: interpreted on this CPU against the chunkwise form, lowered for a GPU, refused with a reason."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels.gpu
from kda_jax import ops, sharding, testing
from kda_jax.ops import dispatch
from kda_jax.testing import TOLERANCE, assert_close
from tests.kernels.test_gpu_kda import KERNEL, export, on_a, on_an_h200


@pytest.fixture
def interpreted():
    """The kernels run where there is no GPU."""
    with testing.runnable("pallas_gpu"):
        yield


def inputs(op="kda", **sizes):
    return ops.REGISTRY[op].make_inputs(jax.random.key(1), **{"B": 2, "T": 40, "H": 1, "HV": 2, **sizes})


def test_packed_rows_and_an_initial_state(interpreted):
    """A sequence starts inside a chunk, one is a single token, the row ends in padding that holds NaN: values and gradients."""
    arrays, state = inputs(), jax.random.normal(jax.random.key(2), (2, 2, 16, 8))
    ids = jnp.array([[1] * 17 + [2] + [3] * 14 + [0] * 8, [4] * 40])
    arrays = arrays._replace(v=arrays.v.at[0, 32:].set(jnp.nan))

    def both(implementation):
        def call(state, *arrays):
            return tuple(ops.kda(*arrays, initial_state=state, segment_ids=ids, chunk_size=16, implementation=implementation))

        out, pull = jax.vjp(call, state, *arrays)
        return dict(zip(("o", "final", "dstate", "dq", "dk", "dv", "dg", "dbeta"), out + pull(jax.tree.map(jnp.cos, out)), strict=True))

    found, want = jax.jit(both, static_argnums=0)("pallas_gpu"), jax.jit(both, static_argnums=0)("xla")
    for name in want:
        assert_close(name, found[name], want[name], TOLERANCE["float32"].gradient)


def test_layers_path(interpreted):
    """kda_from_logits takes the kernels after its norms and gate; mixed dtypes meet in the widest."""
    q, k, v, x, beta = inputs()
    arrays = 3 * q, (2 * k).astype(jnp.bfloat16), v, 2 + x, 4 * beta - 2, jnp.array([0.1, -0.3]), 0.1 * x[0, 0]
    call = functools.partial(ops.kda_from_logits, *arrays, lower_bound=-5.0, chunk_size=16)
    assert_close("o", call(implementation="pallas_gpu").o, call(implementation="xla").o, TOLERANCE["float32"].gradient)


def test_lowers_through_the_op():
    def loss(*arrays):
        return jnp.sum(ops.kda(*arrays, implementation="pallas_gpu").o.astype(jnp.float32))

    arrays = inputs(K=32, V=64)
    assert export(jax.grad(loss), *arrays).count(KERNEL) == 7


def test_batched_by_vmap(interpreted):
    """One more axis of the grid, of which Triton has three."""
    arrays = inputs(T=20, K=32)
    loss = lambda implementation, *a: jnp.sum(jnp.sin(ops.kda(*a, chunk_size=16, implementation=implementation).o))
    rows = [x[:, None] for x in arrays]
    gradients = lambda implementation: jax.vmap(jax.grad(functools.partial(loss, implementation), argnums=(0, 3)))
    for found, want in zip(jax.jit(gradients("pallas_gpu"))(*rows), jax.jit(gradients("xla"))(*rows), strict=True):
        assert_close("gradient", found, want, TOLERANCE["float32"].gradient)


def test_lowers_under_vmap():
    rows = [x[:, None] for x in inputs(T=20, K=32)]
    loss = lambda *a: jnp.sum(ops.kda(*a, chunk_size=16, implementation="pallas_gpu").o)
    assert export(jax.vmap(jax.grad(loss, argnums=(0, 3))), *rows).count(KERNEL) == 7


def test_chosen_by_itself_on_a_hopper_gpu():
    with on_an_h200():
        assert ops.explain("kda", *inputs()).chosen == "pallas_gpu"
        assert ops.explain("kda", *inputs(T=1)).chosen == "scan"
        assert ops.explain("gated_delta_rule", *inputs("gated_delta_rule")).chosen == "xla"
    assert ops.explain("kda", *inputs()).reasons["pallas_gpu"] == "this process computes on cpu"


def test_by_name_on_other_gpus():
    with on_a("NVIDIA A100-SXM4-80GB"):
        explanation = ops.explain("kda", *inputs())
        assert explanation.chosen == "xla"
        why = "measured on Hopper GPUs alone: on this NVIDIA A100-SXM4-80GB it must be named"
        assert explanation.reasons["pallas_gpu"] == why
        assert ops.explain("kda", *inputs(), implementation="pallas_gpu").chosen == "pallas_gpu"


@pytest.mark.parametrize(("devices", "chosen"), [(1, "pallas_gpu"), (2, "xla")])
def test_several_gpus_and_no_mesh(monkeypatch, devices, chosen):
    """Arrays may be split over them, which a kernel does not see. The mesh of one of two, as in the tests above, says that they are not."""
    monkeypatch.setattr(dispatch, "_elsewhere", lambda platform: None if platform == "gpu" else "this process computes on gpu")
    monkeypatch.setattr(sharding, "device_kind", lambda: "NVIDIA H200")
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    explanation = ops.explain("kda", *inputs())
    assert explanation.chosen == chosen
    assert (chosen == "xla") == explanation.reasons["pallas_gpu"].startswith("several devices and no mesh")


@pytest.mark.parametrize(
    ("op", "sizes", "words"),
    [
        ("kda", {"K": 129}, "it takes K and V up to 128, got 129 and 8"),
        ("gated_delta_rule", {}, "it takes decays per channel with the delta rule, KDA alone"),
        ("gated_linear_attention", {}, "it takes decays per channel with the delta rule, KDA alone"),
        ("kda", {"T": 64 * 65536, "K": 1, "V": 1, "B": 1}, "it takes up to 65535 chunks, got 4194304 tokens in chunks of 64"),
        ("kda", {"dtype": jnp.float64}, "it computes in float32, and an argument is float64"),
        ("kda", {}, "this process computes on cpu"),
    ],
)
def test_refusals(op, sizes, words):
    make = ops.REGISTRY[op].make_inputs
    with jax.enable_x64(jnp.float64 in sizes.values()):
        arrays = jax.eval_shape(lambda key: make(key, **{"B": 2, "T": 40, "H": 1, "HV": 2, **sizes}), jax.random.key(0))
    present = [x for x in arrays if x is not None]
    assert ops.explain(op, *present).reasons["pallas_gpu"] == words
    with pytest.raises(NotImplementedError, match=re.escape(f"{op}: implementation 'pallas_gpu' does not apply: {words}")):
        ops.explain(op, *present, implementation="pallas_gpu")


def test_refusals_of_a_call():
    with pytest.raises(NotImplementedError, match="it takes a chunk_size of 16, 32 or 64, got 128"):
        ops.kda(*inputs(), chunk_size=128, implementation="pallas_gpu")
    with pytest.raises(NotImplementedError, match="the GPU kernels: it takes K and V up to 128, got 16 and 130"):
        pallas_kernels.gpu.chunk_kda(*inputs(V=130), jnp.zeros((2, 2, 16, 130)))
    with pytest.raises(NotImplementedError, match="this process computes on cpu"):
        jax.jit(functools.partial(ops.kda, implementation="pallas_gpu"))(*inputs())


def test_states_before_chunks_come_from_elsewhere():
    with on_an_h200(), pytest.raises(NotImplementedError, match="'pallas_gpu' does not apply: its kernels return no states"):
        ops.chunk_states("kda", *inputs(), implementation="pallas_gpu")
