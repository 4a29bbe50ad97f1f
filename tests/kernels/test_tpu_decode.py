"""The decode kernel: states of a pool moved in place, a token or a few at a time, against the float64 recurrence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax import ops
from pallas_kernels.tpu import decode
from tests.kernels.oracle import error, make_case, recurrence
from tests.kernels.run_tpu import interpreted

SLOTS = jnp.array([4, 1, 2])


def problem(decay, delta, T, HV=2):
    """Three rows whose states lie in a pool of six; the other slots hold 1e30."""
    case = make_case(decay, delta, T=T, B=3, H=1, HV=HV, K=128, V=128)
    pool = jnp.full((6, HV, 128, 128), 1e30).at[SLOTS].set(jnp.asarray(case.initial_state, jnp.float32))
    arrays = [x if x is None else jnp.asarray(x, jnp.float32) for x in (case.q, case.k, case.v, case.g, case.beta)]
    return case, pool, arrays


@pytest.mark.parametrize(("decay", "delta"), [("channel", True), ("head", True), ("none", False)])
def test_tokens_in_place(decay, delta):
    """Three tokens: outputs and states are the recurrence's; nothing else of the pool moves (fla tests slots of 1e30 likewise)."""
    case, pool, arrays = problem(decay, delta, T=3)
    with interpreted():
        after, o = jax.jit(decode)(pool, SLOTS, *arrays)
    want = recurrence(case.rounded(jnp.float32))
    assert error(o, want["o"]) <= 1e-6
    assert error(after[SLOTS], want["final"]) <= 1e-6
    others = np.setdiff1d(np.arange(6), SLOTS)
    np.testing.assert_array_equal(after[others], pool[others])


def test_drafts_are_verified_and_then_taken():
    """Outputs of all tokens whatever is taken; a row's state is that of its first `advance` tokens."""
    case, pool, arrays = problem("channel", True, T=3, HV=1)
    advance = jnp.array([0, 2, 3])
    with interpreted():
        after, o = jax.jit(lambda *a: decode(*a, advance=advance))(pool, SLOTS, *arrays)
    assert error(o, recurrence(case.rounded(jnp.float32))["o"]) <= 1e-6
    np.testing.assert_array_equal(after[SLOTS[0]], pool[SLOTS[0]])
    for row, n in ((1, 2), (2, 3)):
        cut = case._replace(**{x: getattr(case, x)[:, :n] for x in ("q", "k", "v", "g", "beta", "do")})
        assert error(after[SLOTS[row]], recurrence(cut.rounded(jnp.float32))["final"][row]) <= 1e-6


@pytest.mark.parametrize("name", ops.REGISTRY)
def test_op_without_a_kernel_is_the_recurrence(name):
    """`ops.decode` anywhere: one call over T tokens is T calls of the op's step, slots not named keep their bits."""
    spec = ops.REGISTRY[name]
    inputs = spec.make_inputs(jax.random.key(0), B=2, T=3, H=1, HV=2, K=8, V=4)
    pool = jax.random.normal(jax.random.key(1), (4, 2, 8, 4))
    slots, arrays = jnp.array([3, 0]), spec.arrays(inputs)
    after, o = ops.decode(name, pool, slots, *arrays, advance=jnp.array([3, 1]))
    whole = getattr(ops, name)(*arrays, initial_state=pool[slots], implementation="scan")
    first = getattr(ops, name)(*(x[:, :1] for x in arrays), initial_state=pool[slots], implementation="scan")
    assert error(o, whole.o) <= 1e-6
    assert error(after[3], whole.final_state[0]) <= 1e-6
    assert error(after[0], first.final_state[1]) <= 1e-6
    np.testing.assert_array_equal(after[1:3], pool[1:3])


@pytest.mark.parametrize("decay", ["none", "head", "channel"])
def test_lowers_in_place(decay):
    """The pool's buffer is the output's; 24 heads are three blocks of 8."""
    make = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    B, T, H, K = 4, 1, 24, 128
    g = {"none": None, "head": make(B, T, H), "channel": make(B, T, H, K)}[decay]
    arguments = make(9, H, K, K), jax.ShapeDtypeStruct((B,), jnp.int32), *[make(B, T, H, K)] * 3, g, make(B, T, H)
    module = jax.export.export(jax.jit(decode, donate_argnums=0), platforms=["tpu"])(*arguments).mlir_module()
    assert "tpu_custom_call" in module
    assert "output_operand_aliases = [#stablehlo.output_operand_alias" in module or "output_operand_alias<" in module


def test_mistakes_are_sentences():
    _, pool, (q, k, v, g, beta) = problem("head", True, T=1)
    with pytest.raises(ValueError, match=r"gated_delta_rule: slots \[1, 1, 2\] name a slot twice"):
        ops.decode("gated_delta_rule", pool, jnp.array([1, 1, 2]), q, k, v, g, beta)
    with pytest.raises(ValueError, match=r"pool has shape \(6, 2, 128, 64\), expected \[Z, 2, 128, 128\]"):
        ops.decode("gated_delta_rule", pool[..., :64], SLOTS, q, k, v, g, beta)
    with pytest.raises(NotImplementedError, match="does not apply: this process computes on cpu"):
        ops.decode("gated_delta_rule", pool, SLOTS, q, k, v, g, beta, implementation="pallas_tpu")
    small = (pool[..., :64, :64], SLOTS, q[..., :64], k[..., :64], v[..., :64], g, beta)
    with pytest.raises(NotImplementedError, match="multiples of 128, got 64 and 64"):
        ops.decode("gated_delta_rule", *small, implementation="pallas_tpu")
