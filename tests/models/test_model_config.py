"""Configurations: what they refuse, in one sentence, and that every field is read by something."""

import ast
import copy
import dataclasses
import json
from pathlib import Path

import pytest

import kda_jax
from kda_jax.models import presets
from kda_jax.models.config import GPT2Config, KimiLinearConfig, LinearAttentionConfig, LinearLMConfig

CONFIGS = (GPT2Config, LinearLMConfig, LinearAttentionConfig, KimiLinearConfig)


def kimi(layers, kda, full, **fields):
    return KimiLinearConfig(
        num_hidden_layers=layers, linear_attn_config=LinearAttentionConfig(kda_layers=kda, full_attn_layers=full), **fields
    )


def test_layer_lists_count_from_one_R113():
    """K3's schedule: MLA at 4, 8, ..., 92 and 93 (from 1), so layers 91 and 92 (from 0) are both MLA; the other 69 are KDA."""
    full = (*range(4, 93, 4), 93)
    config = kimi(93, tuple(i for i in range(1, 94) if i not in full), full)
    assert [i for i in range(93) if not config.is_kda(i)] == [*range(3, 92, 4), 92]
    assert sum(map(config.is_kda, range(93))) == 69


@pytest.mark.parametrize(
    ("kda", "full", "sentence"),
    [
        ((0, 1, 2), (3,), r"\[0\] lie outside 1\.\.4"),
        ((1, 2, 3), (4, 5), r"\[5\] lie outside 1\.\.4"),
        ((1, 2, 3, 4), (4,), r"\[4\] are in both"),
        ((1, 2), (4,), r"\[3\] are in neither"),
        ((1, 2, 2, 3), (4,), r"\[2\] are named twice"),
    ],
)
def test_layer_lists_that_do_not_fit_raise_R113(kda, full, sentence):
    with pytest.raises(ValueError, match=sentence):
        kimi(4, kda, full)


@pytest.mark.parametrize(
    ("config", "fields", "sentence"),
    [
        (presets.gpt2_124m(), {"n_embd": 100}, "multiple of n_head"),
        (presets.gpt2_124m(), {"remat": "some"}, "remat must be one of none, full, dots"),
        (presets.gpt2_124m(), {"n_layer": 0}, "n_layer must be positive"),
        (presets.linear_lm(), {"mixer": "mamba3"}, "mixer must be one of linear_attention, mamba2"),
        (presets.linear_lm("kda"), {"num_v_heads": 12}, "only mamba2 and gated_deltanet"),
        (presets.linear_lm(), {"num_v_heads": 8}, "multiple of num_heads"),
        (presets.linear_lm(), {"head_dim": 5, "expand_v": 0.5}, "whole number"),
        (presets.tiny_hybrid(), {"num_expert_group": 3}, "multiple of num_expert_group"),
        (presets.tiny_hybrid(), {"topk_group": 2}, "at most num_expert_group"),
        (presets.tiny_hybrid(), {"num_expert_group": 4, "num_experts_per_token": 3}, "at most the 2 experts"),
        (presets.tiny_hybrid(), {"moe_router_activation_func": "tanh"}, "sigmoid, softmax"),
        (presets.tiny_hybrid(), {"num_shared_experts": -1}, "must not be negative"),
    ],
)
def test_refusals_are_sentences(config, fields, sentence):
    """Set past the constructor, whose annotations are checked under pytest only."""
    config = copy.copy(config)
    for name, value in fields.items():
        object.__setattr__(config, name, value)
    with pytest.raises(ValueError, match=sentence):
        config.__post_init__()


def test_which_layers_have_experts():
    config = kimi(6, (1, 2, 3, 4, 5, 6), (), first_k_dense_replace=2, moe_layer_freq=2)
    assert [config.is_moe(i) for i in range(6)] == [False, False, True, False, True, False]
    assert [presets.kimi_linear_48b_a3b().is_moe(i) for i in range(27)] == [False] + [True] * 26


def test_presets_are_json():
    """Plain values only."""
    for config in (presets.gpt2_124m(), presets.linear_lm("mamba2"), presets.kimi_linear_48b_a3b(), presets.tiny_hybrid()):
        plain = json.loads(json.dumps(dataclasses.asdict(config)))
        if "linear_attn_config" in plain:
            lists = {k: tuple(v) if isinstance(v, list) else v for k, v in plain["linear_attn_config"].items()}
            plain["linear_attn_config"] = LinearAttentionConfig(**lists)
        assert type(config)(**plain) == config


def test_every_field_is_read():
    """A field that no code reads is a lie: the package must take it from a config somewhere, outside the check of its class."""
    read = set()
    for path in Path(kda_jax.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text())
        checks = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and f.name == "__post_init__" for n in ast.walk(f)}
        read |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and id(n) not in checks}
    unread = [f"{c.__name__}.{f.name}" for c in CONFIGS for f in dataclasses.fields(c) if f.name not in read]
    assert not unread
