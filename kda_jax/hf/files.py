"""safetensors directories: what they hold, read a tensor at a time, and writing one."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from kda_jax.hf.forms import At, Shape

INDEX = "model.safetensors.index.json"
DTYPES = {"F64": np.dtype("float64"), "F32": np.dtype("float32"), "F16": np.dtype("float16"), "BF16": np.dtype(jnp.bfloat16)}


class Tensor(NamedTuple):
    """A tensor in a file, read when it is sliced."""

    file: Path
    name: str
    shape: Shape
    dtype: np.dtype
    reader: "Reader"

    def __getitem__(self, at: At) -> np.ndarray:
        return self.reader.read(self, at)


class Reader:
    """Reads slices, with one file open at a time: what has been read of the others is no longer mapped into memory."""

    def __init__(self):
        self._path: Path | None = None
        self._file = None

    def read(self, tensor: Tensor, at: At) -> np.ndarray:
        if tensor.file != self._path:
            self.close()
            self._path, self._file = tensor.file, safe_open(tensor.file, "numpy")
        if all(part == slice(None) or (part.start or 0, part.stop) == (0, n) for part, n in zip(at, tensor.shape, strict=True)):
            return self._file.get_tensor(tensor.name)
        return self._file.get_slice(tensor.name)[at]

    def close(self) -> None:
        self._path = self._file = None


def tensors(directory: Path, problems: list[str]) -> list[Tensor]:
    """Every tensor in the safetensors files of a directory, from their headers alone.

    Args:
        directory: with model.safetensors, or with an index and the files that it names.
        problems: gets a sentence for each absent or unreadable file and each disagreement between index and files.
    """
    index = directory / INDEX
    expected: dict[str, str] = {}
    if index.is_file():
        try:
            expected = dict(json.loads(index.read_text())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            problems.append(f"{INDEX} has no weight_map that can be read ({error})")
    names = sorted(set(expected.values())) or sorted(path.name for path in directory.glob("*.safetensors"))
    if not names:
        problems.append("there is no .safetensors file")
    reader, found = Reader(), []
    for name in names:
        found += _header(directory / name, reader, problems)
    if expected:
        readable = {tensor.file.name for tensor in found}
        held = {(tensor.name, tensor.file.name) for tensor in found}
        absent = sorted(pair for pair in set(expected.items()) - held if pair[1] in readable)
        problems += [f"{INDEX} says that {file} holds {name}, which it does not" for name, file in absent]
        problems += [f"{file} holds {name}, which is not in {INDEX}" for name, file in sorted(held - set(expected.items()))]
    return found


def _header(path: Path, reader: Reader, problems: list[str]) -> list[Tensor]:
    if not path.is_file():
        problems.append(f"{path.name} is absent, though {INDEX} names it")
        return []
    try:
        with safe_open(path, "numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            return [_tensor(path, name, part, reader, problems) for name, part in slices.items()]
    except (SafetensorError, OSError) as error:
        problems.append(f"{path.name} is truncated or not a safetensors file ({error})")
        return []


def _tensor(path: Path, name: str, part, reader: Reader, problems: list[str]) -> Tensor:
    if part.get_dtype() not in DTYPES:
        problems.append(f"{name} has dtype {part.get_dtype()}, expected one of {', '.join(DTYPES)}")
    return Tensor(path, name, tuple(part.get_shape()), DTYPES.get(part.get_dtype(), np.dtype("float32")), reader)


def by_number(name: str) -> tuple:
    """Sort key of names: numbers compare as numbers, layer 2 before layer 10."""
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split("."))


class Pending(NamedTuple):
    """A tensor to be written."""

    name: str
    shape: Shape
    dtype: np.dtype
    make: Callable[[], np.ndarray]
    """Called when its file is written."""

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self.dtype.itemsize


def write(directory: Path, pending: Iterable[Pending], max_file_bytes: int) -> None:
    """Write tensors in order, in files of at most `max_file_bytes` each (or one tensor), with an index if there are several.

    No more than one file's tensors are in memory at a time.
    """
    groups: list[list[Pending]] = [[]]
    for tensor in pending:
        if groups[-1] and sum(t.nbytes for t in groups[-1]) + tensor.nbytes > max_file_bytes:
            groups.append([])
        groups[-1].append(tensor)
    one = len(groups) == 1
    where = {}
    for number, group in enumerate(groups, start=1):
        name = "model.safetensors" if one else f"model-{number:05}-of-{len(groups):05}.safetensors"
        save_file({t.name: np.ascontiguousarray(t.make()) for t in group}, directory / name, metadata={"format": "pt"})
        where |= {t.name: name for t in group}
    if not one:
        total = sum(t.nbytes for group in groups for t in group)
        (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2) + "\n")
