"""`kda-jax eval parity`, `kda-jax eval layers` and `kda-jax memory`."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kda_jax import cli, hf, models
from kda_jax.memory import memory, mesh_of, saving
from kda_jax.models import presets
from kda_jax.parity import activations, compare_activations, compare_logits
from kda_jax.sharding import MeshConfig

HF = Path(__file__).parent / "hf" / "fixtures"
GPT2, KIMI = HF / "gpt2", HF / "kimi_linear"


@pytest.mark.parametrize("directory", [GPT2, KIMI], ids=lambda path: path.name)
def test_parity_with_transformers(directory, capsys):
    """R198: KL, top-1, top-5 and the largest error of checkpoints that transformers wrote, against the logits it computed."""
    assert cli.main(["eval", "parity", str(directory), "--reference", str(directory / "logits.npz"), "--max-kl", "1e-9"]) == 0
    said = capsys.readouterr().out
    assert "top-1 100.00%, top-5 100.00%" in said
    assert "KL" in said


def test_parity_notices(tmp_path, capsys):
    """One weight doubled: exit code 2 and a sentence."""
    doubled = double(KIMI, tmp_path / "x", "model.layers.4.self_attn.o_proj.weight")
    assert cli.main(["eval", "parity", str(doubled), "--reference", str(KIMI / "logits.npz")]) == 2
    assert "exceeds 0.001" in capsys.readouterr().err


def double(directory, to, name):
    sys.path.insert(0, str(HF.parent))
    from checkpoints import changed, tensors

    return changed(directory, to, add={name: 2 * tensors(directory)[name]})


@pytest.mark.parametrize(
    ("directory", "weight", "module"),
    [
        (KIMI, "model.layers.4.self_attn.f_b_proj.weight", "layers.4.self_attn.f_b_proj"),
        (GPT2, "transformer.h.1.mlp.c_fc.weight", "layers.1.mlp.c_fc"),
    ],
    ids=["kimi_linear", "gpt2"],
)
def test_first_sublayer_that_differs_R121(directory, weight, module, tmp_path, capsys):
    """A dump of every sublayer, and the one whose weight was doubled is named; nothing before it is."""
    dump = tmp_path / "reference.npz"
    assert cli.main(["eval", "layers", str(directory), "--tokens", "3,1,4,1,5,9", "--out", str(dump)]) == 0
    assert cli.main(["eval", "layers", str(directory), "--reference", str(dump)]) == 0
    assert "outputs agree" in capsys.readouterr().out
    assert cli.main(["eval", "layers", str(double(directory, tmp_path / "x", weight)), "--reference", str(dump)]) == 2
    assert f"{module} is the first that differs" in capsys.readouterr().err


@pytest.mark.slow
def test_activations_of_kimi_k3():
    """A depth stream too; the last logits are those of the model, and the model is as it was."""
    model = models.build(presets.tiny_k3(), nnx.Rngs(0))
    tokens = np.array([[1, 2, 3]])
    found = activations(model, tokens)
    assert {"embed_tokens", "layers.0.self_attention_res", "layers.7.block_sparse_moe.routed_expert_norm", "logits"} <= found.keys()
    np.testing.assert_allclose(found["logits"], jax.jit(lambda m: m(jnp.asarray(tokens)).logits)(model), rtol=0, atol=1e-5)
    assert isinstance(model.stack.layer(0).self_attn, nnx.Module)


def test_compare_logits():
    """KL of a known pair, top-5 overlap, errors."""
    ref = np.log(np.array([[[0.5, 0.25, 0.125, 0.0625, 0.03125, 0.03125]]]))
    ours = np.log(np.array([[[0.25, 0.5, 0.125, 0.0625, 0.03125, 0.03125]]]))
    found = compare_logits(ours + 3, ref)
    np.testing.assert_allclose(found.kl_mean, 0.25 * np.log(2), rtol=1e-12)
    assert (found.top1, found.top5) == (0, 1)
    np.testing.assert_allclose(found.max_error, 3 + np.log(2), rtol=1e-12)
    with pytest.raises(ValueError, match="expected the same"):
        compare_logits(ours, ref[..., :3])


def test_compare_activations_needs_common_names():
    with pytest.raises(ValueError, match="has none of the names a"):
        compare_activations({"a": np.zeros(1)}, {"b": np.zeros(1)})
    with pytest.raises(ValueError, match=r"a has shape \(2,\) and the reference \(3,\)"):
        compare_activations({"a": np.zeros(2)}, {"a": np.zeros(3)})


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["parity", str(GPT2), "--reference", "none.npz"], "none.npz cannot be read as npz"),
        (["layers", str(GPT2)], "give --reference to compare with, or --out to write to"),
        (["layers", str(GPT2), "--out", "x.npz"], "give --tokens"),
        (["layers", str(GPT2), "--out", "x.npz", "--tokens", "a"], "--tokens must be numbers"),
        (["layers", str(GPT2), "--out", "x.npz", "--tokens", "99"], "tokens must be [B, T] ids in 0..60"),
    ],
)
def test_mistakes(args, sentence, capsys):
    assert cli.main(["eval", *args]) == 2
    assert sentence in capsys.readouterr().err


def test_published_arithmetic():
    """Bytes per token and sequence of GPT-2, Kimi Linear and K3; 74.1%; the crossovers; nothing allocated."""
    gpt2 = memory(presets.gpt2_124m())
    assert (gpt2.cache_bytes_per_token, gpt2.state_bytes) == (36_864, 0)
    kimi, k3 = memory(presets.kimi_linear_48b_a3b()), memory(presets.kimi_k3())
    assert (kimi.cache_bytes_per_token, kimi.state_bytes, kimi.conv_bytes) == (8_064, 41_943_040, 20 * 73_728)
    assert (k3.cache_bytes_per_token, k3.state_bytes, k3.conv_bytes) == (27_648, 69 * 6_291_456, 69 * 221_184)
    s = saving(presets.kimi_linear_48b_a3b())
    assert f"{s.share:.1%}" == "74.1%"
    assert s.all_attention_bytes_per_token == 31_104
    assert abs(s.crossover_cache - 5_200) < 10
    assert abs(s.crossover_saved - 1_820) < 10
    assert saving(presets.kimi_k3()).all_attention_bytes_per_token == 107_136


@pytest.mark.parametrize("config", [presets.tiny_hybrid(), presets.tiny_k3(), presets.gpt2_tiny(), presets.linear_lm("mamba2")])
def test_bytes_are_those_of_the_arrays_R154(config):
    """Weights and caches of the model itself, counters apart."""
    model = nnx.eval_shape(lambda: models.build(config, nnx.Rngs(0)))
    found = memory(config, batch=3, context=100, dtype=jnp.float32)
    nbytes = lambda tree: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    weights = sum(row.total for row in found.rows if row.name.startswith("weights"))
    assert weights == nbytes(nnx.state(model))
    cache = jax.eval_shape(lambda m: m.init_cache(3, 100), model)
    integers = sum(leaf.size * 4 for leaf in jax.tree.leaves(cache) if leaf.dtype == jnp.int32)
    assert found.total.total - weights == nbytes(cache) - integers


def test_a_mesh_divides():
    """What a device holds: parameters by the rules of kda_jax.sharding, rows over the row axes, heads over tensor."""
    whole = memory(presets.kimi_linear_48b_a3b(), batch=8, context=1000)
    mesh = memory(presets.kimi_linear_48b_a3b(), batch=8, context=1000, mesh=MeshConfig(expert=8, tensor=2))
    assert [row.total for row in mesh.rows] == [row.total for row in whole.rows]
    experts, _, states, _, cache = mesh.rows
    assert experts.device * 16 == experts.total
    assert states.device * 16 == states.total
    assert cache.device * 8 == cache.total  # the latent belongs to all heads
    assert mesh.total.device < whole.total.device / 7
    assert mesh.left_whole == ()
    odd = memory(presets.kimi_linear_48b_a3b(), mesh=MeshConfig(expert=3))
    assert odd.left_whole == ("experts 256 is not a multiple of mesh.expert 3 and stays whole over it",)
    assert mesh_of("fsdp=8,tensor=2") == MeshConfig(fsdp=8, tensor=2)
    with pytest.raises(ValueError, match="'fsd=8' is not AXIS=SIZE with an axis of data, fsdp, expert, tensor, context"):
        mesh_of("fsd=8")
    with pytest.raises(ValueError, match="'fsdp=8,tensor=2,fsdp=4' has fsdp twice"):
        mesh_of("fsdp=8,tensor=2,fsdp=4")


def test_memory_command(tmp_path, capsys):
    image = tmp_path / "x.png"
    assert cli.main(["memory", "kimi_linear_48b_a3b", "--context", "1000000", "--mesh", "fsdp=4", "--plot", str(image)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "74.1% less" in said
    assert "the weights, 98,2" in said
    assert "do not shrink" in said
    assert image.stat().st_size > 10_000
    assert cli.main(["memory", str(KIMI)]) == 0
    assert cli.main(["memory", "kimi_linear_48b"]) == 2
    assert "nearest: kimi_linear_48b_a3b" in capsys.readouterr().err
    assert cli.main(["memory", "kimi_k3", "--mesh", "fsdp"]) == 2
    assert hf.inspect(KIMI).config.vocab_size == 61
