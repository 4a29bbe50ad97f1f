"""Gates, keys and betas at the edge of the contract: finite, and equal to the float64 recurrence (cases R001 R002 R004 R008 R009 R025).

The cases are in extreme_cases.py; test_grid.py crosses all of them with every op.
"""

import jax
import jax.numpy as jnp
import pytest
from extreme_cases import GATES, KEYS, OTHERS, problem_of, with_gates, with_keys

from kda_jax import ops, testing
from kda_jax.testing import TOLERANCE

IMPLEMENTATIONS = ["scan", "xla"]
WITH_KERNELS = [*IMPLEMENTATIONS, pytest.param("pallas_tpu", marks=pytest.mark.slow)]
T = 66


def check(name, problem, implementation):
    with testing.runnable(implementation):
        errors = testing.errors(ops.REGISTRY[name], problem, implementation=implementation)
    for result, error in errors.items():
        assert error.rms <= TOLERANCE["float32"].extreme, f"{name} {implementation} {result}: {error}"


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("implementation", WITH_KERNELS)
@pytest.mark.parametrize(
    ("name", "decay"),
    [("kda", "channel"), ("gated_delta_rule", "head"), ("gated_linear_attention", "channel"), ("gated_linear_attention", "head")],
)
def test_gates(name, decay, implementation, kind):
    check(name, with_gates(problem_of(name, decay), kind), implementation)


@pytest.mark.parametrize("case", KEYS)
@pytest.mark.parametrize("implementation", WITH_KERNELS)
@pytest.mark.parametrize(("name", "decay"), [("kda", "channel"), ("delta_rule", "none")])
def test_keys_and_betas(name, decay, implementation, case):
    check(name, with_keys(problem_of(name, decay, seed=1), case), implementation)


@pytest.mark.parametrize("case", OTHERS)
@pytest.mark.parametrize("implementation", WITH_KERNELS)
def test_states_values_and_cotangents(implementation, case):
    """R030: also cotangents on the state only and on the output only."""
    check("kda", OTHERS[case](problem_of("kda", "channel", seed=2)), implementation)


def test_no_initial_state_is_zeros_bit_for_bit():
    """R039."""
    inputs = ops.REGISTRY["kda"].make_inputs(jax.random.key(3), T=T)
    for implementation in IMPLEMENTATIONS:
        absent = ops.kda(*inputs, implementation=implementation)
        zeros = ops.kda(*inputs, initial_state=jnp.zeros((2, 4, 16, 8)), implementation=implementation)
        assert bool(jnp.all(absent.o == zeros.o))
        assert bool(jnp.all(absent.final_state == zeros.final_state))


def test_no_tokens():
    """R039: nothing in, the state unchanged."""
    inputs = ops.REGISTRY["kda"].make_inputs(jax.random.key(3), T=0)
    state = jax.random.normal(jax.random.key(4), (2, 4, 16, 8))
    for implementation in (*IMPLEMENTATIONS, None):
        out = ops.kda(*inputs, initial_state=state, implementation=implementation)
        assert out.o.shape == (2, 0, 4, 8)
        assert bool(jnp.all(out.final_state == state))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_worked_examples(implementation):
    """R020: the gate multiplies rows. R021: decay, then read, then write. R011: beta is not rounded."""
    one = jnp.ones((1, 1, 1, 1))
    state = jnp.array([[1.0, 2.0], [3.0, 4.0]])[None, None]
    zero = jnp.zeros((1, 1, 1, 2))
    out = ops.kda(
        zero, zero, zero, jnp.log(jnp.array([0.5, 0.25]))[None, None, None], one[..., 0], initial_state=state, implementation=implementation
    )
    assert jnp.allclose(out.final_state[0, 0], jnp.array([[0.5, 1.0], [0.75, 1.0]]), atol=1e-7)
    out = ops.kda(one, one, 2 * one, jnp.log(0.5) * one, 0.5 * one[..., 0], initial_state=8 * one, implementation=implementation)
    assert float(out.final_state[0, 0, 0, 0]) == pytest.approx(3.0, abs=1e-6)
    logits = jnp.full((1, 1, 1), 0.5, jnp.bfloat16)
    bf = one.astype(jnp.bfloat16)
    out = ops.kda_from_logits(bf, bf, bf, bf, logits, jnp.zeros(1), jnp.zeros((1, 1)), implementation=implementation)
    assert float(out.final_state[0, 0, 0, 0]) == pytest.approx(0.622459, abs=2e-6)
