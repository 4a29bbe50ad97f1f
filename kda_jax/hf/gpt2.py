"""GPT-2's released form (transformers' `GPT2LMHeadModel`). torch's Conv1D keeps its matrices [in, out], as we do."""

import re

from kda_jax.hf.family import Family
from kda_jax.hf.fields import Fields
from kda_jax.hf.forms import Tensor
from kda_jax.models.config import GPT2Config

TOP = {
    "wte.embedding": Tensor("transformer.wte.weight"),
    "wpe.embedding": Tensor("transformer.wpe.weight"),
    "ln_f.scale": Tensor("transformer.ln_f.weight"),
    "ln_f.bias": Tensor("transformer.ln_f.bias"),
}
LAYER = {
    "ln_1.scale": Tensor("ln_1.weight"),
    "ln_1.bias": Tensor("ln_1.bias"),
    "attn.c_attn.kernel": Tensor("attn.c_attn.weight"),
    "attn.c_attn.bias": Tensor("attn.c_attn.bias"),
    "attn.c_proj.kernel": Tensor("attn.c_proj.weight"),
    "attn.c_proj.bias": Tensor("attn.c_proj.bias"),
    "ln_2.scale": Tensor("ln_2.weight"),
    "ln_2.bias": Tensor("ln_2.bias"),
    "mlp.c_fc.kernel": Tensor("mlp.c_fc.weight"),
    "mlp.c_fc.bias": Tensor("mlp.c_fc.bias"),
    "mlp.c_proj.kernel": Tensor("mlp.c_proj.weight"),
    "mlp.c_proj.bias": Tensor("mlp.c_proj.bias"),
}
_TAKEN = {
    "vocab_size": (),
    "n_positions": ("max_position_embeddings",),
    "n_embd": ("hidden_size",),
    "n_layer": ("num_hidden_layers",),
    "n_head": ("num_attention_heads",),
    "n_inner": (),
    "layer_norm_epsilon": (),
    "initializer_range": (),
}
_IGNORED = (
    "attn_pdrop embd_pdrop resid_pdrop n_ctx reorder_and_upcast_attn summary_activation summary_first_dropout summary_hidden_size "
    "summary_proj_to_labels summary_type summary_use_proj"
).split()


def read_config(fields: Fields) -> GPT2Config | None:
    values = fields.given(_TAKEN)
    fields.require("activation_function", "gelu_new", "gelu_pytorch_tanh")
    fields.require("scale_attn_weights", True)
    fields.require("scale_attn_by_inverse_layer_idx", False)
    fields.require("add_cross_attention", False)
    fields.require("tie_word_embeddings", True)
    fields.ignore(_IGNORED)
    return fields.build(GPT2Config, values)


def write_config(config: GPT2Config) -> dict:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{name: getattr(config, name) for name in _TAKEN},
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    }


def released_name(name: str, config: GPT2Config) -> str:
    """Files saved from the bare model lack the prefix `transformer.`."""
    return name if name.startswith("transformer.") or name == "lm_head.weight" else f"transformer.{name}"


FAMILY = Family(
    config_class=GPT2Config,
    read_config=read_config,
    write_config=write_config,
    stack="h",
    embedding="wte.embedding",
    top=TOP,
    layer_prefix="transformer.h.{i}.",
    layer_table=lambda config: LAYER,
    released_name=released_name,
    ignored=re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)"),
)
