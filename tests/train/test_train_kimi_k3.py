"""Kimi K3 trains: experts balanced by quantiles, fine-tuning from a Hugging Face directory and from a run."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import run_config, write_text

import kda_jax
from kda_jax import cli, hf, models
from kda_jax.checkpoint import load_run
from kda_jax.errors import UserError
from kda_jax.models import presets
from kda_jax.models.config import K3LinearAttentionConfig
from kda_jax.tokenizer import ByteTokenizer
from kda_jax.train.data import Batches, load_corpus
from kda_jax.train.loop import train
from kda_jax.train.optim import balance_by_quantiles
from kda_jax.train.step import next_token_loss

MODEL = dataclasses.replace(
    presets.tiny_k3(),
    vocab_size=256,
    hidden_size=32,
    num_hidden_layers=2,
    linear_attn_config=K3LinearAttentionConfig(head_dim=16, num_heads=2, kda_layers=(1,), full_attn_layers=(2,)),
    first_k_dense_replace=0,
    attn_res_block_size=1,
    num_experts=4,
)
"""One KDA and one MLA layer, both with latent experts, each a block of its own."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(config, run directory, Hugging Face directory it started from): twelve steps of fine-tuning with Quantile Balancing."""
    folder = tmp_path_factory.mktemp("k3")
    model = jax.jit(lambda: models.build(MODEL, nnx.Rngs(7)))()
    hf.save(model, folder / "hf")
    config = run_config(write_text(folder / "text"), MODEL, start_from=str(folder / "hf"))
    optim = dataclasses.replace(config.optim, router_balance="quantile", router_bins=200)
    config = dataclasses.replace(config, optim=optim)
    train(config, folder / "run")
    return config, folder / "run", folder / "hf"


def metrics(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "train"]


def test_it_learns(trained):
    losses = [line["loss"] for line in metrics(trained[1])]
    assert np.all(np.isfinite(losses))
    assert losses[-1] < losses[0] - 0.3


def test_the_first_loss_is_that_of_the_imported_model(trained):
    config, run, directory = trained
    batch = next(Batches(load_corpus(config.data, ByteTokenizer()).train, batch_size=4, seed=config.train.seed).iterate(0, 1))
    model = kda_jax.load(directory)
    tokens, ids = map(jnp.asarray, batch)
    out = jax.jit(lambda m: m(tokens[:, :-1], segment_ids=ids[:, :-1]))(model)
    nats, count = next_token_loss(out.logits, tokens, ids)
    np.testing.assert_allclose(metrics(run)[0]["loss"], nats / count, rtol=1e-5)


def test_router_biases_moved_and_are_centred(trained):
    for i in (0, 1):
        bias = load_run(trained[1]).model.stack.layer(i).block_sparse_moe.gate.e_score_correction_bias[...]
        assert np.abs(bias).max() > 1e-3
        assert abs(float(bias.mean())) < 1e-6


@pytest.mark.slow
def test_start_from_a_run(trained, tmp_path):
    """About a minute. The parameters of the run's newest checkpoint, and step 0; a resumed run does not start again."""
    config, run, _ = trained
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=4, start_from=str(run)))
    train(config, tmp_path / "next")
    assert metrics(tmp_path / "next")[0]["loss"] < metrics(run)[0]["loss"] - 0.3
    train(dataclasses.replace(config, train=dataclasses.replace(config.train, steps=5)), tmp_path / "next")
    assert [line["step"] for line in metrics(tmp_path / "next")] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"num_experts": 8}, "model.num_experts: 4 there, 8 here"),
        ({"hidden_size": 64}, "holds another model: model.hidden_size: 32 there, 64 here"),
    ],
)
def test_another_model_is_refused(trained, fields, sentence, tmp_path):
    config = dataclasses.replace(trained[0], model=dataclasses.replace(MODEL, **fields))
    with pytest.raises(UserError, match=sentence):
        train(config, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_nothing_to_start_from(trained, tmp_path):
    config = dataclasses.replace(trained[0], train=dataclasses.replace(trained[0].train, start_from=str(tmp_path / "none")))
    with pytest.raises(UserError, match="none is neither a run directory nor a Hugging Face directory"):
        train(config, tmp_path / "run")


def test_start_from_is_an_option(trained, tmp_path, capsys):
    text, (_, run, _) = write_text(tmp_path / "text"), trained
    path = tmp_path / "run.py"
    path.write_text(f"from tiny import *\nconfig = run_config(__import__('pathlib').Path({str(text)!r}))\n")
    assert cli.main(["train", "--config", str(path), "--run-dir", str(tmp_path / "x"), "--start-from", str(run)]) == 2
    assert "holds a kimi_k3 model, and model is a gpt2" in capsys.readouterr().err


def test_quantile_balancing_needs_routers_without_groups(trained, tmp_path):
    grouped = dataclasses.replace(presets.tiny_hybrid(), vocab_size=256, num_expert_group=4, topk_group=2)
    train_config = dataclasses.replace(trained[0].train, start_from=None)
    with pytest.raises(UserError, match="needs routers without groups, got 2 of 4"):
        train(dataclasses.replace(trained[0], model=grouped, train=train_config), tmp_path / "run")


def test_biases_follow_the_order_of_the_layers():
    """Unrolled and stacked layers each get the quantile of their own histogram."""
    rng = np.random.default_rng(0)
    histogram = jnp.asarray(rng.integers(0, 9, (4, 3, 10)), jnp.int32)
    histogram = histogram.at[..., 0].add(100 - histogram.sum(-1))  # every expert has seen the same tokens
    from kda_jax import ops

    zeros = lambda *shape: {"gate": {"e_score_correction_bias": jnp.zeros(shape)}}
    buffers = {"layers": {"prologue": {0: zeros(3)}, "periods": {0: zeros(2, 3)}, "epilogue": {0: zeros(3)}}}
    found = balance_by_quantiles(buffers, histogram, 1)["layers"]
    wanted = [ops.quantile_bias(h, jnp.zeros(3), 1) for h in histogram]
    rows = [found[part][0]["gate"]["e_score_correction_bias"] for part in ("prologue", "periods", "epilogue")]
    np.testing.assert_allclose(np.concatenate([rows[0][None], rows[1], rows[2][None]]), wanted, rtol=1e-6)
