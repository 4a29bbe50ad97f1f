"""Writing checkpoints: names, layouts and bits of the release."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import GPT2, KIMI, assert_same, config, index, loaded_model, tensors
from flax import nnx
from safetensors import safe_open

from kda_jax import hf, models
from kda_jax.errors import UserError
from kda_jax.models import presets


@pytest.mark.parametrize("directory", [GPT2, KIMI], ids=lambda path: path.name)
def test_same_tensors_as_transformers(directory, tmp_path):
    """R197: names, shapes and bits. The dense FFN is called `mlp`, as in the release, where transformers writes `block_sparse_moe`."""
    hf.save(loaded_model(directory), tmp_path / "x")
    wanted = {name.replace("layers.0.block_sparse_moe", "layers.0.mlp"): x for name, x in tensors(directory).items()}
    found = tensors(tmp_path / "x")
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        assert found[name].shape == x.shape, name
        assert np.array_equal(found[name], x), name


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("directory", [GPT2, KIMI], ids=lambda path: path.name)
def test_round_trip(directory, dtype, tmp_path):
    """R197: load(save(x)) is x to the bit, through several files."""
    model = hf.load_model(directory, dtype=dtype)
    hf.save(model, tmp_path / "x", max_file_bytes=10_000)
    found = hf.load(tmp_path / "x")
    assert found.config == model.config
    assert_same(found.params, nnx.to_pure_dict(nnx.state(model)))
    assert config(tmp_path / "x")["dtype"] == ("float32" if dtype is None else "bfloat16")
    files = sorted(path for path in (tmp_path / "x").glob("*.safetensors"))
    assert len(files) > 2
    assert set(index(tmp_path / "x").values()) == {path.name for path in files}
    for path in files:
        with safe_open(path, "numpy") as file:
            names = list(file.keys())
            assert file.metadata() == {"format": "pt"}
            assert len(names) == 1 or path.stat().st_size < 10_000 + 8_000


def test_periodic_moe_round_trip(tmp_path):
    """Experts in every second layer only, in groups; a stack with a prologue and periods."""
    config = dataclasses.replace(presets.tiny_hybrid(), moe_layer_freq=2, num_expert_group=2, topk_group=1)
    model = models.build(config, nnx.Rngs(0))
    hf.save(model, tmp_path / "x")
    found = hf.load(tmp_path / "x")
    assert found.config == config
    assert_same(found.params, nnx.to_pure_dict(nnx.state(model)))


def test_cast_keeps_what_must_be_float32(tmp_path):
    hf.save(loaded_model(KIMI), tmp_path / "x", dtype=jnp.bfloat16)
    found = tensors(tmp_path / "x")
    for name, x in found.items():
        exact = name.endswith(("A_log", "dt_bias", "e_score_correction_bias"))
        assert x.dtype == (np.float32 if exact else jnp.bfloat16), name


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (presets.linear_lm("kda"), "has no form that transformers loads; export knows gpt2, kimi_linear"),
        (dataclasses.replace(presets.tiny_hybrid(), tie_word_embeddings=True), "does not tie its head"),
        (dataclasses.replace(presets.tiny_hybrid(), moe_router_activation_func="softmax"), "routes by sigmoid, not by softmax"),
    ],
    ids=["linear_lm", "tied", "softmax"],
)
def test_models_that_transformers_has_not(config, sentence, tmp_path):
    with pytest.raises(UserError, match=sentence):
        hf.save(nnx.eval_shape(lambda: models.build(config, nnx.Rngs(0))), tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_occupied_directory(tmp_path):
    (tmp_path / "note").write_text("mine")
    with pytest.raises(UserError, match="is not empty; choose another directory"):
        hf.save(loaded_model(GPT2), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


def test_nothing_is_left_of_a_failure(tmp_path, monkeypatch):
    def fail(*args, **keywords):
        raise OSError("no space left on device")

    monkeypatch.setattr("kda_jax.hf.files.save_file", fail)
    with pytest.raises(OSError, match="no space left"):
        hf.save(loaded_model(GPT2), tmp_path / "x")
    assert list(tmp_path.iterdir()) == []
