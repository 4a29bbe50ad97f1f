"""Kimi K3 against a transcription of its description in float64 NumPy: token by token, head by head, expert by expert, no code shared."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from model_cases import CONFIGS, TOKENS, build, reference

from kda_jax import models, testing
from kda_jax.layers import DepthStream
from kda_jax.models import presets

CONFIG = CONFIGS["kimi_k3"]
T = 20


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rms(x, eps):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps)


def norm(p, x, eps=1e-5):
    return rms(x, eps) * p["scale"]


def unit(x):
    return x / np.sqrt(np.sum(x**2) + 1e-6)


def mix(p, bank, prefix):
    """Depth attention: keys normalised, values raw, no 1/sqrt(d); the prefix is the last source."""
    values = np.stack([*bank, prefix])  # [N, T, D]
    scores = rms(values, 1e-5) @ (p["scale"] * p["query"])
    a = np.exp(scores - scores.max(0))
    return np.sum((a / a.sum(0))[..., None] * values, axis=0)


def conv(x, kernel):
    past = np.concatenate([np.zeros((3, x.shape[1])), x])
    y = np.stack([np.sum(past[t : t + 4] * kernel.T, axis=0) for t in range(len(x))])
    return y * sigmoid(y)


def kda(p, x, c):
    H, K = c.linear_attn_config.num_heads, c.linear_attn_config.head_dim
    q, k, v = (conv(x @ p[f"{n}_proj"]["kernel"], p[f"{n}_conv1d"]["kernel"]).reshape(-1, H, K) for n in "qkv")
    z = (x @ p["f_a_proj"]["kernel"] @ p["f_b_proj"]["kernel"] + p["dt_bias"]).reshape(-1, H, K)
    g = c.linear_attn_config.gate_lower_bound * sigmoid(np.exp(p["A_log"])[:, None] * z)
    beta, gate = sigmoid(x @ p["b_proj"]["kernel"]), sigmoid(x @ p["g_proj"]["kernel"]).reshape(-1, H, K)
    o = np.zeros_like(v)
    for h in range(H):
        S = np.zeros((K, K))
        for t in range(len(x)):
            key = unit(k[t, h])
            S = np.exp(g[t, h])[:, None] * S
            S = S + beta[t, h] * np.outer(key, v[t, h] - S.T @ key)
            o[t, h] = S.T @ unit(q[t, h]) * K**-0.5
    return (norm(p["o_norm"], o) * gate).reshape(len(x), -1) @ p["o_proj"]["kernel"]


def mla(p, x, c):
    H, N, P, V, R = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim, c.kv_lora_rank
    q = (norm(p["q_a_layernorm"], x @ p["q_a_proj"]["kernel"], 1e-6) @ p["q_b_proj"]["kernel"]).reshape(-1, H, N + P)
    latent = x @ p["kv_a_proj_with_mqa"]["kernel"]
    kv = (norm(p["kv_a_layernorm"], latent[:, :R], 1e-6) @ p["kv_b_proj"]["kernel"]).reshape(-1, H, N + V)
    o = np.zeros((len(x), H, V))
    for h in range(H):
        keys = np.concatenate([kv[:, h, :N], latent[:, R:]], axis=-1)
        for t in range(len(x)):
            s = keys[: t + 1] @ q[t, h] * (N + P) ** -0.5
            w = np.exp(s - s.max())
            o[t, h] = w / w.sum() @ kv[: t + 1, h, N:]
    return (o.reshape(len(x), -1) * sigmoid(x @ p["g_proj"]["kernel"])) @ p["o_proj"]["kernel"]


def situ(g, u, c):
    b1, b2 = c.activation_situ_beta, c.activation_situ_linear_beta
    return b1 * np.tanh(g / b1) * sigmoid(g) * b2 * np.tanh(u / b2)


def dense(p, x, c):
    return situ(x @ p["gate_proj"]["kernel"], x @ p["up_proj"]["kernel"], c) @ p["down_proj"]["kernel"]


def moe(p, x, c):
    scores = sigmoid(x @ p["gate"]["kernel"])
    y = dense(p["shared_experts"], x, c)
    e = p["experts"]
    for t in range(len(x)):
        chosen = np.argsort(-(scores[t] + p["gate"]["e_score_correction_bias"]), kind="stable")[: c.num_experts_per_token]
        weights = scores[t, chosen] / scores[t, chosen].sum() * c.routed_scaling_factor
        z = x[t] @ p["routed_expert_down_proj"]["kernel"]
        u = sum(w * (situ(z @ e["w1"][j], z @ e["w3"][j], c) @ e["w2"][j]) for w, j in zip(weights, chosen, strict=True))
        y[t] += norm(p["routed_expert_norm"], u) @ p["routed_expert_up_proj"]["kernel"]
    return y


def k3(model, tokens):
    """Logits of one row of tokens, following the released loop over decoder layers."""
    c, plain = model.config, lambda m: jax.tree.map(lambda a: np.asarray(a, np.float64), nnx.to_pure_dict(nnx.state(m)))
    bank, prefix = [], plain(model.embed_tokens)["embedding"][tokens]
    for i in range(c.num_hidden_layers):
        p = plain(model.stack.layer(i))
        h = mix(p["self_attention_res"], bank, prefix) if bank else prefix
        opens = i % c.attn_res_block_size == 0
        if opens:
            bank.append(prefix)
        x = norm(p["input_layernorm"], h)
        a = kda(p["self_attn"], x, c) if i + 1 in c.linear_attn_config.kda_layers else mla(p["self_attn"], x, c)
        prefix = a if opens else prefix + a
        x = norm(p["post_attention_layernorm"], mix(p["mlp_res"], bank, prefix))
        prefix = prefix + (dense(p["mlp"], x, c) if i == 0 else moe(p["block_sparse_moe"], x, c))
    h = mix(plain(model.output_attn_res), bank, prefix)
    return norm(plain(model.norm), h) @ plain(model.lm_head)["kernel"]


def test_logits_of_the_transcription():
    """Also that the sizes are those this is about: three blocks, the second and third opening at different places of the periods."""
    model = build("kimi_k3")
    assert (model.stack.rows, model.stack.layout.repeats, model.stack.layout.bodies) == (3, 3, 4)
    for row in (0, 1):
        testing.assert_close("logits", reference("kimi_k3")[row, :T], k3(model, TOKENS[row, :T]), 1e-5)


def test_the_transcription_notices(monkeypatch):
    """What a wrong port would do: sum instead of mean, bank after the mix, gate without its bound."""
    model = build("kimi_k3")
    right = k3(model, TOKENS[0, :6])
    for name, wrong in {
        "mix": lambda p, bank, prefix: prefix + sum(bank),
        "situ": lambda g, u, c: g * sigmoid(g) * u,
        "rms": lambda x, eps: x / np.sqrt(np.sum(x**2, axis=-1, keepdims=True) + eps),
    }.items():
        with monkeypatch.context() as patch:
            patch.setitem(globals(), name, wrong)
            assert np.abs(k3(model, TOKENS[0, :6]) - right).max() > 1e-3 * np.abs(right).max(), name


def test_count_of_sources_R102():
    assert nnx.eval_shape(lambda: models.build(presets.kimi_k3(), nnx.Rngs(0))).stack.rows + 1 == 9


def test_boundaries_count_layers_R105():
    """Eight layers in blocks of four open at layers 0 and 4, whatever the sublayers; odd block sizes are allowed."""

    def openings(layers, block_sublayers, sublayers_per_layer=2):
        stream, opened = DepthStream.start(jnp.zeros((1, 1, 2)), 16), []
        for i in range(layers * sublayers_per_layer):
            before = int(stream.count)
            stream = stream.enter(block_sublayers).add(jnp.ones((1, 1, 2)))
            opened += [i / 2] if stream.count > before else []
        return opened

    assert openings(8, dataclasses.replace(CONFIG, attn_res_block_size=4).block_sublayers) == [0, 4]
    assert openings(8, CONFIG.block_sublayers) == [0, 3, 6]
    assert openings(2, 1) == [0, 0.5, 1, 1.5]


def test_schedule_R113():
    """24 MLA layers, 0-based 91 and 92 both among them; 69 KDA."""
    config = presets.kimi_k3()
    mla = [i for i in range(93) if not config.is_kda(i)]
    assert len(mla) == 24
    assert mla[-2:] == [91, 92]
    assert mla[:3] == [3, 7, 11]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"attn_res_block_size": 0}, "attn_res_block_size must be positive or None, got 0"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func must be 'sigmoid', got 'softmax'"),
        ({"num_expert_group": 2}, "num_expert_group must be 1, got 2"),
        ({"num_experts_per_token": 9}, r"KimiK3Config.num_experts_per_token \(9\) must be at most the 8 experts"),
        ({"q_lora_rank": 0}, "KimiK3Config.q_lora_rank must be positive"),
    ],
)
def test_refusals(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(CONFIG, **fields)


@pytest.mark.parametrize(("fields", "sentence"), [({"gate_lower_bound": -6.0}, "-5, 0"), ({"A_log_entries": 2}, "at least the 3 heads")])
def test_refusals_of_linear_attn_config(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(CONFIG.linear_attn_config, **fields)
