"""Where precision is kept whatever the inputs are: the state, the gates, and products on devices that round by default."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from extreme_cases import SPECS, problem_of
from jax.extend.core import jaxprs_in_params

from kda_jax import ops, testing

HIGHEST = (jax.lax.Precision.HIGHEST,) * 2


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for sub in jaxprs_in_params(eqn.params):
            yield from equations(sub)


def products(f, *arrays):
    return [eqn for eqn in equations(jax.make_jaxpr(f)(*arrays).jaxpr) if eqn.primitive.name == "dot_general"]


@pytest.mark.parametrize(("name", "decay"), SPECS)
def test_R014_float32_products_are_at_the_highest_precision(name, decay):
    """Forward and backward: TPUs and GPUs otherwise take a float32 product in one pass of bfloat16 or in TF32."""
    spec, inputs = ops.REGISTRY[name], problem_of(name, decay, T=65).inputs
    call = lambda *a: getattr(ops, name)(*a, implementation="xla")
    both = lambda *a: jax.vjp(call, *a)[1](call(*a))
    found = products(both, *spec.arrays(inputs))
    assert len(found) > 10
    assert {eqn.params["precision"] for eqn in found} == {HIGHEST}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("name", "decay"), SPECS)
def test_R014_a_decoded_token_has_no_product_to_round(name, decay, dtype):
    """One token is elementwise products and sums in float32, so that a device's default precision does not matter."""
    spec, inputs = ops.REGISTRY[name], problem_of(name, decay, T=1).astype(dtype).inputs
    call = lambda *a: getattr(ops, name)(*a)
    assert not products(call, *spec.arrays(inputs))
    sums = [eqn for eqn in equations(jax.make_jaxpr(call)(*spec.arrays(inputs)).jaxpr) if eqn.primitive.name == "reduce_sum"]
    assert sums
    assert all(eqn.outvars[0].aval.dtype == jnp.float32 for eqn in sums)


def test_R013_eight_thousand_decoded_tokens_of_bfloat16():
    """The state is float32: it is the exact recurrence on the rounded inputs, where one kept in 16 bits is off by percents."""
    spec = ops.REGISTRY["kda"]
    problem = testing.make_problem(spec, jax.random.key(0), B=1, T=8192, H=1, HV=1, K=8, V=8).astype(jnp.bfloat16)
    problem = problem._replace(inputs=problem.inputs._replace(g=0.01 * problem.inputs.g))
    out = jax.jit(lambda x, state: ops.kda(*x, initial_state=state, implementation="scan"))(problem.inputs, problem.initial_state)
    assert out.final_state.dtype == jnp.float32
    with testing.x64():
        double = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), (problem.inputs, problem.initial_state))
        exact = np.asarray(jax.jit(lambda x, state: ops.kda(*x, initial_state=state, implementation="scan").final_state)(*double))
    testing.assert_close("state", out.final_state, exact, 1e-6)


@pytest.mark.parametrize("implementation", ["scan", "xla"])
def test_R013_a_state_beyond_float16_stays_finite(implementation):
    """1000 written 128 times at one key: 128,000, where float16 ends at 65,504."""
    one = jnp.ones((1, 128, 1, 1), jnp.float16)
    out = ops.linear_attention(one, one, 1000 * one, implementation=implementation)
    assert float(out.final_state[0, 0, 0, 0]) == 128_000
    assert out.o.dtype == jnp.float16
