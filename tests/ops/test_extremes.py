"""Gates, keys and betas at the edge of the contract: finite, and equal to the float64 recurrence (cases R001 R002 R004 R008 R009 R025)."""

import jax
import jax.numpy as jnp
import pytest

from kda_jax import ops, testing
from kda_jax.testing import TOLERANCE, make_problem

NEG_INF = float("-inf")
IMPLEMENTATIONS = ["scan", "xla"]
T = 66


def ordinary(shape):
    return -jax.random.uniform(jax.random.key(9), shape)


def at(tokens, value, g):
    return g.at[:, jnp.array(tokens)].set(value)


GATES = {  # shape [B, T, HV] or [B, T, HV, K] -> g
    "zero": jnp.zeros,
    "two strong tokens (R001)": lambda s: at([10, 40], -300.0, jnp.zeros(s)),
    "at the bound (R002)": lambda s: jnp.full(s, -5.0),
    "at the bound on every second channel (R002)": lambda s: jnp.where(jnp.arange(s[-1]) % 2 == 0, -5.0, jnp.zeros(s)),
    "block starts (R004)": lambda s: at([0, 16], -200.0, jnp.zeros(s)),
    "far below any bound (R008 R025)": lambda s: jnp.full(s, -50.0),
    "-1000 at chunk edges": lambda s: at([0, 63, 64, 65], -1000.0, ordinary(s)),
    "-inf at chunk edges": lambda s: at([0, 63, 64, 65], NEG_INF, ordinary(s)),
    "-inf everywhere": lambda s: jnp.full(s, NEG_INF),
    "one channel never decays": lambda s: jnp.where(jnp.arange(s[-1]) == 1, 0.0, jnp.full(s, -30.0)),
    "0 and -1000 mixed": lambda s: jnp.where(jax.random.bernoulli(jax.random.key(8), 0.3, s), -1000.0, ordinary(s)),
}


def check(spec, problem, implementation):
    for name, error in testing.errors(spec, problem, implementation=implementation).items():
        assert error.rms <= TOLERANCE["float32"].extreme, f"{spec.name} {implementation} {name}: {error}"


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("name", "decay"),
    [("kda", "channel"), ("gated_delta_rule", "head"), ("gated_linear_attention", "channel"), ("gated_linear_attention", "head")],
)
def test_gates(name, decay, implementation, kind):
    spec = ops.REGISTRY[name]
    problem = make_problem(spec, jax.random.key(0), B=1, T=T, H=1, HV=2, decay=decay)
    g = GATES[kind](problem.inputs.g.shape)
    check(spec, problem._replace(inputs=problem.inputs._replace(g=g)), implementation)


def identical(k):
    return jnp.broadcast_to(k[:, :1], k.shape)


KEYS = {
    "identical keys, beta 0.99": (identical, 0.99),
    "identical keys, beta 1": (identical, 1.0),
    "nearly identical keys, beta 0.9": (lambda k: (lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True))(identical(k) + 0.1 * k), 0.9),
    "beta 0": (lambda k: k, 0.0),
    "beta 2": (lambda k: k, 2.0),
    "keys of norm 4, small beta (R009)": (lambda k: 4 * k, 0.1),
    "zero keys": (jnp.zeros_like, 0.5),
    "zero keys at some tokens": (lambda k: k.at[:, 5:30].set(0), 0.5),
}


@pytest.mark.parametrize("case", KEYS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["kda", "delta_rule"])
def test_keys_and_betas(name, implementation, case):
    spec = ops.REGISTRY[name]
    problem = make_problem(spec, jax.random.key(1), B=1, T=T, H=1, HV=2)
    change, beta = KEYS[case]
    inputs = problem.inputs._replace(k=change(problem.inputs.k), beta=jnp.full_like(problem.inputs.beta, beta))
    check(spec, problem._replace(inputs=inputs), implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_states_and_cotangents(implementation):
    """A large initial state; zero values; cotangents on the state only and on the output only (R030)."""
    spec = ops.REGISTRY["kda"]
    problem = make_problem(spec, jax.random.key(2), B=1, T=T, H=1, HV=2)
    check(spec, problem._replace(initial_state=1e4 * problem.initial_state), implementation)
    check(spec, problem._replace(inputs=problem.inputs._replace(v=jnp.zeros_like(problem.inputs.v))), implementation)
    check(spec, problem._replace(do=jnp.zeros_like(problem.do)), implementation)
    check(spec, problem._replace(dstate=jnp.zeros_like(problem.dstate)), implementation)


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
