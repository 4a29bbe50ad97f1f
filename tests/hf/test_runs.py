"""`kda-jax import` and `kda-jax export`, and `kda-jax generate` on a directory as it was downloaded."""

import json
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import GPT2, KIMI, assert_same, copy, large, loaded, loaded_model, tensors
from flax import nnx

import kda_jax
from kda_jax import cli, hf, models
from kda_jax.checkpoint import load_run
from kda_jax.errors import UserError
from kda_jax.hf.text import stop_tokens
from kda_jax.models.config import GPT2Config


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


@pytest.mark.parametrize("command", ["import", "generate"])
def test_a_tokenizer_without_its_vocabulary(command, tmp_path, capsys):
    """A download that lacks a file is not taken for a model of bytes."""
    directory, run = copy(KIMI, tmp_path / "x"), tmp_path / "run"
    (directory / "tokenizer_config.json").write_text("{}")
    assert cli.main(["import", str(directory), str(run)] if command == "import" else ["generate", str(directory), "--prompt", "a"]) == 2
    assert "has a tokenizer_config.json but neither a tiktoken.model nor a tokenizer.json beside it" in capsys.readouterr().err
    assert not run.exists()


def test_load_casts(tmp_path):
    model = kda_jax.load(KIMI, dtype=jnp.bfloat16)
    assert model.embed_tokens.embedding.dtype == jnp.bfloat16
    assert model.stack.layer(0).self_attn.A_log.dtype == np.float32


def test_generate_from_a_downloaded_directory(tmp_path, capsys):
    """The text of the run that it is imported as, and nothing once its configuration calls every token the end of a text."""
    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=32, n_layer=1, n_head=2)
    hf.save(models.build(config, nnx.Rngs(0)), tmp_path / "hf")
    assert cli.main(["import", str(tmp_path / "hf"), str(tmp_path / "run")]) == 0
    options = ["--prompt", "some text", "--max-new-tokens", "8", "--seed", "1"]
    texts = {}
    for name in ("hf", "run"):
        capsys.readouterr()
        assert cli.main(["generate", str(tmp_path / name), *options]) == 0
        texts[name] = capsys.readouterr().out
    assert texts["hf"] == texts["run"] != "some text\n"
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(256))}))
    assert cli.main(["generate", str(tmp_path / "hf"), *options]) == 0
    assert capsys.readouterr().out == "some text\n"


@pytest.mark.parametrize(
    ("main", "generation", "stops"), [(5, None, {5}), (5, [7, 5], {5, 7}), (None, 7, {7}), (None, None, set())], ids=str
)
def test_all_ends_of_text_count(main, generation, stops, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": main}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert stop_tokens(tmp_path) == stops


def test_an_end_of_text_that_is_no_id(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(UserError, match=r"eos_token_id must be an integer or a list of them, got '</s>'"):
        stop_tokens(tmp_path)


@pytest.mark.slow
def test_memory_of_import(tmp_path):
    """R155: beside the float32 masters, half of them again would be too much."""
    code = f"""
import resource
from kda_jax import hf
from kda_jax.hf.runs import import_run
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
import_run({str(GPT2)!r}, {str(tmp_path / "small")!r}, say=lambda line: None)
before = peak()
import_run({str(large(tmp_path / "x"))!r}, {str(tmp_path / "run")!r}, say=lambda line: None)
print(peak() - before)
"""
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    masters = 2 * sum(path.stat().st_size for path in (tmp_path / "x").glob("*.safetensors"))
    assert int(printed) <= 1.4 * masters, f"{int(printed) / 1e6:.0f} MB for {masters / 1e6:.0f} MB of masters"
