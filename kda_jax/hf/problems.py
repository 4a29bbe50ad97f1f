"""Everything that is wrong with a checkpoint, in one error."""

from collections.abc import Sequence
from pathlib import Path

from kda_jax.errors import UserError

_SHOWN = 20


class BadCheckpoint(UserError):
    """A directory that is not the checkpoint its config.json describes.

    Attributes:
        problems: one sentence each, all of them; the message shows the first twenty.
    """

    def __init__(self, directory: Path, problems: Sequence[str]):
        self.problems = tuple(problems)
        shown = [f"\n  {problem}" for problem in self.problems[:_SHOWN]]
        more = len(self.problems) - _SHOWN
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__(f"{directory} cannot be used, {count}:{''.join(shown)}" + (f"\n  and {more} more" if more > 0 else ""))


class BadTensor(UserError):
    """A tensor whose contents, seen only when they are read, cannot be used."""
