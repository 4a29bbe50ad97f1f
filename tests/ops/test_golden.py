"""Recurrences and gates against fla's naive forms in float64 and torch's gradients: tests/golden/make.py."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax import ops, testing
from kda_jax.testing import TOLERANCE, assert_close

CASES = {}
with np.load(Path(__file__).parents[1] / "golden" / "ops.npz") as file:
    for key in file.files:
        case, name = key.split("/")
        CASES.setdefault(case, {})[name] = jnp.asarray(file[key])
TIGHT = TOLERANCE["float32"]


def normalized(q, k, v, **keywords):
    """Katharopoulos et al.'s ratio; fla returns the sum of keys beside the state, we as its last column."""
    out = ops.linear_attention(jax.nn.elu(q) + 1, jax.nn.elu(k) + 1, v, normalize=True, **keywords)
    return out.o, out.final_state[..., :-1], out.final_state[..., -1]


RECURRENCES = {
    "kda": (ops.kda, ("q", "k", "v", "gk", "beta")),
    "gated_delta_rule": (ops.gated_delta_rule, ("q", "k", "v", "g", "beta")),
    "delta_rule": (ops.delta_rule, ("q", "k", "v", "beta")),
    "linear_attention": (ops.linear_attention, ("q", "k", "v")),
    "linear_attention_normalized": (normalized, ("q", "k", "v")),
    "simple_gla": (ops.gated_linear_attention, ("q", "k", "v", "g")),
    "gla": (ops.gated_linear_attention, ("q", "k", "v", "gk")),
}


def compare(f, golden, inputs, outputs):
    """Outputs and gradients of f(*inputs) -> outputs."""
    found, pull = jax.jit(lambda *x: jax.vjp(f, *x))(*(golden[name] for name in inputs))
    gradients = pull(tuple(golden[f"d{name}"] for name in outputs))
    for name, x in zip(outputs, found, strict=True):
        assert_close(name, x, golden[name], TIGHT.output)
    for name, x in zip(inputs, gradients, strict=True):
        assert_close(f"d{name}", x, golden[f"d{name}"], TIGHT.gradient)


ROWS = [(case, implementation) for case in RECURRENCES for implementation in ("scan", "xla")]
ROWS += [pytest.param(case, "pallas_tpu", marks=pytest.mark.slow) for case in RECURRENCES] + [("kda", "pallas_gpu")]


@pytest.mark.parametrize(("case", "implementation"), ROWS)
def test_recurrence(case, implementation):
    with testing.runnable(implementation):
        check_recurrence(case, implementation)


def check_recurrence(case, implementation):
    op, inputs = RECURRENCES[case]
    if case == "linear_attention_normalized":
        compare(lambda *x: op(*x, implementation=implementation), CASES[case], inputs, ("o", "state", "total"))
    else:
        f = lambda *x: tuple(op(*x[:-1], initial_state=x[-1], implementation=implementation))
        compare(f, CASES[case], (*inputs, "initial_state"), ("o", "final_state"))


@pytest.mark.parametrize(("case", "lower_bound"), [("kda_gate", None), ("kda_gate_bounded", -5.0)])
def test_gate(case, lower_bound):
    golden = CASES[case]
    gate = lambda x, A_log, dt_bias: (ops.kda_gate(x, A_log, dt_bias.reshape(x.shape[2:]), lower_bound),)
    compare(gate, golden, ("x", "A_log", "dt_bias"), ("g",))


@pytest.mark.parametrize("implementation", ["scan", "xla"])
@pytest.mark.parametrize(("case", "lower_bound"), [("kda_from_logits", None), ("kda_from_logits_bounded", -5.0)])
def test_from_logits(case, lower_bound, implementation):
    """With the gradients of A_log and dt_bias."""

    def f(q, k, v, x, beta_logits, A_log, dt_bias, initial_state):
        options = dict(lower_bound=lower_bound, initial_state=initial_state, implementation=implementation)
        return tuple(ops.kda_from_logits(q, k, v, x, beta_logits, A_log, dt_bias.reshape(x.shape[2:]), **options))

    compare(f, CASES[case], ("q", "k", "v", "x", "beta_logits", "A_log", "dt_bias", "initial_state"), ("o", "final_state"))
