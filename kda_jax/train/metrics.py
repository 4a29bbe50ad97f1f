"""What a run tells: a progress bar or lines for people, JSONL for programs, and the table of dtypes."""

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kda_jax.layers.params import FLOAT32, NO_DECAY, has_name
from kda_jax.train.state import TrainState, flatten


class Report:
    """The voice of a run; use as a context manager.

    On a terminal there is a progress bar with step, loss, tokens per second and time left; elsewhere a line per logged step.

    Args:
        path: of metrics.jsonl; None writes none.
        step: where the run starts or goes on. Lines of later steps, which a killed process left, are dropped: they will be written again.
        steps: where it ends.
    """

    def __init__(self, path: Path | None, *, step: int, steps: int, console: Console):
        self._console = console
        kept = [] if path is None else _keep_up_to(path, step)
        self._evaluated = {line["step"] for line in kept if line["kind"] == "eval"}
        self._file = Path(os.devnull if path is None else path).open("a", encoding="utf-8")
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=24), TextColumn("{task.fields[numbers]}"))
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        self._bar = Progress(*columns, *times, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("train", total=steps, completed=step, numbers="compiling")
        self._steps = steps

    def __enter__(self) -> "Report":
        self._bar.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.__exit__(*error)
        self._file.close()

    def step(self, step: int, values: dict[str, float], seconds_left: float) -> None:
        """A logged training step: `loss`, `tokens_per_second` and whatever else is worth keeping."""
        self._write({"kind": "train", "step": step, **values})
        numbers = f"loss {values['loss']:.3f}  {values['tokens_per_second']:,.0f} tokens/s"
        self._bar.update(self._task, numbers=numbers)
        if not self._console.is_terminal:
            self.say(f"step {step}/{self._steps}  {numbers}  {_clock(seconds_left)} left")

    def advance(self, step: int) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=step)

    def evaluation(self, step: int, values: dict[str, float]) -> None:
        """Held-out text after `step` steps; a finished run that is started again has it already."""
        if step not in self._evaluated:
            self._write({"kind": "eval", "step": step, **values})
        self.say(f"step {step}/{self._steps}  validation {values['bits_per_byte']:.3f} bits per byte")

    def say(self, line: str) -> None:
        """One line of text."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _write(self, record: dict) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()


def _keep_up_to(path: Path, step: int) -> list[dict]:
    """Drop what is later than `step`, and a line cut off by a kill; the lines that stay."""
    if not path.is_file():
        return []
    kept = [
        record
        for record in map(_parse, path.read_text(encoding="utf-8", errors="replace").splitlines())
        if record and record["step"] <= step
    ]
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    partial.replace(path)
    return kept


def _parse(line: str) -> dict | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(record, dict) and isinstance(record.get("kind"), str) and isinstance(record.get("step"), int)
    return record if whole else None


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02d}"


_MOMENTS = {"Adam: mean": "mu", "Adam: mean of squares": "nu", "Muon: momentum": "momentum"}


def dtype_table(state: TrainState, compute_dtype: str, no_decay: Collection[str] = ()) -> str:
    """Which arrays are stored and computed in which precision, and which of them decay: one row per group of parameters.

    Adam's moments in bfloat16 train to a worse loss without any sign of it, so what is used is printed where a run starts.
    """
    groups: dict[tuple[str, str, str], tuple[int, set[str]]] = {}
    for name, leaf in flatten(state.params).items():
        computed = str(leaf.dtype) if has_name(name, FLOAT32) else compute_dtype
        key = (str(leaf.dtype), computed, "no" if has_name(name, {*NO_DECAY, *no_decay}) else "yes")
        size, names = groups.get(key, (0, set()))
        groups[key] = (size + leaf.size, names | {name.rpartition(".")[2]})
    rows = [("", "values", "stored", "computed", "decay")]
    rows += [(", ".join(sorted(names)), f"{size:,}", *key) for key, (size, names) in sorted(groups.items())]
    moments = flatten(state.opt_state)
    for title, key in _MOMENTS.items():
        rows += _rest(title, [leaf for name, leaf in moments.items() if key in name.split(".")])
    rows += _rest("buffers", list(flatten(state.buffers).values()))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def _rest(name: str, leaves: list) -> list[tuple[str, ...]]:
    dtypes = sorted({str(leaf.dtype) for leaf in leaves})
    return [(name, f"{sum(x.size for x in leaves):,}", "/".join(dtypes), "/".join(dtypes), "no")] if leaves else []
