"""Makes tests/hf/fixtures: tiny checkpoints written by transformers, with the logits that it computes from them.

    pip install torch==2.13.0 transformers==5.24.0 numpy
    python tests/hf/make_fixtures.py

Irregular on purpose: three heads, sizes that are no powers of two, layers that do not end with a period, experts in groups, router biases
that change the choice, several files per checkpoint.
"""

import shutil
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, KimiLinearConfig, KimiLinearForCausalLM

FIXTURES = Path(__file__).parent / "fixtures"
LINEAR, FULL = "linear_attention", "full_attention"


def gpt2():
    config = GPT2Config(
        vocab_size=61, n_positions=37, n_embd=24, n_layer=3, n_head=3, n_inner=40, layer_norm_epsilon=3e-4, bos_token_id=1, eos_token_id=2
    )
    return GPT2LMHeadModel(config)


def kimi_linear():
    config = KimiLinearConfig(
        vocab_size=61, hidden_size=24, intermediate_size=20, moe_intermediate_size=12, num_hidden_layers=8, num_attention_heads=3,
        num_key_value_heads=3, kv_lora_rank=7, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, linear_head_dim=8, linear_num_heads=3,
        linear_conv_kernel_dim=3, layer_types=[LINEAR, LINEAR, FULL, LINEAR, LINEAR, FULL, LINEAR, FULL],
        num_local_experts=6, num_experts_per_tok=2, n_group=2, topk_group=1, n_shared_experts=2, routed_scaling_factor=1.7,
        rms_norm_eps=3e-4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return KimiLinearForCausalLM(config)


def randomize(model):
    """Every array of order one, norms and biases too, so that one left at its initial value shows."""
    rng = np.random.default_rng(7)
    with torch.no_grad():
        for name, x in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("attn.bias"):
                continue
            spread = x.shape[-1] ** -0.5 if x.ndim > 1 and x.shape[-1] > 1 else 0.3
            around = 1.0 if ("norm" in name or "ln_" in name) and name.endswith("weight") else 0.0
            x.copy_(torch.tensor(around + spread * rng.normal(size=tuple(x.shape))))
    return model.eval()


def write(name, model, max_shard_size):
    directory = FIXTURES / name
    shutil.rmtree(directory, ignore_errors=True)
    randomize(model).save_pretrained(directory, max_shard_size=max_shard_size)
    tokens = np.random.default_rng(8).integers(3, 61, size=(2, 29))
    with torch.no_grad():
        logits = model(torch.tensor(tokens)).logits.numpy()
    np.savez_compressed(directory / "logits.npz", tokens=tokens.astype(np.int32), logits=logits)
    size = sum(path.stat().st_size for path in directory.iterdir())
    print(f"{name}: {sum(p.numel() for p in model.parameters()):,} parameters, {size:,} bytes, logits of size {logits.std():.3f}")


if __name__ == "__main__":
    write("gpt2", gpt2(), "200KB")
    write("kimi_linear", kimi_linear(), "120KB")
