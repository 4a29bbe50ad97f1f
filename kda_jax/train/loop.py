"""A run from its configuration to its last checkpoint, resumed if there is something to resume."""

import json
import math
import os
import signal
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx
from rich.console import Console

import kda_jax
from kda_jax import distributed, sharding
from kda_jax.checkpoint import Checkpoints, write_json
from kda_jax.config import RunConfig, differences, from_dict, to_dict
from kda_jax.errors import Interrupted, TrainingStopped, UserError, told
from kda_jax.layers.moe import collect_histograms
from kda_jax.tokenizer import Tokenizer
from kda_jax.tokenizer import build as build_tokenizer
from kda_jax.train.data import Batches, Corpus, load_corpus
from kda_jax.train.evaluate import Evaluation, evaluate, make_eval_forward
from kda_jax.train.metrics import Report, dtype_table
from kda_jax.train.optim import make_optimizer, make_schedule
from kda_jax.train.start import check_start, start_weights
from kda_jax.train.state import TrainState, flatten, initial_state, left_whole, shapes, split, state_shardings, with_shardings
from kda_jax.train.step import StepMetrics, make_train_step

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


class Result(NamedTuple):
    """How a run ended."""

    run_dir: Path
    step: int
    evaluation: Evaluation
    """Of the held-out text, at the end."""


class _Parts(NamedTuple):
    """What a run is made of; making it finds every mistake that can be found before anything is written."""

    config: RunConfig
    tokenizer: Tokenizer
    corpus: Corpus
    graphdef: nnx.GraphDef
    optimizer: Any
    schedule: Any
    mesh: jax.sharding.Mesh
    shardings: TrainState
    """Of the state."""
    left_whole: list[str]
    """What the mesh does not divide."""

    def fresh(self) -> TrainState:
        return initial_state(self.config.model, self.optimizer, self.config.train.seed)


def train(config: RunConfig, run_dir: str | Path, console: Console | None = None) -> Result:
    """Train `config` in `run_dir`, or go on from the newest complete checkpoint there.

    The losses of a run that was killed and started again are bitwise those of one that was not: a step is a function of the state before
    it and of the batch with its number.

    Args:
        config: the run.
        run_dir: made if it is not there. If it holds a run, that run's configuration must be `config` up to `config.FREE_TO_CHANGE`.
        console: where progress goes; None is standard output.

    Raises:
        UserError: something about the configuration, the text or the directory that the user can put right; nothing has been changed.
        TrainingStopped: a non-finite gradient with `train.on_nonfinite="stop"`, or a checkpoint that cannot be written.
        Interrupted: on a signal, after a checkpoint. ProcessLost: another process of the run is gone.

    With several processes (`distributed.start`) each calls this with the same arguments; the first one reports and writes metrics.
    """
    run_dir, console = Path(run_dir), console or Console()
    if not distributed.is_first():
        console = Console(quiet=True)
    parts = _prepare(config)
    _check_run_dir(run_dir, config)
    distributed.check_same("configuration", zlib.crc32(json.dumps(to_dict(config)).encode()))
    distributed.check_same("text (data.source)", parts.corpus.train.checksum)
    distributed.check_shared(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "checkpoints").mkdir(exist_ok=True)

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    with _alone(run_dir), jax.set_mesh(parts.mesh), distributed.explained():
        checkpoints = Checkpoints(run_dir, keep=config.checkpoint.keep, on_failure=config.checkpoint.on_failure, say=say)
        state = _start(parts, checkpoints, say)
        if distributed.is_first():
            write_json(run_dir / "config.json", to_dict(config))
        rows = f"{len(parts.corpus.train):,} rows of {config.data.seq_len} tokens to train on"
        say(f"{config.name}: {_size(state.params):,} parameters, {rows}")
        processes = "" if jax.process_count() == 1 else f" in {jax.process_count()} processes"
        say("\n".join([f"computes on {config.mesh} of {jax.device_count()} devices{processes}", *parts.left_whole]))
        say(dtype_table(state, config.train.compute_dtype, config.optim.no_decay))
        metrics = run_dir / "metrics.jsonl" if distributed.is_first() else None
        with Report(metrics, step=int(state.step), steps=config.train.steps, console=console) as report:
            try:
                evaluation = _Loop(parts, state, checkpoints, report).run()
            except BrokenPipeError:  # of standard output
                raise
            except OSError as error:
                raise TrainingStopped(f"{told(error)}; the same command goes on from the last checkpoint") from error
    return Result(run_dir, config.train.steps, evaluation)


def _prepare(config: RunConfig) -> _Parts:
    tokenizer = build_tokenizer(config.data.tokenizer, config.data.vocabulary)
    if config.model.vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"model.vocab_size ({config.model.vocab_size}) must be at least {tokenizer.vocab_size}, the vocabulary of data.tokenizer "
            f"{config.data.tokenizer!r}"
        )
    if config.optim.qk_clip is not None and not hasattr(config.model, "kv_lora_rank"):
        raise UserError(f"optim.qk_clip is for multi-head latent attention, which a {config.model.model_type} model has not: leave it None")
    if config.optim.router_balance == "quantile" and not hasattr(config.model, "num_experts"):
        raise UserError(f"optim.router_balance 'quantile' is for experts, which a {config.model.model_type} model has not")
    if config.train.start_from is not None:
        check_start(config.train.start_from, config.model)
    positions = getattr(config.model, "n_positions", math.inf)
    if config.data.seq_len > positions:
        raise UserError(f"data.seq_len ({config.data.seq_len}) must be at most model.n_positions ({positions})")
    try:
        schedule = make_schedule(config.optim, config.train.steps)
        model = shapes(config.model)
        if config.optim.router_balance == "quantile":
            collect_histograms(shapes(config.model), config.optim.router_bins)  # refuses routers that it cannot balance
    except ValueError as error:
        raise UserError(str(error)) from error
    mesh = sharding.make_mesh(config.mesh, jax.devices() if jax.process_count() > 1 else None)
    optimizer = make_optimizer(config.optim, config.model)
    shardings = state_shardings(model, jax.eval_shape(lambda: initial_state(config.model, optimizer, config.train.seed)), mesh)
    corpus, whole = load_corpus(config.data, tokenizer), left_whole(model, mesh)
    return _Parts(config, tokenizer, corpus, split(model)[0], optimizer, schedule, mesh, shardings, whole)


def _check_run_dir(run_dir: Path, config: RunConfig) -> None:
    """Refuses what is not this run's."""
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"{run_dir} is a file; choose another --run-dir")
    saved = run_dir / "config.json"
    if saved.is_file():
        try:
            plain = json.loads(saved.read_text())
        except ValueError as error:
            raise UserError(f"{saved} is not JSON ({error}); choose another --run-dir") from error
        _refuse_differences(run_dir, from_dict(plain), config)
    elif run_dir.is_dir() and not all(map(_left_by_a_killed_start, run_dir.iterdir())):
        raise UserError(f"{run_dir} is not empty and not a run directory (no config.json); choose another --run-dir")


def _left_by_a_killed_start(path: Path) -> bool:
    """Whether a process that was killed before config.json was there may have made `path`."""
    return path.name.startswith(".config.json.") or (path.name == "checkpoints" and path.is_dir() and not any(path.iterdir()))


@contextmanager
def _alone(run_dir: Path) -> Iterator[None]:
    """Refuses a second run in the directory while this one lasts; the lock goes with the process, however it ends.

    Of several processes the first holds it. A file system or a platform without such locks holds nothing.
    """
    if fcntl is None or not distributed.is_first():
        yield
        return
    directory = os.open(run_dir / "checkpoints", os.O_RDONLY)
    try:
        with suppress(OSError):
            try:
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"another process is training in {run_dir}; wait for it, or choose another --run-dir") from None
        yield
    finally:
        os.close(directory)


def _refuse_differences(place: Path, saved: RunConfig, wanted: RunConfig) -> None:
    found = differences(saved, wanted)
    if found:
        raise UserError(f"{place} was trained with another configuration: {'; '.join(found)}. Use that one, or another --run-dir")


def _start(parts: _Parts, checkpoints: Checkpoints, say: Any) -> TrainState:
    """The newest complete checkpoint, or a fresh state."""
    config = parts.config
    tokens = parts.corpus.train.checksum

    def check(meta: dict) -> None:
        _refuse_differences(Path("the checkpoint"), from_dict(meta["config"]), config)
        if meta["tokens"] != tokens:
            raise UserError("data.source holds another text than the one this run was trained on, so it cannot go on from its checkpoint")
        if meta["step"] > config.train.steps:
            raise UserError(f"the run has done {meta['step']} steps already, more than train.steps ({config.train.steps})")

    restored = checkpoints.restore(with_shardings(jax.eval_shape(parts.fresh), parts.shardings), check)
    if restored is None:
        # Runs once: on a CPU the compiler would spend longer on optimising it than it takes.
        options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
        state = jax.jit(parts.fresh, compiler_options=options, out_shardings=parts.shardings)()
        if config.train.start_from is None:
            return state
        say(f"starting from {config.train.start_from}")
        params, buffers = start_weights(config.train.start_from, parts.mesh)
        return state._replace(params=params, buffers=buffers)
    say(f"resuming after step {restored.meta['step']}")
    return restored.state


class _Loop:
    """Steps, and what happens between them."""

    def __init__(self, parts: _Parts, state: TrainState, checkpoints: Checkpoints, report: Report):
        self._parts, self._state, self._checkpoints, self._report = parts, state, checkpoints, report
        self._config = config = parts.config
        self._names = list(flatten(state.params))
        self._token_bytes = parts.tokenizer.token_bytes()
        self._step = make_train_step(parts.graphdef, parts.optimizer, parts.schedule, config, parts.shardings)
        self._forward = make_eval_forward(parts.graphdef, config.train.compute_dtype)
        self._pace = _Pace()

    def run(self) -> Evaluation:
        """Steps up to `train.steps`, then the last evaluation."""
        config, first = self._config, int(self._state.step)
        size = config.train.batch_size
        share = sharding.local_rows(size)
        batches = Batches(self._parts.corpus.train, batch_size=size, seed=config.train.seed, share=share)
        vote, stopping = distributed.Vote(), False
        pending = None  # metrics are read one step late, so that the device always has work
        evaluation, saved = None, first if first else None
        with _stop_requests() as asked:
            for number, batch in enumerate(batches.iterate(first, config.train.steps), start=first + 1):
                self._state, metrics = self._step(self._state, sharding.put_rows(batch, share, size))
                stopping = vote.cast(asked.is_set())
                if pending is not None:
                    self._read(*pending)
                pending = number, metrics
                self._checkpoints.check()
                last = number == config.train.steps
                if last or number % config.eval.every == 0 or number % config.checkpoint.every == 0 or stopping:
                    self._read(*pending)
                    pending = None
                    evaluation, saved = self._between(number, last, stopping)
                if stopping:
                    break
        self._checkpoints.close()
        if stopping and number < config.train.steps:
            raise Interrupted(f"interrupted; step {saved} is saved, and the same command goes on from there")
        return evaluation or self._evaluate(config.train.steps, config.eval.final_rows)

    def _between(self, number: int, last: bool, stopped: bool) -> tuple[Evaluation | None, int | None]:
        """Evaluate and save where due: the evaluation, and the step if it was saved."""
        config, evaluation = self._config, None
        with self._pace.paused():
            if last or number % config.eval.every == 0:
                evaluation = self._evaluate(number, config.eval.final_rows if last else config.eval.rows)
            if not (last or stopped or number % config.checkpoint.every == 0):
                return evaluation, None
            meta = {
                "step": number,
                "examples": number * config.train.batch_size,
                "tokens": self._parts.corpus.train.checksum,
                "config": to_dict(config),
                "versions": {"kda_jax": kda_jax.__version__, "jax": jax.__version__},
            }
            self._checkpoints.save(self._state, meta, evaluation.bits_per_byte if evaluation else None)
        return evaluation, number

    def _evaluate(self, number: int, rows: int) -> Evaluation:
        found = evaluate(
            self._forward,
            self._state.params,
            self._state.buffers,
            self._parts.corpus.validation,
            count=rows,
            batch_size=self._config.train.batch_size,
            token_bytes=self._token_bytes,
        )
        self._report.evaluation(number, found._asdict())
        return found

    def _read(self, number: int, metrics: StepMetrics) -> None:
        """Look at a step's metrics: complain, log, move the bar."""
        config = self._config
        if metrics.skipped:
            self._complain(number, metrics)
        self._pace.count(int(metrics.tokens))
        self._report.advance(number)
        if number % config.train.log_every == 0 or number == config.train.steps:
            speed, step_seconds = self._pace.lap()
            values = {
                "loss": float(metrics.loss),
                "grad_norm": float(metrics.grad_norm),
                "learning_rate": float(metrics.learning_rate),
                "expert_load": float(metrics.expert_load),
                "max_logit": float(metrics.max_logit),
                "dropped": int(metrics.dropped),
                "tokens_per_second": speed,
            }
            self._report.step(number, values, step_seconds * (config.train.steps - number))

    def _complain(self, number: int, metrics: StepMetrics) -> None:
        bad = [name for name, finite in zip(self._names, metrics.finite, strict=True) if not finite]
        what = f"step {number}: the loss is {float(metrics.loss)}"
        if bad:
            what = f"step {number}: the gradient of {bad[0]} is not finite ({len(bad)} of {len(self._names)} parameters)"
        if self._config.train.on_nonfinite == "stop":
            raise TrainingStopped(f"{what}; stopped, as train.on_nonfinite says. The last checkpoint is from before")
        self._report.say(f"{what}; step left out")


class _Pace:
    """Tokens per second of the steps alone: without compilation, evaluation and saving."""

    def __init__(self):
        self._began: float | None = None
        self._tokens = self._steps = 0

    def count(self, tokens: int) -> None:
        if self._began is None:  # the first step compiles
            self._began = time.perf_counter()
            return
        self._tokens, self._steps = self._tokens + tokens, self._steps + 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        before = time.perf_counter()
        yield
        if self._began is not None:
            self._began += time.perf_counter() - before

    def lap(self) -> tuple[float, float]:
        """(tokens per second, seconds per step) since the last lap."""
        now = time.perf_counter()
        seconds = max(now - (self._began or now), 1e-9)
        speed, step_seconds = (self._tokens / seconds, seconds / self._steps) if self._steps else (0.0, 0.0)
        self._began, self._tokens, self._steps = now, 0, 0
        return speed, step_seconds


@contextmanager
def _stop_requests() -> Iterator[threading.Event]:
    """An event set by the first SIGINT or SIGTERM (a preemption notice); one that comes more than a second later acts as usual."""
    stopped = threading.Event()
    first = 0.0
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def stop(number: int, frame: Any) -> None:
        nonlocal first
        if not stopped.is_set():
            stopped.set()
            first = time.monotonic()
        elif time.monotonic() - first > 1:  # the same notice may come twice: to the process, and to its group
            signal.signal(number, before[number])
            signal.raise_signal(number)

    for number in before:
        signal.signal(number, stop)
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _size(params: dict) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))
