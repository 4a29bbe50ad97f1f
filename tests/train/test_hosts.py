"""Several processes on the loopback address train what one process trains, stop together, and go on in another number on another mesh."""

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from test_resume import Command, losses, steps_logged
from tiny import GPT2, run_config, write_text

from kda_jax import distributed
from kda_jax.checkpoint import step_directories
from kda_jax.errors import ProcessLost, UserError
from kda_jax.sharding import MeshConfig
from kda_jax.train import loop

ROOT = Path(__file__).parents[2]


class Hosts:
    """`kda-jax train` in several processes; leaving the context ends those that still run."""

    def __init__(self, command: Command, count: int, devices: int, run_dir: Path, *options: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        flags = [f for f in os.environ["XLA_FLAGS"].split() if "device_count" not in f]
        env = os.environ | {"XLA_FLAGS": " ".join([*flags, f"--xla_force_host_platform_device_count={devices}"])}
        base = [sys.executable, "-m", "kda_jax", "train", "--config", str(command.file), "--run-dir", str(run_dir), *options]
        meeting = ["--coordinator", f"127.0.0.1:{port}", "--num-processes", str(count)]
        self.processes = [
            subprocess.Popen(
                [*base, *meeting, "--process-id", str(i)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env
            )
            for i in range(count)
        ]

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *error) -> None:
        for process in self.processes:
            process.kill()

    def wait(self, timeout: float = 500) -> list[tuple[int, str, str]]:
        """(exit code, standard output, standard error) of each."""
        outputs = [process.communicate(timeout=timeout) for process in self.processes]
        return [(process.returncode, *output) for process, output in zip(self.processes, outputs, strict=True)]

    def until(self, condition) -> None:
        while not condition():
            assert all(process.poll() is None for process in self.processes), self.wait()
            time.sleep(0.05)


def a_run(folder: Path, steps: int):
    config = run_config(write_text(folder / "text"), GPT2, steps=steps, batch_size=8)
    optim = dataclasses.replace(config.optim, schedule="wsd", decay_fraction=0.0, learning_rate=1e-3)  # rounding would grow at a high rate
    return dataclasses.replace(config, optim=optim)


def test_two_processes_are_one_run(tmp_path):
    """R150: the losses of one process, one set of metrics and checkpoints; one process on another mesh goes on with them."""
    whole = a_run(tmp_path, 7)
    loop.train(whole, tmp_path / "whole")
    run_dir, command = tmp_path / "run", Command(tmp_path, a_run(tmp_path, 5))
    with Hosts(command, 2, 2, run_dir, "--mesh.fsdp", "2", "--mesh.data", "2") as hosts:
        (code, said, err), (other_code, other_said, other_err) = hosts.wait()
    assert (code, other_code) == (0, 0), err + other_err
    assert "in 2 processes" in said
    assert "bits per byte after 5 steps" in said
    assert "bits per byte" not in other_said
    loop.train(dataclasses.replace(whole, mesh=MeshConfig(tensor=2, fsdp=4)), run_dir)
    found, wanted = losses(run_dir), losses(tmp_path / "whole")
    assert list(found) == list(wanted) == list(range(1, 8))
    np.testing.assert_allclose(list(found.values()), list(wanted.values()), rtol=1e-5)


def test_stops_together(tmp_path):
    """A preemption notice to one process: all save the same step and exit with the code of an interruption."""
    run_dir, command = tmp_path / "run", Command(tmp_path, a_run(tmp_path, 100000))
    with Hosts(command, 2, 1, run_dir, "--mesh.data", "2", "--checkpoint.every", "100000", "--eval.every", "100000") as hosts:
        hosts.until(lambda: steps_logged(run_dir) >= 5)
        hosts.processes[1].send_signal(signal.SIGTERM)
        results = hosts.wait()
    assert [code for code, _, _ in results] == [4, 4], results
    (saved,) = step_directories(run_dir)
    assert all(f"interrupted; step {saved.name} is saved" in err for _, _, err in results)


@pytest.mark.slow
def test_a_killed_process_ends_the_others(tmp_path):
    """R139 R141: of four processes one is killed in the middle; the others say so and end within a minute; two go on. About two minutes."""
    loop.train(a_run(tmp_path, 40), tmp_path / "whole")
    run_dir, command = tmp_path / "run", Command(tmp_path, a_run(tmp_path, 40))
    with Hosts(command, 4, 1, run_dir, "--mesh.fsdp", "4", "--train.steps", "100000", "--checkpoint.every", "8") as hosts:
        hosts.until(lambda: steps_logged(run_dir) >= 10 and step_directories(run_dir))
        hosts.processes[2].kill()
        killed = time.monotonic()
        results = hosts.wait(timeout=90)
        assert time.monotonic() - killed < 60
    for i in (0, 1, 3):
        code, _, err = results[i]
        assert code == 5, results[i]
        assert "no sign of life from process 2 of 4" in err or "most likely because one is gone" in err or "has stopped: " in err
    resumed = int(step_directories(run_dir)[0].name)
    kept = {step: loss for step, loss in losses(run_dir).items() if step <= resumed}
    with Hosts(command, 2, 2, run_dir, "--mesh.data", "2", "--mesh.tensor", "2", "--train.steps", "40") as hosts:
        results = hosts.wait()
    assert [code for code, _, _ in results] == [0, 0], results
    assert f"resuming after step {resumed}" in results[0][1]
    found, wanted = losses(run_dir), losses(tmp_path / "whole")
    assert {step: found[step] for step in kept} == kept
    np.testing.assert_allclose([found[i] for i in range(1, 41)], [wanted[i] for i in range(1, 41)], rtol=1e-4)


def test_one_alone_does_not_wait_for_ever(tmp_path):
    """R142: what was expected, what to do, a non-zero code."""
    command = Command(tmp_path, a_run(tmp_path, 5))
    with Hosts(command, 2, 1, tmp_path / "run", "--start-timeout", "3") as hosts:
        hosts.processes[0].kill()
        code, _, err = hosts.wait()[1]
    assert code == 5
    assert "process 1 has waited 3 s at 127.0.0.1:" in err
    assert "not all 2 processes of the run have come. Start the same command on every host" in err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("localhost:1234",), "--coordinator, --num-processes and --process-id belong together"),
        *[((at, 2, 0), f"--coordinator must be HOST:PORT, .* got '{at}'") for at in ("localhost", ":1234", "host:0", "host:65536")],
        (("localhost:1234", 0, 0), "--num-processes must be at least 1, got 0"),
        (("localhost:1234", 2, 2), r"--process-id must be in 0\.\.1"),
    ],
)
def test_bad_rendezvous(arguments, sentence):
    with pytest.raises(UserError, match=sentence):
        distributed.Rendezvous(*arguments)


class Store:
    """The key-value store of three processes, two of which only this test moves."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value, allow_overwrite):
        assert allow_overwrite
        self.values[key] = value

    def key_value_dir_get(self, key):
        return [item for item in self.values.items() if item[0].startswith(key)]


@pytest.mark.parametrize(
    ("words", "sentence"), [(None, "no sign of life from process 2 of 3"), ("no text", "process 1 of 3 has stopped: no text")]
)
def test_watch(monkeypatch, words, sentence):
    """Silence is noticed, and so are last words; a process that gives signs is left alone."""
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    store, said = Store(), []
    watch = distributed._Watch(store, said.append, silence=0.5, period=0.02)
    watch.start()
    for number in range(30):
        store.values["kda_jax/beats/1"] = str(number)
        time.sleep(0.02)
        if words is not None and number == 5:
            store.values["kda_jax/beats/1"] = f"stopped: {words}"
            break
    watch.join(timeout=5)
    assert len(said) == 1
    assert said[0].startswith(sentence)


def test_failed_computation_is_explained(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ProcessLost, match="over 2 processes failed, most likely because one is gone: Gloo"), distributed.explained():
        raise jax.errors.JaxRuntimeError("Gloo all-reduce failed\nmore")
