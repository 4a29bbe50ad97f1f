"""Errors that the command line turns into one sentence."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something the user can put right. The command line prints the message, without a traceback, and exits with `exit_code`."""

    exit_code = 2


class TrainingStopped(UserError):
    """The run cannot go on: not a mistake in the input, so it has an exit code of its own."""

    exit_code = 3


class Interrupted(TrainingStopped):
    """Asked to stop, by Ctrl-C or a preemption notice: everything is saved, and the same command goes on."""

    exit_code = 4


class ProcessLost(TrainingStopped):
    """Another process of the run has gone. Start all of them again: they go on from the last checkpoint."""

    exit_code = 5


def told(error: OSError) -> str:
    """What the system says, and of which path."""
    where = "" if error.filename is None else f"{str(error.filename)[:200]}: "
    return f"{where}{error.strerror or error}"


def need_positive(options: object, *names: str) -> None:
    """Raises UserError, in the words of the command line, for the first of these fields that is a number below 1; None is no number."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {value}")


def nearest(name: str, known: Iterable[str], n: int = 3) -> str:
    """The sentence part that names what `name` may have been meant to be; empty if nothing comes close.

    Compares whole dotted names and their last components, with dashes and underscores alike.
    """

    def plain(text: str) -> str:
        return text.replace("-", "_")

    known = list(known)
    by_spelling: dict[str, list[str]] = {}
    for candidate in known:
        by_spelling.setdefault(plain(candidate), []).append(candidate)
        by_spelling.setdefault(plain(candidate).rpartition(".")[2], []).append(candidate)
    found = dict.fromkeys(
        candidate
        for wanted in (plain(name), plain(name).rpartition(".")[2])
        for spelling in difflib.get_close_matches(wanted, by_spelling, n=n, cutoff=0.6)
        for candidate in by_spelling[spelling]
    )
    return f"; nearest: {', '.join(list(found)[:n])}" if found else ""
