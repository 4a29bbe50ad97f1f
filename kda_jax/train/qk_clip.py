"""QK-clip: keep the logits of attention from growing without bound, by the weights that make them."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from kda_jax.train.state import by_layer, flatten, unflatten

_KEYS = "kv_b_proj.kernel"


def clip_query_keys(params: dict, max_logits: Float[Array, "layers H"], threshold: float) -> dict:
    """Scale the query and key weights of each MLA head so that its largest logit would have been at most `threshold`.

    Kimi K2 (arXiv 2507.20534, section 2.1 and algorithm 1): with gamma_h = min(1, threshold / S_h) the parts of queries and keys that
    belong to the head, W_qc and W_kc, take sqrt(gamma_h) each, the part of the queries that meets the key shared by all heads, W_qr,
    takes gamma_h, and the shared key is left alone. The logits of that head are then gamma_h times what they were, those of the others
    what they were. It does not change the gradient: it is applied to the weights after the optimizer's step.

    Args:
        params: of a model with MLA layers, nested dicts.
        max_logits: the largest logit S_h of each head in this step, layers in order, as `ModelOutput.aux["max_logits"]`.
        threshold: in units of logits; 100 in Kimi K2.
    """
    flat = flatten(params)
    keys = {name: leaf for name, leaf in flat.items() if name.endswith(_KEYS)}
    gammas = by_layer(keys, jnp.where(max_logits > threshold, threshold / max_logits, 1.0))
    for name, gamma in gammas.items():
        layer = name.removesuffix(_KEYS)
        queries = next(layer + q for q in ("q_proj.kernel", "q_b_proj.kernel") if layer + q in flat)
        H, rank = gamma.shape[-1], keys[name].shape[-2]
        shared = flat[layer + "kv_a_proj_with_mqa.kernel"].shape[-1] - rank
        own = flat[queries].shape[-1] // H - shared
        values = keys[name].shape[-1] // H - own
        root = jnp.sqrt(gamma)
        flat[queries] = _scale(flat[queries], [(root, own), (gamma, shared)])
        flat[name] = _scale(keys[name], [(root, own), (jnp.ones_like(gamma), values)])
    return unflatten(params, flat)


def _scale(kernel: Float[Array, "*n R C"], parts: list[tuple[Float[Array, "*n H"], int]]) -> Float[Array, "*n R C"]:
    """Columns are heads of parts side by side; each part of `width` columns takes its factor."""
    factors = jnp.concatenate([jnp.broadcast_to(x[..., None], (*x.shape, width)) for x, width in parts], axis=-1)
    return kernel * factors.reshape(*factors.shape[:-2], 1, -1)
