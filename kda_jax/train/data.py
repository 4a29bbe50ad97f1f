"""Text files to batches.

    documents -> train | validation, whole documents -> one long row of tokens -> rows of seq_len + 1 -> batches

Batch n is a function of (text, seed, n) and of nothing else: not of how many hosts read it, not of what was read before. The
position in the data is therefore one number, and each host takes its share of the global batch.
"""

import functools
import hashlib
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import grain
import jax
import numpy as np

from kda_jax.config import DataConfig
from kda_jax.errors import UserError
from kda_jax.tokenizer import Tokenizer

PADDING = -1
"""Segment id of positions that hold no token."""


class Document(NamedTuple):
    """One text; `name` is its path below the source it came from."""

    name: str
    text: str


class Batch(NamedTuple):
    """Rows to predict: position t + 1 from positions up to t, within a segment."""

    tokens: np.ndarray | jax.Array
    """[rows, seq_len + 1] int32."""
    segment_ids: np.ndarray | jax.Array
    """[rows, seq_len + 1] int32: 1, 2, ... for the documents of a row, PADDING where there is no token."""


def read_documents(source: Sequence[str]) -> list[Document]:
    """Read text files and directories of .txt files (at any depth), in the order of their names.

    Raises:
        UserError: a path that does not exist, text that is not UTF-8, or no text at all.
    """
    documents = []
    for place in map(Path, source):
        if place.is_dir():
            files = sorted(p for p in place.rglob("*.txt") if p.is_file())
            documents += [Document(str(f.relative_to(place)), _read(f)) for f in files]
        elif place.is_file():
            documents.append(Document(place.name, _read(place)))
        else:
            raise UserError(f"data.source: there is no file or directory {place}; `kda-jax data` fetches the demo's text into data/english")
    documents = [d for d in documents if d.text.strip()]
    if not documents:
        raise UserError(f"data.source: no text in {', '.join(source)}: expected UTF-8 text files, or directories that hold .txt files")
    return documents


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: byte {error.object[error.start]:#04x} at offset {error.start}") from error


def split_documents(documents: Sequence[Document], fraction: float) -> tuple[list[Document], list[Document]]:
    """(train, validation): whole documents, in an order fixed by their names, until `fraction` of the text is held out.

    A lone document is cut in two, its end held out.
    """
    if len(documents) == 1:
        name, text = documents[0]
        cut = min(max(int(len(text) * (1 - fraction)), 1), len(text) - 1)
        if cut < 1:
            raise UserError(f"data.source: {name} is too short to hold out a part of it")
        return [Document(name, text[:cut])], [Document(f"{name} (end)", text[cut:])]
    by_hash = sorted(documents, key=lambda d: hashlib.blake2b(d.name.encode()).digest())
    wanted, held = fraction * sum(len(d.text) for d in documents), 0
    validation: list[Document] = []
    while not validation or (held < wanted and len(validation) < len(documents) - 1):
        document = by_hash[len(validation)]
        validation.append(document)
        held += len(document.text)
    chosen = {id(d) for d in validation}
    return [d for d in documents if id(d) not in chosen], validation


class Rows:
    """Documents laid end to end and cut every `seq_len` tokens; consecutive rows share one token, so each is predicted once.

    `end_of_text` stands before and after every document: a document's first token is predicted, and so is its end.
    """

    def __init__(self, documents: Sequence[Document], tokenizer: Tokenizer, seq_len: int):
        end = np.array([tokenizer.end_of_text], np.int32)
        pieces = [np.concatenate([end, tokenizer.encode(d.text), end]) for d in documents]
        self.tokens = np.concatenate(pieces)
        self.starts = np.cumsum([0] + [len(p) for p in pieces[:-1]])
        self.seq_len = seq_len

    def __len__(self) -> int:
        return max(1, -(-(len(self.tokens) - 1) // self.seq_len))

    def __getitem__(self, index: int) -> Batch:
        """Row `index`, without a batch axis."""
        first = index * self.seq_len
        tokens = self.tokens[first : first + self.seq_len + 1]
        document = np.searchsorted(self.starts, np.arange(first, first + len(tokens)), side="right")
        segment_ids = (document - document[0] + 1).astype(np.int32)
        missing = (0, self.seq_len + 1 - len(tokens))
        return Batch(np.pad(tokens, missing), np.pad(segment_ids, missing, constant_values=PADDING))

    @functools.cached_property
    def checksum(self) -> int:
        """Tells whether a resumed run reads the same tokens."""
        return zlib.crc32(self.starts.tobytes(), zlib.crc32(self.tokens.tobytes()))


class Corpus(NamedTuple):
    """What a run trains on and what it is judged by."""

    train: Rows
    validation: Rows


def load_corpus(config: DataConfig, tokenizer: Tokenizer) -> Corpus:
    """Read, split, tokenise."""
    train, validation = split_documents(read_documents(config.source), config.validation_fraction)
    return Corpus(Rows(train, tokenizer, config.seq_len), Rows(validation, tokenizer, config.seq_len))


class Batches:
    """Training batches by number, without end: every epoch is a new global shuffle of all rows, keyed by the seed.

    Args:
        rows: the training rows.
        batch_size: rows of a batch, over all processes.
        seed: of the order.
        share: numbers of the rows of each batch that this process reads, in order (`sharding.local_rows`); all if None.
    """

    def __init__(self, rows: Rows, *, batch_size: int, seed: int, share: Sequence[int] | np.ndarray | None = None):
        self._share = np.arange(batch_size) if share is None else np.asarray(share)
        self._batch_size = batch_size
        self._examples = grain.MapDataset.source(rows).seed(seed).shuffle().repeat(None)

    def __getitem__(self, number: int) -> Batch:
        return stack_rows([self._examples[number * self._batch_size + int(i)] for i in self._share])

    def iterate(self, first: int, stop: int) -> Iterator[Batch]:
        """Batches first .. stop - 1, read ahead in a background thread."""
        numbers = grain.MapDataset.range(first, stop).map(self.__getitem__)
        return iter(numbers.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))


def stack_rows(rows: Sequence[Batch]) -> Batch:
    """Rows to a batch."""
    return Batch(np.stack([r.tokens for r in rows]), np.stack([r.segment_ids for r in rows]))


def evaluation_batches(rows: Rows, count: int, batch_size: int) -> Iterator[Batch]:
    """The first `count` rows of a fixed shuffle (all, if there are fewer), the last batch filled up with padding rows."""
    order = np.random.default_rng(0).permutation(len(rows))[:count]
    for i in range(0, len(order), batch_size):
        chosen = [rows[int(j)] for j in order[i : i + batch_size]]
        empty = Batch(np.zeros_like(chosen[0].tokens), np.full_like(chosen[0].segment_ids, PADDING))
        yield stack_rows(chosen + [empty] * (batch_size - len(chosen)))
