"""Kimi Linear's released form (moonshotai/Kimi-Linear-48B-A3B), which is also what transformers' `KimiLinearForCausalLM` reads."""

import itertools
import re

from kda_jax.errors import UserError
from kda_jax.hf.family import Family
from kda_jax.hf.fields import Fields
from kda_jax.hf.forms import HEADS, MATRIX, TAPS, Tensor
from kda_jax.models.config import KimiLinearConfig, LinearAttentionConfig

TOP = {
    "embed_tokens.embedding": Tensor("model.embed_tokens.weight"),
    "norm.scale": Tensor("model.norm.weight"),
    "lm_head.kernel": Tensor("lm_head.weight", MATRIX),
}
LAYER = {
    "input_layernorm.scale": Tensor("input_layernorm.weight"),
    "post_attention_layernorm.scale": Tensor("post_attention_layernorm.weight"),
    # both kinds of attention
    "self_attn.q_proj.kernel": Tensor("self_attn.q_proj.weight", MATRIX),
    "self_attn.o_proj.kernel": Tensor("self_attn.o_proj.weight", MATRIX),
    # KDA
    "self_attn.k_proj.kernel": Tensor("self_attn.k_proj.weight", MATRIX),
    "self_attn.v_proj.kernel": Tensor("self_attn.v_proj.weight", MATRIX),
    "self_attn.q_conv1d.kernel": Tensor("self_attn.q_conv1d.weight", TAPS),
    "self_attn.k_conv1d.kernel": Tensor("self_attn.k_conv1d.weight", TAPS),
    "self_attn.v_conv1d.kernel": Tensor("self_attn.v_conv1d.weight", TAPS),
    "self_attn.A_log": Tensor("self_attn.A_log", HEADS),
    "self_attn.dt_bias": Tensor("self_attn.dt_bias"),
    "self_attn.f_a_proj.kernel": Tensor("self_attn.f_a_proj.weight", MATRIX),
    "self_attn.f_b_proj.kernel": Tensor("self_attn.f_b_proj.weight", MATRIX),
    "self_attn.b_proj.kernel": Tensor("self_attn.b_proj.weight", MATRIX),
    "self_attn.g_a_proj.kernel": Tensor("self_attn.g_a_proj.weight", MATRIX),
    "self_attn.g_b_proj.kernel": Tensor("self_attn.g_b_proj.weight", MATRIX),
    "self_attn.o_norm.scale": Tensor("self_attn.o_norm.weight"),
    # MLA
    "self_attn.kv_a_proj_with_mqa.kernel": Tensor("self_attn.kv_a_proj_with_mqa.weight", MATRIX),
    "self_attn.kv_a_layernorm.scale": Tensor("self_attn.kv_a_layernorm.weight"),
    "self_attn.kv_b_proj.kernel": Tensor("self_attn.kv_b_proj.weight", MATRIX),
    # dense FFN
    "mlp.gate_proj.kernel": Tensor("mlp.gate_proj.weight", MATRIX),
    "mlp.up_proj.kernel": Tensor("mlp.up_proj.weight", MATRIX),
    "mlp.down_proj.kernel": Tensor("mlp.down_proj.weight", MATRIX),
    # experts
    "block_sparse_moe.gate.kernel": Tensor("block_sparse_moe.gate.weight", MATRIX),
    "block_sparse_moe.gate.e_score_correction_bias": Tensor("block_sparse_moe.gate.e_score_correction_bias"),
    "block_sparse_moe.experts.w1": Tensor("block_sparse_moe.experts.{e}.w1.weight", MATRIX),
    "block_sparse_moe.experts.w3": Tensor("block_sparse_moe.experts.{e}.w3.weight", MATRIX),
    "block_sparse_moe.experts.w2": Tensor("block_sparse_moe.experts.{e}.w2.weight", MATRIX),
    "block_sparse_moe.shared_experts.gate_proj.kernel": Tensor("block_sparse_moe.shared_experts.gate_proj.weight", MATRIX),
    "block_sparse_moe.shared_experts.up_proj.kernel": Tensor("block_sparse_moe.shared_experts.up_proj.weight", MATRIX),
    "block_sparse_moe.shared_experts.down_proj.kernel": Tensor("block_sparse_moe.shared_experts.down_proj.weight", MATRIX),
}
# our field -> other names that it has been given
TAKEN = {
    "vocab_size": (),
    "hidden_size": (),
    "num_hidden_layers": (),
    "num_attention_heads": (),
    "kv_lora_rank": (),
    "qk_nope_head_dim": (),
    "qk_rope_head_dim": (),
    "v_head_dim": (),
    "intermediate_size": (),
    "num_experts": ("num_local_experts",),
    "num_experts_per_token": ("num_experts_per_tok",),
    "num_shared_experts": ("n_shared_experts",),
    "moe_intermediate_size": (),
    "moe_router_activation_func": (),
    "moe_renormalize": ("norm_topk_prob",),
    "routed_scaling_factor": (),
    "num_expert_group": ("n_group",),
    "topk_group": (),
    "rms_norm_eps": (),
    "initializer_range": (),
    "tie_word_embeddings": (),
}
_LINEAR = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads", "short_conv_kernel_size": "linear_conv_kernel_dim"}
# MLA has no positions and a head dim of its own, whatever these say
IGNORED = (
    "attention_dropout head_dim max_position_embeddings model_max_length output_router_logits pretraining_tp qk_head_dim rope_parameters "
    "rope_scaling rope_theta"
).split()


def read_config(fields: Fields) -> KimiLinearConfig | None:
    """Both dialects: the release's (`linear_attn_config`, `first_k_dense_replace`) and transformers' (`layer_types`, `linear_*`)."""
    values = fields.given(TAKEN)
    layers = values.get("num_hidden_layers", KimiLinearConfig.num_hidden_layers)
    heads = values.get("num_attention_heads", KimiLinearConfig.num_attention_heads)
    fields.require("hidden_act", "silu")
    fields.require("q_lora_rank", None)
    fields.require("mla_use_nope", True)
    fields.require("attention_bias", False)
    fields.require("num_nextn_predict_layers", 0)
    fields.require("num_key_value_heads", heads, None)
    if not fields.take("use_grouped_topk", default=True):
        values |= {"num_expert_group": 1, "topk_group": 1}
    fields.ignore(IGNORED)
    attention = _read_attention(fields, layers)
    first, every = read_ffns(fields, layers)
    if attention is None:
        return None
    return fields.build(
        KimiLinearConfig, values | {"linear_attn_config": attention, "first_k_dense_replace": first, "moe_layer_freq": every}
    )


def _read_attention(fields: Fields, layers: int) -> LinearAttentionConfig | None:
    nested = dict(fields.take("linear_attn_config", default=None) or {})
    values = {}
    for ours, flat in _LINEAR.items():
        value = fields.take(flat, default=nested.get(ours))
        if ours in nested and value != nested[ours]:
            fields.problem(f"{flat} is {value!r} and linear_attn_config.{ours} is {nested[ours]!r}: they mean the same")
        values |= {} if value is None else {ours: value}
    kinds = fields.take("layer_types")
    from_kinds = None
    if kinds is not None:
        unknown = sorted(set(kinds) - {"linear_attention", "full_attention"})
        if unknown or len(kinds) != layers:
            fields.problem(f"layer_types must be {layers} of 'linear_attention' and 'full_attention', got {len(kinds)} with {unknown}")
        from_kinds = [tuple(i + 1 for i, kind in enumerate(kinds) if kind == name) for name in ("linear_attention", "full_attention")]
    lists = [tuple(nested[name]) if name in nested else None for name in ("kda_layers", "full_attn_layers")]
    if None in lists and from_kinds is None:
        fields.problem("neither linear_attn_config.kda_layers and full_attn_layers nor layer_types say which layers are KDA")
        return None
    if None not in lists and from_kinds not in (None, [tuple(sorted(x)) for x in lists]):
        fields.problem("layer_types and linear_attn_config (which counts from 1) disagree about which layers are KDA")
    kda, full = from_kinds if None in lists else lists
    for name in sorted(nested.keys() - {*_LINEAR, "kda_layers", "full_attn_layers"}):
        fields.problem(f"unknown field linear_attn_config.{name}")
    return fields.build(LinearAttentionConfig, values | {"kda_layers": kda, "full_attn_layers": full})


def read_ffns(fields: Fields, layers: int) -> tuple[int, int]:
    """(first_k_dense_replace, moe_layer_freq)."""
    first, every = fields.take("first_k_dense_replace"), fields.take("moe_layer_freq")
    kinds = fields.take("mlp_layer_types")
    stated = (1 if first is None else first), (1 if every is None else every)
    if kinds is None or list(kinds) == _ffn_kinds(*stated, layers):
        return stated
    if first is None and every is None:
        for choice in itertools.product(range(layers + 1), range(1, layers + 1)):
            if list(kinds) == _ffn_kinds(*choice, layers):
                return choice
    fields.problem(
        f"mlp_layer_types {list(kinds)} is not what first_k_dense_replace and moe_layer_freq ({first} and {every}) say of {layers} layers, "
        "or nothing that they can say"
    )
    return stated


def _ffn_kinds(first: int, every: int, layers: int) -> list[str]:
    return ["sparse" if i >= first and i % every == 0 else "dense" for i in range(layers)]


def write_config(config: KimiLinearConfig) -> dict:
    """The release's fields, and the two lists by which transformers goes. Raises UserError for what transformers would compute otherwise."""
    if config.moe_router_activation_func != "sigmoid":
        raise UserError(f"transformers' Kimi Linear routes by sigmoid, not by {config.moe_router_activation_func}: it cannot be exported")
    if config.tie_word_embeddings:
        raise UserError("transformers' Kimi Linear does not tie its head to the embedding: it cannot be exported")
    linear, layers = config.linear_attn_config, config.num_hidden_layers
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        **{name: getattr(config, name) for name in TAKEN},
        "first_k_dense_replace": config.first_k_dense_replace,
        "moe_layer_freq": config.moe_layer_freq,
        "linear_attn_config": {
            **{name: getattr(linear, name) for name in _LINEAR},
            "kda_layers": list(linear.kda_layers),
            "full_attn_layers": list(linear.full_attn_layers),
        },
        "layer_types": ["linear_attention" if config.is_kda(i) else "full_attention" for i in range(layers)],
        "mlp_layer_types": _ffn_kinds(config.first_k_dense_replace, config.moe_layer_freq, layers),
        "num_key_value_heads": config.num_attention_heads,
        "hidden_act": "silu",
        "q_lora_rank": None,
        "mla_use_nope": True,
        "use_grouped_topk": True,
        "num_nextn_predict_layers": 0,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def released_name(name: str, config: KimiLinearConfig) -> str:
    """transformers writes a dense FFN under `block_sparse_moe`, the release under `mlp`; a text model inside another has a longer root."""
    name = name.removeprefix("language_model.")
    found = re.fullmatch(r"(model\.layers\.(\d+)\.)(?:mlp|block_sparse_moe)\.(.*)", name)
    if not found:
        return name
    prefix, layer, rest = found.groups()
    sparse = int(layer) < config.num_hidden_layers and config.is_moe(int(layer))
    return f"{prefix}{'block_sparse_moe' if sparse else 'mlp'}.{rest}"


FAMILY = Family(
    config_class=KimiLinearConfig,
    read_config=read_config,
    write_config=write_config,
    stack="layers",
    embedding="embed_tokens.embedding",
    top=TOP,
    layer_prefix="model.layers.{i}.",
    layer_table=lambda config: LAYER,
    released_name=released_name,
    ignored=re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
)
