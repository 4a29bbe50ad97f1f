"""Recurrences and the functions around them: arrays in, arrays out."""

from kda_jax.ops.linear_attention import linear_attention, linear_attention_step  # isort: skip  (the order of the ladder)
from kda_jax.ops.gated_linear_attention import gated_linear_attention, gated_linear_attention_step  # isort: skip
from kda_jax.ops.delta_rule import delta_rule, delta_rule_from_logits, delta_rule_step  # isort: skip
from kda_jax.ops.gated_delta_rule import gated_delta_rule, gated_delta_rule_from_logits, gated_delta_rule_step  # isort: skip
from kda_jax.ops.kda import kda, kda_from_logits, kda_step  # isort: skip
from kda_jax.ops.activations import Situ
from kda_jax.ops.attention import attention, attention_with_max_logit
from kda_jax.ops.decode import decode
from kda_jax.ops.depth_attention import attention_residual
from kda_jax.ops.dispatch import Explanation, explain
from kda_jax.ops.experts import experts
from kda_jax.ops.gates import gdn_gate, kda_gate
from kda_jax.ops.mla import mla
from kda_jax.ops.norms import gated_rms_norm, l2_norm, layer_norm, rms_norm
from kda_jax.ops.routing import Routing, bias_histogram, expert_counts, limit, quantile_bias, route
from kda_jax.ops.segments import Segments, segments
from kda_jax.ops.short_conv import ConvOutput, short_conv
from kda_jax.ops.spec import REGISTRY, OpSpec, RecurrenceOutput
from kda_jax.ops.states import ChunkStates, chunk_states
