"""How an array is laid out in a release, against how it is laid out here: one class per layout, both directions."""

from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

Shape = tuple[int, ...]
At = tuple[slice, ...]


@runtime_checkable
class Stored(Protocol):
    """A tensor in a file. A slice reads no more than itself."""

    shape: Shape

    def __getitem__(self, at: At) -> np.ndarray: ...


class Plain:
    """The same on both sides; the base of the others."""

    def shape(self, ours: Shape) -> Shape:
        """The shape that a release has."""
        return ours

    def accepts(self, stored: Shape, ours: Shape) -> bool:
        """Whether a tensor of shape `stored` can be our array of shape `ours`."""
        return stored == self.shape(ours)

    def problem(self, stored: Stored, ours: Shape) -> str | None:
        """What is wrong with the contents of a tensor of an accepted shape."""
        return None

    def read(self, stored: Stored, ours: Shape, at: At) -> np.ndarray:
        """The part `at` of our array, one slice per axis."""
        return stored[at]

    def write(self, x: np.ndarray) -> np.ndarray:
        """Our array as a release has it."""
        return x


class Matrix(Plain):
    """A linear map: [in, out] here, [out, in] in torch."""

    def shape(self, ours: Shape) -> Shape:
        return ours[::-1]

    def read(self, stored: Stored, ours: Shape, at: At) -> np.ndarray:
        return stored[at[::-1]].T

    def write(self, x: np.ndarray) -> np.ndarray:
        return x.T


class Taps(Plain):
    """A depthwise convolution: [channels, taps] here, [channels, 1, taps] in torch; some files leave the middle axis out."""

    def shape(self, ours: Shape) -> Shape:
        return ours[0], 1, ours[1]

    def accepts(self, stored: Shape, ours: Shape) -> bool:
        return stored in (self.shape(ours), ours)

    def read(self, stored: Stored, ours: Shape, at: At) -> np.ndarray:
        return _whole(stored).reshape(ours)[at]

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

    def read(self, stored: Stored, ours: Shape, at: At) -> np.ndarray:
        return _whole(stored).reshape(-1)[: ours[0]][at]

    def write(self, x: np.ndarray) -> np.ndarray:
        return x[None, None, :, None]


PLAIN, MATRIX, TAPS, HEADS = Plain(), Matrix(), Taps(), Heads()


class Tensor(NamedTuple):
    """What one array of ours is in a release."""

    name: str
    """`{e}` stands for the expert: a tensor each, where we have one array with the experts as its first axis."""
    form: Plain = PLAIN


def _whole(stored: Stored) -> np.ndarray:
    return stored[tuple(slice(None) for _ in stored.shape)]
