"""Configurations of the models: plain, frozen, JSON-able, checked when made. Field names are those of the released config.json files."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

Remat = Literal["none", "full", "dots"]
Mixer = Literal["linear_attention", "mamba2", "deltanet", "gated_deltanet", "kda"]


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)


def _positive(config, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(value > 0, f"{type(config).__name__}.{name} must be positive, got {value}")


def _one_of(config, name: str, allowed: Iterable[str]) -> None:
    value, allowed = getattr(config, name), tuple(allowed)
    _require(value in allowed, f"{type(config).__name__}.{name} must be one of {', '.join(allowed)}, got {value!r}")


@dataclass(frozen=True)
class GPT2Config:
    """GPT-2 (Radford et al. 2019): softmax attention, learned positions, tied head. The defaults are GPT-2 small, 124M."""

    model_type: ClassVar[str] = "gpt2"

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    """Width of the MLP; None is 4 * n_embd."""
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    remat: Remat = "none"

    def __post_init__(self):
        _positive(self, "vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
        _require(self.n_inner is None or self.n_inner > 0, f"GPT2Config.n_inner must be positive or None, got {self.n_inner}")
        _require(self.n_embd % self.n_head == 0, f"GPT2Config.n_embd ({self.n_embd}) must be a multiple of n_head ({self.n_head})")
        _one_of(self, "remat", get_args(Remat))

    @property
    def inner_size(self) -> int:
        return 4 * self.n_embd if self.n_inner is None else self.n_inner


@dataclass(frozen=True)
class LinearLMConfig:
    """A language model with one recurrent mixer in every layer: linear attention, Mamba-2, DeltaNet, Gated DeltaNet or KDA.

    `num_heads` query/key heads of width `head_dim` serve `num_v_heads` value heads of width `head_dim * expand_v`. In Mamba-2's
    own words these are the groups, the state size, the heads and the head dim.
    """

    model_type: ClassVar[str] = "linear_lm"

    mixer: Mixer = "gated_deltanet"
    vocab_size: int = 50257
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_heads: int = 6
    num_v_heads: int | None = None
    """None is `num_heads`; a multiple of it where the mixer has grouped value heads (mamba2, gated_deltanet)."""
    head_dim: int = 128
    expand_v: float = 1.0
    intermediate_size: int = 2048
    short_conv_kernel_size: int = 4
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    remat: Remat = "none"

    def __post_init__(self):
        _one_of(self, "mixer", get_args(Mixer))
        _one_of(self, "remat", get_args(Remat))
        _positive(self, "vocab_size", "hidden_size", "num_hidden_layers", "num_heads", "head_dim", "expand_v", "intermediate_size")
        _positive(self, "short_conv_kernel_size")
        heads = self.value_heads
        _require(
            heads > 0 and heads % self.num_heads == 0,
            f"LinearLMConfig.num_v_heads ({heads}) must be a multiple of num_heads ({self.num_heads})",
        )
        _require(
            heads == self.num_heads or self.mixer in ("mamba2", "gated_deltanet"),
            f"LinearLMConfig.num_v_heads ({heads}) must equal num_heads ({self.num_heads}) for mixer {self.mixer!r}: "
            "only mamba2 and gated_deltanet group their value heads",
        )
        _require(
            float(self.head_dim * self.expand_v).is_integer(),
            f"LinearLMConfig.head_dim * expand_v must be a whole number, got {self.head_dim} * {self.expand_v}",
        )

    @property
    def value_heads(self) -> int:
        return self.num_heads if self.num_v_heads is None else self.num_v_heads

    @property
    def value_dim(self) -> int:
        """Width of one value head."""
        return int(self.head_dim * self.expand_v)


@dataclass(frozen=True)
class LinearAttentionConfig:
    """`linear_attn_config` of a Kimi Linear checkpoint: the shape of its KDA layers and which layers are which, counted from 1."""

    head_dim: int = 128
    num_heads: int = 32
    short_conv_kernel_size: int = 4
    kda_layers: tuple[int, ...] = (1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26)
    full_attn_layers: tuple[int, ...] = (4, 8, 12, 16, 20, 24, 27)

    def __post_init__(self):
        _positive(self, "head_dim", "num_heads", "short_conv_kernel_size")


@dataclass(frozen=True)
class KimiLinearConfig:
    """Kimi Linear (arXiv 2510.26692): KDA layers with a NoPE MLA layer after every third, mixture-of-experts FFNs.

    The defaults are the released 48B-A3B. Layer lists count from 1. The released fields that nothing in the model depends on
    (head_dim, num_key_value_heads, rope_theta, rope_scaling, use_cache ...) have no counterpart here.
    """

    model_type: ClassVar[str] = "kimi_linear"

    vocab_size: int = 163840
    hidden_size: int = 2304
    num_hidden_layers: int = 27
    linear_attn_config: LinearAttentionConfig = LinearAttentionConfig()
    num_attention_heads: int = 32
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    intermediate_size: int = 9216
    """Width of the dense FFN."""
    first_k_dense_replace: int = 1
    """The first so many layers have a dense FFN."""
    moe_layer_freq: int = 1
    """After those, layer i (from 0) has experts where i is a multiple of this, and a dense FFN elsewhere."""
    num_experts: int = 256
    num_experts_per_token: int = 8
    num_shared_experts: int = 1
    moe_intermediate_size: int = 1024
    moe_router_activation_func: Literal["sigmoid", "softmax"] = "sigmoid"
    moe_renormalize: bool = True
    routed_scaling_factor: float = 2.446
    num_expert_group: int = 1
    topk_group: int = 1
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    remat: Remat = "none"

    def __post_init__(self):
        _positive(self, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim")
        _positive(self, "v_head_dim", "intermediate_size", "moe_layer_freq", "num_experts", "num_experts_per_token")
        _positive(self, "moe_intermediate_size", "num_expert_group", "topk_group")
        _one_of(self, "moe_router_activation_func", ("sigmoid", "softmax"))
        _one_of(self, "remat", get_args(Remat))
        _require(self.qk_rope_head_dim >= 0, f"{type(self).__name__}.qk_rope_head_dim must not be negative, got {self.qk_rope_head_dim}")
        _require(
            self.num_shared_experts >= 0, f"{type(self).__name__}.num_shared_experts must not be negative, got {self.num_shared_experts}"
        )
        _check_layer_lists(self.linear_attn_config, self.num_hidden_layers)
        _check_experts(self)

    def is_kda(self, layer: int) -> bool:
        """Whether layer `layer`, counted from 0, is KDA (else MLA)."""
        return layer + 1 in self.linear_attn_config.kda_layers

    def is_moe(self, layer: int) -> bool:
        """Whether layer `layer`, counted from 0, has experts (else a dense FFN)."""
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0


def _check_layer_lists(config: LinearAttentionConfig, layers: int) -> None:
    kda, full = config.kda_layers, config.full_attn_layers
    where = "linear_attn_config.kda_layers and full_attn_layers count layers from 1 and name each exactly once"
    outside = sorted(i for i in kda + full if not 1 <= i <= layers)
    _require(not outside, f"{where}: {outside} lie outside 1..{layers}")
    both = sorted(set(kda) & set(full))
    _require(not both, f"{where}: {both} are in both")
    missing = sorted(set(range(1, layers + 1)) - set(kda + full))
    _require(not missing, f"{where}: {missing} are in neither")
    repeated = sorted({i for i in kda + full if (kda + full).count(i) > 1})
    _require(not repeated, f"{where}: {repeated} are named twice")


def _check_experts(config: KimiLinearConfig) -> None:
    name = type(config).__name__
    E, k, groups = config.num_experts, config.num_experts_per_token, config.num_expert_group
    _require(E % groups == 0, f"{name}.num_experts ({E}) must be a multiple of num_expert_group ({groups})")
    _require(config.topk_group <= groups, f"{name}.topk_group ({config.topk_group}) must be at most num_expert_group ({groups})")
    reachable = E // groups * config.topk_group
    _require(
        k <= reachable,
        f"{name}.num_experts_per_token ({k}) must be at most the {reachable} experts that topk_group leaves to choose from",
    )


@dataclass(frozen=True)
class K3LinearAttentionConfig(LinearAttentionConfig):
    """`linear_attn_config` of Kimi K3: the decay is bounded, and the output gate has full rank."""

    num_heads: int = 96
    kda_layers: tuple[int, ...] = tuple(i for i in range(1, 93) if i % 4)
    full_attn_layers: tuple[int, ...] = (*range(4, 93, 4), 93)
    gate_lower_bound: float = -5.0
    """Of the log decay, in [-5, 0)."""
    A_log_entries: int | None = None
    """Numbers that a checkpoint stores of each A_log: one per head, then zeros. None: one per head. The release has 128 for 96 heads."""

    def __post_init__(self):
        super().__post_init__()
        bound, entries = self.gate_lower_bound, self.A_log_entries
        _require(-5 <= bound < 0, f"linear_attn_config.gate_lower_bound must lie in [-5, 0), got {bound}")
        _require(
            entries is None or entries >= self.num_heads,
            f"linear_attn_config.A_log_entries must be at least the {self.num_heads} heads, or None, got {entries}",
        )


@dataclass(frozen=True)
class KimiK3Config(KimiLinearConfig):
    """Kimi K3's text model (arXiv 2607.24653): Kimi Linear with bounded KDA, gated MLA, LatentMoE and Attention Residuals.

    The defaults are the release, 2.8T-A104B, but for `A_log_entries`, which `presets.kimi_k3` sets.
    """

    model_type: ClassVar[str] = "kimi_k3"

    hidden_size: int = 7168
    num_hidden_layers: int = 93
    linear_attn_config: K3LinearAttentionConfig = K3LinearAttentionConfig()
    num_attention_heads: int = 96
    q_lora_rank: int = 1536
    intermediate_size: int = 33792
    num_experts: int = 896
    num_experts_per_token: int = 16
    num_shared_experts: int = 2
    moe_intermediate_size: int = 3072
    routed_expert_hidden_size: int = 3584
    """Width of the latent space that routed experts work in."""
    routed_scaling_factor: float = 1.0
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float = 25.0
    attn_res_block_size: int | None = 12
    """Decoder layers (two sublayers each) whose outputs are summed into one source of the Attention Residuals. None: every sublayer's
    output is a source of its own."""

    def __post_init__(self):
        super().__post_init__()
        _positive(self, "q_lora_rank", "routed_expert_hidden_size", "activation_situ_beta", "activation_situ_linear_beta")
        size = self.attn_res_block_size
        _require(size is None or size > 0, f"KimiK3Config.attn_res_block_size must be positive or None, got {size}")
        for name, only in (("moe_router_activation_func", "sigmoid"), ("num_expert_group", 1), ("topk_group", 1)):
            _require(getattr(self, name) == only, f"KimiK3Config.{name} must be {only!r}, got {getattr(self, name)!r}")

    @property
    def block_sublayers(self) -> int:
        """Sublayers in a block of the Attention Residuals."""
        return 1 if self.attn_res_block_size is None else 2 * self.attn_res_block_size


ModelConfig = GPT2Config | LinearLMConfig | KimiLinearConfig | KimiK3Config
