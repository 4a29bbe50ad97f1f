"""`kda-jax import` and `kda-jax export`."""

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import GPT2, KIMI, assert_same, loaded, loaded_model, tensors
from flax import nnx

import kda_jax
from kda_jax import cli, hf
from kda_jax.checkpoint import load_run


@pytest.mark.parametrize("directory", [GPT2, KIMI], ids=lambda path: path.name)
def test_there_and_back(directory, tmp_path, capsys):
    """R197: from Hugging Face form to a run directory and back, to the bit."""
    run, back = tmp_path / "run", tmp_path / "back"
    assert cli.main(["import", str(directory), str(run)]) == 0
    assert f"{len(tensors(directory))} tensors used, 0 ignored" in capsys.readouterr().out
    assert cli.main(["export", str(run), str(back)]) == 0
    assert_same(hf.load(back).params, loaded(directory).params)
    model = kda_jax.load(run)
    assert_same(nnx.to_pure_dict(nnx.state(model)), loaded(directory).params)
    assert (load_run(run).config.model, load_run(run).step) == (hf.inspect(directory).config, 0)


def test_bfloat16_there_and_back(tmp_path):
    """A run holds float32 masters; --dtype bfloat16 gives the imported bits back."""
    narrow, run, back = tmp_path / "narrow", tmp_path / "run", tmp_path / "back"
    hf.save(loaded_model(KIMI), narrow, dtype=jnp.bfloat16)
    assert cli.main(["import", str(narrow), str(run)]) == 0
    assert load_run(run).config.train.compute_dtype == "bfloat16"
    assert kda_jax.load(run).embed_tokens.embedding.dtype == jnp.float32
    assert cli.main(["export", str(run), str(back), "--dtype", "bfloat16"]) == 0
    assert_same(hf.load(back).params, hf.load(narrow).params)


@pytest.mark.parametrize("command", ["import", "export"])
def test_occupied_destination(command, tmp_path, capsys):
    (tmp_path / "note").write_text("mine")
    assert cli.main([command, str(GPT2), str(tmp_path)]) == 2
    assert "is not empty; choose another directory" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["note"]


def test_load_casts(tmp_path):
    model = kda_jax.load(KIMI, dtype=jnp.bfloat16)
    assert model.embed_tokens.embedding.dtype == jnp.bfloat16
    assert model.stack.layer(0).self_attn.A_log.dtype == np.float32
