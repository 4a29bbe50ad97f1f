"""Bits per byte: how well a model predicts text, whatever its tokenizer."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx

from kda_jax import sharding
from kda_jax.train.data import Batch, Rows, evaluation_batches
from kda_jax.train.step import Sums, make_forward

Forward = Callable[[dict, dict, Batch], Sums]


class Evaluation(NamedTuple):
    """The prediction of some held-out text."""

    bits_per_byte: float
    """Total cross-entropy in bits over the UTF-8 bytes that the predicted tokens stand for; comparable between tokenizers."""
    loss: float
    """Nats per token."""
    tokens: int
    bytes: int


def bits_per_byte(nats: float, byte_count: int) -> float:
    """nats / (ln 2 * bytes)."""
    return nats / (math.log(2) * byte_count) if byte_count else math.nan


def make_eval_forward(graphdef: nnx.GraphDef, compute_dtype: str) -> Forward:
    """The jitted loss of one batch, on the ambient mesh if there is one; its sums are on every device."""
    return jax.jit(sharding.automatic(make_forward(graphdef, compute_dtype), jax.sharding.PartitionSpec()))


def evaluate(
    forward: Forward, params: dict, buffers: dict, rows: Rows, *, count: int, batch_size: int, token_bytes: np.ndarray
) -> Evaluation:
    """Predict up to `count` rows, each from its own beginning.

    Args:
        forward: from `make_eval_forward`.
        rows: of held-out text.
        count: rows, a fixed sample of them if there are more.
        token_bytes: [vocab] bytes that each token stands for (`Tokenizer.token_bytes`).
    """
    nats, tokens, byte_count = 0.0, 0, 0
    for batch in evaluation_batches(rows, count, batch_size):
        sums = forward(params, buffers, sharding.put_rows(batch))
        nats, tokens = nats + float(sums.nats), tokens + int(sums.tokens)
        byte_count += predicted_bytes(batch, token_bytes)
    return Evaluation(bits_per_byte(nats, byte_count), nats / max(tokens, 1), tokens, byte_count)


def predicted_bytes(batch: Batch, token_bytes: np.ndarray) -> int:
    """Bytes of the tokens that the loss counts: those with a predecessor in their own document. End-of-text has none."""
    segment_ids = batch.segment_ids
    predicted = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] >= 0)
    return int(np.sum(token_bytes[batch.tokens[:, 1:]] * predicted))
