"""TPU kernels against the float64 token recurrence: outputs, final state and every gradient."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.oracle import error, make_case, recurrence
from tests.kernels.run_tpu import forward_backward

KINDS = [(decay, delta) for decay in ("none", "head", "channel", "bounded") for delta in (True, False)]
LIMITS = {jnp.float32: (1e-6, 2e-6), jnp.bfloat16: (2.5e-3, 3e-3)}  # output, gradient; rounding the result alone is 1.7e-3


def compare(case, dtype, reference=None, limits=None, **options):
    reference = reference or recurrence(case.rounded(dtype))
    output, gradient = limits or LIMITS[dtype]
    got = forward_backward(case, dtype, **options)
    assert got.keys() == reference.keys()
    errors = {n: error(got[n], reference[n]) for n in reference}
    for name, value in errors.items():
        assert value <= (output if name in ("o", "final") else gradient), (name, errors)


def bound(decay):
    return -5.0 if decay == "bounded" else None


ROWS = [(d, delta, t) for d, delta in KINDS for t in LIMITS]


@pytest.mark.parametrize(
    ("decay", "delta", "dtype"),
    [pytest.param(*row, marks=() if row[1] or row[2] == jnp.float32 else pytest.mark.slow) for row in ROWS],
)
def test_every_kind(decay, delta, dtype):
    """Three chunks, the last one partial."""
    case = make_case(decay, delta, T=83, H=1, HV=2, K=20, V=24)
    compare(case, dtype, chunk_size=32, lower_bound=bound(decay))


@pytest.mark.parametrize(
    ("decay", "H", "HV", "K", "V", "chunk"),
    [
        ("none", 1, 1, 16, 16, 16),
        ("head", 2, 4, 64, 32, 64),
        ("channel", 1, 3, 16, 16, 16),
        ("bounded", 3, 3, 48, 16, 32),
        pytest.param("bounded", 2, 8, 256, 256, 64, marks=pytest.mark.slow),
        pytest.param("channel", 1, 1, 128, 256, 128, marks=pytest.mark.slow),
        pytest.param("head", 16, 32, 128, 128, 64, marks=pytest.mark.slow),
    ],
)
def test_shapes(decay, H, HV, K, V, chunk):
    """Grouped value heads, K != V, every chunk size, odd numbers of heads (R036, fla#624: HV != H)."""
    case = make_case(decay, True, T=2 * chunk + 3, H=H, HV=HV, K=K, V=V)
    compare(case, jnp.float32, chunk_size=chunk, lower_bound=bound(decay))


@pytest.mark.parametrize("T", [1, 15, 17])
def test_lengths(T):
    compare(make_case("channel", True, T=T), jnp.float32, chunk_size=16)


@pytest.mark.parametrize("decay", ["none", "head", "channel", "bounded"])
def test_reset(decay):
    """R036: the state is forgotten at a sequence start; gradients do not cross it."""
    case = make_case(decay, True, T=50, HV=2, H=1)
    reset = np.zeros((1, 50), bool)
    reset[:, [3, 16, 17, 40]] = True
    g = np.zeros((1, 50, 2)) if case.g is None else case.g.copy()
    g[reset] = -np.inf
    reference = recurrence(case._replace(g=g).rounded(jnp.float32))
    if case.g is None:
        del reference["g"]
    else:
        reference["g"][reset] = 0.0
    compare(case, jnp.float32, reference, chunk_size=16, lower_bound=bound(decay), reset=jnp.asarray(reset))


def extreme(name, decay, T, HV, K):
    """Rows of the adversarial grid: decays in natural log, base shape [1, T, HV, K]."""
    rng = np.random.default_rng(1)
    g = -0.1 * rng.uniform(0, 1, (1, T, HV, K))
    if name == "zero":
        g[:] = 0.0
    elif name == "saturated":
        g[:] = -5.0
    elif name == "channels":
        g[..., ::3] = -1000.0
        g[..., 1] = 0.0
    elif name == "tokens":
        g[:, ::7] = -np.inf
    elif name == "edges":
        g[:, [0, 15, 16, 31, 32]] = -1000.0
    elif name == "mixed":
        g[:, :16] = np.where(rng.uniform(size=g[:, :16].shape) < 0.5, 0.0, -1000.0)
    elif name == "steep":
        g *= 200.0
    return g if decay == "channel" else g[..., 0]


@pytest.mark.parametrize(
    ("decay", "name"),
    [("channel", n) for n in ("zero", "saturated", "channels", "tokens", "edges", "mixed", "steep")]
    + [("head", n) for n in ("tokens", "edges", "steep")],
)
def test_extreme_decays(decay, name):
    """R025 and fla#77: g of 0, -1000 and -inf, forward and gradients finite and equal to the scan."""
    case = make_case(decay, True, T=40)
    case = case._replace(g=extreme(name, decay, 40, 1, 16))
    compare(case, jnp.float32, limits=(2e-6, 1e-5), chunk_size=16)


@pytest.mark.parametrize("name", ["zero", "saturated"])
def test_extreme_bounded(name):
    case = make_case("bounded", True, T=40)
    compare(case._replace(g=extreme(name, "channel", 40, 1, 16)), jnp.float32, limits=(2e-6, 1e-5), chunk_size=16, lower_bound=-5.0)


def correlated(name, T):
    case = make_case("channel", True, T=T)
    rng = np.random.default_rng(2)
    base = rng.standard_normal((1, 1, 1, 16))
    k, beta = np.broadcast_to(base, case.k.shape), np.full_like(case.beta, 0.99)
    if name == "beta 1":
        beta[:] = 1.0
    return case._replace(k=k / np.linalg.norm(k, axis=-1, keepdims=True), beta=beta, g=0.01 * case.g)


@pytest.mark.parametrize(
    ("name", "dtype", "limits"),
    [
        ("beta 1", jnp.bfloat16, (4e-3, 6e-3)),
        ("identical", jnp.float32, (2e-6, 5e-6)),
    ],
)
def test_correlated_keys(name, dtype, limits):
    """FlashKDA#10 and tt-metal#54813: inverses by powers of A fail here by orders of magnitude. More in test_tpu_floor.py."""
    compare(correlated(name, 96), dtype, limits=limits, chunk_size=64)


@pytest.mark.parametrize("only", ["do", "dfinal"])
def test_one_cotangent(only):
    """R030: the final state alone, or the output alone, has gradients."""
    case = make_case("head", True, T=20)
    zeros = "dfinal" if only == "do" else "do"
    compare(case._replace(**{zeros: np.zeros_like(getattr(case, zeros))}), jnp.float32, chunk_size=16)


def test_large_values():
    case = make_case("channel", True, T=40)
    compare(case._replace(q=case.q * 1e4, v=case.v * 1e4, initial_state=case.initial_state * 1e4), jnp.float32, chunk_size=16)
