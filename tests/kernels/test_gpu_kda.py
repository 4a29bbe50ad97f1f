"""GPU kernels of KDA, interpreted on a CPU: outputs, final state and every gradient against the float64 token recurrence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_jax.testing import FLOOR_RATIO, TOLERANCE
from pallas_kernels.gpu import Launch, Tuning, chunk_kda
from tests.kernels.oracle import Case, error, make_case, recurrence
from tests.kernels.run_gpu import forward_backward
from tests.kernels.test_tpu_floor import ROUNDED, keys

FLOAT32 = TOLERANCE["float32"]


def compare(case: Case, limits=(FLOAT32.output, FLOAT32.gradient), **options) -> None:
    found, want = forward_backward(case, jnp.float32, **options), recurrence(case.rounded(jnp.float32))
    assert found.keys() == want.keys()
    errors = {n: error(found[n], want[n]) for n in want}
    for name, value in errors.items():
        assert value <= limits[name not in ("o", "final")], (name, errors)


@pytest.mark.parametrize("T", [1, 15, 40])
def test_lengths(T):
    """Grouped value heads, K != V, neither a power of two, a partial last chunk."""
    compare(make_case("channel", True, T=T, B=2, H=1, HV=2, K=20, V=24), chunk_size=16)


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
def test_blocks(chunk_size):
    """Every chunk size, with two blocks in every kernel."""
    compare(make_case("channel", True, T=70, K=32, V=32), chunk_size=chunk_size, tuning=Tuning(*[Launch(16, 4)] * 7))


def gates(name: str, g: np.ndarray) -> np.ndarray:
    rng = np.random.default_rng(5)
    some = rng.uniform(size=g.shape) < 0.3
    tokens = rng.uniform(size=(*g.shape[:3], 1)) < 0.3
    return {
        "none": np.zeros_like(g),
        "-1000 on some channels": np.where(some, -1000.0, g),
        "-inf on some channels": np.where(some, -np.inf, g),
        "-inf on whole tokens": np.where(tokens, -np.inf, 0.1 * g),
        "-30 everywhere": np.full_like(g, -30.0),
        "0 and -1000 in one block": np.where(some, -1000.0, 0.0),
        "one channel stays": np.where(np.arange(g.shape[-1]) == 3, 0.0, -300.0) + 0 * g,
        "slow": 1e-6 * g,
    }[name]


GATES = ["none", "-1000 on some channels", "-inf on some channels", "-inf on whole tokens", "-30 everywhere", "0 and -1000 in one block"]
GATES += ["one channel stays", "slow"]


@pytest.mark.parametrize("name", GATES)
def test_gates(name):
    """Unbounded decays, exact ones of zero included; the limits are those of ordinary gates."""
    case = make_case("channel", True, T=40, B=2, H=1, HV=2, K=20, V=24)
    compare(case._replace(g=gates(name, case.g)), chunk_size=16)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.99, 2.0])
def test_identical_keys(beta):
    case = make_case("channel", True, T=40, B=2, H=1, HV=2, K=20, V=24)
    same = case._replace(k=np.broadcast_to(case.k[:, :1, :1], case.k.shape), beta=np.full_like(case.beta, beta), g=0.02 * case.g)
    compare(same, (FLOAT32.extreme, FLOAT32.extreme), chunk_size=16)


ROWS = [
    pytest.param(name, marks=() if name == "identical" else pytest.mark.slow) for name in ("identical", "random", "cosine 0.9", "beta 2")
]


@pytest.mark.parametrize("name", ROWS)
def test_bfloat16_at_the_floor(name):
    """One head of K = V = 128 as the layers have it: error over that of the exact recurrence on the rounded inputs."""
    case = keys(name, "channel")
    exact, best, found = recurrence(case), recurrence(case.rounded(jnp.bfloat16)), forward_backward(case, jnp.bfloat16)
    best |= {n: np.asarray(jnp.asarray(best[n]).astype(jnp.bfloat16), np.float64) for n in ROUNDED}
    ratios = {n: error(found[n], exact[n]) / error(best[n], exact[n]) for n in exact}
    assert max(ratios.values()) <= FLOOR_RATIO, ratios


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_future_tokens_change_nothing(dtype):
    """fla#1240: bitwise, at a position inside a block of every level; and an empty future, as padding, is a future too."""
    a, b = make_case("channel", True, T=50), make_case("channel", True, T=50, seed=1)
    names = ("q", "k", "v", "g", "beta")
    mixed = a._replace(**{n: np.concatenate([getattr(a, n)[:, :21], getattr(b, n)[:, 21:]], 1) for n in names})
    short = a._replace(**{n: getattr(a, n)[:, :21] for n in names})
    run = lambda case: forward_backward(case._replace(do=case.do[:, : case.q.shape[1]]), dtype, chunk_size=32)["o"]
    whole, other, prefix = (np.asarray(run(case), np.float32) for case in (a, mixed, short))
    np.testing.assert_array_equal(whole[:, :21], other[:, :21])
    np.testing.assert_array_equal(whole[:, :21], prefix)
    assert np.any(whole[:, 21:] != other[:, 21:])


def test_half_precision_is_computed_in_float32():
    case = make_case("channel", True, T=20)
    found, want = forward_backward(case, jnp.float16, chunk_size=16), recurrence(case.rounded(jnp.float16))
    assert found["o"].dtype == found["q"].dtype == jnp.float16
    assert max(error(found[n], want[n]) for n in ("final", "g", "beta", "initial_state")) <= FLOAT32.gradient
    assert max(error(found[n], want[n]) for n in ("o", "q", "k", "v")) <= 3e-4  # rounding the result alone


KERNEL = "custom_call @__gpu$xla.gpu.triton"


def on_an_h200():
    return on_a("NVIDIA H200")


def on_a(kind: str):
    """A mesh of one GPU of this kind, which need not be there."""
    mesh = jax.sharding.AbstractMesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    device = jax.sharding.AbstractDevice(kind, num_cores=None, platform="cuda")
    return jax.sharding.use_abstract_mesh(mesh.update(abstract_device=device))


def export(f, *arguments) -> str:
    unchecked = jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")
    with on_an_h200():
        return jax.export.export(jax.jit(f), platforms=["cuda"], disabled_checks=[unchecked])(*arguments).mlir_module()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_lowers_for_a_gpu(dtype):
    """To Triton's dialect, forward and backward, on a machine without a GPU."""
    make = jax.ShapeDtypeStruct
    q, v, g = make((2, 100, 2, 128), dtype), make((2, 100, 4, 64), dtype), make((2, 100, 4, 128), jnp.float32)
    beta, state = make((2, 100, 4), jnp.float32), make((2, 4, 128, 64), jnp.float32)

    def both(*arrays):
        out, pull = jax.vjp(chunk_kda, *arrays)
        return out, pull(out)

    assert export(both, q, q, v, g, beta, state).count(KERNEL) == 7


@pytest.mark.parametrize(("names", "kernels"), [((), 9), (("chunk_states", "chunk_inverse", "chunk_o", "chunk_final"), 7)])
def test_remat_policy(names, kernels):
    """With all that has a name kept, a remat runs no kernel of the forward again."""
    make, policy = jax.ShapeDtypeStruct, jax.checkpoint_policies.save_only_these_names(*names)
    q, beta = make((1, 64, 2, 32), jnp.float32), make((1, 64, 2), jnp.float32)
    f = jax.checkpoint(lambda *a: jnp.sum(jnp.sin(chunk_kda(*a)[0])), policy=policy)
    assert (
        export(jax.value_and_grad(f, argnums=(0, 1, 2, 3, 4)), q, q, q, q, beta, make((1, 2, 32, 32), jnp.float32)).count(KERNEL) == kernels
    )


def test_sixty_four_bit_mode():
    """Constants and indices keep their types, so that results keep their bits and kernels still lower."""
    case = make_case("channel", True, T=20)
    found = forward_backward(case, jnp.bfloat16, chunk_size=16)
    with jax.enable_x64(True):
        wide = forward_backward(case, jnp.bfloat16, chunk_size=16)
        make = jax.ShapeDtypeStruct
        q, g, beta = make((1, 20, 1, 16), jnp.bfloat16), make((1, 20, 1, 16), jnp.float32), make((1, 20, 1), jnp.float32)
        assert export(chunk_kda, q, q, q, g, beta, make((1, 1, 16, 16), jnp.float32)).count(KERNEL) == 2
    jax.tree.map(np.testing.assert_array_equal, found, wide)
