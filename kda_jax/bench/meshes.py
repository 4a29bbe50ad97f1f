"""`kda-jax bench --meshes fsdp=2 expert=2 --config FILE`: one run's train step on meshes of the devices that are there.

The losses of every mesh are compared with those of one device before anything is timed.
"""

import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from kda_jax import sharding
from kda_jax.config import RunConfig
from kda_jax.errors import UserError
from kda_jax.memory import mesh_of
from kda_jax.train.data import Batch
from kda_jax.train.optim import make_optimizer, make_schedule
from kda_jax.train.state import initial_state, shapes, split, state_shardings
from kda_jax.train.step import make_train_step

TOLERANCE = (1e-6, 1e-4)
"""Of the first loss, which is a forward pass, and of the others: Adam divides a gradient by its own size, and a router moves a token whose
two best experts are equal up to rounding, so that steps amplify the order of sums. Small models of the tests stay within 1e-5.
"""
REPEATS = 5


@dataclasses.dataclass(frozen=True)
class MeshOptions:
    """Losses and speed of a run's train step on one device without a mesh and on each mesh. Any field of the configuration is an option."""

    meshes: tuple[str, ...]
    """Meshes to compare: data=1 fsdp=2 expert=2,context=2."""
    config: Path
    """Python file that defines `config = RunConfig(...)`; its text is not read, the tokens are random."""
    compared_steps: int = 5
    """Steps whose losses must agree, computed in float32."""
    timed_steps: int = 5
    """Steps of each of five repeats, in `train.compute_dtype`; the fastest repeat counts."""
    json: Path | None = None
    """Also write the rows to this file."""


@dataclasses.dataclass(frozen=True)
class MeshRow:
    """One mesh."""

    mesh: str
    devices: int
    losses: tuple[float, ...]
    """Of the compared steps, nats per token."""
    difference: float
    """Largest relative difference of a loss from one device's."""
    tokens_per_second: float
    efficiency: float
    """Tokens per second and device, over those of one device without a mesh; the batch is the same."""


def main(options: MeshOptions, config: RunConfig) -> None:
    """Run `kda-jax bench --meshes`.

    Raises:
        UserError: a mesh cannot be read or has more devices than there are, a size is not positive, or losses differ from one device's.
    """
    for name in ("compared_steps", "timed_steps"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    if not options.meshes:
        raise UserError("--meshes names no mesh: for instance --meshes fsdp=2 expert=2")
    try:
        meshes = {text: mesh_of(text) for text in options.meshes}
    except ValueError as error:
        raise UserError(f"--meshes: {error}") from None
    for text, mesh in meshes.items():
        if mesh.size > jax.device_count():
            raise UserError(f"--meshes {text} needs {mesh.size} devices and there are {jax.device_count()}")
    rows = []
    for text, mesh in {"no mesh": None, **meshes}.items():
        rows.append(measure(config, text, mesh, options, rows[0] if rows else None))
        row = rows[-1]
        print(f"{text}: losses within {row.difference:.1e} of one device's, {row.tokens_per_second:,.0f} tokens/s", flush=True)
    _print(rows, config)
    if options.json is not None:
        record = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "rows": [dataclasses.asdict(row) for row in rows]}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


def measure(config: RunConfig, name: str, mesh: sharding.MeshConfig | None, options: MeshOptions, one: MeshRow | None) -> MeshRow:
    """The row of one mesh; `one` is that of one device without a mesh.

    Raises:
        UserError: the losses are not those of one device, up to rounding.
    """
    exact = dataclasses.replace(config, train=dataclasses.replace(config.train, compute_dtype="float32"))
    with jax.default_matmul_precision("highest"), running(exact, mesh) as step:
        losses = tuple(step(number) for number in range(options.compared_steps))
    differences = np.zeros(len(losses)) if one is None else np.abs(np.divide(losses, one.losses) - 1)
    difference = float(np.max(differences))
    if not (differences[0] <= TOLERANCE[0] and difference <= TOLERANCE[1]):
        raise UserError(f"{name}: losses {losses} differ from those of one device, {one.losses}, by {difference:.1e}")
    with running(config, mesh) as step:
        step(0)
        seconds = min(_seconds(step, options.timed_steps) for _ in range(REPEATS))
    speed = options.timed_steps * config.train.batch_size * config.data.seq_len / seconds
    devices = 1 if mesh is None else mesh.size
    return MeshRow(name, devices, losses, difference, speed, 1.0 if one is None else speed / devices / one.tokens_per_second)


@contextlib.contextmanager
def running(config: RunConfig, mesh: sharding.MeshConfig | None) -> Iterator[Callable[[int], float]]:
    """A run from its first step on a mesh of the first devices, None for one device without: step number -> loss of that step."""
    optimizer, model = make_optimizer(config.optim, config.model), shapes(config.model)
    make = functools.partial(initial_state, config.model, optimizer, config.train.seed)
    placed, scope = None, contextlib.nullcontext()
    if mesh is not None:
        devices = sharding.make_mesh(mesh, jax.devices()[: mesh.size])
        placed, scope = state_shardings(model, jax.eval_shape(make), devices), jax.set_mesh(devices)
    with scope:
        train_step = make_train_step(split(model)[0], optimizer, make_schedule(config.optim, config.train.steps), config, placed)
        state = jax.jit(make, out_shardings=placed)()

        def step(number: int) -> float:
            nonlocal state
            state, metrics = train_step(state, sharding.put_rows(_batch(config, number)))
            return float(metrics.loss)

        yield step


def _batch(config: RunConfig, number: int) -> Batch:
    shape = config.train.batch_size, config.data.seq_len + 1
    tokens = np.random.default_rng(number).integers(0, config.model.vocab_size, shape).astype(np.int32)
    return Batch(tokens, np.ones_like(tokens))


def _seconds(step: Callable[[int], float], count: int) -> float:
    start = time.perf_counter()
    for number in range(count):
        step(number)
    return time.perf_counter() - start


def _print(rows: list[MeshRow], config: RunConfig) -> None:
    size = f"{config.name}: {config.train.batch_size} rows of {config.data.seq_len:,} tokens, {config.train.compute_dtype}"
    table = Table(title=f"{size}, on {jax.devices()[0].device_kind}, jax {jax.__version__}")
    for column in ("mesh", "devices", "losses differ by", "tokens/s", "efficiency"):
        table.add_column(column, justify="left" if column == "mesh" else "right")
    for row in rows:
        table.add_row(row.mesh, str(row.devices), f"{row.difference:.1e}", f"{row.tokens_per_second:,.0f}", f"{row.efficiency:.1%}")
    console = Console()
    (console if console.is_terminal else Console(width=130)).print(table)
