"""Bytes, and GPT-2's byte-pair encoding from a vocabulary file."""

import base64
import json

import numpy as np
import pytest

from kda_jax import tokenizer
from kda_jax.errors import UserError

TEXTS = ["", "Hello world", "naïve café, 漢字 🙂\n\ttab", "a" * 100]


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """A vocabulary of GPT-2's size: the bytes, the merges of "Hello", and made-up tokens to fill it."""
    tokens = [bytes([i]) for i in range(256)] + [b"He", b"ll", b"Hell", b"Hello", b" w"]
    tokens += [b"~" + i.to_bytes(3, "big") for i in range(tokenizer.GPT2_END_OF_TEXT - len(tokens))]
    return {token: i for i, token in enumerate(tokens)}


def write_encoder_json(path, ranks: dict[bytes, int]) -> None:
    spelling = tokenizer.printable_bytes()
    names = {"".join(spelling[b] for b in token): i for token, i in ranks.items()}
    path.write_text(json.dumps(names | {"<|endoftext|>": tokenizer.GPT2_END_OF_TEXT}))


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_round_trip(text):
    t = tokenizer.ByteTokenizer()
    ids = t.encode(text)
    assert ids.dtype == np.int32
    assert t.decode_bytes([*ids.tolist(), t.end_of_text]) == text.encode()
    assert t.token_bytes()[ids].sum() == len(text.encode())
    assert t.token_bytes()[t.end_of_text] == 0


def test_text_never_holds_the_end_of_text_byte():
    every = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))
    assert tokenizer.ByteTokenizer.end_of_text not in every.encode()


@pytest.mark.parametrize("name", ["encoder.json", "gpt2.tiktoken"])
@pytest.mark.parametrize("text", TEXTS)
def test_gpt2_round_trip(tmp_path, ranks, name, text):
    if name == "encoder.json":
        write_encoder_json(tmp_path / name, ranks)
    else:
        (tmp_path / name).write_text("".join(f"{base64.b64encode(t).decode()} {i}\n" for t, i in ranks.items()))
    t = tokenizer.build("gpt2", str(tmp_path))
    ids = t.encode(text)
    assert t.decode_bytes(ids.tolist()) == text.encode()
    assert t.token_bytes()[ids].sum() == len(text.encode())


def test_gpt2_merges(tmp_path, ranks):
    t = tokenizer.GPT2Tokenizer(ranks)
    assert t.encode("Hello").tolist() == [ranks[b"Hello"]]
    assert t.encode("<|endoftext|>").max() < t.end_of_text, "a special token's spelling in text is text"


def test_missing_vocabulary_says_where_it_looked(tmp_path):
    with pytest.raises(UserError, match=r"encoder\.json.*looked in .*encoder\.json, .*gpt2\.tiktoken.*data\.vocabulary"):
        tokenizer.build("gpt2", str(tmp_path))


@pytest.mark.parametrize("content", ["not json", '{"a": 0}', "[1]"])
def test_wrong_vocabulary(tmp_path, content):
    (tmp_path / "encoder.json").write_text(content)
    with pytest.raises(UserError, match="vocabulary"):
        tokenizer.build("gpt2", str(tmp_path))


def test_text_that_is_not_unicode():
    with pytest.raises(UserError, match="not valid Unicode at character 2"):
        tokenizer.ByteTokenizer().encode("ab\udcff")
