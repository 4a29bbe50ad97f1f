"""The tokenizer of a checkpoint in Hugging Face form, and the tokens that end its texts."""

import json
from pathlib import Path

from kda_jax.config import DataConfig
from kda_jax.errors import UserError

_GPT2_VOCABULARY = 50257


def tokenizer_of(directory: str | Path, vocab_size: int) -> DataConfig:
    """The tokenizer that lies beside a checkpoint; without one, GPT-2's for a vocabulary of its size and bytes for any other.

    Raises:
        UserError: there is a tokenizer_config.json, but not the vocabulary that it is about.
    """
    directory = Path(directory)
    for name, tokenizer in (("tiktoken.model", "kimi"), ("tokenizer.json", "json")):
        if (directory / name).is_file():
            return DataConfig(tokenizer=tokenizer, vocabulary=str(directory.absolute()))
    if vocab_size != _GPT2_VOCABULARY and (directory / "tokenizer_config.json").is_file():
        raise UserError(f"{directory} has a tokenizer_config.json but neither a tiktoken.model nor a tokenizer.json beside it")
    return DataConfig(tokenizer="gpt2" if vocab_size == _GPT2_VOCABULARY else "bytes")


def stop_tokens(directory: str | Path) -> frozenset[int]:
    """What config.json and generation_config.json call the end of a text: they do not always agree, so all of it.

    Raises:
        UserError: one of the two is not JSON, or an id is no integer.
    """
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = Path(directory) / name
        if not path.is_file():
            continue
        try:
            stated = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise UserError(f"{path} is not a JSON object ({error})") from error
        ids = stated if isinstance(stated, list) else [] if stated is None else [stated]
        if not all(isinstance(i, int) for i in ids):
            raise UserError(f"{path}: eos_token_id must be an integer or a list of them, got {stated!r}")
        found.update(ids)
    return frozenset(found)
