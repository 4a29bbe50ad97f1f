"""What the README says, run: every Python block as it stands, every kda-jax command in order, every make target."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.S)


@pytest.mark.parametrize("code", [code for language, code in BLOCKS if language == "python"], ids=lambda code: code.splitlines()[-1][:30])
def test_python_block(code, tmp_path):
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]


def test_commands(tmp_path):
    """In an empty directory, with a little text of its own in place of the download that `kda-jax data` makes."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for i in range(8):
        folder = tmp_path / "data" / "english"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i}.txt").write_text(f"Page {i}. The state keeps, corrects and forgets. " * 60)
    commands = [line for language, code in BLOCKS if language == "bash" for line in code.splitlines()]
    assert commands[0] == "kda-jax data"
    for command in commands[1:]:
        program, *arguments = shlex.split(command)
        assert program == "kda-jax"
        run = subprocess.run([sys.executable, "-m", "kda_jax", *arguments], cwd=tmp_path, env=os.environ, capture_output=True, text=True)
        assert run.returncode == 0, f"{command}\n{run.stdout[-1000:]}\n{run.stderr[-2000:]}"


def commands_of_the_runbook() -> list[list[str]]:
    """Every kda-jax command in ```sh blocks, which need a pod: alone on its line, or inside gcloud's --command."""
    lines = [line for language, code in BLOCKS if language == "sh" for line in code.splitlines()]
    texts = [re.search(r"kda-jax (?:train|plan) [^']*", line) for line in lines]
    return [shlex.split(text[0])[1:] for text in texts if text is not None]


@pytest.mark.parametrize("arguments", commands_of_the_runbook(), ids=lambda arguments: " ".join(arguments)[:60])
def test_runbook_options_exist(arguments, monkeypatch):
    """Read by the command line up to the point where it would start; a wrong option ends there with code 2."""
    from kda_jax import cli

    monkeypatch.chdir(ROOT)
    name, *rest = arguments
    options, config = cli.read_run(name, {"train": cli.TrainOptions, "plan": cli.PlanOptions}[name], rest)
    assert options.config == pathlib.Path("configs/kimi_linear_48b.py")
    assert config.mesh.size >= 64


@pytest.mark.parametrize("row", re.findall(r"^\| `(\w+\.py --topology [^`]*)`", README, re.M))
def test_plans_of_the_table_name_meshes_of_their_slices(row, monkeypatch):
    from kda_jax import cli
    from kda_jax.bench.slices import find

    monkeypatch.chdir(ROOT)
    options, config = cli.read_run("plan", cli.PlanOptions, ["--config", *shlex.split(f"configs/{row}")])
    assert config.mesh.size == find(options.topology).devices


def test_make_targets():
    named = set(re.findall(r"make ([a-z-]+)", README + (ROOT / "CONTRIBUTING.md").read_text()))
    assert {"demo", "test"} <= named
    for target in named:
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)


def test_files_that_are_named_exist():
    for path in re.findall(r"`((?:configs|notebooks|kda_jax|tests)/[\w/.]+)`", README):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"`((?:ops|layers)/\w+\.py)`", README):
        assert (ROOT / "kda_jax" / path).exists(), path
