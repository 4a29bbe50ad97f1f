"""Kimi K3's released form (moonshotai/Kimi-K3), its text model: routed experts in MXFP4, the vision tower ignored by name."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from kda_jax.hf import kimi_linear
from kda_jax.hf.family import Family
from kda_jax.hf.fields import Fields
from kda_jax.hf.forms import MATRIX, ROW, TAPS, PaddedHeads, Stored, Tensor
from kda_jax.models.config import K3LinearAttentionConfig, KimiK3Config

TOP = kimi_linear.TOP | {
    "output_attn_res.query": Tensor("model.output_attn_res_proj.weight", ROW),
    "output_attn_res.scale": Tensor("model.output_attn_res_norm.weight"),
}
_EXPERTS = {
    f"block_sparse_moe.experts.{w}": Tensor(f"block_sparse_moe.experts.{{e}}.{w}.weight", MATRIX, "mxfp4") for w in ("w1", "w3", "w2")
}
_CONVOLUTIONS = {f"self_attn.{x}_conv1d.kernel": Tensor(f"self_attn.{x}_conv1d.weight", TAPS, "float32") for x in "qkv"}
LAYER = (
    {ours: tensor for ours, tensor in kimi_linear.LAYER.items() if not re.match(r"self_attn\.g_[ab]_proj", ours)}
    | _EXPERTS
    | _CONVOLUTIONS
    | {
        "self_attention_res.query": Tensor("self_attention_res_proj.weight", ROW),
        "self_attention_res.scale": Tensor("self_attention_res_norm.weight"),
        "mlp_res.query": Tensor("mlp_res_proj.weight", ROW),
        "mlp_res.scale": Tensor("mlp_res_norm.weight"),
        # both kinds of attention: the output gate
        "self_attn.g_proj.kernel": Tensor("self_attn.g_proj.weight", MATRIX),
        # KDA
        "self_attn.dt_bias": Tensor("self_attn.dt_bias", stored="float32"),
        "self_attn.o_norm.scale": Tensor("self_attn.o_norm.weight", stored="float32"),
        # MLA
        "self_attn.q_a_proj.kernel": Tensor("self_attn.q_a_proj.weight", MATRIX),
        "self_attn.q_a_layernorm.scale": Tensor("self_attn.q_a_layernorm.weight"),
        "self_attn.q_b_proj.kernel": Tensor("self_attn.q_b_proj.weight", MATRIX),
        # experts
        "block_sparse_moe.gate.e_score_correction_bias": Tensor("block_sparse_moe.gate.e_score_correction_bias", stored="float32"),
        "block_sparse_moe.routed_expert_down_proj.kernel": Tensor("block_sparse_moe.routed_expert_down_proj.weight", MATRIX),
        "block_sparse_moe.routed_expert_norm.scale": Tensor("block_sparse_moe.routed_expert_norm.weight"),
        "block_sparse_moe.routed_expert_up_proj.kernel": Tensor("block_sparse_moe.routed_expert_up_proj.weight", MATRIX),
    }
)
_TAKEN = kimi_linear.TAKEN | {
    "q_lora_rank": (),
    "routed_expert_hidden_size": (),
    "activation_situ_beta": (),
    "activation_situ_linear_beta": (),
    "attn_res_block_size": (),
}
_FIXED = {
    "hidden_act": "situ",
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "latent_moe_use_norm": True,
    "attention_bias": False,
    "num_nextn_predict_layers": 0,
    "topk_method": "noaux_tc",
    "use_grouped_topk": True,
}
_LINEAR = ("head_dim", "num_heads", "short_conv_kernel_size", "kda_layers", "full_attn_layers", "gate_lower_bound")
_A_LOG = "model.layers.{i}.self_attn.A_log"


def is_text_config(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json of model_type kimi_linear is K3's text model on its own."""
    return "attn_res_block_size" in raw


def read_config(fields: Fields) -> KimiK3Config | None:
    """The whole release's config.json, whose `text_config` is the model here, or that object alone."""
    if fields.take("text_config") is None:
        return _read_text(fields)
    _check_quantization(fields)
    fields.ignore_rest()  # of the vision tower and of what joins it to the text
    text = fields.section("text_config")
    config = _read_text(text)
    text.close()
    return config


def _read_text(fields: Fields) -> KimiK3Config | None:
    values = fields.given(_TAKEN)
    for name, value in _FIXED.items():
        fields.require(name, value)
    fields.require("num_key_value_heads", values.get("num_attention_heads", KimiK3Config.num_attention_heads), None)
    fields.ignore(kimi_linear.IGNORED)
    _check_quantization(fields)
    layers = values.get("num_hidden_layers", KimiK3Config.num_hidden_layers)
    first, every = kimi_linear.read_ffns(fields, layers)
    linear = _read_linear(fields.section("linear_attn_config"))
    if linear is None:
        return None
    return fields.build(KimiK3Config, values | {"linear_attn_config": linear, "first_k_dense_replace": first, "moe_layer_freq": every})


def _read_linear(fields: Fields) -> K3LinearAttentionConfig | None:
    values = {name: tuple(x) if isinstance(x, list) else x for name, x in fields.given(dict.fromkeys(_LINEAR, ())).items()}
    fields.require("use_full_rank_gate", True)
    fields.close()
    absent = [name for name in _LINEAR if name not in values]
    if absent:
        fields.problem(f"{', '.join(absent)} missing")
        return None
    return fields.build(K3LinearAttentionConfig, values)


def _check_quantization(fields: Fields) -> None:
    """Only that it is the form that is unpacked here; which tensors are in it shows in the files."""
    found = fields.take("quantization_config")
    if found is not None and found.get("format") != "mxfp4-pack-quantized":
        fields.problem(f"quantization_config.format is {found.get('format')!r}, but only 'mxfp4-pack-quantized' is implemented")


def write_config(config: KimiK3Config) -> dict:
    """The release's fields: an outer object, and the text model inside it."""
    linear = config.linear_attn_config
    text = {
        "model_type": "kimi_linear",
        **{name: getattr(config, name) for name in _TAKEN},
        **_FIXED,
        "first_k_dense_replace": config.first_k_dense_replace,
        "moe_layer_freq": config.moe_layer_freq,
        "num_key_value_heads": config.num_attention_heads,
        "linear_attn_config": {
            **{name: list(x) if isinstance(x := getattr(linear, name), tuple) else x for name in _LINEAR},
            "use_full_rank_gate": True,
        },
    }
    return {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "text_config": text}


def complete(config: KimiK3Config, tensors: Mapping[str, Stored]) -> KimiK3Config:
    """The configuration with what only the tensors say: how many numbers are stored of each A_log."""
    linear = config.linear_attn_config
    stored = tensors.get(_A_LOG.format(i=linear.kda_layers[0] - 1)) if linear.kda_layers else None
    if stored is None or len(stored.shape) != 1 or stored.shape[0] <= linear.num_heads:
        return config
    return dataclasses.replace(config, linear_attn_config=dataclasses.replace(linear, A_log_entries=stored.shape[0]))


def layer_table(config: KimiK3Config) -> dict[str, Tensor]:
    linear = config.linear_attn_config
    return LAYER | {"self_attn.A_log": Tensor("self_attn.A_log", PaddedHeads(linear.A_log_entries or linear.num_heads), "float32")}


FAMILY = Family(
    config_class=KimiK3Config,
    read_config=read_config,
    write_config=write_config,
    stack="layers",
    embedding="embed_tokens.embedding",
    top=TOP,
    layer_prefix="model.layers.{i}.",
    layer_table=layer_table,
    released_name=kimi_linear.released_name,
    ignored=re.compile(r"(vision_tower|mm_projector)\..*|model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
    root="language_model.",
    complete=complete,
)
