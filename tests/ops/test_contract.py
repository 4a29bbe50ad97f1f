"""Arguments out of contract get one sentence that names them; explain tells what was chosen."""

import doctest
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax import ops, testing
from kda_jax.testing import TOLERANCE


@pytest.fixture(scope="module")
def inputs():
    return ops.REGISTRY["kda"].make_inputs(jax.random.key(0), T=4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": lambda x: x[0]}, r"q has shape \(4, 2, 16\), expected \[B, T, H, K\]"),
        ({"q": lambda x: x[:, :, :0], "k": lambda x: x[:, :, :0]}, r"q has shape \(2, 4, 0, 16\), expected .* with H and K at least 1"),
        ({"q": lambda x: x[..., :0], "k": lambda x: x[..., :0]}, r"q has shape \(2, 4, 2, 0\), expected .* with H and K at least 1"),
        ({"k": lambda x: x[:, :3]}, r"k has shape \(2, 3, 2, 16\)"),
        ({"v": lambda x: x[:, :, :3]}, r"v has shape \(2, 4, 3, 8\), expected .*multiple of q's 2 heads"),
        ({"g": lambda x: x[..., 0]}, r"g has shape \(2, 4, 4\), expected \(2, 4, 4, 16\)"),
        ({"g": lambda x: -x}, "g is a log decay and must be <= 0"),
        ({"beta": lambda x: x[..., None]}, r"beta has shape \(2, 4, 4, 1\)"),
    ],
)
def test_wrong_arrays(inputs, change, words):
    """R189."""
    arrays = inputs._asdict() | {name: f(getattr(inputs, name)) for name, f in change.items()}
    with pytest.raises(ValueError, match=f"kda: {words}"):
        ops.kda(**arrays)


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"initial_state": jnp.zeros((2, 4, 8, 16))}, r"initial_state has shape \(2, 4, 8, 16\), expected \(2, 4, 16, 8\)"),
        ({"segment_ids": jnp.zeros((2, 5), jnp.int32)}, r"segment_ids has shape \(2, 5\)"),
        ({"segment_ids": jnp.zeros((2, 4))}, "segment_ids has dtype float32, expected integers"),
        ({"chunk_size": 48}, "chunk_size is 48, expected a power of two"),
        ({"implementation": "cuda"}, "implementation is 'cuda', expected None or one of scan, xla"),
    ],
)
def test_wrong_keywords(inputs, keywords, words):
    with pytest.raises(ValueError, match=f"kda: {words}"):
        ops.kda(*inputs, **keywords)


KINDS = [
    (lambda x: np.asarray(x).tolist(), "is a list, expected an array"),
    (lambda x: None, "is None, expected an array"),
    (lambda x: 1.0, "is a float, expected an array"),
    (lambda x: x.astype(jnp.int32), "has dtype int32, expected a float of 16, 32 or 64 bits"),
    (lambda x: x.astype(jnp.complex64), "has dtype complex64, expected a float"),
    (lambda x: x.astype(jnp.float8_e4m3fn), "has dtype float8_e4m3fn, expected a float"),
]
"""What is no array of floats. Integer values gave outputs truncated to integers, complex ones lost half of themselves."""


def _calls():
    """(function, its arrays by name) for every op that takes several."""
    for name, spec in ops.REGISTRY.items():
        arrays = dict(zip(spec.arguments, spec.arrays(spec.make_inputs(jax.random.key(0), B=1, T=2, H=1, HV=1, K=4, V=4)), strict=True))
        yield getattr(ops, name), arrays
        yield functools.partial(ops.decode, name, jnp.zeros((2, 1, 4, 4)), jnp.array([1])), arrays
    x, gate = jnp.ones((1, 2, 1, 4)), {"A_log": jnp.ones(1)}
    qkv, beta = {"q": x, "k": x, "v": x}, {"beta_logits": x[..., 0]}
    yield ops.kda_from_logits, {**qkv, "x": x, **beta, **gate, "dt_bias": jnp.ones((1, 4))}
    yield ops.gated_delta_rule_from_logits, {**qkv, "x": x[..., 0], **beta, **gate, "dt_bias": jnp.ones(1)}
    yield ops.delta_rule_from_logits, qkv | beta
    yield ops.attention, qkv
    yield functools.partial(ops.mla, scale=1.0), {"q_latent": x, "q_rope": x, "latent": jnp.ones((1, 2, 8))}
    yield ops.short_conv, {"x": jnp.ones((1, 2, 4)), "weight": jnp.ones((4, 3))}
    yield functools.partial(ops.route, top_k=1, renormalize=True, scaling_factor=1.0), {"logits": jnp.ones((2, 3))}
    routing, w = ops.Routing(jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 1))), jnp.ones((3, 4, 4))
    yield lambda x, w1, w3, w2: ops.experts(x, routing, w1, w3, w2), {"x": jnp.ones((2, 4)), "w1": w, "w3": w, "w2": w}


def test_what_is_no_array_of_floats():
    for call, arrays in _calls():
        for name, x in arrays.items():
            for change, words in KINDS:
                changed = list((arrays | {name: change(x)}).items())
                positional = isinstance(call, functools.partial) and call.func is ops.decode
                with pytest.raises(ValueError, match=f"{name} {words}"):
                    call(*(a for _, a in changed)) if positional else call(**dict(changed))


def test_other_arguments_that_are_no_arrays(inputs):
    with pytest.raises(ValueError, match="kda: initial_state has dtype int32, expected a float"):
        ops.kda(*inputs, initial_state=jnp.zeros((2, 4, 16, 8), jnp.int32))
    with pytest.raises(ValueError, match="kda: initial_state is a float, expected an array"):
        ops.kda(*inputs, initial_state=0.0)
    with pytest.raises(ValueError, match="kda: segment_ids is a list, expected an array"):
        ops.kda(*inputs, segment_ids=[[1] * 4] * 2)
    with pytest.raises(ValueError, match="kda: g is a log decay and must be <= 0"):
        ops.kda(*inputs._replace(g=-np.asarray(inputs.g)))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: ops.attention(x[0], x, x), r"attention: q has shape \(3, 2, 4\), expected \[B, T, H, K\]"),
        (lambda x: ops.attention(x, x[..., :3], x), r"attention: k has shape \(2, 3, 2, 3\), expected \[2, S, HK, 4\]"),
        (lambda x: ops.attention(x, x, x[:, :2]), r"attention: v has shape \(2, 2, 2, 4\), expected \[2, 3, HK, V\]"),
        (
            lambda x: ops.attention(x, x, x, segment_ids=jnp.ones((2, 4), int)),
            r"attention: segment_ids has shape \(2, 4\), expected \(2, 3\)",
        ),
        (lambda x: ops.attention(x, x, x, q_index=jnp.ones(3, int)), r"attention: q_index has shape \(3,\), expected \(2, 3\)"),
        (lambda x: ops.attention(x, x, x, q_index=jnp.ones((2, 3))), "attention: q_index has dtype float32, expected integers"),
        (lambda x: ops.mla(x, x[:, :2], x[:, :, 0], scale=1.0), r"mla: q_rope has shape \(2, 2, 2, 4\), expected \(2, 3, 2\) and a width"),
        (lambda x: ops.mla(x, x, x, scale=1.0), r"mla: latent has shape \(2, 3, 2, 4\), expected 3 axes"),
        (lambda x: ops.short_conv(x, jnp.ones((4, 3))), r"x has shape \(2, 3, 2, 4\); expected \[B, T, D\]"),
        (lambda x: ops.short_conv(x[0], jnp.ones((4, 0))), r"weight has shape \(4, 0\); expected \(4, W\) with W at least 1"),
        (lambda x: ops.short_conv(x[0], jnp.ones((4, 3)), jnp.ones(3)), r"bias has shape \(3,\); expected \(4,\)"),
        (lambda x: ops.short_conv(x[0], jnp.ones((4, 3)), segment_ids=jnp.ones((3, 3), int)), r"segment_ids has shape \(3, 3\)"),
        (lambda x: ops.route(x, top_k=1, renormalize=True, scaling_factor=1.0), r"logits has shape \(2, 3, 2, 4\); expected"),
        (lambda x: ops.route(x[0], jnp.ones(3), top_k=1, renormalize=True, scaling_factor=1.0), r"bias has shape \(3,\); expected \(4,\)"),
        (
            lambda x: ops.experts(x[0], ops.Routing(jnp.zeros((3, 1), int), jnp.ones((3, 1))), *[jnp.ones((2, 4, 4))] * 3),
            r"routing has experts \(3, 1\) and weights \(3, 1\); expected \(3, 2\) and k in both",
        ),
    ],
)
def test_shapes_of_the_functions_around_them(call, words):
    with pytest.raises(ValueError, match=words):
        call(jnp.ones((2, 3, 2, 4)))


@pytest.mark.parametrize("shape", [dict(B=0), dict(T=0), dict(V=0)])
@pytest.mark.parametrize("implementation", ["scan", "xla"])
def test_nothing_to_do(shape, implementation):
    arrays = ops.REGISTRY["kda"].make_inputs(jax.random.key(0), **{"B": 2, "T": 3, "H": 1, "HV": 2, "K": 4, "V": 3, **shape})
    state = jnp.ones((arrays.v.shape[0], 2, 4, arrays.v.shape[-1]))
    out = ops.kda(*arrays, initial_state=state, implementation=implementation)
    assert out.o.shape == arrays.v.shape
    assert jnp.array_equal(out.final_state, state)


def test_gates_check_their_arguments():
    x = jnp.zeros((1, 2, 3, 4))
    with pytest.raises(ValueError, match=r"kda_gate: A_log has shape \(4,\), expected one value per head, \(3,\)"):
        ops.kda_gate(x, jnp.zeros(4), jnp.zeros((3, 4)))
    with pytest.raises(ValueError, match=r"kda_gate: lower_bound is -9.0, expected None or a number in \[-5, 0\)"):
        ops.kda_gate(x, jnp.zeros(3), jnp.zeros((3, 4)), lower_bound=-9.0)
    with pytest.raises(ValueError, match="gdn_gate: x has shape"):
        ops.gdn_gate(x, jnp.zeros(3), jnp.zeros(3))


def test_a_named_implementation_is_that_one_or_an_error(inputs):
    with pytest.raises(NotImplementedError, match="kda: implementation 'pallas_gpu' does not apply: "):
        ops.kda(*inputs, implementation="pallas_gpu")


def test_explain(inputs, capsys):
    explanation = ops.explain(ops.kda, *inputs)
    assert explanation.chosen == "xla"
    assert set(explanation.reasons) == {"scan", "xla", "pallas_tpu", "pallas_gpu"}
    assert capsys.readouterr().out.strip() == str(explanation)
    with pytest.raises(ValueError, match="no recurrence is named 'attention'"):
        ops.explain("attention")
    with pytest.raises(ValueError, match=r"kda takes 5 arrays \(q, k, v, g, beta\), got 1"):
        ops.explain("kda", inputs.q)


def test_gate_values():
    """R006: two gate forms, two functions; and gates far in the tail keep their relative accuracy."""
    zero = jnp.zeros((1, 1, 1, 1))
    assert float(ops.kda_gate(zero, jnp.zeros(1), jnp.zeros((1, 1)))[0, 0, 0, 0]) == pytest.approx(-0.693147, abs=1e-6)
    assert float(ops.kda_gate(zero, jnp.zeros(1), jnp.zeros((1, 1)), lower_bound=-5.0)[0, 0, 0, 0]) == -2.5
    tail = ops.gdn_gate(jnp.full((1, 1, 1), -40.0), jnp.zeros(1), jnp.zeros(1))
    assert float(tail[0, 0, 0]) == pytest.approx(-4.248354e-18, rel=1e-5)
    low = ops.kda_gate(jnp.full((1, 1, 1, 1), 3.0, jnp.bfloat16), jnp.zeros(1), jnp.zeros((1, 1)))
    assert low.dtype == jnp.float32


def test_logits_entry_is_the_separate_functions():
    keys = jax.random.split(jax.random.key(0), 7)
    q, k = (jax.random.normal(key, (1, 9, 2, 8)) for key in keys[:2])
    v, x = jax.random.normal(keys[2], (1, 9, 4, 6)), jax.random.normal(keys[3], (1, 9, 4, 8))
    logits, A_log, dt_bias = jax.random.normal(keys[4], (1, 9, 4)), jax.random.normal(keys[5], (4,)), jax.random.normal(keys[6], (4, 8))
    unit = lambda x: x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)
    for bound in (None, -5.0):
        whole = ops.kda_from_logits(q, k, v, x, logits, A_log, dt_bias, lower_bound=bound)
        parts = ops.kda(unit(q), unit(k), v, ops.kda_gate(x, A_log, dt_bias, bound), jax.nn.sigmoid(logits))
        assert jnp.allclose(whole.o, parts.o, rtol=1e-5, atol=1e-6)


def test_docstring_examples_run():
    for name, module in sorted(sys.modules.items()):
        if name.startswith("kda_jax.ops"):
            assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0, name


def test_values_of_a_constant_are_checked_inside_jit():
    """What is done to a constant inside jit is traced, but its values can be seen, and a positive gate is named there too."""
    inputs = ops.REGISTRY["kda"].make_inputs(jax.random.key(0), B=1, T=3, H=1, HV=1, K=4, V=4)

    def loss(q, g):
        return ops.kda(q, inputs.k, inputs.v, g, inputs.beta, implementation="scan").o.sum()

    assert jnp.isfinite(jax.jit(lambda q: loss(q, inputs.g))(inputs.q))
    positive = -inputs.g
    with pytest.raises(ValueError, match="log decay"):
        jax.jit(lambda q: loss(q, positive))(inputs.q)


@pytest.mark.parametrize("implementation", ["scan", "xla"])
def test_a_traced_scale_is_a_sentence(implementation):
    inputs = ops.REGISTRY["kda"].make_inputs(jax.random.key(0), T=4)
    call = jax.jit(lambda scale: ops.kda(*inputs, scale=scale, implementation=implementation).o)
    with pytest.raises(ValueError, match="kda: scale is traced, and kernels are compiled for one: pass a number, multiply o by"):
        call(0.5)
    of_numpy, of_python = (ops.kda(*inputs, scale=x, implementation=implementation).o for x in (np.float32(0.5), 0.5))
    np.testing.assert_array_equal(of_numpy, of_python)


@pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_gpu"])
def test_second_derivatives_of_a_kernel_are_a_sentence(implementation):
    """Reverse and forward over reverse; of the definition and the chunkwise form they are right."""
    inputs = ops.REGISTRY["kda"].make_inputs(jax.random.key(0), B=1, T=20, H=1, HV=1, K=8, V=8)
    loss = lambda q, name: jnp.sum(ops.kda(q, *inputs[1:], chunk_size=16, implementation=name).o ** 2)
    slope = lambda q, name: jnp.sum(jax.grad(loss)(q, name) ** 2)
    found, want = (jax.grad(slope)(inputs.q, name) for name in ("xla", "scan"))
    testing.assert_close("second derivative", found, want, TOLERANCE["float32"].gradient)
    words = "a kernel has first derivatives only: implementation 'xla' or 'scan' has second ones"
    with testing.runnable(implementation):
        with pytest.raises(NotImplementedError, match=words):
            jax.grad(slope)(inputs.q, implementation)
        with pytest.raises(NotImplementedError, match=words):
            jax.jvp(lambda q: jax.grad(loss)(q, implementation), (inputs.q,), (inputs.q,))
