"""Directories that are not what they say: one error with everything that is wrong, and nothing written."""

import json

import numpy as np
import pytest
from checkpoints import GPT2, KIMI, changed, config, copy, index, tensors

from kda_jax import cli, hf
from kda_jax.hf.files import INDEX

SHARD = "model-00002-of-00004.safetensors"


def problems(directory):
    with pytest.raises(hf.BadCheckpoint) as caught:
        hf.load(directory)
    return list(caught.value.problems)


def test_every_problem_of_the_tensors(tmp_path):
    """Missing, left over and of another shape, at once."""
    add = {
        "model.layers.1.self_attn.q_proj.bias": np.zeros(24, np.float32),
        "model.layers.2.self_attn.kv_b_proj.weight": np.zeros((33, 6), np.float32),
        "model.layers.8.input_layernorm.weight": np.ones(24, np.float32),
    }
    drop = ["model.norm.weight", "model.layers.4.block_sparse_moe.experts.5.w3.weight"]
    assert problems(changed(KIMI, tmp_path / "x", add=add, drop=drop)) == [
        "model.layers.1.self_attn.q_proj.bias is not part of the model; nearest: model.layers.1.self_attn.q_proj.weight",
        "model.layers.2.self_attn.kv_b_proj.weight has shape (33, 6), expected (33, 7)",
        "model.layers.4.block_sparse_moe.experts.5.w3.weight is missing",
        "model.layers.8.input_layernorm.weight is not part of the model; nearest: model.layers.7.input_layernorm.weight",
        "model.norm.weight is missing",
    ]


def test_a_transposed_matrix_is_refused(tmp_path):
    name = "transformer.h.0.mlp.c_fc.weight"
    x = np.ascontiguousarray(tensors(GPT2)[name].T)
    assert problems(changed(GPT2, tmp_path / "x", add={name: x})) == [f"{name} has shape (40, 24), expected (24, 40)"]


def test_a_tensor_under_two_names(tmp_path):
    add = {"wte.weight": tensors(GPT2)["transformer.wte.weight"]}
    (found,) = problems(changed(GPT2, tmp_path / "x", add=add))
    assert "wte.weight in model.safetensors and" in found
    assert "are the same tensor" in found


def test_integers_are_refused(tmp_path):
    name = "transformer.ln_f.bias"
    (found,) = problems(changed(GPT2, tmp_path / "x", add={name: np.zeros(24, np.int32)}))
    assert found == f"{name} has dtype I32, expected one of F64, F32, F16, BF16"


def test_truncated_and_absent_files(tmp_path):
    directory = copy(KIMI, tmp_path / "x")
    first, *_, last = sorted(directory.glob("*.safetensors"))
    last.write_bytes(last.read_bytes()[:-5])
    first.unlink()
    found = problems(directory)
    assert f"{first.name} is absent, though {INDEX} names it" in found
    assert any(p.startswith(f"{last.name} is truncated or not a safetensors file") for p in found)
    held = [name for name, file in index(directory).items() if file in (first.name, last.name)]
    assert sum(p.endswith(" is missing") for p in found) == len(held)


def test_index_and_files_that_disagree(tmp_path):
    directory = copy(KIMI, tmp_path / "x")
    where = index(directory)
    file = where.pop("model.norm.weight")
    where["model.extra.weight"] = file
    (directory / INDEX).write_text(json.dumps({"weight_map": where}))
    assert problems(directory) == [
        f"{INDEX} says that {file} holds model.extra.weight, which it does not",
        f"{file} holds model.norm.weight, which is not in {INDEX}",
    ]


def test_every_problem_of_the_config(tmp_path):
    fields = {"n_embed": 24, "activation_function": "relu", "tie_word_embeddings": False, "n_head": 5}
    assert problems(changed(GPT2, tmp_path / "x", fields=fields)) == [
        "config.json: activation_function is 'relu', but only 'gelu_new' or 'gelu_pytorch_tanh' is implemented",
        "config.json: tie_word_embeddings is False, but only True is implemented",
        "config.json: GPT2Config.n_embd (24) must be a multiple of n_head (5)",
        "config.json: unknown field n_embed; nearest: n_embd, n_head",
    ]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"q_lora_rank": 4}, "q_lora_rank is 4, but only None is implemented"),
        ({"num_key_value_heads": 1}, "num_key_value_heads is 1, but only 3 or None is implemented"),
        ({"num_experts_per_tok": 3}, "num_experts_per_token is 2 and num_experts_per_tok is 3: they mean the same"),
        ({"linear_attn_config": {"head_dim": 9}}, "linear_head_dim is 8 and linear_attn_config.head_dim is 9: they mean the same"),
        (
            {"linear_attn_config": {"kda_layers": [0, 1, 3, 4, 6], "full_attn_layers": [2, 5, 7]}},
            "layer_types and linear_attn_config (which counts from 1) disagree about which layers are KDA",
        ),
        ({"linear_attn_config": {"gate": 1}}, "unknown field linear_attn_config.gate"),
        ({"layer_types": None}, "neither linear_attn_config.kda_layers and full_attn_layers nor layer_types say which layers are KDA"),
        ({"layer_types": ["linear_attention"] * 7}, "layer_types must be 8 of 'linear_attention' and 'full_attention'"),
        ({"first_k_dense_replace": 2}, "is not what first_k_dense_replace and moe_layer_freq (2 and None) say of 8 layers"),
        ({"vocab_size": "many"}, "'many'"),
        ({"model_type": "kimi_k9"}, "model_type is 'kimi_k9', expected gpt2 or kimi_linear"),
    ],
)
def test_kimi_linear_fields(fields, sentence, tmp_path):
    found = problems(changed(KIMI, tmp_path / "x", fields=fields))
    assert any(p.startswith("config.json: ") and sentence in p for p in found), found


def test_no_checkpoint_at_all(tmp_path):
    found = problems(tmp_path)
    assert found[0].startswith("config.json cannot be read")
    assert found[1] == "there is no .safetensors file"


def test_many_problems_are_counted(tmp_path):
    drop = [name for name in tensors(KIMI) if "experts" in name]
    directory = changed(KIMI, tmp_path / "x", drop=drop)
    with pytest.raises(hf.BadCheckpoint) as caught:
        hf.load(directory)
    assert len(caught.value.problems) == len(drop)
    assert f"{len(drop)} problems:" in str(caught.value)
    assert str(caught.value).endswith(f"and {len(drop) - 20} more")


def test_import_writes_nothing(tmp_path, capsys):
    bad = changed(GPT2, tmp_path / "bad", fields={"n_layer": 4})
    assert cli.main(["import", str(bad), str(tmp_path / "run")]) == 2
    assert "transformer.h.3.ln_1.weight is missing" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]


def test_config_of_the_fixture_is_what_transformers_writes():
    assert config(KIMI)["transformers_version"] == "5.24.0"
