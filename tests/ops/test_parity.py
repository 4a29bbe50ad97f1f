"""Every recurrence, every implementation, against the float64 recurrence: outputs, final state and all gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax import ops, testing
from kda_jax.ops.spec import Inputs
from kda_jax.testing import TOLERANCE, make_problem

CASES = [pytest.param(spec, decay, id=f"{name}-{decay}") for name, spec in ops.REGISTRY.items() for decay in spec.decays]
IMPLEMENTATIONS = ["scan", "xla"]
TIGHT = TOLERANCE["float32"]


def check(spec, problem, implementation, tolerance, chunk_size=64):
    for name, error in testing.errors(spec, problem, implementation=implementation, chunk_size=chunk_size).items():
        limit = tolerance.output if name in ("o", "final_state") else tolerance.gradient
        assert error.rms <= limit, f"{spec.name} {implementation} {name}: {error} exceeds {limit:.0e}"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("spec", "decay"), CASES)
def test_float32(spec, decay, implementation):
    """T off the chunk grid, grouped value heads, K != V, a state carried in and a cotangent on the state that comes out."""
    check(spec, make_problem(spec, jax.random.key(0), T=130, decay=decay), implementation, TIGHT)


@pytest.mark.parametrize(("spec", "decay"), CASES)
def test_float64(spec, decay):
    with testing.x64():
        problem = make_problem(spec, jax.random.key(1), T=70, decay=decay).astype(jnp.float64)
        check(spec, problem, "xla", TOLERANCE["float64"])


@pytest.mark.parametrize(("spec", "decay"), CASES)
def test_bfloat16_is_at_the_floor(spec, decay):
    problem = make_problem(spec, jax.random.key(2), T=130, decay=decay)
    for name, (error, ratio) in testing.floor_ratios(spec, problem, jnp.bfloat16, implementation="xla").items():
        assert ratio <= testing.FLOOR_RATIO, f"{name}: {error}, {ratio:.2f} times the floor"


@pytest.mark.parametrize("T", [1, 2, 15, 17, 63, 64, 65, 129])
def test_any_length(T):
    """R017 R018: outputs, gradients and the final state off the chunk grid."""
    check(ops.REGISTRY["kda"], make_problem(ops.REGISTRY["kda"], jax.random.key(T), B=1, H=1, HV=2, T=T), "xla", TIGHT)


@pytest.mark.parametrize(("K", "V", "H", "HV"), [(20, 60, 1, 4), (128, 256, 1, 1), (1, 1, 2, 2)])
def test_head_shapes(K, V, H, HV):
    """R192: any K and V, K != V, grouped value heads."""
    check(ops.REGISTRY["kda"], make_problem(ops.REGISTRY["kda"], jax.random.key(3), B=1, T=66, H=H, HV=HV, K=K, V=V), "xla", TIGHT)


@pytest.mark.parametrize(("spec", "decay"), CASES)
def test_axes_cannot_be_mixed_up(spec, decay):
    """R049 R190: all axes of one length, so that no swap of time and heads or of keys and values raises; the state is not symmetric."""
    problem = make_problem(spec, jax.random.key(7), B=3, T=3, H=3, HV=3, K=3, V=3, decay=decay)
    reference = testing.oracle(spec, problem)
    for implementation in IMPLEMENTATIONS:
        out = getattr(ops, spec.name)(*spec.arrays(problem.inputs), initial_state=problem.initial_state, implementation=implementation)
        testing.assert_close("o", out.o, reference["o"], TIGHT.output)
        testing.assert_close("final state", out.final_state, reference["final_state"], TIGHT.output)


@pytest.mark.parametrize("chunk_size", [1, 8, 16, 128])
@pytest.mark.parametrize("name", ["kda", "gated_delta_rule"])
def test_chunk_size_changes_nothing(name, chunk_size):
    check(ops.REGISTRY[name], make_problem(ops.REGISTRY[name], jax.random.key(4), B=1, T=70), "xla", TIGHT, chunk_size)


@pytest.mark.parametrize(("spec", "decay"), CASES)
def test_same_structure_everywhere(spec, decay):
    """R064: one pytree structure, shape and dtype from every implementation."""
    inputs = spec.make_inputs(jax.random.key(0), T=5, decay=decay, dtype=jnp.bfloat16)
    shapes = [
        jax.eval_shape(lambda *a, i=i: getattr(ops, spec.name)(*spec.arrays(Inputs(*a)), implementation=i), *inputs)
        for i in (*IMPLEMENTATIONS, "pallas_tpu", None)
    ]
    assert shapes[0] == shapes[1] == shapes[2] == shapes[3]
    assert shapes[0].o.dtype == jnp.bfloat16
    assert shapes[0].final_state.dtype == jnp.float32


@pytest.mark.parametrize(("spec", "decay"), CASES)
def test_step_is_the_definition(spec, decay):
    """Tokens fed to the public step one by one give the scan, bit for bit."""
    inputs = spec.make_inputs(jax.random.key(5), T=7, decay=decay)
    state = jnp.zeros((2, 4, 16, 8))
    outputs = []
    for t in range(7):
        token = Inputs(*(None if x is None else x[:, t] for x in inputs))
        state, o = getattr(ops, f"{spec.name}_step")(state, *spec.arrays(token))
        outputs.append(o)
    whole = getattr(ops, spec.name)(*spec.arrays(inputs), implementation="scan")
    testing.assert_close("o", jnp.stack(outputs, 1), whole.o, 1e-6)
    testing.assert_close("state", state, whole.final_state, 1e-6)


def test_one_token_takes_the_step():
    """R066: a call of length 1 holds no matrix product over a chunk."""
    inputs = ops.REGISTRY["kda"].make_inputs(jax.random.key(0), T=1)
    assert "dot_general" not in str(jax.make_jaxpr(ops.kda)(*inputs))


def test_state_does_not_drift():
    """R013: a state that hardly decays, over 32 thousand tokens, against float64; test_grid.py takes a million."""
    spec = ops.REGISTRY["kda"]
    inputs = spec.make_inputs(jax.random.key(6), B=1, T=2**15, H=1, HV=1, K=8, V=8)
    inputs = inputs._replace(g=inputs.g * 1e-3)
    found = jax.jit(ops.kda)(*inputs)
    with testing.x64():
        double = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), inputs)
        reference = jax.tree.map(np.asarray, jax.jit(lambda *a: ops.kda(*a, implementation="scan"))(*double))
    testing.assert_close("o", found.o, reference.o, TIGHT.output)
    testing.assert_close("final state", found.final_state, reference.final_state, TIGHT.output)
