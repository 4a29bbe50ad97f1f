"""safetensors directories: what they hold, read a tensor at a time, and writing one."""

import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from kda_jax.hf.forms import At, Shape
from kda_jax.hf.problems import BadTensor

INDEX = "model.safetensors.index.json"
DTYPES = {"F64": np.dtype("float64"), "F32": np.dtype("float32"), "F16": np.dtype("float16"), "BF16": np.dtype(jnp.bfloat16)}

PACKED, SCALE = ".weight_packed", ".weight_scale"
"""Ends of the names of the two tensors that one MXFP4 weight is stored as; see `hf.mxfp4`."""


class Tensor(NamedTuple):
    """A tensor in a file, read when it is sliced."""

    file: Path
    name: str
    shape: Shape
    dtype: np.dtype
    offset: int
    """Of its first byte in the file."""

    @property
    def expansion(self) -> int:
        """How many bytes become of one that is read."""
        return 1

    def reading(self, dtype: np.dtype) -> "Tensor":
        """The tensor as it is read best to become `dtype`."""
        return self

    def __getitem__(self, at: At) -> np.ndarray:
        """The rows that are asked for are read, and columns that are not are cut off."""
        if not self.shape:
            return self._rows(np.empty(1, self.dtype), 0).reshape(())
        start, stop, _ = at[0].indices(self.shape[0])
        return self._rows(np.empty((stop - start, *self.shape[1:]), self.dtype), start)[(slice(None), *at[1:])]

    def read(self, to: np.ndarray, at: At) -> bool:
        """Read whole rows into `to`; False, and nothing read, if columns are left out or `to` has gaps."""
        whole = all(part.indices(n)[:2] == (0, n) for part, n in zip(at[1:], self.shape[1:], strict=True))
        if not self.shape or not whole or not to.flags.c_contiguous:
            return False
        self._rows(to, at[0].indices(self.shape[0])[0])
        return True

    def _rows(self, to: np.ndarray, start: int) -> np.ndarray:
        """`to` filled from row `start` on, without a map of the file: what has been read leaves no trace in memory."""
        view = memoryview(to.reshape(-1).view(np.uint8))
        at = self.offset + start * self.dtype.itemsize * math.prod(self.shape[1:])
        with _open(self.file) as file:
            while view:
                done = os.preadv(file.fileno(), [view], at)
                if not done:
                    raise BadTensor(f"{self.file.name} ends inside {self.name}")
                view, at = view[done:], at + done
        return to


def _open(path: Path):
    return open(path, "rb", buffering=0)


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
    found = [tensor for name in names for tensor in _header(directory / name, problems)]
    if expected:
        readable = {tensor.file.name for tensor in found}
        held = {(tensor.name, tensor.file.name) for tensor in found}
        absent = sorted(pair for pair in set(expected.items()) - held if pair[1] in readable)
        problems += [f"{INDEX} says that {file} holds {name}, which it does not" for name, file in absent]
        problems += [f"{file} holds {name}, which is not in {INDEX}" for name, file in sorted(held - set(expected.items()))]
    return found


def _header(path: Path, problems: list[str]) -> list[Tensor]:
    if not path.is_file():
        problems.append(f"{path.name} is absent, though {INDEX} names it")
        return []
    try:
        with safe_open(path, "numpy"):  # checks that header and file fit each other
            pass
        with _open(path) as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
    except (SafetensorError, OSError, ValueError) as error:
        problems.append(f"{path.name} is truncated or not a safetensors file ({error})")
        return []
    header.pop("__metadata__", None)
    return [_tensor(path, name, entry, 8 + size, problems) for name, entry in header.items()]


def _tensor(path: Path, name: str, entry: dict, start: int, problems: list[str]) -> Tensor:
    kind = entry["dtype"]
    packed = kind == "U8" and name.endswith((PACKED, SCALE))
    if kind not in DTYPES and not packed:
        problems.append(f"{name} has dtype {kind}, expected one of {', '.join(DTYPES)}")
    dtype = np.dtype(np.uint8) if packed else DTYPES.get(kind, np.dtype("float32"))
    return Tensor(path, name, tuple(entry["shape"]), dtype, start + entry["data_offsets"][0])


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
