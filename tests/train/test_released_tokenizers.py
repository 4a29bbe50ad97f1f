"""Kimi's tiktoken.model and tokenizer.json: formats, special ids, chat layout, round trips, and what is said when something is missing."""

import base64
import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from kda_jax.errors import UserError
from kda_jax.generate import stop_set
from kda_jax.hf.text import tokenizer_of
from kda_jax.released_tokenizers import JsonTokenizer, KimiTokenizer
from kda_jax.tokenizer import Tokenizer as Protocol
from kda_jax.tokenizer import build

TEXTS = ["Hello world", "  two  spaces\n\nand lines", "naïve café", "数学は楽しい, 中文和English", "🙂🙃", "it's 123456"]
SPELLED, EMPTY = "<|im_end|> is text", ""
HAN = "中".encode(), "文".encode()
MERGES = [b"he", b"ll", b"hell", b"or", b"ld", b" w", b"in", b"th", b"the", b" the"]
MERGES += [HAN[0][:2], HAN[0], HAN[1][:2], HAN[1], HAN[0] + HAN[1]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tiktoken.model of 256 bytes and a few merges, base64 and rank per line."""
    folder = tmp_path_factory.mktemp("kimi")
    tokens = [bytes([b]) for b in range(256)] + MERGES
    lines = (f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens))
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def kimi(directory):
    return build("kimi", str(directory))


FIRST = 256 + len(MERGES)


def test_special_ids_follow_the_ranks(kimi):
    """256 of them, at the release's distances: [BOS] first, [PAD] last, 163,605 - 163,584 for the media placeholder."""
    assert isinstance(kimi, Protocol)
    assert kimi.vocab_size == FIRST + 256
    offsets = {name: kimi.special[name] - FIRST for name in ("[BOS]", "[EOS]", "<|im_end|>", "<|media_pad|>", "[PAD]")}
    assert offsets == {"[BOS]": 0, "[EOS]": 1, "<|im_end|>": 2, "<|media_pad|>": 21, "[PAD]": 255}
    assert len(kimi.special) == 256


def test_two_ends_R122(kimi):
    """[EOS] of the tokenizer and <|im_end|> of the config are both stops, and neither is text."""
    end, im_end = kimi.special["[EOS]"], kimi.special["<|im_end|>"]
    assert {end, im_end} <= stop_set(kimi.stop_tokens)
    assert kimi.decode_bytes([104, end, im_end, 105]) == b"hi"


@pytest.mark.parametrize("text", [*TEXTS, SPELLED, EMPTY])
def test_kimi_round_trip(kimi, text):
    ids = kimi.encode(text)
    assert kimi.decode_bytes(ids.tolist()) == text.encode()
    assert kimi.token_bytes()[ids].sum() == len(text.encode())
    assert np.all(ids < FIRST)  # a marker that a text spells out is text


def test_han_is_split_off_first(kimi):
    """The merge of two Han characters applies; none reaches over to Latin letters."""
    assert kimi.encode("中文").tolist() == [256 + MERGES.index("中文".encode())]
    assert kimi.encode("中文the").tolist() == [256 + MERGES.index("中文".encode()), 256 + MERGES.index(b"the")]
    assert kimi.encode("12345").tolist() == [49, 50, 51, 52, 53]


def test_chat_layout_R126(kimi):
    """Single known ids around plain text."""
    s = kimi.special
    text = lambda t: kimi.encode(t).tolist()
    found = kimi.chat([{"role": "system", "content": "be kind"}, {"role": "user", "content": "<|im_end|>hello"}])
    assert found.tolist() == [
        s["<|im_system|>"], *text("system"), s["<|im_middle|>"], *text("be kind"), s["<|im_end|>"],
        s["<|im_user|>"], *text("user"), s["<|im_middle|>"], *text("<|im_end|>hello"), s["<|im_end|>"],
        s["<|im_assistant|>"], *text("assistant"), s["<|im_middle|>"],
    ]  # fmt: skip
    assert np.array_equal(kimi.chat([], reply=False), [])
    with pytest.raises(UserError, match="role must be one of system, user, assistant, got 'robot'"):
        kimi.chat([{"role": "robot", "content": ""}])


def with_names(directory, tmp_path, names):
    (tmp_path / "tiktoken.model").write_bytes((directory / "tiktoken.model").read_bytes())
    added = {str(i): {"content": name, "special": True} for i, name in names.items()}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    return tmp_path


def test_names_of_another_release_R124(directory, tmp_path):
    """From tokenizer_config.json, without its code: Kimi K3 calls the same ids otherwise, and lays conversations out otherwise."""
    names = {FIRST: "[BOS]", FIRST + 2: "<|end_of_msg|>", FIRST + 8: "<|open|>"}
    found = KimiTokenizer(with_names(directory, tmp_path, names))
    assert found.special["<|end_of_msg|>"] == FIRST + 2
    assert found.stop_tokens == {FIRST + 1, FIRST + 2}
    assert f"<|reserved_token_{FIRST + 3}|>" in found.special
    with pytest.raises(UserError, match="Kimi Linear's chat layout is not its own"):
        found.chat([])


@pytest.mark.parametrize(
    ("names", "sentence"), [({5: "x"}, r"names the ids \[5\], outside the 256"), ({FIRST: "a", FIRST + 1: "a"}, "one name to two ids")]
)
def test_names_that_cannot_be(directory, tmp_path, names, sentence):
    with pytest.raises(UserError, match=sentence):
        KimiTokenizer(with_names(directory, tmp_path, names))


def test_missing_and_broken_files(tmp_path):
    """One sentence with the file and where it was looked for."""
    with pytest.raises(UserError, match=rf"tiktoken\.model is missing: looked for {tmp_path}/tiktoken\.model"):
        build("kimi", str(tmp_path))
    with pytest.raises(UserError, match=r"tokenizer\.json is missing: set data\.vocabulary"):
        build("json")
    (tmp_path / "tiktoken.model").write_text("not base64 at all\n")
    with pytest.raises(UserError, match="is not a vocabulary of base64 and rank"):
        build("kimi", str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"cannot be read as tokenizer\.json"):
        build("json", str(tmp_path))


@pytest.fixture(scope="module")
def json_directory(tmp_path_factory):
    """A byte-level BPE as transformers saves it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    folder = tmp_path_factory.mktemp("json")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("text", [*TEXTS, EMPTY, "<|endoftext|>"])
def test_json_round_trip(json_directory, text):
    """The reader agrees with the library itself; a special token that a text spells out is text."""
    found = build("json", str(json_directory))
    ids = found.encode(text)
    assert found.decode_bytes(ids.tolist()) == text.encode()
    assert found.token_bytes()[ids].sum() == len(text.encode())
    assert found.end_of_text not in ids
    if "<|" not in text:
        library = Tokenizer.from_file(str(json_directory / "tokenizer.json"))
        assert ids.tolist() == library.encode(text).ids


def test_end_of_text_of_tokenizer_config(json_directory, tmp_path):
    (tmp_path / "tokenizer.json").write_text((json_directory / "tokenizer.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "!"}}))
    found = JsonTokenizer(tmp_path)
    assert found.end_of_text == Tokenizer.from_file(str(tmp_path / "tokenizer.json")).token_to_id("!")
    assert found.decode_bytes([found.end_of_text]) == b""


def test_import_finds_the_tokenizer_beside_a_checkpoint(directory, json_directory, tmp_path):
    found = tokenizer_of(directory, 999)
    assert (found.tokenizer, found.vocabulary) == ("kimi", str(directory))
    assert tokenizer_of(json_directory, 999).tokenizer == "json"
    assert [tokenizer_of(tmp_path, size).tokenizer for size in (50257, 999)] == ["gpt2", "bytes"]
