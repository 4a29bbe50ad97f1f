"""Makes the golden files beside this script: what other people's code computes, small enough to keep.

    pip install torch==2.13.0 transformers==5.24.0 fla-core==0.6.0 numpy
    python tests/golden/make.py

ops.npz: fla's naive recurrences and KDA gates, with their torch gradients. The source of each function is run with float64 written in
place of float32, so that the numbers are good to the last bit of the float32 they are stored in.
depth.npz: fla's naive Attention Residuals, the same way.
layers.npz: layers of transformers, float32, with gradients of the input and of every parameter.
Keys are "case/name"; names of parameters are those of the released checkpoints.
"""

import ast
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from einops import einsum
from torch.nn import functional as F

HERE = Path(__file__).parent
FLA = Path(next(p for p in importlib.metadata.files("fla-core") if str(p) == "fla/__init__.py").locate()).parent
B, T, H, HV, K, V = 1, 67, 1, 2, 8, 5


def fla(path, *names):
    """Functions of a file of fla, in float64. Importing the packages would need triton."""
    source = (FLA / path).read_text()
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name in names]
    text = "\n".join(ast.get_source_segment(source, node) for node in functions)
    for single, double in (("torch.float32", "torch.float64"), ("torch.float)", "torch.float64)"), (".float()", ".double()")):
        text = text.replace(single, double)
    scope = {"torch": torch, "F": F, "einsum": einsum, "Sequence": Sequence}
    exec(text, scope)
    return [scope[name] for name in names]


def draw(rng, *shape, scale=1.0):
    """Numbers that float32 holds exactly, as float64."""
    return torch.tensor(rng.normal(size=shape).astype(np.float32) * np.float32(scale), dtype=torch.float64)


def unit(x):
    return F.normalize(x, dim=-1).float().double()


def record(f, inputs, seed):
    """Inputs, outputs, random cotangents ("do", ...) and gradients ("dq", ...) of f(**inputs) -> dict of tensors."""
    rng = np.random.default_rng(seed)
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    outputs = f(**leaves)
    cotangents = {name: draw(rng, *y.shape).to(y.dtype) for name, y in outputs.items()}
    torch.autograd.backward(list(outputs.values()), list(cotangents.values()))
    found = {**inputs, **outputs, **{f"d{name}": x for name, x in cotangents.items()}}
    found |= {f"d{name}": x.grad for name, x in leaves.items()}
    return {name: x.detach().numpy().astype(np.float32) for name, x in found.items()}


def recurrence_inputs(seed, H, HV, *names):
    rng = np.random.default_rng(seed)
    every = {
        "q": draw(rng, B, T, H, K),
        "k": unit(draw(rng, B, T, H, K)),
        "v": draw(rng, B, T, HV, V),
        "g": -F.softplus(draw(rng, B, T, HV)).float().double(),
        "gk": -F.softplus(draw(rng, B, T, HV, K)).float().double(),
        "beta": torch.sigmoid(draw(rng, B, T, HV)).float().double(),
        "initial_state": draw(rng, B, HV, K, V),
    }
    return {name: every[name] for name in (*("q", "k", "v"), *names, "initial_state")}


def recurrences():
    (kda,) = fla("ops/kda/naive.py", "naive_recurrent_kda")
    (gdn,) = fla("ops/gated_delta_rule/naive.py", "naive_recurrent_gated_delta_rule")
    (delta,) = fla("ops/delta_rule/naive.py", "delta_rule_recurrence")
    (linear,) = fla("ops/linear_attn/naive.py", "naive_recurrent_linear_attn")
    (simple_gla,) = fla("ops/simple_gla/naive.py", "naive_recurrent_simple_gla")
    (gla,) = fla("ops/gla/naive.py", "naive_recurrent_gla")
    name = lambda pair: dict(zip(("o", "final_state"), pair, strict=True))
    swap = lambda x: x.transpose(1, 2)

    def delta_rule(q, k, v, beta, initial_state):  # [B, H, T, .]
        o, state = delta(*map(swap, (q, k, v, beta)), initial_state=initial_state)
        return {"o": swap(o), "final_state": state}

    def normalized(q, k, v):
        q, k = F.elu(q) + 1, F.elu(k) + 1
        o, (state, total) = linear(q, k, v, normalize=True, output_final_state=True)
        return {"o": o, "state": state, "total": total[:, 0]}

    def with_state(f, last="g", state="initial_state"):
        return lambda **x: name(f(x["q"], x["k"], x["v"], *([x[last]] if last else []), **{state: x[state]}, output_final_state=True))

    kda_ = lambda q, k, v, gk, beta, initial_state: name(kda(q, k, v, gk, beta, initial_state=initial_state, output_final_state=True))
    gdn_ = lambda q, k, v, g, beta, initial_state: name(gdn(q, k, v, beta, g, initial_state=initial_state, output_final_state=True))
    plain = recurrence_inputs(5, 2, 2)
    del plain["initial_state"]
    return {
        "kda": record(kda_, recurrence_inputs(1, H, HV, "gk", "beta"), 11),
        "gated_delta_rule": record(gdn_, recurrence_inputs(2, 2, 2, "g", "beta"), 12),
        "delta_rule": record(delta_rule, recurrence_inputs(3, 2, 2, "beta"), 13),
        "linear_attention": record(with_state(linear, last=None), recurrence_inputs(4, 2, 2), 14),
        "linear_attention_normalized": record(normalized, plain, 15),
        "simple_gla": record(with_state(simple_gla), recurrence_inputs(6, 2, 2, "g"), 16),
        "gla": record(with_state(gla, last="gk"), recurrence_inputs(7, 2, 2, "gk"), 17),
    }


def gates():
    softplus, bounded = fla("ops/kda/gate.py", "naive_kda_gate", "naive_kda_lowerbound_gate")
    rng = np.random.default_rng(8)
    inputs = {"x": draw(rng, 1, 9, 3, K, scale=4.0), "A_log": draw(rng, 3), "dt_bias": draw(rng, 3 * K)}
    return {
        "kda_gate": record(lambda x, A_log, dt_bias: {"g": softplus(x, A_log, dt_bias)}, inputs, 18),
        "kda_gate_bounded": record(lambda x, A_log, dt_bias: {"g": bounded(x, A_log, dt_bias, -5.0)}, inputs, 19),
    }


def depth():
    (attnres,) = fla("ops/attnres/naive.py", "naive_attnres")
    rng = np.random.default_rng(9)
    inputs = {"sources": draw(rng, 4, 2, 3, 16), "query": draw(rng, 16, scale=0.5), "weight": draw(rng, 16)}
    return record(lambda sources, query, weight: {"o": attnres(query, list(sources.contiguous()), weight)}, inputs, 20)


def layer_paths():
    """From the projections to the output, as a KDA layer computes it: L2 norm, gate, sigmoid, recurrence, in one differentiable piece."""
    softplus, bounded = fla("ops/kda/gate.py", "naive_kda_gate", "naive_kda_lowerbound_gate")
    (kda,) = fla("ops/kda/naive.py", "naive_recurrent_kda")
    rng = np.random.default_rng(9)
    inputs = recurrence_inputs(10, H, HV) | {"k": draw(rng, B, T, H, K), "x": draw(rng, B, T, HV, K, scale=2.0)}
    inputs |= {"beta_logits": draw(rng, B, T, HV), "A_log": draw(rng, HV), "dt_bias": draw(rng, HV * K)}
    norm = lambda x: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)

    def path(gate):
        def f(q, k, v, initial_state, x, beta_logits, A_log, dt_bias):
            g = gate(x, A_log, dt_bias)
            o, state = kda(norm(q), norm(k), v, g, torch.sigmoid(beta_logits), initial_state=initial_state, output_final_state=True)
            return {"o": o, "final_state": state}

        return f

    return {
        "kda_from_logits": record(path(softplus), inputs, 27),
        "kda_from_logits_bounded": record(path(lambda x, A_log, dt_bias: bounded(x, A_log, dt_bias, -5.0)), inputs, 28),
    }


def randomize(module, seed):
    """Parameters and buffers of order one, so that an ignored scale or bias shows; matrices keep their inputs' size."""
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, x in (*module.named_parameters(), *module.named_buffers()):
            fan_in = x.shape[-1] if x.ndim > 1 else 1
            around = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            spread = fan_in**-0.5 if x.ndim > 1 else 0.3
            x.copy_(torch.tensor(around + spread * rng.normal(size=tuple(x.shape))))
    return module.float().eval()


def record_layer(module, width, call, seed, shape=(2, 19)):
    """The layer's input, output, cotangent, and gradients, under transformers' names."""
    rng = np.random.default_rng(seed)
    x = draw(rng, *shape, width).float().requires_grad_()
    y = call(randomize(module, seed), x)
    dy = draw(rng, *y.shape).float()
    y.backward(dy)
    found = {"x": x, "y": y, "dy": dy, "dx": x.grad}
    for name, p in (*module.named_parameters(), *module.named_buffers()):
        found[f"weights/{name}"] = p
        if p.grad is not None:
            found[f"gradients/{name}"] = p.grad
    return {name: x.detach().numpy().astype(np.float32) for name, x in found.items()}


def released(arrays):
    """transformers' module names -> those on disk (its `conversion_mapping.py`)."""
    renamed = {}
    for name, x in arrays.items():
        name = name.replace("forget_gate.", "")
        if name.endswith("experts.gate_up_proj"):
            w1, w3 = np.split(x, 2, axis=1)
            parts = {"w1": w1, "w3": w3}
        elif name.endswith("experts.down_proj") and "shared" not in name:
            parts = {"w2": x}
        elif name.endswith("conv1d.weight") and "qkv" in arrays:
            parts, ends = {}, np.cumsum(arrays["qkv"])[:-1]
            for which, part in zip("qkv", np.split(x, ends), strict=True):
                renamed[name.replace("conv1d", f"{which}_conv1d")] = part
        else:
            renamed[name] = x
            continue
        stem = name.rpartition(".")[0]
        renamed |= {f"{stem}.{e}.{which}.weight": x[e] for which, x in parts.items() for e in range(len(x))}
    renamed.pop("qkv", None)
    return renamed


def unfused(arrays, heads, dims):
    """Qwen3-Next's projections, which interleave their parts per key head, as one matrix per part: q, k, v, z and b, a."""
    (key_heads, value_heads), (k_dim, v_dim) = heads, dims
    share = value_heads // key_heads
    parts = {
        "in_proj_qkvz": {"q_proj": k_dim, "k_proj": k_dim, "v_proj": share * v_dim, "g_proj": share * v_dim},
        "in_proj_ba": {"b_proj": share, "a_proj": share},
    }
    renamed = {}
    for name, x in arrays.items():
        kind, _, fused = name.removesuffix(".weight").partition("/")
        if fused not in parts:
            renamed[name] = x
            continue
        ends = np.cumsum(list(parts[fused].values()))[:-1]
        per_head = x.reshape(key_heads, -1, x.shape[-1])
        for part, rows in zip(parts[fused], np.split(per_head, ends, axis=1), strict=True):
            renamed[f"{kind}/{part}.weight"] = rows.reshape(-1, x.shape[-1])
    return renamed


def kimi_linear_layers():
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi

    config = kimi.KimiLinearConfig(
        hidden_size=12, num_attention_heads=3, num_key_value_heads=3, kv_lora_rank=7, qk_nope_head_dim=6, qk_rope_head_dim=4,
        v_head_dim=5, linear_head_dim=8, linear_num_heads=3, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"],
        moe_intermediate_size=10, num_local_experts=6, num_experts_per_tok=2, n_group=2, topk_group=1, routed_scaling_factor=1.7,
    )  # fmt: skip
    config._attn_implementation = "eager"
    mask = torch.full((19, 19), -torch.inf).triu(1)[None, None]
    kda = record_layer(kimi.KimiLinearDeltaAttention(config, 0), 12, lambda m, x: m(x), 21)
    mla = record_layer(kimi.KimiLinearAttention(config, 1), 12, lambda m, x: m(x, mask)[0], 22)
    moe = record_layer(kimi.KimiLinearMoE(config), 12, lambda m, x: m(x), 23)
    return {"kda": released(kda | {"qkv": [24, 24, 24]}), "mla": mla, "moe": released(moe)}


def lineage_layers():
    from transformers import GPT2Config, Mamba2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
    from transformers.models.olmo_hybrid import modeling_olmo_hybrid as olmo
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    gpt2 = GPT2Config(n_embd=12, n_head=3, n_inner=20, n_positions=32, attn_implementation="eager")
    mask = torch.full((19, 19), -torch.inf).triu(1)[None, None]
    block = record_layer(GPT2Block(gpt2, layer_idx=0), 12, lambda m, x: y if torch.is_tensor(y := m(x, attention_mask=mask)) else y[0], 24)
    mamba = Mamba2Config(
        hidden_size=12, num_heads=4, head_dim=6, expand=2, state_size=8, n_groups=1, num_hidden_layers=1, chunk_size=16, use_bias=False
    )
    mamba2 = record_layer(Mamba2Mixer(mamba, 0), 12, lambda m, x: m(x), 25)
    hybrid = olmo.OlmoHybridConfig(
        hidden_size=12, num_attention_heads=2, num_hidden_layers=2, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=8, linear_value_head_dim=5, linear_allow_neg_eigval=False, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    gdn = record_layer(olmo.OlmoHybridGatedDeltaNet(hybrid, 0), 12, lambda m, x: m(x), 26)
    qwen3 = qwen.Qwen3NextConfig(
        hidden_size=12, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=5,
        num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], rms_norm_eps=1e-5,
    )  # fmt: skip
    qwen_gdn = unfused(record_layer(qwen.Qwen3NextGatedDeltaNet(qwen3, 0), 12, lambda m, x: m(x), 29), (2, 4), (8, 5))
    return {
        "gpt2_block": block,
        "mamba2": mamba2,
        "gated_deltanet": released(gdn | {"qkv": [16, 16, 20]}),
        "qwen3_next": released(qwen_gdn | {"qkv": [16, 16, 20]}),
    }


def write(name, cases):
    flat = {f"{case}/{key}".lstrip("/"): x for case, arrays in cases.items() for key, x in arrays.items()}
    assert all(np.isfinite(x).all() for x in flat.values())
    np.savez_compressed(HERE / name, **flat)
    print(f"{name}: {len(flat)} arrays, {(HERE / name).stat().st_size:,} bytes")


if __name__ == "__main__":
    torch.manual_seed(0)
    write("ops.npz", recurrences() | gates() | layer_paths())
    write("depth.npz", {"": depth()})
    write("layers.npz", kimi_linear_layers() | lineage_layers())
