"""Text to batches: the order of the data, packing, the split, and what bad text is answered with."""

import numpy as np
import pytest

from kda_jax.config import DataConfig
from kda_jax.errors import UserError
from kda_jax.tokenizer import ByteTokenizer
from kda_jax.train.data import (
    PADDING,
    Batches,
    Document,
    Rows,
    evaluation_batches,
    load_corpus,
    read_documents,
    split_documents,
)

END = ByteTokenizer.end_of_text


def rows_of(*texts: str, seq_len: int = 8) -> Rows:
    return Rows([Document(f"{i}.txt", text) for i, text in enumerate(texts)], ByteTokenizer(), seq_len)


@pytest.fixture(scope="module")
def many() -> Rows:
    """300 rows, each of whose first tokens is different from its neighbours'."""
    text = "".join(chr(33 + i % 90) for i in range(300 * 8 - 2))
    return rows_of(text)


def seen(rows: Rows, steps: range, batch_size: int, processes: int) -> list[np.ndarray]:
    """What all processes together read in `steps`: the global batches."""
    hosts = [Batches(rows, batch_size=batch_size, seed=7, share=np.arange(batch_size).reshape(processes, -1)[i]) for i in range(processes)]
    return [np.concatenate([host[step].tokens for host in hosts]) for step in steps]


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_order_does_not_depend_on_hosts(many, processes):
    """R141: the global batches are the same for any number of processes, so a run may go on with another."""
    for one, several in zip(seen(many, range(5), 8, 1), seen(many, range(5), 8, processes), strict=True):
        np.testing.assert_array_equal(one, several)


def test_resume_on_other_hosts_sees_every_row_once():
    """R141 R144: ten records, fewer than rows of two batches: 4 processes then 2, disjoint and complete over an epoch."""
    rows = rows_of("".join(chr(65 + i) * 8 for i in range(10))[:78])
    assert len(rows) == 10
    first, second = seen(rows, range(1), 4, 4), seen(rows, range(1, 5), 4, 2)
    epochs = np.concatenate(first + second)[:20, 1]
    want = sorted(rows[i].tokens[1] for i in range(10))
    assert sorted(epochs[:10]) == want
    assert sorted(epochs[10:]) == want


def test_shuffle_is_global(many):
    """R149: with two hosts, the first one's rows come from the whole corpus, not from its half."""
    rows = Rows([Document("a", "x" * (300 * 8 - 2))], ByteTokenizer(), 8)
    rows.tokens = np.arange(len(rows.tokens), dtype=np.int32)
    host = Batches(rows, batch_size=8, seed=3, share=range(4))
    first = np.concatenate([host[i].tokens[:, 0] for i in range(30)]) // 8
    assert first.min() < 30
    assert first.max() > 270
    assert len(set(first.tolist())) == 120


def test_epochs_are_complete_and_differ(many):
    batches = Batches(many, batch_size=10, seed=1)
    epochs = [np.concatenate([batches[e * 30 + i].tokens for i in range(30)]) for e in range(2)]
    assert len(many) == 300
    np.testing.assert_array_equal(*[np.sort(e.view([("", e.dtype)] * 9), axis=0) for e in epochs])
    assert (epochs[0] != epochs[1]).any()


def test_iterating_is_indexing(many):
    """Read-ahead returns batch n as number n: the position in the data is one number."""
    batches = Batches(many, batch_size=4, seed=5)
    for number, batch in zip(range(17, 23), batches.iterate(17, 23), strict=True):
        np.testing.assert_array_equal(batch.tokens, batches[number].tokens)
        np.testing.assert_array_equal(batch.segment_ids, batches[number].segment_ids)


def test_seed_changes_the_order(many):
    assert (Batches(many, batch_size=8, seed=0)[0].tokens != Batches(many, batch_size=8, seed=1)[0].tokens).any()


def test_packing():
    """Documents between end-of-text marks, cut every seq_len tokens, one token shared, the tail padded."""
    rows = rows_of("abcde", "xy", seq_len=4)
    a, b, c, d, e, x, y = b"abcdexy"
    assert len(rows) == 3
    np.testing.assert_array_equal(rows[0].tokens, [END, a, b, c, d])
    np.testing.assert_array_equal(rows[1].tokens, [d, e, END, END, x])
    np.testing.assert_array_equal(rows[1].segment_ids, [1, 1, 1, 2, 2])
    np.testing.assert_array_equal(rows[2].tokens, [x, y, END, 0, 0])
    np.testing.assert_array_equal(rows[2].segment_ids, [1, 1, 1, PADDING, PADDING])


def test_every_token_is_predicted_once():
    texts = ["hello there", "a", "some more words"]
    rows = rows_of(*texts, seq_len=5)
    predicted = 0
    for i in range(len(rows)):
        ids = rows[i].segment_ids
        predicted += int(np.sum((ids[1:] == ids[:-1]) & (ids[1:] >= 0)))
    assert predicted == sum(len(t) + 1 for t in texts)


def test_evaluation_batches_are_a_fixed_sample(many):
    batches = list(evaluation_batches(many, 10, 4))
    assert [b.tokens.shape for b in batches] == [(4, 9)] * 3
    assert (batches[-1].segment_ids[2:] == PADDING).all()
    again = list(evaluation_batches(many, 10, 4))
    np.testing.assert_array_equal(batches[1].tokens, again[1].tokens)


def test_split_is_by_document():
    documents = [Document(f"{i}", "x" * 100) for i in range(50)]
    train, held = split_documents(documents, 0.1)
    assert len(held) == 5
    assert sorted(d.name for d in train + held) == sorted(d.name for d in documents)
    assert {d.name for d in split_documents(documents[::-1], 0.1)[1]} == {d.name for d in held}


def test_split_leaves_something_on_both_sides():
    train, held = split_documents([Document("a", "xx"), Document("b", "x")], 0.99)
    assert len(train) == len(held) == 1
    train, held = split_documents([Document("a", "0123456789")], 0.2)
    assert (train[0].text, held[0].text) == ("01234567", "89")


def test_reads_files_and_directories(tmp_path):
    (tmp_path / "d" / "e").mkdir(parents=True)
    (tmp_path / "d" / "b.txt").write_text("second")
    (tmp_path / "d" / "e" / "a.txt").write_text("third")
    (tmp_path / "d" / "skip.md").write_text("not text")
    (tmp_path / "one").write_bytes(b"\xef\xbb\xbffirst\r\n")
    documents = read_documents([str(tmp_path / "one"), str(tmp_path / "d")])
    assert [(d.name, d.text) for d in documents] == [("one", "first\n"), ("b.txt", "second"), ("e/a.txt", "third")]


def test_missing_source_is_named(tmp_path):
    with pytest.raises(UserError, match=r"no file or directory .*nowhere"):
        read_documents([str(tmp_path / "nowhere")])


@pytest.mark.parametrize("content", [None, "", "  \n"])
def test_empty_corpus(tmp_path, content):
    if content is not None:
        (tmp_path / "a.txt").write_text(content)
    with pytest.raises(UserError, match=r"no text in .*\.txt"):
        load_corpus(DataConfig(source=(str(tmp_path),)), ByteTokenizer())


def test_text_must_be_utf8(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match=r"a\.txt is not UTF-8 text: byte 0xe9 at offset 3"):
        read_documents([str(tmp_path)])
