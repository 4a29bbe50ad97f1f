"""Every layer against a transcription of its paper in float64 numpy: token by token, head by head, no code shared with the library."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from mixer_cases import MIXERS, D, H, K, V, assert_close, build, forward, parameters, random_input, with_random_parameters

from kda_jax import layers
from kda_jax.layers.linear_attention import elu_plus_one

T = 10


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softplus(x):
    return np.log1p(np.exp(x))


def rms(x, eps):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps)


def unit(x):
    return x / np.sqrt(np.sum(x**2, axis=-1, keepdims=True) + 1e-6)


def conv(x, p):
    """x [T, C]: four taps, the last for the current token, then SiLU."""
    past = np.concatenate([np.zeros((3, x.shape[1])), x])
    return silu(np.stack([np.sum(past[t : t + 4] * p["kernel"].T, axis=0) for t in range(len(x))]) + p.get("bias", 0))


def causal_softmax(q, k, v, scale):
    """q, k [T, dims], v [T, V]: one head."""
    rows = [np.exp(scale * (q[t] @ k[: t + 1].T)) for t in range(len(q))]
    return np.stack([p / p.sum() @ v[: len(p)] for p in rows])


def heads(x, n):
    """[T, n dims] -> n arrays [T, dims]."""
    return np.split(x, n, axis=-1)


def gpt2(p, x):
    q, k, v = np.split(x @ p["c_attn"]["kernel"] + p["c_attn"]["bias"], 3, axis=-1)
    o = [causal_softmax(*qkv, (D // H) ** -0.5) for qkv in zip(*(heads(a, H) for a in (q, k, v)), strict=True)]
    return np.concatenate(o, axis=-1) @ p["c_proj"]["kernel"] + p["c_proj"]["bias"]


def linear(p, x, original):
    q, k, v = (heads(x @ p[name]["kernel"], H) for name in ("q_proj", "k_proj", "v_proj"))
    outputs = []
    for h in range(H):
        phi_q, phi_k = (np.where(a > 0, a + 1, np.exp(a)) for a in (q[h], k[h]))
        scores = np.tril(phi_q @ phi_k.T)
        o = scores @ v[h]
        outputs.append(o / scores.sum(-1, keepdims=True) if original else rms(o * K**-0.5, 1e-5) * p["o_norm"]["scale"])
    return np.concatenate(outputs, axis=-1) @ p["o_proj"]["kernel"]


def delta(q, k, v, log_decay, beta):
    """One head: decay [T] or [T, K], beta [T]."""
    S, o = np.zeros((q.shape[1], v.shape[1])), []
    for t in range(len(q)):
        S = np.exp(log_decay[t])[..., None] * S
        S = S + beta[t] * np.outer(k[t], v[t] - S.T @ k[t])
        o.append(S.T @ q[t] * q.shape[1] ** -0.5)
    return np.stack(o)


def convolved(p, x, value_heads):
    q, k, v = (conv(x @ p[f"{n}_proj"]["kernel"], p[f"{n}_conv1d"]) for n in "qkv")
    return [unit(a) for a in heads(q, H)], [unit(a) for a in heads(k, H)], heads(v, value_heads)


def deltanet(p, x):
    q, k, v = convolved(p, x, H)
    beta = sigmoid(x @ p["b_proj"]["kernel"])
    o = [rms(delta(q[h], k[h], v[h], np.zeros((T, 1)), beta[:, h]), 1e-5) * p["o_norm"]["scale"] for h in range(H)]
    return np.concatenate(o, axis=-1) @ p["o_proj"]["kernel"]


def gated_deltanet(p, x):
    q, k, v = convolved(p, x, 2 * H)
    beta = sigmoid(x @ p["b_proj"]["kernel"])
    g = -np.exp(p["A_log"]) * softplus(x @ p["a_proj"]["kernel"] + p["dt_bias"])
    gate = heads(x @ p["g_proj"]["kernel"], 2 * H)
    o = []
    for h in range(2 * H):  # key head 0 serves value heads 0 and 1, and so on
        y = delta(q[h // 2], k[h // 2], v[h], g[:, [h]], beta[:, h])
        o.append(rms(y, 1e-5) * p["o_norm"]["scale"] * silu(gate[h]))
    return np.concatenate(o, axis=-1) @ p["o_proj"]["kernel"]


def kda(p, x, k3):
    q, k, v = convolved(p, x, H)
    beta = sigmoid(x @ p["b_proj"]["kernel"])
    f = heads(x @ p["f_a_proj"]["kernel"] @ p["f_b_proj"]["kernel"], H)
    dt_bias = heads(p["dt_bias"], H)
    gate = heads(x @ p["g_proj"]["kernel"] if k3 else x @ p["g_a_proj"]["kernel"] @ p["g_b_proj"]["kernel"], H)
    o = []
    for h in range(H):
        rate, z = np.exp(p["A_log"][h]), f[h] + dt_bias[h]
        g = -5 * sigmoid(rate * z) if k3 else -rate * softplus(z)
        o.append(rms(delta(q[h], k[h], v[h], g, beta[:, h]), 1e-5) * p["o_norm"]["scale"] * sigmoid(gate[h]))
    return np.concatenate(o, axis=-1) @ p["o_proj"]["kernel"]


def mamba2(p, x):
    inner, shared = 2 * H * V, H * K
    z, xBC, dt = np.split(x @ p["in_proj"]["kernel"], [inner, 2 * inner + 2 * shared], axis=-1)
    xs, B, C = np.split(conv(xBC, p["conv1d"]), [inner, inner + shared], axis=-1)
    xs, B, C = heads(xs, 2 * H), heads(B, H), heads(C, H)
    step = softplus(dt + p["dt_bias"])
    y = []
    for h in range(2 * H):
        S = np.zeros((K, V))
        for t in range(T):
            S = np.exp(-step[t, h] * np.exp(p["A_log"][h])) * S + step[t, h] * np.outer(B[h // 2][t], xs[h][t])
            y.append(S.T @ C[h // 2][t] + p["D"][h] * xs[h][t])
    y = np.array(y).reshape(2 * H, T, V).swapaxes(0, 1).reshape(T, inner)
    return rms(y * silu(z), 1e-5) * p["norm"]["scale"] @ p["out_proj"]["kernel"]


def mla(p, x, k3):
    R, N, P = 7, 6, 4
    if k3:
        q = rms(x @ p["q_a_proj"]["kernel"], 1e-6) * p["q_a_layernorm"]["scale"] @ p["q_b_proj"]["kernel"]
    else:
        q = x @ p["q_proj"]["kernel"]
    c, k_rope = np.split(x @ p["kv_a_proj_with_mqa"]["kernel"], [R], axis=-1)
    kv = rms(c, 1e-6) * p["kv_a_layernorm"]["scale"] @ p["kv_b_proj"]["kernel"]
    o = []
    for q_h, kv_h in zip(heads(q, H), heads(kv, H), strict=True):
        o.append(causal_softmax(q_h, np.concatenate([kv_h[:, :N], k_rope], axis=-1), kv_h[:, N:], (N + P) ** -0.5))
    o = np.concatenate(o, axis=-1)
    return (o * sigmoid(x @ p["g_proj"]["kernel"]) if k3 else o) @ p["o_proj"]["kernel"]


TRANSCRIPTIONS = {
    "gpt2": gpt2,
    "linear_modern": lambda p, x: linear(p, x, original=False),
    "linear_original": lambda p, x: linear(p, x, original=True),
    "mamba2": mamba2,
    "deltanet": deltanet,
    "gated_deltanet": gated_deltanet,
    "kda": lambda p, x: kda(p, x, k3=False),
    "kda_k3": lambda p, x: kda(p, x, k3=True),
    "mla": lambda p, x: mla(p, x, k3=False),
    "mla_k3": lambda p, x: mla(p, x, k3=True),
}


@pytest.mark.parametrize("name", MIXERS)
def test_mixer_equals_its_transcription(name):
    mixer, x = build(name), random_input(2, T)
    expected = np.stack([TRANSCRIPTIONS[name](parameters(mixer), np.asarray(row, np.float64)) for row in x])
    assert_close(forward(mixer, x).y, expected)


def test_R074_scale_of_mla_comes_from_its_query_dims():
    sizes = {"hidden_size": 64, "num_heads": 8, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    mla = nnx.eval_shape(lambda: layers.MultiHeadLatentAttention(**sizes, rngs=nnx.Rngs(0)))
    assert mla.scale == pytest.approx(0.204124, abs=1e-6)


def test_R072_absorbed_and_expanded_mla_agree():
    mixer, x = build("mla"), random_input(2, T)
    index = jnp.broadcast_to(jnp.arange(T), (2, T))

    @jax.jit
    def both(mixer, x):
        q, latent = mixer.queries(x), mixer.latent(x)
        return mixer.absorbed(q, latent, index, jnp.zeros_like(index)), mixer.expanded(q, latent, None)[0]

    assert_close(*both(mixer, x))


def test_R076_latent_norms_have_an_eps_of_their_own():
    sizes = {"hidden_size": 16, "num_heads": 1, "kv_lora_rank": 16, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4}
    for eps in (1e-6, 1e-5):
        mla = nnx.eval_shape(lambda: layers.MultiHeadLatentAttention(**sizes, q_lora_rank=3, latent_norm_eps=eps, rngs=nnx.Rngs(0)))  # noqa: B023
        assert mla.kv_a_layernorm.eps == mla.q_a_layernorm.eps == eps
    assert nnx.eval_shape(lambda: layers.MultiHeadLatentAttention(**sizes, rngs=nnx.Rngs(0))).kv_a_layernorm.eps == 1e-6


@pytest.mark.parametrize(("x", "expected"), [(-8.0, 0.000335693), (-6.0, 0.00247192), (0.0, 1.0), (2.0, 3.0)])
def test_R015_elu_plus_one_keeps_its_digits_in_bfloat16(x, expected):
    np.testing.assert_allclose(float(elu_plus_one(jnp.asarray(x, jnp.bfloat16))), expected, rtol=1e-5)
    assert jax.grad(elu_plus_one)(0.0) == 1.0
    assert jax.grad(elu_plus_one)(1000.0) == 1.0


def test_feed_forwards():
    x = random_input(2, 3)
    gpt = with_random_parameters(lambda: layers.MLP(hidden_size=D, intermediate_size=7, rngs=nnx.Rngs(0)))
    p, row = parameters(gpt), np.asarray(x, np.float64)
    h = row @ p["c_fc"]["kernel"] + p["c_fc"]["bias"]
    h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
    assert_close(gpt(x), h @ p["c_proj"]["kernel"] + p["c_proj"]["bias"])
    glu = with_random_parameters(lambda: layers.SwiGLU(hidden_size=D, intermediate_size=7, rngs=nnx.Rngs(0)))
    p = parameters(glu)
    assert_close(glu(x), (silu(row @ p["gate_proj"]["kernel"]) * (row @ p["up_proj"]["kernel"])) @ p["down_proj"]["kernel"])


def test_misfits_are_named():
    with pytest.raises(ValueError, match=r"hidden_size \(10\) must be a multiple of num_heads \(3\)"):
        layers.GPT2Attention(hidden_size=10, num_heads=3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"num_v_heads \(4\) must be a multiple of num_heads \(3\)"):
        layers.GatedDeltaNet(hidden_size=8, num_heads=3, head_dim=4, num_v_heads=4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"num_heads \(4\) must be a multiple of num_groups \(3\)"):
        layers.Mamba2(hidden_size=8, num_heads=4, head_dim=4, state_size=4, num_groups=3, rngs=nnx.Rngs(0))
