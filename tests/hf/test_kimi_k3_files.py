"""Checkpoints of Kimi K3: its names, counts and bytes, packed experts, padding, and what else its files hold."""

import dataclasses
import json
import subprocess
import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoints import assert_same, changed, config, tensors
from checkpoints import packed as large_packed
from flax import nnx

import kda_jax
from kda_jax import cli, hf, models
from kda_jax.hf import mxfp4
from kda_jax.models import presets
from kda_jax.train.state import flatten

LINEAR = {
    "full_attn_layers": [*range(4, 93, 4), 93], "gate_lower_bound": -5.0, "head_dim": 128, "kda_layers": [i for i in range(1, 93) if i % 4],
    "num_heads": 96, "short_conv_kernel_size": 4, "use_full_rank_gate": True,
}  # fmt: skip
TEXT = {
    "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0, "attn_res_block_size": 12, "bos_token_id": 163584,
    "dtype": "bfloat16", "eos_token_id": 163586, "first_k_dense_replace": 1, "hidden_act": "situ", "hidden_size": 7168,
    "initializer_range": 0.02, "intermediate_size": 33792, "kv_lora_rank": 512, "latent_moe_use_norm": True,
    "linear_attn_config": LINEAR,
    "max_position_embeddings": 1048576, "mla_use_nope": True, "mla_use_output_gate": True, "model_type": "kimi_linear",
    "moe_intermediate_size": 3072, "moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 96, "num_expert_group": 1, "num_experts": 896, "num_experts_per_token": 16, "num_hidden_layers": 93,
    "num_key_value_heads": 96, "num_nextn_predict_layers": 0, "num_shared_experts": 2, "pad_token_id": 163839, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "routed_expert_hidden_size": 3584, "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "use_grouped_topk": True, "v_head_dim": 128,
    "vocab_size": 163840, "quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
}  # fmt: skip
RELEASED = {
    "architectures": ["KimiK3ForConditionalGeneration"], "media_placeholder_token_id": 163605, "model_type": "kimi_k3", "text_config": TEXT,
    "vision_config": {"hidden_size": 1024},
}  # fmt: skip
VISION_TENSORS, VISION_BYTES = 168, 2 * (401_214_464 + 46_144_512)


def test_the_release_tensor_by_tensor():
    """497,220 tensors, 2,779,484,478,208 parameters of text, 1,560,860,324,864 bytes: names, shapes and dtypes of the whole file set."""
    found = list(hf.released(presets.kimi_k3()))
    names = {tensor.name for tensor in found}
    assert len(names) == len(found) == 497_220 - VISION_TENSORS
    assert sum(tensor.parameters for tensor in found) == 2_779_484_478_208 == models.count(presets.kimi_k3()).total
    assert sum(tensor.nbytes for tensor in found) + VISION_BYTES == 1_560_860_324_864
    by_name = {tensor.name: (tensor.shape, tensor.dtype.name) for tensor in found}
    layer = "language_model.model.layers.{}.".format
    assert by_name[layer(1) + "self_attn.A_log"] == ((128,), "float32")
    assert by_name[layer(1) + "self_attn.q_conv1d.weight"] == ((12288, 1, 4), "float32")
    assert by_name[layer(92) + "mlp_res_proj.weight"] == ((1, 7168), "bfloat16")
    assert by_name[layer(92) + "self_attn.kv_b_proj.weight"] == ((24576, 512), "bfloat16")
    assert by_name[layer(92) + "block_sparse_moe.experts.895.w2.weight_packed"] == ((3584, 1536), "uint8")
    assert by_name[layer(92) + "block_sparse_moe.experts.895.w2.weight_scale"] == ((3584, 96), "uint8")
    assert by_name["language_model.model.output_attn_res_proj.weight"] == ((1, 7168), "bfloat16")


@pytest.mark.parametrize("raw", [RELEASED, TEXT], ids=["whole", "text alone"])
def test_released_config(tmp_path, raw):
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(hf.BadCheckpoint) as caught:
        hf.inspect(tmp_path)
    assert [p for p in caught.value.problems if "config.json" in p] == []
    from kda_jax.hf import kimi_k3
    from kda_jax.hf.fields import Fields

    found = kimi_k3.read_config(Fields(raw, []))
    linear = dataclasses.replace(found.linear_attn_config, A_log_entries=128)
    assert dataclasses.replace(found, linear_attn_config=linear) == presets.kimi_k3()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ({"mla_use_output_gate": False}, "text_config: mla_use_output_gate is False, but only True is implemented"),
        ({"hidden_act": "silu"}, "text_config: hidden_act is 'silu', but only 'situ' is implemented"),
        ({"attn_res_blok_size": 3}, "text_config: unknown field attn_res_blok_size; nearest: attn_res_block_size"),
        ({"quantization_config": {"format": "int4"}}, "quantization_config.format is 'int4'"),
        ({"linear_attn_config": LINEAR | {"use_full_rank_gate": False}}, "text_config: linear_attn_config: use_full_rank_gate is False"),
        ({"linear_attn_config": {}}, "text_config: linear_attn_config: head_dim, num_heads"),
    ],
)
def test_config_problems(tmp_path, text, sentence):
    (tmp_path / "config.json").write_text(json.dumps(RELEASED | {"text_config": TEXT | text}))
    with pytest.raises(hf.BadCheckpoint) as caught:
        hf.inspect(tmp_path)
    assert any(sentence in problem for problem in caught.value.problems), caught.value.problems


@pytest.fixture(scope="module")
def model():
    """A tiny K3 with random arrays, those of the release's float32 in float32 and the others in bfloat16."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: models.build(presets.tiny_k3(), nnx.Rngs(0))))
    rng, abstract = np.random.default_rng(0), nnx.to_pure_dict(state)
    exact = ("A_log", "dt_bias", "e_score_correction_bias", "o_norm.scale", "conv1d.kernel")
    leaves = {
        path: jnp.asarray(0.3 * rng.normal(size=leaf.shape), jnp.float32 if path.endswith(exact) else jnp.bfloat16)
        for path, leaf in flatten(abstract).items()
    }
    from kda_jax.train.state import unflatten

    return nnx.merge(graphdef, unflatten(abstract, leaves))


@pytest.fixture(scope="module")
def plain(model, tmp_path_factory):
    """Its checkpoint with plain experts."""
    directory = tmp_path_factory.mktemp("k3") / "plain"
    hf.save(model, directory, max_file_bytes=200_000)
    return directory


def params(model):
    return nnx.to_pure_dict(nnx.state(model))


def test_there_and_back(model, plain):
    """R197: to the bit, dtypes included, through several files with an index; the padding of A_log is found again."""
    found = hf.load(plain)
    assert found.config == model.config
    assert_same(found.params, params(model))
    written = tensors(plain)
    assert all(name.startswith("language_model.") for name in written)
    assert {name: x.shape for name, x in written.items()}.items() >= {
        "language_model.model.layers.0.mlp.gate_proj.weight": (80, 48),
        "language_model.model.layers.7.mlp_res_proj.weight": (1, 48),
        "language_model.model.layers.7.block_sparse_moe.experts.7.w1.weight": (32, 32),
    }.items()
    assert config(plain)["text_config"]["dtype"] == "bfloat16"


def test_padding_of_A_log_R106(model, plain, tmp_path):
    """Three heads in four entries: zeros on disk, narrowed here, refused if not zero."""
    name = "language_model.model.layers.3.self_attn.A_log"
    stored = tensors(plain)[name]
    assert stored.shape == (4,)
    assert stored[3] == 0
    assert np.array_equal(stored[:3], np.asarray(model.stack.layer(3).self_attn.A_log[...]))
    with pytest.raises(hf.BadCheckpoint, match="1 values after those of the 3 heads that are not all zero"):
        hf.load(changed(plain, tmp_path / "x", add={name: np.float32([1, 2, 3, 1e-30])}))


def test_16_bit_export_keeps_what_the_release_keeps(model, tmp_path):
    """Convolutions and the norm of KDA's output are float32 on disk, besides the gates and the router's bias."""
    hf.save(model, tmp_path / "x", dtype=jnp.bfloat16)
    kept = {name.split(".", 4)[-1] for name, x in tensors(tmp_path / "x").items() if x.dtype == np.float32}
    exact = [f"self_attn.{n}" for n in ("A_log", "dt_bias", "o_norm.weight", *(f"{x}_conv1d.weight" for x in "qkv"))]
    assert kept == {*exact, "block_sparse_moe.gate.e_score_correction_bias"}


CODES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def decoded(packed, scale):
    """MXFP4 element by element, for comparison."""
    out = np.zeros((packed.shape[0], 2 * packed.shape[1]))
    for i, j in np.ndindex(out.shape):
        byte = int(packed[i, j // 2])
        code = byte >> 4 if j % 2 else byte & 15
        out[i, j] = (-1.0) ** (code >> 3) * CODES[code & 7] * 2.0 ** (int(scale[i, j // 32]) - 127)
    return out


def test_worked_bytes_R107():
    """The low nibble is the even element; the scale's exponent is biased by 127."""
    byte = lambda b, s: mxfp4.unpack(np.full((1, 16), b, np.uint8), np.full((1, 1), s, np.uint8))[0, :2].tolist()
    assert byte(0x2B, 127) == [-1.5, 1.0]
    assert byte(0x2B, 126) == [-0.75, 0.5]
    assert byte(0x2B, 130) == [-12, 8]
    assert byte(0xF7, 127) == [6, -6]


@pytest.mark.parametrize("scales", [(100, 140), (0, 255)], ids=["ordinary", "any"])
def test_unpack_and_pack(scales):
    """Every byte, any scale but NaN: equal to the definition, where bfloat16 holds it, and packed again to the same numbers."""
    rng = np.random.default_rng(0)
    packed, scale = rng.integers(0, 256, (6, 32), np.uint8), rng.integers(*scales, (6, 2)).astype(np.uint8)
    got = mxfp4.unpack(packed, scale)
    assert got.dtype == ml_dtypes.bfloat16
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got, decoded(packed, scale).astype(ml_dtypes.bfloat16))
    again = mxfp4.pack(got)
    if scales[0] > 3:
        np.testing.assert_array_equal(mxfp4.unpack(*again).view(np.uint16), got.view(np.uint16))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_every_byte_with_every_scale(dtype):
    """To the bit: both zeros, what is subnormal in bfloat16 and what is infinite in it, in either dtype."""
    packed, scale = np.tile(np.arange(256, dtype=np.uint8), (255, 1)), np.tile(np.arange(255, dtype=np.uint8)[:, None], 16)
    exact = np.stack([np.array([*CODES, *(-x for x in map(float, CODES))])[packed >> shift & 15] for shift in (0, 4)], axis=-1).reshape(
        255, 512
    )
    with np.errstate(over="ignore"):
        exact = (exact * 2.0 ** (np.arange(255.0)[:, None] - 127)).astype(dtype)
    assert exact[0, :16].tolist() == [0, 0, *[x for code in [0.5, 1, 1.5, 2, 3, 4, 6] for x in (code * 2.0**-127, 0)]]
    assert np.isinf(exact[254, 2 * 0x07])
    bits = f"u{exact.dtype.itemsize}"
    np.testing.assert_array_equal(mxfp4.unpack(packed, scale, dtype).view(bits), exact.view(bits))


def test_what_does_not_pack():
    assert mxfp4.pack(np.full((1, 32), 7.0, np.float32)) is None
    assert mxfp4.pack(np.float32([[6.0] + [0.01] * 31])) is None
    assert mxfp4.pack(np.zeros((1, 33), np.float32)) is None


@pytest.fixture(scope="module")
def packed(plain, tmp_path_factory):
    """The same checkpoint with random packed experts, and beside it one with those experts decoded."""
    rng, both, decode = np.random.default_rng(1), {}, {}
    for name, x in tensors(plain).items():
        if ".experts." in name:
            weight, scale = (
                rng.integers(0, 256, (x.shape[0], x.shape[1] // 2), np.uint8),
                rng.integers(118, 124, (x.shape[0], x.shape[1] // 32)),
            )
            both |= {f"{name}_packed": weight, f"{name}_scale": scale.astype(np.uint8)}
            decode[name] = decoded(weight, scale).astype(ml_dtypes.bfloat16)
    folder = tmp_path_factory.mktemp("packed")
    return changed(plain, folder / "packed", drop=decode, add=both), changed(plain, folder / "decoded", add=decode)


def test_packed_and_plain_experts_R110(packed):
    assert_same(hf.load(packed[0]).params, hf.load(packed[1]).params)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_packed_experts_as_another_dtype(packed, dtype):
    """Unpacked to float32, or cast to what is neither."""
    assert_same(hf.load(packed[0], dtype=dtype).params, hf.load(packed[1], dtype=dtype).params)


def test_an_array_of_packed_and_plain_experts(packed, tmp_path):
    """The layers and the experts of one array need not be stored alike."""
    stem = "language_model.model.layers.2.block_sparse_moe.experts.3.w1.weight"
    halves = [f"{stem}_packed", f"{stem}_scale"]
    mixed = changed(packed[0], tmp_path / "x", drop=halves, add={stem: tensors(packed[1])[stem]})
    assert_same(hf.load(mixed).params, hf.load(packed[1]).params)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_memory_while_unpacking_R155(tmp_path, dtype):
    """Beside what is loaded, no more than the packed bytes of the largest array are in memory."""
    directory = large_packed(tmp_path / "x", 8, width=1024, latent=2048)
    code = f"""
import resource, jax
from kda_jax import hf
hf.load({str(large_packed(tmp_path / "warm", 8, width=32, latent=32))!r})
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
sizes = [x.nbytes for x in jax.tree.leaves(hf.load({str(directory)!r}, dtype={dtype!r}).params)]
print(sum(sizes), max(sizes), peak() - before)
"""
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    total, largest, grown = map(int, printed.split())
    assert total > 250e6
    assert grown <= total + 0.5 * largest, f"{grown / 1e6:.0f} MB for {total / 1e6:.0f} MB of parameters"


def test_packed_experts_in_pieces(packed, monkeypatch):
    monkeypatch.setattr("kda_jax.hf.forms.PIECE_ROWS", 5)
    monkeypatch.setattr("kda_jax.hf.forms.PIECE_BYTES", 1)
    assert_same(hf.load(packed[0]).params, hf.load(packed[1]).params)


def test_packed_experts_into_shards(packed):
    """Every device unpacks its own part, also where it begins inside a group of 32."""
    import jax
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    mesh = jax.make_mesh((2, 2), ("expert", "fsdp"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    name = "layers.periods.0.block_sparse_moe.experts.w1"
    shardings = {name: NamedSharding(mesh, PartitionSpec(None, "expert", "fsdp"))}
    with jax.set_mesh(mesh):
        assert_same(hf.load(packed[0], shardings=shardings).params, hf.load(packed[1]).params)


def test_export_of_packed_experts(model, packed, tmp_path):
    """What was packed can be packed again and means the same; what MXFP4 does not hold is refused."""
    hf.save(hf.load_model(packed[0]), tmp_path / "again", experts="mxfp4")
    assert_same(hf.load(tmp_path / "again").params, hf.load(packed[0]).params)
    assert any(name.endswith("weight_packed") for name in tensors(tmp_path / "again"))
    with pytest.raises(kda_jax.errors.UserError, match="is not exactly what MXFP4 can hold; export it with plain experts"):
        hf.save(model, tmp_path / "x", experts="mxfp4")
    assert not (tmp_path / "x").exists()


def test_halves_of_packed_experts(packed, tmp_path):
    stem = "language_model.model.layers.2.block_sparse_moe.experts.3."
    shape = (32, 2)
    broken = changed(
        packed[0],
        tmp_path / "x",
        drop=[f"{stem}w1.weight_scale", f"{stem}w2.weight_packed"],
        add={f"{stem}w3.weight_scale": np.zeros(shape, np.uint8)},
    )
    with pytest.raises(hf.BadCheckpoint) as caught:
        hf.load(broken)
    found = caught.value.problems
    assert f"{stem}w1.weight_packed has no {stem}w1.weight_scale beside it" in found
    assert f"{stem}w2.weight_scale has no {stem}w2.weight_packed beside it" in found
    assert any(p.startswith(f"{stem}w3.weight_packed has shape (32, 16) and its scale (32, 2)") for p in found)


def test_a_scale_that_is_not_a_number_R107(packed, tmp_path):
    name = "language_model.model.layers.2.block_sparse_moe.experts.3.w1.weight_scale"
    bad = changed(packed[0], tmp_path / "x", add={name: np.full((32, 1), 255, np.uint8)})
    with pytest.raises(hf.BadTensor, match=r"experts\.3\.w1\.weight has a scale of 255"):
        hf.load(bad)


def test_vision_is_ignored_by_name_R110(plain, tmp_path):
    """With a count; and the text's names without the outer root."""
    extra = {"vision_tower.patch_embed.proj.weight": np.zeros(3, np.float32), "mm_projector.proj.0.weight": np.zeros(3, np.float32)}
    assert set(hf.inspect(changed(plain, tmp_path / "whole", add=extra)).ignored) == set(extra)
    bare = changed(plain, tmp_path / "bare", rename=lambda name: name.removeprefix("language_model."))
    assert_same(hf.load(bare).params, hf.load(plain).params)
    with pytest.raises(hf.BadCheckpoint, match=r"audio_tower\.weight is not part of the model"):
        hf.load(changed(plain, tmp_path / "x", add={"audio_tower.weight": np.zeros(3, np.float32)}))


def test_an_unread_norm_is_refused_R095(plain, tmp_path):
    """And a missing one: the norm of the latent space cannot get lost."""
    name = "language_model.model.layers.2.block_sparse_moe.routed_expert_norm.weight"
    with pytest.raises(hf.BadCheckpoint, match=r"routed_expert_norm\.weight is missing"):
        hf.load(changed(plain, tmp_path / "x", drop=[name]))


def test_runs(plain, tmp_path, capsys):
    """`kda-jax import` and `export`: a run holds float32 masters, and the bits come back."""
    assert cli.main(["import", str(plain), str(tmp_path / "run")]) == 0
    assert "KimiK3Config" in capsys.readouterr().out
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "back"), "--dtype", "bfloat16"]) == 0
    assert_same(hf.load(tmp_path / "back").params, hf.load(plain).params)
