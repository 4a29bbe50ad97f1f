"""Tokenizers of released checkpoints: Kimi's `tiktoken.model` with its special ids and chat layout, and any `tokenizer.json`.

Both are read by the libraries that define the formats; no code of a checkpoint is run.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from kda_jax.errors import UserError
from kda_jax.tokenizer import printable_bytes, read_ranks, utf8

RESERVED = 256
"""Special ids after the ranks of a `tiktoken.model`."""
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""How Kimi's models split text before merging bytes: runs of Han characters first. Part of the vocabulary, though not in its file."""
SPECIAL = {
    0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>", 6: "<|start_header_id|>", 7: "<|end_header_id|>",
    9: "[EOT]", 10: "<|im_system|>", 11: "<|tool_calls_section_begin|>", 12: "<|tool_calls_section_end|>", 13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>", 15: "<|tool_call_end|>", 17: "<|im_middle|>", 18: "<|media_begin|>", 19: "<|media_content|>",
    20: "<|media_end|>", 21: "<|media_pad|>", 254: "[UNK]", 255: "[PAD]",
}  # fmt: skip
"""Kimi Linear's special tokens, counted from the first id after the ranks (163,584 in the releases)."""
_STOPS = ("[EOS]", "[EOT]", "<|im_end|>", "<|end_of_msg|>")
_ROLES = {"system": "<|im_system|>", "user": "<|im_user|>", "assistant": "<|im_assistant|>"}


class KimiTokenizer:
    """The byte-pair encoding of Kimi Linear and Kimi K3: `tiktoken.model` (base64 token, space, rank) and 256 special ids after it.

    Names of special ids come from `tokenizer_config.json` where that is there, else from SPECIAL.

    Args:
        directory: with tiktoken.model.

    Raises:
        UserError: a file that is missing or not in its format.
    """

    def __init__(self, directory: str | Path):
        import tiktoken

        directory = Path(directory)
        ranks = read_ranks(find("tiktoken.model", directory))
        if set(ranks.values()) != set(range(len(ranks))):
            raise UserError(f"{directory / 'tiktoken.model'} has ranks that are not 0..{len(ranks) - 1}")
        names = _special_names(directory / "tokenizer_config.json", len(ranks))
        self.special = {names.get(i, f"<|reserved_token_{i}|>"): i for i in range(len(ranks), len(ranks) + RESERVED)}
        self.vocab_size = len(ranks) + RESERVED
        self._ranks = ranks
        self._encoding = tiktoken.Encoding(
            "kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=self.special, explicit_n_vocab=self.vocab_size
        )
        self.stop_tokens = frozenset(self.special[name] for name in _STOPS if name in self.special)
        self.end_of_text = self.special["[EOS]"]

    def encode(self, text: str) -> np.ndarray:
        return np.asarray(self._encoding.encode_ordinary(utf8(text).decode()), np.int32)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return self._encoding.decode_bytes([i for i in map(int, ids) if i < len(self._ranks)])

    def token_bytes(self) -> np.ndarray:
        counts = np.zeros(self.vocab_size, np.int32)
        for token, rank in self._ranks.items():
            counts[rank] = len(token)
        return counts

    def chat(self, messages: Sequence[Mapping[str, str]], *, reply: bool = True) -> np.ndarray:
        """A conversation in Kimi Linear's layout: for each message its role's marker, role, `<|im_middle|>`, content, `<|im_end|>`.

        Args:
            messages: {"role": "system" | "user" | "assistant", "content": text}, and "name" to call a role otherwise. Markers that are
                spelled out in a content are ordinary text.
            reply: end with the beginning of the assistant's next message.

        Returns:
            int32 ids.

        Raises:
            UserError: an unknown role, or a vocabulary without these markers (Kimi K3 lays conversations out in another way).
        """
        needed = (*_ROLES.values(), "<|im_middle|>", "<|im_end|>")
        absent = [name for name in needed if name not in self.special]
        if absent:
            raise UserError(f"this vocabulary has no {', '.join(absent)}: Kimi Linear's chat layout is not its own")
        ids: list[int] = []
        for message in messages:
            role = message["role"]
            if role not in _ROLES:
                raise UserError(f"a message's role must be one of {', '.join(_ROLES)}, got {role!r}")
            ids += self._head(role, message.get("name", role))
            ids += [*self.encode(message["content"]).tolist(), self.special["<|im_end|>"]]
        return np.asarray(ids + (self._head("assistant", "assistant") if reply else []), np.int32)

    def _head(self, role: str, name: str) -> list[int]:
        return [self.special[_ROLES[role]], *self.encode(name).tolist(), self.special["<|im_middle|>"]]


class JsonTokenizer:
    """Any Hugging Face `tokenizer.json`, through the `tokenizers` library.

    The end of a text is `eos_token` of `tokenizer_config.json` beside it, else the first of a few usual names in the vocabulary.

    Args:
        path: the file, or a directory that holds it.

    Raises:
        UserError: a file that is missing or not in its format, or a vocabulary without an end of text.
    """

    def __init__(self, path: str | Path):
        import tokenizers

        path = Path(path)
        path = find("tokenizer.json", path) if path.is_dir() or not path.suffix else path
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"{path} cannot be read as tokenizer.json ({error})") from error
        self._tokenizer.encode_special_tokens = True  # what spells a special token in a text is text
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self._special = {i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        self.end_of_text = _end_of_text(path, vocabulary)
        self.stop_tokens = frozenset({self.end_of_text})
        bytes_of = _byte_level if "ByteLevel" in json.dumps(json.loads(self._tokenizer.to_str()).get("decoder")) else _spelled
        self._bytes = [b""] * self.vocab_size
        for token, i in vocabulary.items():
            self._bytes[i] = b"" if i in self._special or i == self.end_of_text else bytes_of(token)

    def encode(self, text: str) -> np.ndarray:
        return np.asarray(self._tokenizer.encode(utf8(text).decode(), add_special_tokens=False).ids, np.int32)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(self._bytes[int(i)] for i in ids)

    def token_bytes(self) -> np.ndarray:
        return np.array([len(token) for token in self._bytes], np.int32)


def find(name: str, directory: str | Path | None) -> Path:
    """The file `name` in `directory`, or `directory` itself if it is that file; one sentence if it is not there."""
    if directory is None:
        raise UserError(f"{name} is missing: set data.vocabulary to the directory that holds it")
    directory = Path(directory)
    path = directory if directory.name == name else directory / name
    if not path.is_file():
        raise UserError(f"{name} is missing: looked for {path}; set data.vocabulary to the directory that holds it")
    return path


def _special_names(path: Path, first: int) -> dict[int, str]:
    """id -> name of the special tokens."""
    if not path.is_file():
        return {first + offset: name for offset, name in SPECIAL.items()}
    try:
        added = json.loads(path.read_text(encoding="utf-8")).get("added_tokens_decoder", {})
        names = {int(i): entry["content"] for i, entry in added.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} cannot be read ({error})") from error
    outside = sorted(i for i in names if not first <= i < first + RESERVED)
    if outside:
        raise UserError(f"{path} names the ids {outside[:4]}, outside the {RESERVED} special ones from {first} on")
    if len(set(names.values())) < len(names):
        raise UserError(f"{path} gives one name to two ids")
    return {first + 1: "[EOS]"} | names if "[EOS]" not in names.values() else names


def _end_of_text(path: Path, vocabulary: Mapping[str, int]) -> int:
    beside = path.with_name("tokenizer_config.json")
    names = ["<|endoftext|>", "<|end_of_text|>", "</s>", "[EOS]", "<eos>", "<|im_end|>"]
    if beside.is_file():
        stated = json.loads(beside.read_text(encoding="utf-8")).get("eos_token")
        names.insert(0, stated["content"] if isinstance(stated, dict) else stated)
    found = next((vocabulary[name] for name in names if name in vocabulary), None)
    if found is None:
        raise UserError(f"{path} has no token that ends a text: set eos_token in {beside.name} beside it")
    return found


def _byte_level(token: str) -> bytes:
    """A token in GPT-2's spelling of bytes."""
    known = _BYTE_OF
    return bytes(known[c] for c in token) if all(c in known for c in token) else token.encode()


def _spelled(token: str) -> bytes:
    """A token in SentencePiece's spelling: a low line for a space, <0x0A> for a byte."""
    byte = re.fullmatch(r"<0x([0-9A-F]{2})>", token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


_BYTE_OF = {char: byte for byte, char in printable_bytes().items()}
