"""How an array is laid out in a release, against how it is laid out here: one class per layout, both directions."""

from collections.abc import Iterator
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

Shape = tuple[int, ...]
At = tuple[slice, ...]

PIECE_BYTES = 2**20
"""Of a tensor that is read at a time: what a core's cache holds, so that nothing on the way to its place passes through memory."""
PIECE_ROWS = 32
"""The fewest rows of a piece, and what their number is a multiple of: whole strips."""
_STRIP_BYTES = 32


@runtime_checkable
class Stored(Protocol):
    """A tensor in a file. A slice reads no more than itself."""

    shape: Shape
    dtype: np.dtype

    def __getitem__(self, at: At) -> np.ndarray: ...


class Plain:
    """The same on both sides; the base of the others."""

    rows = 0
    """Our axis that is the first in the file."""

    def shape(self, ours: Shape) -> Shape:
        """The shape that a release has."""
        return ours

    def accepts(self, stored: Shape, ours: Shape) -> bool:
        """Whether a tensor of shape `stored` can be our array of shape `ours`."""
        return stored == self.shape(ours)

    def problem(self, stored: Stored, ours: Shape) -> str | None:
        """What is wrong with the contents of a tensor of an accepted shape."""
        return None

    def pieces(self, to: np.ndarray, at: At, expansion: int = 1) -> Iterator[tuple[np.ndarray, At]]:
        """`to`, the room for the part `at` of our array, in pieces of about `PIECE_BYTES`, and the part that each of them is.

        Args:
            expansion: how many bytes become of one that is read.
        """
        if not at:
            yield to, at
            return
        before, part, after = at[: self.rows], at[self.rows], at[self.rows + 1 :]
        count = to.shape[self.rows]
        step = max(1, PIECE_BYTES * expansion * count // max(to.nbytes, 1) // PIECE_ROWS) * PIECE_ROWS
        for first in range(0, count, step):
            piece = slice(first, min(first + step, count))
            whole = (slice(None),) * self.rows
            yield to[(*whole, piece)], (*before, slice(part.start + piece.start, part.start + piece.stop), *after)

    def fill(self, to: np.ndarray, stored: Stored, ours: Shape, at: At) -> None:
        """Read the part `at` of our array, one slice per axis with both ends, into `to`, which has its shape."""
        if not (to.dtype == stored.dtype and hasattr(stored, "read") and stored.read(to, at)):
            to[...] = stored[at]

    def read(self, stored: Stored, ours: Shape) -> np.ndarray:
        """The whole of our array."""
        to = np.empty(ours, stored.dtype)
        self.fill(to, stored, ours, tuple(slice(0, n) for n in ours))
        return to

    def write(self, x: np.ndarray) -> np.ndarray:
        """Our array as a release has it."""
        return x


class Matrix(Plain):
    """A linear map: [in, out] here, [out, in] in torch."""

    rows = 1

    def shape(self, ours: Shape) -> Shape:
        return ours[::-1]

    def fill(self, to: np.ndarray, stored: Stored, ours: Shape, at: At) -> None:
        """Transposed in strips of half a cache line, several times as fast as NumPy transposes the whole; or as it is, if it was made so."""
        x = stored[at[::-1]].astype(to.dtype, copy=False)
        to, x = (array.view(f"u{array.itemsize}") for array in (to, x))  # NumPy copies bfloat16 an element at a time
        step = len(x) if x.T.flags.c_contiguous else _STRIP_BYTES // x.itemsize
        for first in range(0, len(x), step):
            to[:, first : first + step] = x[first : first + step].T

    def write(self, x: np.ndarray) -> np.ndarray:
        return x.T


class Taps(Plain):
    """A depthwise convolution: [channels, taps] here, [channels, 1, taps] in torch; some files leave the middle axis out."""

    def shape(self, ours: Shape) -> Shape:
        return ours[0], 1, ours[1]

    def accepts(self, stored: Shape, ours: Shape) -> bool:
        return stored in (self.shape(ours), ours)

    def fill(self, to: np.ndarray, stored: Stored, ours: Shape, at: At) -> None:
        to[...] = _whole(stored).reshape(ours)[at]

    def write(self, x: np.ndarray) -> np.ndarray:
        return x[:, None]


class Heads(Plain):
    """A number per head: [H] here, [1, 1, H, 1] in the releases, [H] in some files. There may be zeros after the last head."""

    def shape(self, ours: Shape) -> Shape:
        return 1, 1, *ours, 1

    def accepts(self, stored: Shape, ours: Shape) -> bool:
        count = int(np.prod(stored))
        return count >= ours[0] and stored in ((1, 1, count, 1), (count,))

    def problem(self, stored: Stored, ours: Shape) -> str | None:
        extra = _whole(stored).reshape(-1)[ours[0] :]
        return f"holds {extra.size} values after those of the {ours[0]} heads that are not all zero" if np.any(extra) else None

    def fill(self, to: np.ndarray, stored: Stored, ours: Shape, at: At) -> None:
        to[...] = _whole(stored).reshape(-1)[: ours[0]][at]

    def write(self, x: np.ndarray) -> np.ndarray:
        return x[None, None, :, None]


class PaddedHeads(Heads):
    """A number per head, [H], followed by zeros: [entries] in the release."""

    def __init__(self, entries: int):
        self._entries = entries

    def shape(self, ours: Shape) -> Shape:
        return (self._entries,)

    def write(self, x: np.ndarray) -> np.ndarray:
        return np.pad(x, (0, self._entries - x.size))


class Row(Plain):
    """A vector: [D] here, a linear map to one number, [1, D], in torch."""

    def shape(self, ours: Shape) -> Shape:
        return 1, *ours

    def fill(self, to: np.ndarray, stored: Stored, ours: Shape, at: At) -> None:
        to[...] = stored[(slice(0, 1), *at)][0]

    def write(self, x: np.ndarray) -> np.ndarray:
        return x[None]


PLAIN, MATRIX, TAPS, HEADS, ROW = Plain(), Matrix(), Taps(), Heads(), Row()


class Tensor(NamedTuple):
    """What one array of ours is in a release."""

    name: str
    """`{e}` stands for the expert: a tensor each, where we have one array with the experts as its first axis."""
    form: Plain = PLAIN
    stored: Literal["model", "float32", "mxfp4"] = "model"
    """How the release stores it: as most of the model, in float32 whatever the rest is, or packed (`hf.mxfp4`)."""


def _whole(stored: Stored) -> np.ndarray:
    return stored[tuple(slice(None) for _ in stored.shape)]
