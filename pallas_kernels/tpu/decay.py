"""What a decay does inside a chunk: elementwise operands, the masked scores made of them, and the gradients of those scores.

All log decays here are base 2 and <= 0. Every exponent is a sum of the log decays of the very tokens it spans, made by a product with a
0/1 matrix: nothing is ever a difference of two cumulative sums, so there is no cancellation, no inf - inf, and no factor above 1 (except
inside a 16-row strip of the "bounded" kind, where the bound keeps it below e^80).

The operands are pure elementwise functions of one pack's q, k and log decays, so the backward kernel differentiates them by `jax.vjp`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.tpu.plan import STRIP, Plan, causal_masks, dot, exp2, split_rows, spread, sums, to_lanes

SHIFT = 2.0**57  # centres the factors of a bounded strip (2^-115 .. 1 and its inverse): small gradients times them do not underflow
HALVES = (1, 2, 4, 8)  # half block sizes of the binary hierarchy below a strip


class Operands(NamedTuple):
    """One head. Lists hold one [STRIP, K] array per strip of the chunk. The state S is [V, K]; None where the kind has no such operand.

    Decays per channel are inside the operands. Decays per head are one factor per token: they stay outside, on the products, and q and k
    meet the matrix unit as they came.
    """

    q_state: list[jax.Array]  # queries as they read the state at the chunk's start
    k_state: list[jax.Array] | None  # keys as they read it (delta rule)
    tail: list[jax.Array]  # keys as they write to the state at the chunk's end
    total: jax.Array | None  # [1, K] or [1, 1], what remains of the state
    into: jax.Array | None  # "head": [C, 1], decay from the chunk's start to each token
    outof: jax.Array | None  # "head": [C, 1], decay from each token to the chunk's end
    q_row: list[jax.Array]  # queries and keys decayed since their strip began; bounded: times SHIFT, and columns divided by it
    k_row: list[jax.Array] | None
    columns: list[
        list[jax.Array]
    ]  # columns[b][a]: keys of strip a < b decayed to the start of b; bounded: columns[b][b], divided by the prefix
    levels: list[tuple[jax.Array, jax.Array]]  # "channel": (q, k) [C, K] per half size of the hierarchy inside strips


class Scores(NamedTuple):
    """Decayed products of a pack: q_i . k_j in block form [N, N], k_i . k_j for i > j in lane form [C, N] (delta rule).

    q . k has its diagonal for kinds "none" and "head"; under channel decays it is kept apart, exact."""

    qk: jax.Array
    kk: jax.Array | None


def decay_constants(plan: Plan) -> dict[str, np.ndarray]:
    """0/1 matrices [rows, C] whose products with log decays give every local sum the kind of decay needs, and their transposes."""
    t, u = np.arange(plan.C)[:, None], np.arange(plan.C)[None, :]
    if plan.decay == "none":
        return {}
    matrices = {}
    if plan.decay == "head" or plan.reset:
        matrices = {"prefix": u <= t, "suffix": u > t}
    if plan.channel:
        strip = t // STRIP == u // STRIP
        rows = [strip & (u <= t), strip & (u > t)]
        if plan.decay == "channel":
            for s in HALVES:
                rows.append((t // s == u // s) & np.where(t // s % 2 == 1, u <= t, u > t))
        matrices["local"] = np.concatenate(rows)
    transposed = {n + "_t": m.T for n, m in matrices.items()}
    return {n: m.astype(plan.operand) for n, m in {**matrices, **transposed}.items()}


def channel_operands(plan: Plan, local: tuple[jax.Array, jax.Array], q: jax.Array, k: jax.Array, g: jax.Array, cut) -> Operands:
    """Decays per channel; q, k, g [C, K] float32, `local` the matrix of sums and its transpose, `cut` None or a pack.Cut."""
    B, bounded = plan.C // STRIP, plan.decay == "bounded"
    strips = split_rows(sums(plan, *local, g), STRIP)
    log_prefix, log_suffix = strips[:B], strips[B : 2 * B]
    shift = SHIFT if bounded else 1.0
    prefix = [exp2(e, shift) for e in log_prefix]  # decay of the strip's rows up to and including this one
    suffix = [exp2(e, 1 / shift) for e in log_suffix]  # decay of the strip's rows after this one
    qs, ks = split_rows(q, STRIP), split_rows(k, STRIP)
    q_row = [x * p for x, p in zip(qs, prefix, strict=True)]
    k_row = [x * p for x, p in zip(ks, prefix, strict=True)] if plan.delta else None
    before, columns, current = jnp.full((1, plan.K), 1 / shift, jnp.float32), [], []
    q_state, k_state = [], [] if plan.delta else None
    for b in range(B):
        whole = exp2(log_prefix[b][STRIP - 1 :])
        columns.append(current + ([ks[b] * exp2(-log_prefix[b], 1 / shift)] if bounded else []))
        current = [c * whole for c in current] + [ks[b] * suffix[b]]
        untouched = b == 0 and not bounded
        q_state.append(q_row[b] if untouched else q_row[b] * before)
        if plan.delta:
            k_state.append(k_row[b] if untouched else k_row[b] * before)
        before = before * whole
    if bounded:
        current, before = [c * SHIFT for c in current], before * SHIFT
    levels = []
    for n in range(0 if bounded else len(HALVES)):
        factor = exp2(jnp.concatenate(strips[(2 + n) * B : (3 + n) * B], 0))
        levels.append((q * factor, k * factor))
    if cut is not None:
        into, outof = split_rows(cut.decays.prefix, STRIP), split_rows(cut.decays.suffix, STRIP)
        q_state = [x * c for x, c in zip(q_state, into, strict=True)]
        k_state = [x * c for x, c in zip(k_state, into, strict=True)] if plan.delta else None
        current = [x * c for x, c in zip(current, outof, strict=True)]
        before = before * into[-1][STRIP - 1 :]
    return Operands(q_state, k_state, current, before, None, None, q_row, k_row, columns, levels)


def scalar_operands(plan: Plan, q: jax.Array, k: jax.Array, prefix: jax.Array | None, suffix: jax.Array | None) -> Operands:
    """Decay "none" (prefix None), or "head" with prefix, suffix [C, 1]: decays up to and including a token, and after it."""
    total = None if prefix is None else prefix[plan.C - 1 :]
    return Operands([q], [k] if plan.delta else None, [k], total, prefix, suffix, [], None, [], [])


def head_matrix(plan: Plan, prefix: tuple[jax.Array, jax.Array], g: list[jax.Array]) -> jax.Array:
    """P columns of log decays [C, 1] -> 2^(sum of g over j < t <= i) in lane form [C, N] (1 above the diagonal)."""
    t, j = (lax.broadcasted_iota(jnp.int32, (plan.C, plan.N), d) for d in (0, 1))
    spans = jnp.where(t > (j & (plan.C - 1)), spread(plan, g), 0.0)
    return exp2(sums(plan, *prefix, spans))


def raw_scores(plan: Plan, q: list[jax.Array], k: list[jax.Array], columns: list[jax.Array], kk: bool) -> Scores:
    """Unmasked q . columns and, if asked, k . columns of a pack: one product, or two where one kind of row is more exact."""
    N, C, right = plan.N, plan.C, jnp.concatenate(columns, 0)
    lefts = [q] if not kk else [q + k] if q[0].dtype == k[0].dtype else [q, k]
    s = jnp.concatenate([dot(plan, jnp.concatenate(left, 0), right, (1, 1)) for left in lefts], 0)
    return Scores(s[:N], to_lanes(plan, [s[N + p * C : N + (p + 1) * C] for p in range(plan.pack)]) if kk else None)


def mask_scores(plan: Plan, scores: Scores) -> Scores:
    block, strict = causal_masks(plan)
    return Scores(jnp.where(block, scores.qk, 0.0), None if scores.kk is None else jnp.where(strict, scores.kk, 0.0))


def scalar_scores(plan: Plan, q: list[jax.Array], k: list[jax.Array], matrix: jax.Array | None, kk: bool) -> Scores:
    """Masked scores of a pack, times the decay matrix (lane form) of kind "head"."""
    raw = raw_scores(plan, q, k, k, kk)
    if matrix is not None:
        raw = Scores(raw.qk * jnp.concatenate([matrix] * plan.pack, 0), raw.kk * matrix if kk else None)
    return mask_scores(plan, raw)


def strip_columns(plan: Plan, operands: list[Operands], b: int) -> jax.Array:
    """[N, K]: the keys that strip b's rows meet, zeros where it meets none."""
    rows = []
    for op in operands:
        rows += op.columns[b]
        missing = plan.C - STRIP * len(op.columns[b])
        if missing:
            rows.append(jnp.zeros((missing, plan.K), jnp.float32))
    return jnp.concatenate(rows, 0)


def channel_scores(plan: Plan, operands: list[Operands], kk: bool) -> Scores:
    """Masked scores of a pack under channel decays; queries are rounded and so are a strip's rows, no other keys.

    Many rows meet a column, whose rounding they share: with repeated keys the solve would add it up. So it would the four roundings of a
    row of the general kind.

    Strip by strip: the rows of strip b meet the earlier strips' keys decayed to the start of b. Inside a strip the bounded kind divides by
    the prefix; the general kind pairs the halves of every 2, 4, 8 and 16 rows (a row of the later half carries the decay since that half
    began, a key of the earlier one the decay to that half's end).
    """
    P, B, kinds = plan.pack, plan.C // STRIP, 1 + kk
    once = lambda x: x.astype(plan.operand)
    q_rows, k_rows = [[] for _ in range(P)], [[] for _ in range(P)]
    for b in range(B):
        if operands[0].columns[b]:
            lhs = jnp.concatenate([x[b] for op in operands for x in (op.q_row, op.k_row)[:kinds]], 0)
            s = dot(plan, once(lhs), strip_columns(plan, operands, b), (1, 1))
        else:
            s = jnp.zeros((kinds * P * STRIP, plan.N), jnp.float32)
        for p in range(P):
            q_rows[p].append(s[kinds * p * STRIP :][:STRIP])
            k_rows[p].append(s[(kinds * p + 1) * STRIP :][:STRIP])
    qk = jnp.concatenate([r for p in range(P) for r in q_rows[p]], 0)
    scores = mask_scores(plan, Scores(qk, to_lanes(plan, [jnp.concatenate(r, 0) for r in k_rows]) if kk else None))
    if plan.decay == "bounded":
        return scores
    qk, kk_lanes = scores
    for n, s in enumerate(HALVES):
        q, k = zip(*[op.levels[n] for op in operands], strict=True)
        level = raw_scores(plan, [once(x) for x in q], list(k), list(k), kk)
        qk = jnp.where(level_mask(plan, s, plan.N), level.qk, qk)
        kk_lanes = jnp.where(level_mask(plan, s, plan.C), level.kk, kk_lanes) if kk else None
    return Scores(qk, kk_lanes)


def level_mask(plan: Plan, half: int, rows: int) -> jax.Array:
    """[rows, N] boolean: pairs (later half, earlier half) of the same block of 2 * half rows."""
    i, j = (lax.broadcasted_iota(jnp.int32, (rows, plan.N), d) for d in (0, 1))
    if rows == plan.C:
        j = j & (plan.C - 1)
    shift = half.bit_length() - 1
    return ((i >> shift) == (j >> shift) + 1) & ((i >> shift + 1) == (j >> shift + 1))


def score_gradients(plan: Plan, rows: jax.Array, columns: jax.Array, d: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gradients of rows [R, K] and columns [S, K] of a product whose entries [R, S] have gradients d."""
    return dot(plan, d, columns), dot(plan, d, rows, (0, 0))


def channel_score_gradients(plan: Plan, operands: list[Operands], d: jax.Array) -> list[Operands]:
    """d [N or 2N, N], masked: gradients of q . k over those of k . k, block form. State operands are left None."""
    P, B, N, C = plan.pack, plan.C // STRIP, plan.N, plan.C
    kinds = 1 + plan.delta
    out = [Operands(None, None, None, None, None, None, [], [] if plan.delta else None, [], []) for _ in range(P)]
    for b in range(B):
        if not operands[0].columns[b]:
            for o, op in zip(out, operands, strict=True):
                o.q_row.append(jnp.zeros_like(op.q_row[b]))
                o.columns.append([])
                if plan.delta:
                    o.k_row.append(jnp.zeros_like(op.k_row[b]))
            continue
        rows = jnp.concatenate([x[b] for op in operands for x in (op.q_row, op.k_row)[:kinds]], 0)
        part = jnp.concatenate([d[n * N + p * C + b * STRIP :][:STRIP] for p in range(P) for n in range(kinds)], 0)
        d_rows, d_columns = score_gradients(plan, rows, strip_columns(plan, operands, b), part)
        for p, o in enumerate(out):
            o.q_row.append(d_rows[kinds * p * STRIP :][:STRIP])
            if plan.delta:
                o.k_row.append(d_rows[(kinds * p + 1) * STRIP :][:STRIP])
            o.columns.append([d_columns[p * C + a * STRIP :][:STRIP] for a in range(len(operands[p].columns[b]))])
    for n, s in enumerate(() if plan.decay == "bounded" else HALVES):
        q, k = ([op.levels[n][i] for op in operands] for i in (0, 1))
        mask = level_mask(plan, s, N)
        part = jnp.concatenate([jnp.where(mask, d[i * N : (i + 1) * N], 0.0) for i in range(kinds)], 0)
        q, k = ([x.astype(plan.operand) for x in xs] for xs in (q, k))
        d_rows, d_keys = score_gradients(plan, jnp.concatenate((q + k)[: kinds * P], 0), jnp.concatenate(k, 0), part)
        d_q, d_k = split_rows(d_rows[:N], C), split_rows(d_keys, C)
        if plan.delta:
            d_k = [x + y for x, y in zip(d_k, split_rows(d_rows[N:], C), strict=True)]
        for o, a, b in zip(out, d_q, d_k, strict=True):
            o.levels.append((a, b))
    return out
