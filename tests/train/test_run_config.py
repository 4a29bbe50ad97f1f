"""Run configurations: JSON and back, run files, and what a wrong field is answered with."""

import dataclasses
import json

import pytest

from kda_jax.config import (
    DataConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
    differences,
    field_names,
    from_dict,
    load_config_file,
    to_dict,
)
from kda_jax.errors import UserError
from kda_jax.models import presets

MODELS = [presets.gpt2_tiny(), presets.linear_lm("mamba2"), presets.kimi_linear_48b_a3b(), presets.tiny_hybrid()]


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.model_type)
def test_json_round_trip(model):
    config = RunConfig("x", model, data=DataConfig(source=("a", "b")), optim=OptimConfig(schedule="wsd"))
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def change(config: RunConfig, path: str, value):
    head, _, rest = path.partition(".")
    return dataclasses.replace(config, **{head: change(getattr(config, head), rest, value) if rest else value})


def test_unknown_field_names_the_nearest():
    plain = to_dict(RunConfig("x", presets.tiny_hybrid()))
    plain["train"]["batchsize"] = 3
    with pytest.raises(UserError, match=r"unknown config field train\.batchsize; nearest: batch_size"):
        from_dict(plain)


def test_unknown_model_type():
    plain = to_dict(RunConfig("x", presets.tiny_hybrid()))
    plain["model"]["model_type"] = "kimi_linar"
    with pytest.raises(UserError, match="unknown model_type 'kimi_linar'; nearest: kimi_linear"):
        from_dict(plain)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: TrainConfig(steps=0), "train.steps must be at least 1, got 0"),
        (lambda: TrainConfig(batch_size=6, micro_batches=4), r"train.batch_size \(6\) must be a multiple of train.micro_batches \(4\)"),
        (lambda: DataConfig(source=()), "data.source must name at least one"),
        (lambda: OptimConfig(final_fraction=1.5), "optim.final_fraction must lie in 0..1, got 1.5"),
        (lambda: TrainConfig(seed=-1), "train.seed must lie in 0..4294967295, got -1"),
        (lambda: TrainConfig(seed=2**70), "train.seed must lie in 0..4294967295, got 11805"),
        (lambda: OptimConfig(learning_rate=float("inf")), "optim.learning_rate must be positive and finite, got inf"),
        (lambda: OptimConfig(learning_rate=float("nan")), "optim.learning_rate must be a number, got nan"),
        (lambda: OptimConfig(weight_decay=float("nan")), "optim.weight_decay must be a number, got nan"),
        (lambda: OptimConfig(weight_decay=-1.0), "optim.weight_decay must be finite and not negative, got -1"),
        (lambda: OptimConfig(b2=1.0), r"optim.b2 must lie in \[0, 1\), got 1"),
        (lambda: OptimConfig(eps=-1.0), "optim.eps must be finite and not negative, got -1"),
        (
            lambda: RunConfig("x", dataclasses.replace(presets.tiny_hybrid(), rms_norm_eps=float("nan"))),
            "model.rms_norm_eps must be a number",
        ),
    ],
)
def test_refused_values(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


@pytest.mark.parametrize("path", ["train.seed", "train.batch_size", "optim.learning_rate", "data.seq_len", "model.hidden_size"])
def test_differences_are_listed(path):
    config = RunConfig("x", presets.tiny_hybrid())
    value = 32 if isinstance(getattr(getattr(config, path.split(".")[0]), path.split(".")[1]), int) else 0.5
    found = differences(config, change(config, path, value))
    assert len(found) == 1
    assert found[0].startswith(f"{path}: ")
    assert found[0].endswith(f"-> {value}")


@pytest.mark.parametrize(("path", "value"), [("train.steps", 5), ("eval.every", 3), ("checkpoint.keep", 9), ("name", "y")])
def test_free_to_change(path, value):
    config = RunConfig("x", presets.tiny_hybrid())
    assert differences(config, change(config, path, value)) == []


def test_field_names_are_dotted():
    names = field_names(RunConfig("x", presets.tiny_hybrid()))
    assert {"name", "train.steps", "model.hidden_size", "model.linear_attn_config.head_dim", "data.source"} <= set(names)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x = 1", "must define `config = RunConfig"),
        ("config = 3", "must define `config = RunConfig"),
        ("def", "is not Python: .* in line 1"),
        ("from kda_jax.config import *\nTrainConfig(stepz=3)", r"unexpected keyword argument 'stepz'; nearest: steps"),
        ("from kda_jax.config import *\nTrainConfig(steps=-3)", r"train.steps must be at least 1, got -3"),
        ("import nothing_of_this_name", "No module named"),
        ("\nconfig = RunConfig()", "NameError in line 2: name 'RunConfig' is not defined"),
        ("raise SystemExit(0)", "SystemExit in line 1"),
        ("open('nothing.of.this.name')", "FileNotFoundError in line 1: .*nothing.of.this.name"),
    ],
)
def test_bad_run_files(tmp_path, text, sentence):
    path = tmp_path / "run.py"
    path.write_text(text)
    with pytest.raises(UserError, match=sentence):
        load_config_file(path)


def test_missing_run_file_names_neighbours(tmp_path):
    (tmp_path / "demo.py").write_text("")
    with pytest.raises(UserError, match=r"no config file .*dmo\.py; nearest: .*demo\.py"):
        load_config_file(tmp_path / "dmo.py")


def test_missing_run_file_where_only_the_package_is(tmp_path, monkeypatch):
    """Wheels hold no run files: who follows the README elsewhere is told where they are."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"no config file configs/demo\.py; .* in the folder configs/ of its repository"):
        load_config_file("configs/demo.py")
