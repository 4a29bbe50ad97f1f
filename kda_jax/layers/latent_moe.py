"""Stable LatentMoE: experts that work in a narrow latent space, chosen from the full width."""

from flax import nnx
from jaxtyping import Array, Bool, Float

from kda_jax.layers.initializers import linear
from kda_jax.layers.mlp import SiTU
from kda_jax.layers.moe import Experts, MoEOutput, Router
from kda_jax.layers.norms import RMSNorm
from kda_jax.ops.activations import Situ


class LatentMoE(nnx.Module):
    """y = W_up RMSNorm(sum_j p_j E_j(W_down x)) + Shared(x) (Kimi K3, arXiv 2607.24653, section 2.3, eqs. 11-14). No token is dropped.

    The router sees x at its full width D and scores by sigmoid; the experts, gated MLPs with `ops.Situ`, work on R dims. The norm stands
    after the weighted sum and before the up projection, so a factor common to the combine weights changes nothing but eps.

    Args:
        hidden_size: D.
        latent_size: R, width of the experts' inputs and outputs.
        intermediate_size: F of one expert.
        num_experts: E.
        num_experts_per_token: experts each token is sent to.
        num_shared_experts: experts every token goes to, on the full width, fused into one of that many times F; 0 for none.
        activation: of all experts.
        renormalize, routed_scaling_factor: of the router, as in `ops.route`.
        rms_norm_eps: of the norm in the latent space.
        initializer_range: standard deviation of all matrices.

    Numerics: router float32; w1, w3 and w2 of each expert in x's dtype with the activation between them in float32, rounded once; the sum
        over experts float32, rounded once before the norm; shared experts are added in x's dtype.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        latent_size: int,
        intermediate_size: int,
        num_experts: int,
        num_experts_per_token: int,
        num_shared_experts: int,
        activation: Situ,
        renormalize: bool = True,
        routed_scaling_factor: float = 1.0,
        rms_norm_eps: float = 1e-5,
        initializer_range: float = 0.02,
        rngs: nnx.Rngs,
    ):
        init = {"initializer_range": initializer_range, "rngs": rngs}
        self.gate = Router(
            hidden_size=hidden_size,
            num_experts=num_experts,
            num_experts_per_token=num_experts_per_token,
            renormalize=renormalize,
            routed_scaling_factor=routed_scaling_factor,
            activation="sigmoid",
            num_groups=1,
            top_groups=1,
            **init,
        )
        self.routed_expert_down_proj = linear(hidden_size, latent_size, ("embed", "latent"), **init)
        sizes = {"num_experts": num_experts, "hidden_size": latent_size, "intermediate_size": intermediate_size}
        self.experts = Experts(**sizes, activation=activation, **init)
        self.routed_expert_norm = RMSNorm(latent_size, eps=rms_norm_eps, axis="latent")
        self.routed_expert_up_proj = linear(latent_size, hidden_size, ("latent", "embed"), **init)
        width = num_shared_experts * intermediate_size
        shared = SiTU(hidden_size=hidden_size, intermediate_size=width, activation=activation, **init) if width else None
        self.shared_experts = shared

    def __call__(self, x: Float[Array, "B T D"], *, valid: Bool[Array, "B T"] | None = None) -> MoEOutput:
        """Args: x [B, T, D]; valid [B, T], False at padding, which is sent to no expert and not counted."""
        routing, counts, dropped = self.gate.choose(x, valid)
        u = self.experts(self.routed_expert_down_proj(x), routing)
        y = self.routed_expert_up_proj(self.routed_expert_norm(u))
        y = y if self.shared_experts is None else y + self.shared_experts(x)
        return MoEOutput(y, counts, self.gate.histogram(x, valid), dropped)
