"""`kda-jax bench --meshes`: the losses of one device before any speed."""

import json

import pytest

from kda_jax import cli
from kda_jax.bench import meshes
from kda_jax.config import load_config_file

TINY = """
from kda_jax.config import DataConfig, OptimConfig, RunConfig, TrainConfig
from kda_jax.models.config import GPT2Config

config = RunConfig(
    "tiny",
    GPT2Config(vocab_size=256, n_positions=64, n_embd=32, n_layer=1, n_head=2),
    data=DataConfig(seq_len=16),
    optim=OptimConfig(warmup_steps=2, learning_rate=1e-2),
    train=TrainConfig(steps=12, batch_size=4, compute_dtype="bfloat16"),
)
"""


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "tiny.py"
    path.write_text(TINY)
    return path


def test_rows(config_file, tmp_path, capsys):
    written = tmp_path / "rows.json"
    options = ["--config", str(config_file), "--compared-steps", "3", "--timed-steps", "1", "--json", str(written)]
    assert cli.main(["bench", "--meshes", "data=1", "fsdp=2,tensor=2", *options]) == 0
    assert "efficiency" in capsys.readouterr().out
    one, same, parts = json.loads(written.read_text())["rows"]
    assert (one["mesh"], same["mesh"], parts["mesh"], parts["devices"]) == ("no mesh", "data=1", "fsdp=2,tensor=2", 4)
    assert len(set(one["losses"])) == 3
    assert max(same["difference"], parts["difference"]) <= 1e-5
    assert parts["efficiency"] == pytest.approx(parts["tokens_per_second"] / one["tokens_per_second"] / 4)


def test_losses_that_differ_are_not_timed(config_file):
    options = meshes.MeshOptions((), config_file, compared_steps=1)
    wrong = meshes.MeshRow("no mesh", 1, (9.0,), 0.0, 1.0, 1.0)
    with pytest.raises(cli.UserError, match=r"data=1: losses \(5\.\d+,\) differ from those of one device, \(9\.0,\), by 3"):
        meshes.measure(load_config_file(config_file), "data=1", meshes.mesh_of("data=1"), options, wrong)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "--meshes names no mesh: for instance --meshes fsdp=2 expert=2"),
        (["fsdp"], "--meshes: 'fsdp' is not AXIS=SIZE with an axis of data, fsdp, expert, tensor, context"),
        (["fsdp=64"], "--meshes fsdp=64 needs 64 devices and there are"),
        (["fsdp=0"], "mesh.fsdp must be at least 1, got 0"),
        (["fsdp=2", "--timed-steps", "0"], "--timed-steps must be at least 1, got 0"),
        (["fsdp=2", "--model.n-layr", "2"], "unknown option --model.n-layr"),
    ],
)
def test_mistakes_are_sentences(arguments, sentence, config_file, capsys):
    assert cli.main(["bench", "--meshes", *arguments, "--config", str(config_file)]) == 2
    assert sentence in capsys.readouterr().err
