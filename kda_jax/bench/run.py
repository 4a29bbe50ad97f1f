"""`kda-jax bench`: parity first, then time and memory of every implementation in one process."""

import dataclasses
import json
import pathlib
import statistics
import time
from typing import Literal

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.table import Table

from kda_jax import ops, testing
from kda_jax.bench import tpu_search, tpu_static
from kda_jax.errors import UserError, nearest, need_positive
from kda_jax.ops.spec import OpSpec

PARITY_TOKENS = 130  # as many tokens as the float64 oracle walks through in a moment


@dataclasses.dataclass(frozen=True)
class BenchOptions:
    """Time the recurrences. An implementation that fails parity with the float64 recurrence is not timed.

    `kda-jax bench --tpu-static OP` reads a recurrence's cost on a TPU from its compiled schedule instead, `--tpu-search DEVICE` tunes the
    kernels by it, and `--meshes MESH ... --config FILE` runs a train step on several meshes; each has options of its own.
    """

    ops: tuple[str, ...] = ("kda",)
    """Recurrences by name."""
    implementations: tuple[str, ...] = ("scan", "xla")
    """Implementations by name; ratios are to the first."""
    batch: int = 1
    tokens: int = 4096
    heads: int = 8
    value_heads: int | None = None
    """Value heads; as many as heads if absent."""
    key_dim: int = 64
    value_dim: int = 64
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    repeats: int = 5
    json: pathlib.Path | None = None
    """Also write the rows to this file."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One implementation of one op at one shape; times are medians in milliseconds."""

    op: str
    implementation: str
    error_output: float
    error_gradient: float
    forward_ms: float
    both_ms: float
    temporary_mib: float


def main(args: list[str]) -> None:
    """Run `kda-jax bench` with these arguments.

    Raises:
        UserError: an op or implementation is unknown, a size does not fit, or an implementation fails parity.
    """
    if any(arg.partition("=")[0] == "--tpu-static" for arg in args):
        tpu_static.main(args)
        return
    if any(arg.partition("=")[0] == "--tpu-search" for arg in args):
        tpu_search.main(args)
        return
    options = tyro.cli(BenchOptions, args=args, prog="kda-jax bench")
    for name in options.ops:
        if name not in ops.REGISTRY:
            raise UserError(f"there is no recurrence {name!r}{nearest(name, ops.REGISTRY)}; there are {', '.join(ops.REGISTRY)}")
    need_positive(options, "batch", "tokens", "heads", "value_heads", "key_dim", "value_dim", "repeats")
    if options.value_heads is not None and options.value_heads % options.heads:
        raise UserError(f"--value-heads must be a multiple of --heads ({options.heads}), got {options.value_heads}")
    try:
        rows = [measure(ops.REGISTRY[name], implementation, options) for name in options.ops for implementation in options.implementations]
    except (NotImplementedError, ValueError) as refused:  # what the op says of an implementation or a shape
        raise UserError(str(refused)) from None
    _print(rows, options)
    if options.json is not None:
        record = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "options": dataclasses.asdict(options) | {"json": None}}
        options.json.write_text(json.dumps(record | {"rows": [dataclasses.asdict(row) for row in rows]}, indent=1))


def measure(spec: OpSpec, implementation: str, options: BenchOptions) -> Row:
    """Parity at a small T, then time and compiled temporaries at the full one."""
    dtype = jnp.dtype(options.dtype)
    shape = dict(B=options.batch, H=options.heads, HV=options.value_heads or options.heads, K=options.key_dim, V=options.value_dim)
    output, gradient = check_parity(spec, implementation, dtype, shape)
    problem = testing.make_problem(spec, jax.random.key(0), T=options.tokens, **shape).astype(dtype)
    arrays, call = spec.arrays(problem.inputs), getattr(ops, spec.name)

    def forward(arrays):
        return call(*arrays, implementation=implementation).o

    def both(arrays, do):
        o, pull = jax.vjp(forward, arrays)
        return o, pull(do)

    both = jax.jit(both).lower(arrays, problem.do).compile()
    forward_ms = _median_ms(jax.jit(forward).lower(arrays).compile(), options.repeats, arrays)
    both_ms = _median_ms(both, options.repeats, arrays, problem.do)
    temporary = both.memory_analysis().temp_size_in_bytes / 2**20
    return Row(spec.name, implementation, output, gradient, forward_ms, both_ms, temporary)


def check_parity(spec: OpSpec, implementation: str, dtype, shape: dict[str, int]) -> tuple[float, float]:
    """Largest errors of outputs and of gradients against the float64 recurrence.

    Raises:
        UserError: one of them exceeds the tolerance of `kda_jax.testing`.
    """
    problem = testing.make_problem(spec, jax.random.key(1), T=PARITY_TOKENS, **shape)
    if dtype.itemsize < 4:
        ratios = testing.floor_ratios(spec, problem, dtype, implementation=implementation)
        errors = {name: found for name, (found, _) in ratios.items()}
        wrong = [f"{name} is {ratio:.2f} times the floor" for name, (_, ratio) in ratios.items() if not ratio <= testing.FLOOR_RATIO]
    else:
        errors = testing.errors(spec, problem, implementation=implementation)
        limit = testing.TOLERANCE[dtype.name]
        limits = {name: limit.output if name in ("o", "final_state") else limit.gradient for name in errors}
        wrong = [f"{name}: {found}" for name, found in errors.items() if not found.rms <= limits[name]]
    if wrong:
        raise UserError(f"{spec.name} {implementation} fails parity and is not timed: {'; '.join(wrong)}")
    outputs = [errors[name].rms for name in ("o", "final_state")]
    return max(outputs), max(found.rms for name, found in errors.items() if name not in ("o", "final_state"))


def _median_ms(compiled, repeats, *args):
    jax.block_until_ready(compiled(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def _print(rows: list[Row], options: BenchOptions) -> None:
    token_heads = options.batch * options.tokens * (options.value_heads or options.heads)
    shape = f"B={options.batch} T={options.tokens} H={options.heads} K={options.key_dim} V={options.value_dim} {options.dtype}"
    table = Table(title=f"{shape} on {jax.devices()[0].device_kind}, jax {jax.__version__}")
    for column in ("op", "implementation", "error o", "error grad", "forward ms", "fwd+bwd ms", "ns/token-head", "vs first", "temp MiB"):
        table.add_column(column, justify="left" if column in ("op", "implementation") else "right")
    first = {row.op: row for row in reversed(rows)}
    for row in rows:
        numbers = f"{row.error_output:.1e}", f"{row.error_gradient:.1e}", f"{row.forward_ms:.1f}", f"{row.both_ms:.1f}"
        speed = f"{row.both_ms * 1e6 / token_heads:.0f}", f"{first[row.op].both_ms / row.both_ms:.1f}x", f"{row.temporary_mib:.1f}"
        table.add_row(row.op, row.implementation, *numbers, *speed)
    console = Console()
    (console if console.is_terminal else Console(width=130)).print(table)
