"""R194: states at chunk edges, the snapshots of a prefix (R050)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from extreme_cases import SPECS, problem_of, tokens_of

from kda_jax import ops, testing
from kda_jax.testing import assert_close


def call(name, problem, **keywords):
    return ops.chunk_states(name, *ops.REGISTRY[name].arrays(problem.inputs), initial_state=problem.initial_state, **keywords)


@pytest.mark.parametrize(("name", "decay", "implementation"), [*((*op, "xla") for op in SPECS), ("kda", "channel", "scan")])
def test_R194_row_n_is_the_final_state_of_the_first_n_chunks(name, decay, implementation):
    problem = problem_of(name, decay, T=40)
    out = jax.jit(lambda p: call(name, p, chunk_size=16, implementation=implementation))(problem)
    op = lambda x: getattr(ops, name)(*ops.REGISTRY[name].arrays(x), initial_state=problem.initial_state, implementation="scan")
    whole = op(problem.inputs)
    assert_close("o", out.o, whole.o, 1e-6)
    assert_close("final state", out.final_state, whole.final_state, 1e-6)
    assert (out.states.shape, out.states.dtype) == ((1, 3, 2, 16, 8), jnp.float32)
    for n in range(3):
        assert_close(f"row {n}", out.states[:, n], op(tokens_of(problem.inputs, slice(0, 16 * n))).final_state, 1e-6)


@pytest.mark.parametrize("T", [0, 1, 31, 32, 33])
def test_number_of_rows(T):
    problem = problem_of("kda", "channel", T=T)
    for implementation in ("scan", "xla", None):
        out = jax.eval_shape(lambda p, i=implementation: call("kda", p, chunk_size=32, implementation=i), problem)
        assert (out.o.shape, out.states.shape) == ((1, T, 2, 8), (1, T // 32 + 1, 2, 16, 8))


def test_first_and_last_row():
    problem = problem_of("kda", "channel", T=32)
    out = jax.jit(lambda p: call("kda", p, chunk_size=16))(problem)
    np.testing.assert_array_equal(out.states[:, 0], problem.initial_state)
    np.testing.assert_array_equal(out.states[:, 2], out.final_state)


def test_R050_going_on_from_a_snapshot_is_the_uninterrupted_run_to_the_bit():
    """Groups of chunks begin at multiples of 64 tokens here, and so does the snapshot."""
    problem = problem_of("kda", "channel", T=200)
    snapshots = jax.jit(lambda p: call("kda", p))(problem)
    rest = tokens_of(problem.inputs, slice(128, None))
    later = jax.jit(lambda x, state: ops.kda(*x, initial_state=state))(rest, snapshots.states[:, 2])
    np.testing.assert_array_equal(later.o, snapshots.o[:, 128:])
    np.testing.assert_array_equal(later.final_state, snapshots.final_state)


@pytest.mark.parametrize(("name", "decay"), [("kda", "channel"), ("gated_linear_attention", "head")])
def test_gradients_through_every_state(name, decay):
    """The chunkwise backward takes cotangents of the states: the same as autodiff of the scan."""
    problem = problem_of(name, decay, T=40)
    weights = jax.random.normal(jax.random.key(1), (1, 3, 2, 16, 8))

    def gradients(implementation):
        def loss(inputs, state):
            out = call(name, problem._replace(inputs=inputs, initial_state=state), chunk_size=16, implementation=implementation)
            return jnp.sum(out.states * weights) + jnp.sum(out.o * problem.do) + jnp.sum(out.final_state * problem.dstate)

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(problem.inputs, problem.initial_state)

    for got, want in zip(*map(jax.tree.leaves, (gradients("xla"), gradients("scan"))), strict=True):
        assert_close("gradient", got, want, 2e-6)


def test_packed_rows():
    """The state after n chunks is that of the document which they end in."""
    problem = problem_of("kda", "channel", T=48)
    ids = jnp.array([[1] * 10 + [2] * 22 + [3] * 16])
    out = jax.jit(lambda p: call("kda", p, segment_ids=ids, chunk_size=16))(problem)
    second = ops.kda(*tokens_of(problem.inputs, slice(10, 32)), implementation="scan")
    assert_close("end of the second document", out.states[:, 2], second.final_state, 1e-6)


@pytest.mark.parametrize(("name", "decay"), [("kda", "channel"), ("gated_delta_rule", "head"), ("linear_attention", "none")])
def test_tpu_kernel(name, decay):
    """Interpreted: the values of the chunkwise form on packed rows, of 16-bit inputs too, and gradients through every state."""
    problem, ids = problem_of(name, decay, T=40), jnp.array([[1] * 20 + [2] * 20])
    weights = jax.random.normal(jax.random.key(1), (1, 3, 2, 16, 8))

    def loss(p, implementation):
        out = call(name, p, segment_ids=ids, chunk_size=16, implementation=implementation)
        total = jnp.sum(out.states * weights) + jnp.sum(out.o * problem.do) + jnp.sum(out.final_state * problem.dstate)
        return total, out

    with testing.runnable("pallas_tpu"):
        found = jax.jit(jax.value_and_grad(lambda p: loss(p, "pallas_tpu"), has_aux=True, allow_int=True))(problem)
        low = jax.jit(lambda p: loss(p, "pallas_tpu")[1])(problem.astype(jnp.bfloat16))
    wanted = jax.jit(jax.value_and_grad(lambda p: loss(p, "xla"), has_aux=True, allow_int=True))(problem)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert_close("kernel", got, want, 2e-6)
    assert low.o.dtype == jnp.bfloat16
    assert_close("states of bfloat16", low.states, wanted[0][1].states, 1e-2)


def test_refusals():
    problem = problem_of("kda", "channel", T=20)
    with pytest.raises(NotImplementedError, match="implementation 'pallas_tpu' does not apply: this process computes on cpu"):
        call("kda", problem, implementation="pallas_tpu")
    with pytest.raises(ValueError, match="kda: chunk_size is 48, expected a power of two"):
        call("kda", problem, chunk_size=48)
    with pytest.raises(ValueError, match=r"kda takes 5 arrays \(q, k, v, g, beta\), got 1"):
        ops.chunk_states(ops.kda, problem.inputs.q)
