"""Reading checkpoints that transformers wrote, and what other files have been seen to look like."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoints import GPT2, KIMI, assert_same, changed, large, loaded, loaded_model, tensors
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import kda_jax
from kda_jax import hf, ops
from kda_jax.models import presets
from kda_jax.testing import assert_close
from kda_jax.train.state import flatten

RELEASED = {  # config.json of moonshotai/Kimi-Linear-48B-A3B
    "architectures": ["KimiLinearForCausalLM"], "bos_token_id": 163584, "dtype": "bfloat16", "eos_token_id": 163586,
    "first_k_dense_replace": 1, "head_dim": 72, "hidden_act": "silu", "hidden_size": 2304, "initializer_range": 0.02,
    "intermediate_size": 9216, "kv_lora_rank": 512, "mla_use_nope": True, "model_max_length": 1048576, "model_type": "kimi_linear",
    "moe_intermediate_size": 1024, "moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32, "num_expert_group": 1, "num_experts": 256, "num_experts_per_token": 8, "num_hidden_layers": 27,
    "num_key_value_heads": 32, "num_nextn_predict_layers": 0, "num_shared_experts": 1, "pad_token_id": 163839, "q_lora_rank": None,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446, "tie_word_embeddings": False, "topk_group": 1, "transformers_version": "4.57.1", "use_cache": True,
    "use_grouped_topk": True, "v_head_dim": 128, "vocab_size": 163840,
    "linear_attn_config": {
        "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4, "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
    },
}  # fmt: skip
A_LOG = "model.layers.3.self_attn.A_log"
CONV = "model.layers.3.self_attn.k_conv1d.weight"


@pytest.mark.parametrize("directory", [GPT2, KIMI], ids=lambda path: path.name)
def test_logits_of_transformers(directory):
    model = kda_jax.load(directory)
    with np.load(directory / "logits.npz") as golden:
        logits = jax.jit(lambda model, tokens: model(tokens).logits)(model, golden["tokens"])
        assert_close("logits", logits, golden["logits"], 1e-5)


def test_needs_no_torch():
    """R186."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy as np; from kda_jax import hf\n"
        f"print(float(np.asarray(hf.load({str(GPT2)!r}).params['wte']['embedding'], np.float64).sum()))\n"
    )
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert float(printed) == tensors(GPT2)["transformer.wte.weight"].astype(np.float64).sum()


def read_config(tmp_path, raw):
    """Our configuration of a config.json, without tensors."""
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(hf.BadCheckpoint) as caught:
        hf.inspect(tmp_path)
    return [p for p in caught.value.problems if p.startswith("config.json")]


def test_released_config_and_tensors(tmp_path):
    """R113: the lists count from 1. All 20,493 tensors of the release have a place."""
    from kda_jax.hf import kimi_linear
    from kda_jax.hf.fields import Fields

    problems = []
    fields = Fields(RELEASED, problems)
    found = kimi_linear.read_config(fields)
    fields.close()
    assert problems == []
    assert found == presets.kimi_linear_48b_a3b()
    assert [i for i in range(27) if not found.is_kda(i)] == [3, 7, 11, 15, 19, 23, 26]
    names = [tensor.name for tensor in hf.released(found)]
    assert len(names) == len(set(names)) == 20493


def test_gpt2_has_148_tensors():
    assert sum(1 for _ in hf.released(presets.gpt2_124m())) == 148


def test_released_dialect_of_the_same_model(tmp_path):
    """`linear_attn_config`, `first_k_dense_replace` and a dense FFN under `mlp`, as Moonshot writes them."""
    lists = {"kda_layers": [1, 2, 4, 5, 7], "full_attn_layers": [3, 6, 8], "head_dim": 8, "num_heads": 3, "short_conv_kernel_size": 3}
    gone = dict.fromkeys(["layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"])
    fields = gone | {"linear_attn_config": lists, "first_k_dense_replace": 1, "moe_layer_freq": 1}
    rename = lambda name: name.replace("layers.0.block_sparse_moe", "layers.0.mlp")
    released = hf.load(changed(KIMI, tmp_path / "released", fields=fields, rename=rename))
    found = loaded(KIMI)
    assert released.config == found.config
    assert_same(released.params, found.params)


def test_conv_of_rank_2(tmp_path):
    """R119: the last tap multiplies the current token, whatever the rank."""
    add = {name: np.ascontiguousarray(x[:, 0]) for name, x in tensors(KIMI).items() if "conv1d" in name}
    assert_same(hf.load(changed(KIMI, tmp_path / "flat", add=add)).params, loaded(KIMI).params)
    first = np.zeros((24, 1, 3), np.float32)
    first[:, 0, 0] = 1
    model = hf.load_model(changed(KIMI, tmp_path / "tap", add={CONV: first}))
    x = jnp.broadcast_to(jnp.arange(1.0, 6)[None, :, None], (1, 5, 24))
    y = ops.short_conv(x, model.stack.layer(3).self_attn.k_conv1d.kernel[...], activation=None).y
    assert y[0, :, 0].tolist() == [0, 0, 1, 2, 3]


@pytest.mark.parametrize("shape", [(3,), (8,), (1, 1, 8, 1)])
def test_A_log_with_zeros_behind(tmp_path, shape):
    """R106: one value per head, or more, zeros after the last head."""
    stored = np.zeros(shape, np.float32)
    stored.reshape(-1)[:3] = tensors(KIMI)[A_LOG].reshape(-1)
    assert_same(hf.load(changed(KIMI, tmp_path / "x", add={A_LOG: stored})).params, loaded(KIMI).params)


def test_A_log_with_values_behind(tmp_path):
    stored = np.zeros((1, 1, 8, 1), np.float32)
    stored[0, 0, 5] = 1e-30
    with pytest.raises(hf.BadCheckpoint, match="5 values after those of the 3 heads that are not all zero"):
        hf.load(changed(KIMI, tmp_path / "x", add={A_LOG: stored}))


def test_gpt2_with_buffers_and_without_prefix(tmp_path):
    """R115: mask buffers and a copy of the tied head are ignored by name; one parameter holds both."""
    rename = lambda name: name.removeprefix("transformer.")
    mask = np.tril(np.ones((1, 1, 37, 37), np.float32))
    add = {"h.0.attn.bias": mask, "h.2.attn.masked_bias": np.float32([-1e4]), "lm_head.weight": tensors(GPT2)["transformer.wte.weight"]}
    directory = changed(GPT2, tmp_path / "old", add=add, rename=rename)
    assert set(hf.inspect(directory).ignored) == set(add)
    assert_same(hf.load(directory).params, loaded(GPT2).params)
    assert "lm_head" not in hf.load(directory).params


def test_head_that_is_not_the_embedding(tmp_path):
    """R115."""
    other = tensors(GPT2)["transformer.wte.weight"] + 1
    with pytest.raises(hf.BadCheckpoint, match=r"lm_head\.weight differs from transformer\.wte\.weight"):
        hf.load(changed(GPT2, tmp_path / "x", add={"lm_head.weight": other}))


def test_tied_and_untied_kimi_linear(tmp_path):
    """R115."""
    tied = hf.load(changed(KIMI, tmp_path / "tied", fields={"tie_word_embeddings": True}, drop=["lm_head.weight"]))
    assert tied.config.tie_word_embeddings
    assert "lm_head" not in tied.params
    with pytest.raises(hf.BadCheckpoint, match=r"lm_head\.weight is missing"):
        hf.load(changed(KIMI, tmp_path / "untied", drop=["lm_head.weight"]))


def test_router_bias_is_read():
    """R118."""
    stored = tensors(KIMI)["model.layers.7.block_sparse_moe.gate.e_score_correction_bias"]
    model = loaded_model(KIMI)
    assert np.array_equal(model.stack.layer(7).block_sparse_moe.gate.e_score_correction_bias[...], stored)
    assert np.any(stored)


def test_dtypes_are_kept(tmp_path):
    """bfloat16 stays bfloat16 and float32 stays float32; a cast leaves alone what must be float32."""
    exact = ("A_log", "dt_bias", "e_score_correction_bias")
    mixed = {name: x if name.endswith(exact) else x.astype(ml_dtypes.bfloat16) for name, x in tensors(KIMI).items()}
    found = hf.load(changed(KIMI, tmp_path / "mixed", add=mixed)).params
    for path, x in flatten(found).items():
        assert x.dtype == (jnp.float32 if path.endswith(exact) else jnp.bfloat16), path
    assert_same(hf.load(KIMI, dtype=jnp.bfloat16).params, found)


def test_straight_into_shards():
    """Every device gets its part of a stacked array, and the whole is the same."""
    mesh = jax.make_mesh((2, 2), ("expert", "fsdp"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    name = "layers.periods.0.block_sparse_moe.experts.w1"
    shardings = {
        name: NamedSharding(mesh, PartitionSpec(None, "expert", "fsdp")),
        "layers.periods.0.self_attn.A_log": NamedSharding(mesh, PartitionSpec()),
        "embed_tokens.embedding": NamedSharding(mesh, PartitionSpec(None, "fsdp")),
    }
    whole, parted = loaded(KIMI).params, hf.load(KIMI, shardings=shardings).params
    assert_same(parted, whole)
    x = flatten(parted)[name]
    assert x.shape == (2, 6, 24, 12)
    assert {part.data.shape for part in x.addressable_shards} == {(2, 3, 12, 12)}


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("directory", [GPT2, KIMI], ids=lambda path: path.name)
def test_tensors_in_pieces(directory, dtype, monkeypatch):
    """A tensor that is read, transposed and cast a few rows at a time is the tensor, also where a device holds a part of it."""
    whole = hf.load(directory, dtype=dtype).params
    monkeypatch.setattr("kda_jax.hf.forms.PIECE_ROWS", 5)
    monkeypatch.setattr("kda_jax.hf.forms.PIECE_BYTES", 1)
    assert_same(hf.load(directory, dtype=dtype).params, whole)
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    even = {path: x.ndim - 1 for path, x in flatten(whole).items() if x.shape[-1] % 2 == 0}
    parts = {path: NamedSharding(mesh, PartitionSpec(*[None] * axis, "fsdp")) for path, axis in even.items()}
    assert_same(hf.load(directory, dtype=dtype, shardings=parts).params, whole)


def test_every_byte_is_read_once(monkeypatch):
    """Where no head is padded: headers and what is checked by its contents are small."""
    read, preadv = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, to, at: read.append(preadv(file, to, at)) or read[-1])
    hf.load(GPT2)
    assert sum(read) == sum(x.nbytes for x in tensors(GPT2).values())


def test_memory_while_reading(tmp_path):
    """R155: beside what is loaded, no more than the largest stacked array and one file are in memory."""
    code = f"""
import resource, sys, json
import numpy as np
from safetensors.numpy import save_file
from kda_jax import hf, models
L, D = 8, 512
rng = np.random.default_rng(0)
directory = {str(tmp_path)!r}
where = {{}}
def put(file, arrays):
    save_file(arrays, f"{{directory}}/{{file}}")
    where.update(dict.fromkeys(arrays, file))
for i in range(L):
    shapes = {{"ln_1.weight": (D,), "ln_1.bias": (D,), "attn.c_attn.weight": (D, 3 * D), "attn.c_attn.bias": (3 * D,),
        "attn.c_proj.weight": (D, D), "attn.c_proj.bias": (D,), "ln_2.weight": (D,), "ln_2.bias": (D,),
        "mlp.c_fc.weight": (D, 4 * D), "mlp.c_fc.bias": (4 * D,), "mlp.c_proj.weight": (4 * D, D), "mlp.c_proj.bias": (D,)}}
    put(f"{{i}}.safetensors", {{f"transformer.h.{{i}}.{{n}}": rng.random(s, np.float32) for n, s in shapes.items()}})
rest = {{"wte.weight": (64, D), "wpe.weight": (8, D), "ln_f.weight": (D,), "ln_f.bias": (D,)}}
put("rest.safetensors", {{f"transformer.{{n}}": rng.random(s, np.float32) for n, s in rest.items()}})
json.dump({{"weight_map": where}}, open(directory + "/model.safetensors.index.json", "w"))
config = {{"model_type": "gpt2", "vocab_size": 64, "n_positions": 8, "n_embd": D, "n_layer": L, "n_head": 8}}
json.dump(config, open(directory + "/config.json", "w"))
hf.load({str(GPT2)!r})
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
params = hf.load(directory).params
import jax
sizes = [x.nbytes for x in jax.tree.leaves(params)]
print(sum(sizes), max(sizes), peak() - before)
"""
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    total, largest, grown = map(int, printed.split())
    assert total > 100e6
    file = 13e6
    assert grown <= total + 1.5 * largest + file, f"{grown / 1e6:.0f} MB for {total / 1e6:.0f} MB of parameters"


@pytest.mark.slow
def test_speed_of_stacked_and_transposed_tensors(tmp_path):
    """In processor time, which other work on the machine does not change much: at most six plain reads into fresh memory."""
    directory = large(tmp_path / "x")
    code = f"""
import os, pathlib, resource, time
import jax, numpy as np
from kda_jax import hf
directory = pathlib.Path({str(directory)!r})
def plain():
    return [np.fromfile(path, np.uint8) for path in directory.glob("*.safetensors")]
def seconds(f):
    start = time.process_time()
    result = jax.block_until_ready(f())
    return time.process_time() - start
load = lambda: hf.load(directory).params
hf.inspect(directory)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
sizes = [x.nbytes for x in jax.tree.leaves(load())]
grown = peak() - before
times = [(seconds(plain), seconds(load)) for _ in range(5)]
print(sum(sizes), max(sizes), grown, *map(min, zip(*times)))
"""
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    total, largest, grown, plain, load = map(float, printed.split())
    assert total > 300e6
    assert grown <= total + 0.5 * largest, f"{grown / 1e6:.0f} MB for {total / 1e6:.0f} MB of parameters"
    assert load <= 6 * plain, f"{load:.2f} s of the processor against {plain:.2f} s for a plain read"
