# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The memory ladder
#
# A model that reads a long text has a limited memory. How does it decide what to keep, what to overwrite, what to forget, and how to
# find it again? Here one toy, an associative memory of 32 rows, climbs from linear attention to Kimi Delta Attention. Nothing is
# trained: keys, values and gates are set by hand, so every picture shows the recurrence and nothing else.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("kda_jax") is None:  # in Colab
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "kda-jax"], check=True)

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

import kda_jax
from kda_jax import ops

print(f"kda_jax {kda_jax.__version__}, jax {jax.__version__} on {jax.devices()[0].device_kind}")

# %% tags=["parameters"]
K = 32  # rows of the state
most = 96  # associations in the longest text
trials = 16  # texts averaged, one per row of the batch

# %% [markdown]
# A text is a list of (key, value) pairs written one after the other; a question is one of the keys. All ops take `[B, T, H, K]`;
# here one head, unit keys, and a query for everything written, asked after the end: read the final state at each key.

# %%
keys = jax.random.normal(jax.random.key(0), (trials, most, 1, K))
keys = keys / jnp.linalg.norm(keys, axis=-1, keepdims=True)
values = jax.random.normal(jax.random.key(1), (trials, most, 1, K))
ones = jnp.ones((trials, most, 1))


def recall_error(state, keys, values):
    """Relative error of the values read from `state` [B, 1, K, V] at keys [B, T, 1, K]."""
    read = jnp.einsum("bhkv,bthk->bthv", state, keys, precision="highest")
    return float(jnp.linalg.norm(read - values) / jnp.linalg.norm(values))


# %% [markdown]
# ## 1. Linear attention: a sum that never forgets
#
# $S_t = S_{t-1} + k_t v_t^\top$. Random keys overlap, so every association that is stored leaks into the reading of every other.
#
# ## 2. DeltaNet: write the correction
#
# $S_t = S_{t-1} + \beta_t k_t (v_t - S_{t-1}^\top k_t)^\top$. First read what the memory says, then write only the difference.
# With $\beta = 1$ the pair just written is always exact; older ones suffer only along the part that the new key overlaps.

# %%
counts = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96]
counts = [n for n in counts if n <= most]
recall = {"linear attention": [], "DeltaNet": []}
for n in counts:
    k, v = keys[:, :n], values[:, :n]
    recall["linear attention"].append(recall_error(ops.linear_attention(k, k, v).final_state, k, v))
    recall["DeltaNet"].append(recall_error(ops.delta_rule(k, k, v, ones[:, :n]).final_state, k, v))

for name, errors in recall.items():
    plt.plot(counts, errors, marker="o", label=name)
plt.axvline(K, color="gray", linestyle=":", label=f"{K} rows")
plt.xlabel("associations written")
plt.ylabel("relative error of recall")
plt.xscale("log", base=2)
plt.legend()
plt.title("Interference")
plt.show()

half = counts.index(16)
assert recall["linear attention"][0] < 1e-5  # one association is exact
assert recall["linear attention"][half] > 0.5  # sixteen in 32 rows are not: they interfere
assert recall["DeltaNet"][half] < 0.8 * recall["linear attention"][half]
assert recall["linear attention"][-1] > 1.5  # past the number of rows the sum is mostly noise

# %% [markdown]
# The same key written twice shows the difference best: linear attention returns the sum, DeltaNet the latest.

# %%
k = jnp.repeat(keys[:1, :1], 2, axis=1)
v = values[:1, :2]
summed = recall_error(ops.linear_attention(k, k, v).final_state, k[:, :1], v[:, :1] + v[:, 1:])
latest = recall_error(ops.delta_rule(k, k, v, ones[:1, :2]).final_state, k[:, :1], v[:, 1:])
print(f"linear attention reads the sum (error {summed:.1e}), DeltaNet the latest value (error {latest:.1e})")
assert summed < 1e-5
assert latest < 1e-5

# %% [markdown]
# ## 3. Gated DeltaNet: one dial for everything
#
# DeltaNet only replaces what is written again. After the topic changes, the old associations stay and crowd the new ones. One decay
# per head, $S_t = \alpha_t (I - \beta_t k_t k_t^\top) S_{t-1} + \beta_t k_t v_t^\top$, can drop them all at the border.

# %%
old = 64 if most >= 96 else most // 2
new = min(16, most - old)
k, v = keys[:, : old + new], values[:, : old + new]
g = jnp.zeros((trials, old + new, 1)).at[:, old].set(-20.0)  # forget everything as the new topic begins
crowded = recall_error(ops.delta_rule(k, k, v, ones[:, : old + new]).final_state, k[:, old:], v[:, old:])
cleared = recall_error(ops.gated_delta_rule(k, k, v, g, ones[:, : old + new]).final_state, k[:, old:], v[:, old:])
print(f"recall error of the new topic: DeltaNet {crowded:.2f}, Gated DeltaNet {cleared:.2f}")
assert cleared < crowded

# %% [markdown]
# ## 4. Kimi Delta Attention: a dial for every row
#
# Some things should outlive the change of topic. Let the first half of the key's channels address long-term facts and the second half
# scratch notes. One dial per head must choose: keep both or lose both. With $\mathrm{Diag}(\alpha_t)$, KDA clears the scratch rows
# alone.

# %%
facts, notes = K // 4, K // 2


def half_keys(key, n, first):
    """Orthonormal keys that use only the first or only the second half of the channels: [1, n, 1, K]."""
    basis = jnp.linalg.qr(jax.random.normal(key, (K // 2, K // 2)))[0][:n]
    pad = (0, K // 2) if first else (K // 2, 0)
    return jnp.pad(basis, ((0, 0), pad))[None, :, None]


text = [half_keys(jax.random.key(2), facts, True), half_keys(jax.random.key(3), notes, False), half_keys(jax.random.key(4), notes, False)]
k = jnp.concatenate(text, axis=1)  # facts, then two pages of notes on the same scratch rows
T = k.shape[1]
v = values[:1, :T]
beta = jnp.full((1, T, 1), 0.5)  # a gentle write: without clearing, half of the old page shines through
border = facts + notes
per_head = jnp.zeros((1, T, 1)).at[:, border].set(-20.0)
per_channel = jnp.zeros((1, T, 1, K)).at[:, border, :, K // 2 :].set(-20.0)

states = {
    "before the border": ops.delta_rule(k[:, :border], k[:, :border], v[:, :border], beta[:, :border]).final_state,
    "DeltaNet": ops.delta_rule(k, k, v, beta).final_state,
    "Gated DeltaNet": ops.gated_delta_rule(k, k, v, per_head, beta).final_state,
    "KDA": ops.kda(k, k, v, per_channel, beta).final_state,
}
figure, axes = plt.subplots(1, len(states), figsize=(13, 3.5), sharey=True)
for axis, (name, state) in zip(axes, states.items(), strict=True):
    axis.imshow(state[0, 0], cmap="RdBu", vmin=-1.5, vmax=1.5, aspect="auto")
    axis.axhline(K // 2 - 0.5, color="black", linewidth=0.8)
    axis.set_title(name)
    axis.set_xlabel("value channel")
axes[0].set_ylabel("key channel: facts above, scratch below")
plt.show()

# %%
written = 0.5  # what one write with beta = 0.5 on an empty row leaves
errors = {}
for name in ("DeltaNet", "Gated DeltaNet", "KDA"):
    fact_error = recall_error(states[name], k[:, :facts], written * v[:, :facts])
    note_error = recall_error(states[name], k[:, border:], written * v[:, border:])
    errors[name] = fact_error, note_error
    print(f"{name:15} facts {fact_error:.2f}   notes of the second page {note_error:.2f}")

assert errors["DeltaNet"][0] < 1e-5 and errors["DeltaNet"][1] > 0.3  # noqa: PT018  keeps both
assert errors["Gated DeltaNet"][0] > 0.9 and errors["Gated DeltaNet"][1] < 1e-5  # noqa: PT018  loses both
assert errors["KDA"][0] < 1e-5 and errors["KDA"][1] < 1e-5  # noqa: PT018  keeps the facts, clears the scratch

# %% [markdown]
# That is the whole ladder: keep a sum, correct it, fade it, fade each row by itself. Each step is one line in `kda_jax/ops/`:
# `linear_attention.py`, `delta_rule.py`, `gated_delta_rule.py`, `kda.py`. The state never grew: `K x V` numbers per head after one
# token or after a million.
