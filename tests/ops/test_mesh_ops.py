"""Ops on a mesh of eight fake devices: the values and gradients of one device, or of the float64 recurrence."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax import ops, testing
from kda_jax.bench.hlo import bytes_by_kind, bytes_by_source, collectives
from kda_jax.ops import exchange
from kda_jax.ops.experts import experts
from kda_jax.ops.routing import Routing, bias_histogram, expert_counts, limit, route
from kda_jax.ops.short_conv import short_conv
from kda_jax.sharding import MeshConfig, activation_sharding, make_mesh
from kda_jax.testing import TOLERANCE, make_problem

TIGHT = TOLERANCE["float32"]
PACKED = np.array([[1] * 20 + [2] * 17 + [3] * 27, [1] * 3 + [-1] * 5 + [1] * 40 + [2] * 8 + [-1] * 8])
"""Documents that go on, begin and end inside the segments of 16 tokens, padding in the middle and at the end."""


def on_mesh(mesh, f, *args):
    """f(*args), jitted, on a mesh of all devices."""
    with jax.set_mesh(make_mesh(mesh)):
        return jax.jit(f)(*args)


def assert_same(found, wanted, tolerance=2e-6):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert testing.error(a, b).rms < tolerance


FAST = "gated_linear_attention-channel", "gated_delta_rule-head", "kda-channel"
"""A diagonal summary, full ones with one decay per head and per channel; the others are special cases of these, 5 s of processor each."""
CASES = [
    pytest.param(spec, decay, id=f"{name}-{decay}", marks=[] if f"{name}-{decay}" in FAST else pytest.mark.slow)
    for name, spec in ops.REGISTRY.items()
    for decay in spec.decays
]


@pytest.mark.parametrize(("spec", "decay"), CASES)
def test_recurrences_over_time_and_heads(spec, decay):
    """R166 R193: a packed sequence in four segments, heads in two parts: state in and out, every gradient, against float64."""
    problem = make_problem(spec, jax.random.key(0), T=64, K=8, V=4, decay=decay, segment_ids=PACKED)
    with jax.set_mesh(make_mesh(MeshConfig(context=4, tensor=2))):
        for name, error in testing.errors(spec, problem, implementation="xla", chunk_size=16).items():
            assert error.rms <= (TIGHT.output if name in ("o", "final_state") else TIGHT.gradient), f"{name}: {error}"


def with_gradients(f):
    """f's results, and the gradients of a sum of them whose weights tell positions apart."""

    def value(*args):
        out = f(*args)
        return sum(jnp.sum(x * jnp.cos(jnp.arange(x.size)).reshape(x.shape)) for x in jax.tree.leaves(out)), out

    return lambda *args: jax.grad(value, range(len(args)), has_aux=True)(*args)


@pytest.mark.parametrize("tokens", [pytest.param(64, id="halo"), pytest.param(8, id="segments shorter than it", marks=pytest.mark.slow)])
def test_short_conv_over_time_and_channels(tokens):
    x, history = jax.random.normal(jax.random.key(0), (2, tokens, 6)), jax.random.normal(jax.random.key(1), (2, 3, 6))
    weight = jax.random.normal(jax.random.key(2), (6, 4))
    ids = [None, jnp.asarray(PACKED[:, :tokens]), jnp.asarray(np.sort(np.abs(PACKED[:, :tokens])))]

    def all_of_them(x, weight, history):
        return [tuple(ops.short_conv(x, weight, initial_state=history, segment_ids=segment_ids)) for segment_ids in ids]

    f = with_gradients(all_of_them)
    assert_same(on_mesh(MeshConfig(context=4, tensor=2), f, x, weight, history), jax.jit(f)(x, weight, history))


@pytest.mark.parametrize("place", [(), ("tensor",)], ids=str)
def test_arrays_that_lie_anywhere_on_an_explicit_mesh(place):
    """Their shardings are part of their types; what is not where an op wants it moves: the values and gradients of one device."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((4, 8, 2, 4)) / 2, jnp.float32) for _ in range(3))
    shapes = (4, 8, 6), (4, 6, 8), (4, 6, 8), (4, 8, 6)
    x, w1, w3, w2 = (jnp.asarray(rng.standard_normal(shape) / 2, jnp.float32) for shape in shapes)

    def both(q, k, v, x, w1, w3, w2):
        routing = route(x[..., :4], top_k=2, renormalize=True, scaling_factor=1.0)
        return ops.delta_rule(q, k, v, jnp.full(q.shape[:3], 0.5)).o, experts(x, routing, w1, w3, w2), expert_counts(routing.experts, 4)

    def loss(*args):
        return sum(jnp.sum(jnp.sin(out)) for out in both(*args)[:2])

    args = q, k, v, x, w1, w3, w2
    f = jax.jit(lambda *args: (both(*args), jax.grad(loss, range(7))(*args)))
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2, context=2, axis_type="explicit"))
    wanted = f(*args)
    with jax.set_mesh(mesh):
        assert_same(f(*(jax.device_put(a, jax.NamedSharding(mesh, jax.P(*place))) for a in args)), wanted)


def test_tokens_stay_with_their_rows():
    """What is done for each token by itself, on a mesh that splits rows, sends sums of gradients but no token."""
    mesh, names = make_mesh(MeshConfig(fsdp=8)), ("batch", None, None)
    x, logits, ids = (jax.ShapeDtypeStruct((8, 64, *more), d) for more, d in (((32,), "float32"), ((16,), "float32"), ((), "int32")))
    place = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=activation_sharding(mesh, names[: a.ndim], a.shape))

    def value(x, logits, ids):
        y = short_conv(x, jnp.ones((32, 4)), segment_ids=ids).y
        weights = route(logits, top_k=2, renormalize=True, scaling_factor=1.0).weights
        return jnp.sum(y**2) + jnp.sum(weights**2), bias_histogram(logits, jnp.zeros(16), top_k=2, bins=8)

    with jax.set_mesh(mesh):
        text = jax.jit(jax.grad(value, (0, 1), has_aux=True)).lower(*map(place, (x, logits, ids))).compile().as_text()
    histogram = 16 * 8 * 4
    assert sum(bytes_by_kind(collectives(text)).values()) < histogram + 64, bytes_by_source(collectives(text))


def test_attention_over_time_rows_and_heads():
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 64, h, 8)) for i, h in ((0, 4), (1, 2), (2, 2)))
    ids = jnp.asarray(PACKED)

    def both(q, k, v):
        return ops.attention(q, k, v, segment_ids=ids), ops.mla(q[..., :6], q[..., 6:], k[:, :, 0], scale=0.3, segment_ids=ids)

    f = with_gradients(both)
    assert_same(on_mesh(MeshConfig(data=2, context=2, tensor=2), f, q, k, v), jax.jit(f)(q, k, v))


B, T, D, F, TOP_K = 4, 8, 6, 8, 2


def moe(E, seed=0):
    """(a function of tokens, router logits and weights: results, counts; its arguments)."""
    rng = np.random.default_rng(seed)
    shapes = (B, T, D), (B, T, E), (E, D, F), (E, D, F), (E, F, D)
    args = tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)

    def f(x, logits, *w):
        logits = logits.at[:, :, E // 2].set(-50.0)  # nobody chooses this one
        routing = route(logits, top_k=TOP_K, renormalize=True, scaling_factor=2.0)
        chosen = routing.experts.at[0, :3].set(-1)  # padding
        return experts(x, Routing(chosen, routing.weights), *w), expert_counts(chosen, E)

    def gradients(*args):
        (y, counts), pull = jax.vjp(f, *args)
        return y, counts, pull((jnp.cos(jnp.arange(y.size)).reshape(y.shape), np.zeros(counts.shape, jax.dtypes.float0)))

    return gradients, args


MESHES = [
    MeshConfig(expert=4, tensor=2),
    MeshConfig(expert=2, fsdp=2, context=2),
    MeshConfig(expert=8),  # more than there are rows: the owners share the tokens
    MeshConfig(data=2, fsdp=2, tensor=2),
]


@pytest.mark.parametrize(("mesh", "E"), [*((mesh, 8) for mesh in MESHES), (MESHES[0], 6)], ids=str)
def test_experts(mesh, E):
    """R086 R088 R090 R091: outputs, counts over all devices, gradients; also of six experts on four devices."""
    f, args = moe(E)
    y, counts, grads = on_mesh(mesh, f, *args)
    wanted_y, wanted_counts, wanted_grads = jax.jit(f)(*args)
    np.testing.assert_array_equal(counts, wanted_counts)
    assert int(counts.sum()) == (B * T - 3) * TOP_K
    assert_same((y, grads), (wanted_y, wanted_grads))
    for dw in grads[2:]:
        assert not np.any(np.asarray(dw)[E // 2]), "an expert without tokens has a gradient"


def test_all_tokens_to_one_expert():
    """R090: one owner gets everything, seven get nothing; none is dropped."""
    x, w = jnp.arange(32.0).reshape(8, 2, 2), jnp.arange(1.0, 9.0)[:, None, None] * jnp.eye(2)
    for e in (0, 5):
        routing = Routing(jnp.full((8, 2, 1), e), jnp.ones((8, 2, 1)))
        y = on_mesh(MeshConfig(expert=8), lambda x: experts(x, routing, w, w, w, activation=lambda gate, up: up), x)  # noqa: B023
        np.testing.assert_allclose(y, (e + 1) ** 2 * x, rtol=1e-6)


def emulated_ragged_all_to_all(rows, out, starts, sizes, slots, received, *, axis_name):
    """`jax.lax.ragged_all_to_all` by its definition, for platforms without it: everybody sees everything and takes what is meant for it."""
    here = jax.lax.axis_index(axis_name)
    everything = [jax.lax.all_gather(x, axis_name) for x in (rows, starts, sizes, slots)]
    at = jnp.arange(out.shape[0])
    for sender in range(starts.shape[0]):
        rows_of, start, size, slot = everything[0][sender], *(x[sender, here] for x in everything[1:])
        inside = (at >= slot) & (at < slot + size)
        out = jnp.where(inside[:, None], rows_of[jnp.clip(at - slot + start, 0, rows.shape[0] - 1)], out)
    return out


def test_ragged_exchange_is_the_dense_one(monkeypatch):
    """Offsets and sizes of the ragged path, on its definition: results and gradients to the bit."""
    f, args = moe(8)
    wanted = on_mesh(MESHES[0], f, *args)
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulated_ragged_all_to_all)
    monkeypatch.setattr(exchange, "_send_dense", exchange._send_ragged)
    monkeypatch.setattr(exchange, "_send_back_dense", exchange._send_back_ragged)
    jax.tree.map(np.testing.assert_array_equal, on_mesh(MESHES[0], lambda *a: f(*a), *args), wanted)


def test_capacity():
    """R092: 8 tokens, 4 experts, 2 choices, factor 1 give 4 places each; what is beyond is counted and contributes nothing."""
    chosen = jnp.asarray([[0, 1]] * 6 + [[2, 3], [-1, -1]])
    routing, dropped = limit(Routing(chosen, jnp.ones(chosen.shape)), 4, 1.0)
    np.testing.assert_array_equal(routing.experts, [[0, 1]] * 4 + [[-1, -1]] * 2 + [[2, 3], [-1, -1]])
    assert int(dropped) == 4
    assert int(limit(Routing(chosen, jnp.ones(chosen.shape)), 4, 2.0).dropped) == 0


def test_capacity_on_a_mesh():
    """Enough of it is no limit; with less, owners keep less room, and the result is that of the routing with those choices left out."""
    _, (x, logits, *w) = moe(8)
    routing = route(logits, top_k=TOP_K, renormalize=True, scaling_factor=2.0)

    def limited(x, factor):
        left, dropped = limit(routing, 8, factor)
        return experts(x, left, *w, capacity_factor=factor), dropped, left.experts

    y, dropped, _ = on_mesh(MESHES[1], lambda x: limited(x, 4.0), x)
    assert int(dropped) == 0
    assert_same(y, experts(x, routing, *w))
    y, dropped, left = on_mesh(MESHES[1], lambda x: limited(x, 0.5), x)
    assert int(dropped) == int((left < 0).sum()) > 0
    assert_same(y, experts(x, routing._replace(experts=jnp.asarray(np.asarray(left))), *w))


def test_bytes_moved():
    """One exchange moves tokens x choices x width numbers a device: ragged without a limit, dense with room for the mean load."""
    n, k, D, E, P = 64, 2, 16, 8, 8
    x, chosen, w = (jax.ShapeDtypeStruct(shape, t) for shape, t in (((P, n, D), "f4"), ((P, n, k), "i4"), ((E, D, D), "f4")))
    wanted = n * k * D * 4

    def f(factor):
        return lambda x, chosen, w: experts(x, Routing(chosen, jnp.ones(chosen.shape)), w, w, w, capacity_factor=factor)

    with jax.set_mesh(make_mesh(MeshConfig(expert=P))):
        compiled = jax.jit(f(1.0)).lower(x, chosen, w).compile().as_text()
        lowered = jax.jit(f(None)).trace(x, chosen, w).lower(lowering_platforms=("tpu",)).as_text()
    dense = re.findall(r"= (.*) all-to-all\(", compiled)
    assert [sum(4 * math.prod(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+)\]", r)) for r in dense] == 2 * [wanted]
    rows = r"tensor<(\d+)x\d+xf32>"
    ragged = re.findall(rf"@ragged_all_to_all\(.*: \({rows}, {rows},", lowered)
    assert [4 * D * min(map(int, sizes)) for sizes in ragged] == 2 * [wanted]  # the other size is room
