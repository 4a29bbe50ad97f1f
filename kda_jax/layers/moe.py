"""Mixture of experts: a router, routed experts, shared experts."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from kda_jax.layers.initializers import normal
from kda_jax.layers.mlp import SwiGLU
from kda_jax.ops.experts import experts, swiglu
from kda_jax.ops.routing import Routing, bias_histogram, expert_counts, limit, route


class MoEOutput(NamedTuple):
    """y [B, T, D], counts [E], and histogram [E, bins] and dropped [] where they were asked for."""

    y: Float[Array, "B T D"]
    counts: Int[Array, "E"]
    """Tokens that each expert received, padding not counted."""
    histogram: Int[Array, "E bins"] | None = None
    """Of the bias at which each token would just choose each expert, where the router collects it; see `ops.bias_histogram`."""
    dropped: Int[Array, ""] | None = None
    """Choices that found their expert full, where `limit_experts` has set a capacity; `counts` holds them all the same."""


class RouterBias(nnx.Variable):
    """The router's correction bias: moved by the balancing rule, not by gradients, hence no `nnx.Param`."""


class Router(nnx.Module):
    """Scores of the experts, float32 throughout; see `ops.route` for the rule and its arguments."""

    def __init__(
        self,
        *,
        hidden_size: int,
        num_experts: int,
        num_experts_per_token: int,
        renormalize: bool,
        routed_scaling_factor: float,
        activation: Literal["sigmoid", "softmax"],
        num_groups: int,
        top_groups: int,
        initializer_range: float,
        rngs: nnx.Rngs,
    ):
        self.kernel = normal((hidden_size, num_experts), ("embed", None), initializer_range=initializer_range, rngs=rngs)
        self.e_score_correction_bias = RouterBias(jnp.zeros(num_experts), axes=(None,))
        self.num_experts_per_token = num_experts_per_token
        self.renormalize, self.routed_scaling_factor, self.activation = renormalize, routed_scaling_factor, activation
        self.num_groups, self.top_groups = num_groups, top_groups
        self.histogram_bins: int | None = None
        self.capacity_factor: float | None = None

    def logits(self, x: Float[Array, "*tokens D"]) -> Float[Array, "*tokens E"]:
        wide = jnp.promote_types(x.dtype, jnp.float32)
        return jnp.dot(x.astype(wide), self.kernel[...].astype(wide), precision="highest")

    def histogram(self, x: Float[Array, "*tokens D"], valid: Bool[Array, "*tokens"] | None) -> Int[Array, "E bins"] | None:
        """What Quantile Balancing needs of these tokens; None unless `collect_histograms` has asked for it."""
        if self.histogram_bins is None:
            return None
        options = {"top_k": self.num_experts_per_token, "activation": self.activation, "bins": self.histogram_bins}
        return bias_histogram(self.logits(x), self.e_score_correction_bias[...], valid, **options)

    def choose(self, x: Float[Array, "*tokens D"], valid: Bool[Array, "*tokens"] | None) -> tuple[Routing, Array, Array | None]:
        """Where real tokens go, how many chose each expert, and how many choices `limit_experts` dropped (None without a capacity)."""
        routing = self(x)
        if valid is not None:
            routing = routing._replace(experts=jnp.where(valid[..., None], routing.experts, -1))
        E = self.kernel.shape[-1]
        counts = expert_counts(routing.experts, E)
        if self.capacity_factor is None:
            return routing, counts, None
        routing, dropped = limit(routing, E, self.capacity_factor)
        return routing, counts, dropped

    def __call__(self, x: Float[Array, "*tokens D"]) -> Routing:
        return route(
            self.logits(x),
            self.e_score_correction_bias[...],
            top_k=self.num_experts_per_token,
            renormalize=self.renormalize,
            scaling_factor=self.routed_scaling_factor,
            activation=self.activation,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
        )


class Experts(nnx.Module):
    """E gated experts in stacked weights: w1 (gate) and w3 (up) [E, D, F], w2 (down) [E, F, D]; see `ops.experts`.

    `activation` is (gate, up) -> product, a function or a value with equality.
    """

    def __init__(
        self,
        *,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: Callable[[Array, Array], Array] = swiglu,
        initializer_range: float,
        rngs: nnx.Rngs,
    ):
        init = {"initializer_range": initializer_range, "rngs": rngs}
        self.w1 = normal((num_experts, hidden_size, intermediate_size), ("experts", "embed", "mlp"), **init)
        self.w3 = normal((num_experts, hidden_size, intermediate_size), ("experts", "embed", "mlp"), **init)
        self.w2 = normal((num_experts, intermediate_size, hidden_size), ("experts", "mlp", "embed"), **init)
        self.activation = activation
        self.capacity_factor: float | None = None

    def __call__(self, x: Float[Array, "*tokens D"], routing: Routing) -> Float[Array, "*tokens D"]:
        weights = self.w1[...], self.w3[...], self.w2[...]
        return experts(x, routing, *weights, activation=self.activation, capacity_factor=self.capacity_factor)


class MoE(nnx.Module):
    """y = sum_j p_j E_j(x) + Shared(x) (DeepSeek-V3, arXiv 2412.19437, section 2.1.2, as Kimi Linear uses it). No token is dropped.

    Args:
        hidden_size: D.
        intermediate_size: F of one expert.
        num_experts: E.
        num_experts_per_token: experts each token is sent to.
        num_shared_experts: experts every token goes to, fused into one SwiGLU of that many times F; 0 for none.
        renormalize, routed_scaling_factor, activation, num_groups, top_groups: of the router, as in `ops.route`.
        initializer_range: standard deviation of router, experts and shared experts.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        num_experts_per_token: int,
        num_shared_experts: int = 1,
        renormalize: bool = True,
        routed_scaling_factor: float = 1.0,
        activation: Literal["sigmoid", "softmax"] = "sigmoid",
        num_groups: int = 1,
        top_groups: int = 1,
        initializer_range: float = 0.02,
        rngs: nnx.Rngs,
    ):
        sizes = {"hidden_size": hidden_size, "num_experts": num_experts, "initializer_range": initializer_range, "rngs": rngs}
        self.gate = Router(
            num_experts_per_token=num_experts_per_token,
            renormalize=renormalize,
            routed_scaling_factor=routed_scaling_factor,
            activation=activation,
            num_groups=num_groups,
            top_groups=top_groups,
            **sizes,
        )
        self.experts = Experts(intermediate_size=intermediate_size, **sizes)
        width = num_shared_experts * intermediate_size
        self.shared_experts = (
            SwiGLU(hidden_size=hidden_size, intermediate_size=width, initializer_range=initializer_range, rngs=rngs) if width else None
        )

    def __call__(self, x: Float[Array, "B T D"], *, valid: Bool[Array, "B T"] | None = None) -> MoEOutput:
        """Args: x [B, T, D]; valid [B, T], False at padding, which is sent to no expert and not counted."""
        routing, counts, dropped = self.gate.choose(x, valid)
        y = self.experts(x, routing)
        y = y if self.shared_experts is None else y + self.shared_experts(x)
        return MoEOutput(y, counts, self.gate.histogram(x, valid), dropped)


def limit_experts(model: nnx.Module, capacity_factor: float | None) -> None:
    """Give every expert in `model` a capacity (`ops.limit`), for buffers of a size known beforehand; None takes it away.

    Tokens are dropped then, and how many is in `MoEOutput.dropped`. What is dropped depends on which tokens share a device.
    """
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Router | Experts):
            module.capacity_factor = capacity_factor


def collect_histograms(model: nnx.Module, bins: int) -> None:
    """Have every router in `model` report `ops.bias_histogram` with that many bins, as Quantile Balancing needs.

    Raises:
        ValueError: a router that chooses among groups: its cutoff is that of the groups, which no expert's bias moves alone.
    """
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Router):
            if module.top_groups < module.num_groups:
                raise ValueError(f"quantile balancing needs routers without groups, got {module.top_groups} of {module.num_groups} groups")
            module.histogram_bins = bins
