"""A run that is killed and started again is, from its last complete checkpoint on, bitwise the run that was not."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny import GPT2, HYBRID, run_config, write_text

from kda_jax.checkpoint import step_directories, write_json
from kda_jax.config import to_dict
from kda_jax.errors import TrainingStopped, UserError
from kda_jax.train import loop
from kda_jax.train.metrics import Report

MODELS = pytest.mark.parametrize("model", [pytest.param(GPT2, id="gpt2"), pytest.param(HYBRID, id="kimi_linear", marks=pytest.mark.slow)])


def losses(run_dir: Path) -> dict[int, float]:
    """Loss by step; a step that was logged twice shows as an error."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found = [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"]
    assert len(dict(found)) == len(found)
    return dict(found)


def evaluations(run_dir: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["bits_per_byte"] for line in lines if line["kind"] == "eval"}


class Command:
    """`kda-jax train` of one configuration, in processes of its own."""

    def __init__(self, folder: Path, config):
        write_json(folder / "config.json", to_dict(config))
        self.file = folder / "run.py"
        self.file.write_text(
            "import json\nfrom pathlib import Path\nfrom kda_jax.config import from_dict\n"
            "config = from_dict(json.loads(Path(__file__).with_name('config.json').read_text()))\n"
        )

    def start(self, run_dir: Path) -> subprocess.Popen:
        command = [sys.executable, "-m", "kda_jax", "train", "--config", str(self.file), "--run-dir", str(run_dir)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=Path(__file__).parents[2])

    def finish(self, run_dir: Path) -> str:
        process = self.start(run_dir)
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output
        return output

    def kill_when(self, run_dir: Path, condition) -> None:
        process = self.start(run_dir)
        try:
            while process.poll() is None and not condition():
                time.sleep(0.01)
        finally:
            process.kill()
            process.communicate()


def steps_logged(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_text().count('"train"') if path.is_file() else 0


@MODELS
def test_kill_and_run_again(tmp_path, model):
    """R132: SIGKILL between checkpoints; the same command goes on, and every loss and evaluation is bitwise that of a whole run."""
    command = Command(tmp_path, run_config(write_text(tmp_path / "text"), model, steps=24))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    command.finish(whole)
    command.kill_when(killed, lambda: steps_logged(killed) >= 10 and step_directories(killed))
    assert 10 <= max(losses_so_far(killed)) < 24, "the run was over before it could be killed"
    output = command.finish(killed)
    assert "resuming after step " in output
    assert losses(killed) == losses(whole)
    assert evaluations(killed) == evaluations(whole)


def losses_so_far(run_dir: Path) -> list[int]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line)["step"] for line in lines if line.endswith("\n")]


@pytest.mark.slow
def test_twenty_kills(tmp_path):
    """R132: killed twenty times at random moments, a run still ends as if nothing had been, and always finds a complete checkpoint."""
    command = Command(tmp_path, run_config(write_text(tmp_path / "text"), steps=400))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    command.finish(whole)
    chance = random.Random(0)
    for _ in range(20):
        deadline = time.monotonic() + chance.uniform(3, 12)
        command.kill_when(killed, lambda deadline=deadline: time.monotonic() > deadline)
    assert step_directories(killed), "it never got as far as a checkpoint"
    command.finish(killed)
    assert losses(killed) == losses(whole)


def test_signal_saves_and_stops(tmp_path, monkeypatch):
    """R199: on SIGTERM the step is finished and saved, the run says so, and goes on from exactly there."""
    config = run_config(write_text(tmp_path / "text"), steps=10)
    whole = loop.train(config, tmp_path / "whole")
    log = Report.step

    def log_and_stop(self, step, *rest):
        log(self, step, *rest)
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Report, "step", log_and_stop)
    with pytest.raises(TrainingStopped, match=r"interrupted; step [67] is saved"):
        loop.train(config, tmp_path / "run")
    monkeypatch.setattr(Report, "step", log)
    assert step_directories(tmp_path / "run")[0].name in ("6", "7")
    again = loop.train(config, tmp_path / "run")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert again.evaluation == whole.evaluation


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of 8 steps: (its configuration, its directory)."""
    folder = tmp_path_factory.mktemp("finished")
    config = run_config(write_text(folder / "text"), steps=8)
    loop.train(config, folder / "run")
    return config, folder / "run"


def test_finished_run_is_not_repeated(finished, capsys):
    config, run_dir = finished
    before = (run_dir / "metrics.jsonl").read_text()
    found = loop.train(config, run_dir)
    assert found.evaluation.bits_per_byte == evaluations(run_dir)[8]
    assert (run_dir / "metrics.jsonl").read_text() == before


def test_other_configuration_is_refused(finished):
    """The differing fields are listed, and nothing is changed."""
    config, run_dir = finished
    other = run_config(Path(config.data.source[0]), steps=8, batch_size=2, seed=5)
    before = {p: p.stat().st_mtime_ns for p in run_dir.rglob("*")}
    with pytest.raises(UserError, match=r"train\.batch_size: 4 -> 2; train\.seed: 0 -> 5\. Use that one"):
        loop.train(other, run_dir)
    assert before == {p: p.stat().st_mtime_ns for p in run_dir.rglob("*")}


def test_other_text_is_refused(finished, tmp_path):
    """R141: the position in the data means nothing in another text."""
    _, run_dir = finished
    other = run_config(write_text(tmp_path / "text", documents=7), steps=8)
    with pytest.raises(UserError, match="another text"):
        loop.train(other, run_dir)


def test_fewer_steps_than_done(finished):
    config, run_dir = finished
    with pytest.raises(UserError, match=r"has done 8 steps already, more than train.steps \(4\)"):
        loop.train(run_config(Path(config.data.source[0]), steps=4), run_dir)


def test_directory_of_something_else(tmp_path):
    config = run_config(write_text(tmp_path / "text"))
    with pytest.raises(UserError, match="not empty and not a run directory"):
        loop.train(config, tmp_path / "text")


def test_killed_before_the_configuration_was_written(tmp_path):
    """`checkpoints/` is made first; compiling the first state, which takes seconds, lies between it and config.json."""
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / ".config.json.123").write_text("{")
    config = run_config(write_text(tmp_path / "text"), steps=3)
    assert loop.train(config, run_dir).step == 3


def test_two_runs_do_not_share_a_directory(tmp_path):
    """The second is refused while the first lasts, and nothing is written; afterwards it may go on."""
    config, run_dir = run_config(write_text(tmp_path / "text"), steps=4), tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    with loop._alone(run_dir):
        with pytest.raises(UserError, match=r"another process is training in .*run; wait for it, or choose another --run-dir"):
            loop.train(config, run_dir)
        assert [path.name for path in run_dir.rglob("*")] == ["checkpoints"]
    assert loop.train(config, run_dir).step == 4
