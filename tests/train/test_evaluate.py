"""Bits per byte."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax.tokenizer import ByteTokenizer
from kda_jax.train.data import Batch, Document, Rows
from kda_jax.train.evaluate import bits_per_byte, evaluate, predicted_bytes
from kda_jax.train.step import Sums, next_token_loss


def test_bits_per_byte():
    assert bits_per_byte(math.log(2) * 24, 8) == pytest.approx(3.0)
    assert math.isnan(bits_per_byte(1.0, 0))


def test_bytes_are_those_of_the_predicted_tokens():
    """Tokens of 3, 1 and 2 bytes: the first of a segment is not predicted, padding counts nothing."""
    token_bytes = np.array([0, 3, 1, 2])
    batch = Batch(np.array([[1, 1, 2, 3, 2, 1]], np.int32), np.array([[1, 1, 1, 2, 2, -1]], np.int32))
    assert predicted_bytes(batch, token_bytes) == 3 + 1 + 1


def test_uniform_model_needs_eight_bits():
    """A model that knows nothing of 256 bytes: 8 bits per token, and slightly more per byte, as the end of text has no byte."""
    rows = Rows([Document("a", "x" * 70), Document("b", "y" * 30)], ByteTokenizer(), 16)

    def forward(params, buffers, batch):
        logits = jnp.zeros((*batch.tokens[:, 1:].shape, 256))
        return Sums(*next_token_loss(logits, *map(jnp.asarray, batch)), None, None)

    found = evaluate(forward, {}, {}, rows, count=100, batch_size=4, token_bytes=ByteTokenizer().token_bytes())
    assert (found.tokens, found.bytes) == (102, 100)
    assert found.loss == pytest.approx(math.log(256))
    assert found.bits_per_byte == pytest.approx(8 * 102 / 100)


def test_loss_is_per_byte_for_any_tokenizer():
    """The same text, predicted equally well: half as many tokens of twice the bytes give the same bits per byte."""
    assert bits_per_byte(100 * math.log(4), 100) == bits_per_byte(50 * math.log(16), 100)
