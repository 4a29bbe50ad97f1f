"""Runs on disk, and the only file that knows Orbax.

    RUN/config.json              the resolved configuration
    RUN/metrics.jsonl            one line per logged step and per evaluation
    RUN/checkpoints/STEP/        model/ optimizer/ meta/: a complete state after STEP steps, or nothing
    RUN/checkpoints/STEP.damaged a checkpoint that could not be read, out of the way

Arrays are stored under dotted names ("model.layers...kernel") and restored onto the shapes, dtypes and shardings that the caller asks
for: nothing about the machine that wrote them is needed. Every array has a checksum, because a flipped bit in a data file is otherwise
read without complaint.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jaxtyping import Array, UInt32

from kda_jax import distributed, sharding
from kda_jax.config import RunConfig, from_dict
from kda_jax.errors import TrainingStopped, UserError
from kda_jax.train.state import TrainState, flatten, merge, shapes, split, state_shardings, unflatten, with_shardings

Say = Callable[[str], None]
_FILE_BYTES = 2**27
"""Of a data file, about. Orbax gathers the whole of each in memory before it is written, 2 GiB if it is not told."""


class Restored(NamedTuple):
    """A checkpoint that was read and found whole."""

    state: TrainState
    meta: dict


def step_directories(run_dir: Path) -> list[Path]:
    """The checkpoints of a run, newest first; whether they are whole shows when they are read."""
    found = (run_dir / "checkpoints").glob("[0-9]*")
    return sorted((p for p in found if p.is_dir() and p.name.isdecimal()), key=lambda p: int(p.name), reverse=True)


class Checkpoints:
    """Writes and finds the checkpoints of one run.

    Writing happens in the background. A checkpoint appears under its final name only when it is complete, and older ones are removed only
    after that, so a process that is killed at any moment leaves at least as much as it found.

    Args:
        run_dir: the run directory.
        keep: newest checkpoints to keep, besides the one with the fewest bits per byte.
        on_failure: "stop" raises TrainingStopped when a background write has failed; "warn" says so and goes on.
        say: gets one line per event worth knowing.
    """

    def __init__(self, run_dir: Path, *, keep: int, on_failure: str, say: Say):
        self._run_dir, self._keep, self._on_failure, self._say = run_dir, keep, on_failure, say
        self._manager: ocp.CheckpointManager | None = None

    def restore(self, target: TrainState, check: Callable[[dict], None]) -> Restored | None:
        """The newest complete checkpoint, or None. Damaged and half-written ones are named, and moved out of the way of later saves.

        Args:
            target: shapes, dtypes and, where wanted, shardings (`jax.ShapeDtypeStruct` leaves).
            check: called with the checkpoint's meta before arrays are read; raises UserError if the run may not go on from there.
        """
        restored, damaged = None, []
        for directory in step_directories(self._run_dir):
            try:
                meta = read_meta(directory)
            except DamagedCheckpoint as error:
                damaged.append((directory, error))
                continue
            check(meta)
            try:
                restored = Restored(_read_state(directory, meta, target), meta)
                break
            except DamagedCheckpoint as error:
                damaged.append((directory, error))
        if distributed.is_first():
            self._clear(damaged)
        distributed.together("damaged checkpoints are out of the way")
        return restored

    def _clear(self, damaged: Sequence[tuple[Path, Exception]]) -> None:
        for directory, error in damaged:
            self._say(f"skipping damaged checkpoint {directory}: {error}")
            directory.rename(_free_name(directory.with_name(f"{directory.name}.damaged")))
        for leftover in (self._run_dir / "checkpoints").glob("*.orbax-checkpoint-tmp*"):
            self._say(f"skipping half-written checkpoint {leftover}")
            shutil.rmtree(leftover, ignore_errors=True)

    def save(self, state: TrainState, meta: dict, bits_per_byte: float | None) -> None:
        """Start writing `state` as a checkpoint. The arrays may be donated as soon as this returns.

        Args:
            meta: JSON; `fingerprints` is added.
            bits_per_byte: of the held-out text, if it was measured at this step.

        Raises:
            TrainingStopped: this write or an earlier one failed, and `on_failure` is "stop".
        """
        step = int(state.step)
        items = _items(state)
        meta = meta | {"fingerprints": {name: fingerprints(item) for name, item in items.items()}}
        arrays = {name: ocp.args.PyTreeSave(item, ocdbt_target_data_file_size=_FILE_BYTES) for name, item in items.items()}
        metrics = None if bits_per_byte is None else {"bits_per_byte": bits_per_byte}
        with self._failures(f"checkpoint {step}"):
            self._opened().save(step, args=ocp.args.Composite(**arrays, meta=ocp.args.JsonSave(meta)), metrics=metrics)

    def check(self) -> None:
        """Report a background write that has failed; `on_failure` decides how."""
        if self._manager is not None:
            with self._failures("the last checkpoint"):
                self._manager.check_for_errors()

    def close(self) -> None:
        """Wait for what is being written."""
        if self._manager is not None:
            with self._failures("the last checkpoint"):
                self._manager.wait_until_finished()
            self._manager.close()
            self._manager = None

    def _opened(self) -> ocp.CheckpointManager:
        if self._manager is None:
            # Directories made in the background fail there too, and Orbax's other threads then wait minutes for them.
            background = ocp.AsyncOptions(create_directories_asynchronously=False)
            options = ocp.CheckpointManagerOptions(preservation_policy=NewestAndBest(self._keep), async_options=background)
            # Trained float32 shrinks by 8 percent only, and compression takes nine times as long as writing it does without.
            arrays = ocp.PyTreeCheckpointHandler(use_compression=False)
            handlers = ocp.handlers.create_default_handler_registry(model=arrays, optimizer=arrays)
            where = (self._run_dir / "checkpoints").absolute()
            self._manager = ocp.CheckpointManager(where, options=options, handler_registry=handlers)
        return self._manager

    def _failures(self, what: str) -> "_Failures":
        return _Failures(what, self._on_failure, self._say)


class _Failures:
    """Turns a failed write into TrainingStopped or into a message."""

    def __init__(self, what: str, on_failure: str, say: Say):
        self._what, self._on_failure, self._say = what, on_failure, say

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: Any) -> bool:
        if not isinstance(error, Exception):
            return False
        message = f"{self._what} could not be written: {error}"
        if self._on_failure == "stop":
            raise TrainingStopped(f"{message}; the checkpoints before it are untouched (checkpoint.on_failure is 'stop')") from error
        self._say(message + "; going on, the next one will be tried")
        return True


class NewestAndBest(ocp.checkpoint_managers.PreservationPolicy):
    """Keep the newest `keep` checkpoints and the best of those that were evaluated."""

    def __init__(self, keep: int):
        self._keep = keep

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        newest = {c.step for c in sorted(checkpoints, key=lambda c: c.step)[-self._keep :]}
        evaluated = [c for c in checkpoints if c.metrics and np.isfinite(c.metrics.get("bits_per_byte", np.nan))]
        best = min(evaluated, key=lambda c: (c.metrics["bits_per_byte"], -c.step)).step if evaluated else None
        return [c.step in newest or c.step == best for c in checkpoints]


class DamagedCheckpoint(Exception):
    """A checkpoint directory that is incomplete, unreadable, or not what was written."""


def read_meta(directory: Path) -> dict:
    """The JSON part of a checkpoint. Raises DamagedCheckpoint."""
    meta = _read(directory, meta=ocp.args.JsonRestore())["meta"]
    if not isinstance(meta, dict) or not {"step", "config", "fingerprints"} <= meta.keys():
        raise DamagedCheckpoint("its meta part is incomplete")
    return meta


def read_arrays(directory: Path, item: str, target: dict[str, Any], expected: dict[str, int]) -> dict[str, Array]:
    """One item of a checkpoint, checked against its fingerprints.

    Args:
        directory: of the checkpoint.
        item: "model" or "optimizer".
        target: name -> `jax.ShapeDtypeStruct`, with a sharding where one is wanted.
        expected: name -> fingerprint.

    Raises:
        DamagedCheckpoint: it cannot be read, or an array is not the one that was written.
    """
    arrays = _read(directory, **{item: ocp.args.StandardRestore(target)})[item]
    found = fingerprints(arrays)
    wrong = [name for name, value in found.items() if value != expected.get(name)]
    if wrong:
        raise DamagedCheckpoint(f"the contents of {', '.join(wrong[:3])} have changed since it was written")
    return arrays


def fingerprints(arrays: dict[str, Array]) -> dict[str, int]:
    """A checksum of each array's bits, the same on every mesh: a weighted sum modulo 2**32, in which any one changed word shows."""
    here = {name: _fingerprint(np.asarray(x)) for name, x in arrays.items() if _is_on_host(x)}
    there = {name: x for name, x in arrays.items() if name not in here}
    if there:
        with sharding.no_mesh():
            values = np.asarray(_fingerprints([sharding.untyped(x) for x in there.values()]))
        here |= zip(there, map(int, values), strict=True)
    return {name: here[name] for name in arrays}


def _is_on_host(x: Array) -> bool:
    return len(x.devices()) == 1 and {device.platform for device in x.devices()} == {"cpu"}


def _fingerprint(x: np.ndarray, block: int = 2**16) -> int:
    """As `_fingerprints`, for which XLA on a CPU needs room for the array once more, and several times as long."""
    words, weights = x.reshape(-1).view(f"u{min(x.itemsize, 4)}"), np.arange(1, 2 * block, 2, dtype=np.uint32)
    total = 0
    for first in range(0, words.size, block):
        part = words[first : first + block].astype(np.uint32, copy=False)
        total += int(np.dot(part, weights[: part.size])) + 2 * first * int(np.sum(part, dtype=np.uint32))
    return total % 2**32


@jax.jit
def _fingerprints(arrays: list[Array]) -> UInt32[Array, "n"]:
    def one(x: Array) -> Array:
        words = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * min(x.dtype.itemsize, 4)}")).astype(jnp.uint32)
        number = jnp.zeros(words.shape, jnp.uint32)  # of each word; made axis by axis, for to flatten a sharded array gathers it
        for axis, size in enumerate(words.shape):
            number = number * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        return jnp.sum(words * (2 * number + 1), dtype=jnp.uint32)

    return jnp.stack([one(x) for x in arrays])


def load(path: str | Path, *, dtype: Any = None, mesh: jax.sharding.Mesh | None = None) -> nnx.Module:
    """The model of a run directory, from its newest complete checkpoint, or of a Hugging Face directory, ready to call.

    Args:
        path: the directory.
        dtype: compute dtype that parameters are cast to, by name (`layers.params`); None keeps the float32 masters of a run, or the
            dtypes of the files.
        mesh: from `sharding.make_mesh`: every array is read straight into its place there. Call the model under `jax.set_mesh(mesh)`.

    Raises:
        UserError: neither kind of directory, or nothing complete in it (`hf.BadCheckpoint` lists all that is wrong).
    """
    if any(Path(path).glob("*.safetensors*")):
        from kda_jax import hf

        return hf.load_model(path, dtype=dtype, mesh=mesh)
    return load_run(path, dtype=dtype, mesh=mesh).model


class Run(NamedTuple):
    """A trained model and what it was trained with."""

    config: RunConfig
    step: int
    model: nnx.Module


def read_run_config(path: str | Path) -> RunConfig:
    """The resolved configuration of a run directory. Raises UserError: `path` is none, or its config.json is not one."""
    saved = _run_directory(path) / "config.json"
    try:
        return from_dict(json.loads(saved.read_text()))
    except ValueError as error:
        raise UserError(f"{saved} is not JSON ({error})") from error


def _run_directory(path: str | Path) -> Path:
    run_dir = Path(path)
    if not (run_dir / "config.json").is_file() or not (run_dir / "checkpoints").is_dir():
        raise UserError(f"{run_dir} is not a run directory: it has no config.json and checkpoints/ as `kda-jax train` writes them")
    return run_dir


def load_run(path: str | Path, *, dtype: Any = None, mesh: jax.sharding.Mesh | None = None, say: Say = print) -> Run:
    """`load`, with the run's configuration and the step."""
    from kda_jax.layers.params import cast

    run_dir = _run_directory(path)  # the configuration comes from the checkpoint itself
    for directory in step_directories(run_dir):
        try:
            meta = read_meta(directory)
            config = from_dict(meta["config"])
            abstract = shapes(config.model)
            target = flatten(_model_item(*split(abstract)[1:]))
            here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])  # R127: never where the file says
            places = {name: here for name in target} if mesh is None else state_shardings(abstract, target, mesh)
            target = with_shardings(target, places)
            leaves = read_arrays(directory, "model", target, meta["fingerprints"]["model"])
        except DamagedCheckpoint as error:
            say(f"skipping damaged checkpoint {directory}: {error}")
            continue
        graphdef, params, buffers = split(abstract)
        tree = unflatten(_model_item(params, buffers), leaves)
        params = tree["params"] if dtype is None else cast(tree["params"], jnp.dtype(dtype))
        return Run(config, meta["step"], merge(graphdef, params, tree["buffers"]))
    raise UserError(f"{run_dir} holds no complete checkpoint yet")


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file in one step: a reader, or the next run after a crash, sees the old one or the new one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(value, indent=2) + "\n")
    partial.replace(path)


def _model_item(params: dict, buffers: dict) -> dict:
    return {"params": params, "buffers": buffers}


def _items(state: TrainState) -> dict[str, dict[str, Any]]:
    """The state as the named arrays of each item on disk."""
    return {
        "model": flatten(_model_item(state.params, state.buffers)),
        "optimizer": flatten({"opt_state": state.opt_state, "step": state.step}),
    }


def _read_state(directory: Path, meta: dict, target: TrainState) -> TrainState:
    read = {name: read_arrays(directory, name, item, meta["fingerprints"].get(name, {})) for name, item in _items(target).items()}
    model = unflatten(_model_item(target.params, target.buffers), read["model"])
    rest = unflatten({"opt_state": target.opt_state, "step": target.step}, read["optimizer"])
    return TrainState(model["params"], model["buffers"], rest["opt_state"], rest["step"])


def _read(directory: Path, **args: Any) -> dict:
    """Items by name. Each process reads its parts by itself, without waiting for the others; then all return, or all raise."""
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=None, active_processes={me}, barrier_sync_key_prefix=f"reader{me}")
    found, problem = {}, None
    try:
        handler = ocp.CompositeCheckpointHandler(composite_options=ocp.CompositeOptions(multiprocessing_options=alone))
        with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
            found = dict(checkpointer.restore(directory.absolute(), args=ocp.args.Composite(**args)).items())
    except Exception as error:
        problem = error
    if not distributed.all_true(problem is None):
        raise DamagedCheckpoint(_first_line(problem) if problem else "another process could not read its part") from problem
    return found


def _free_name(path: Path) -> Path:
    return next(p for p in _numbered(path) if not p.exists())


def _numbered(path: Path) -> Iterator[Path]:
    yield path
    number = 1
    while True:
        yield path.with_name(f"{path.name}-{number}")
        number += 1


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__
