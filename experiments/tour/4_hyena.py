# %% [markdown]
# # 4. Hyena, layer by layer and as a matrix
#
# Hyena (Poli et al. 2023) replaces attention by long convolutions with gates between them. We take the
# *annotated* variant, whose every step is a line of arithmetic, run one layer of it step by step, write it as
# a matrix, and end with a whole language model in plain NumPy that equals the Flax module with the same
# weights.
#
# In this notebook $B$ is the number of sequences, $L$ their length, $D$ the number of channels: a batch of
# activations is an array $[B, L, D]$. Convolutions run along time, so they work on $[B, D, L]$.

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np

from hyena_jax import models
from hyena_jax.config import (
    AnnotatedHyenaConfig,
    GatedHyenaConfig,
    HyenaConfig,
    ImplicitFilterConfig,
    LanguageModelConfig,
    LookupFilterConfig,
)
from hyena_jax.mixers import AnnotatedHyena, Hyena
from hyena_jax.reference import filters, hyena, language_models
from hyena_jax.reference.convolution import long_conv, short_conv, toeplitz
from hyena_jax.reference.layers import dense

plt.style.use("tour.mplstyle")

# %% [markdown]
# ## A text and a model
#
# Tokens are characters here. The model embeds each of them, adds a learned vector for its position, and sends
# the result through two layers. It is not trained: this notebook is about what is computed, not about what is
# learned.

# %%
text = "the hyena laughs at the long grass."
vocabulary = sorted(set(text))
tokens = np.array([[vocabulary.index(character) for character in text]])
length, width = tokens.shape[1], 12

mixer_config = AnnotatedHyenaConfig(order=2)
config = LanguageModelConfig(
    pattern=(mixer_config,),
    n_layers=2,
    d_model=width,
    max_len=length,
    vocab_size=len(vocabulary),
    norm="none",
    residual=False,
    ffn="none",
    d_ff=None,
    learned_positions=True,
    init="torch",
)
model = models.build(config)
params = jax.tree.map(np.asarray, model.init(jax.random.key(0), tokens)["params"])
layer = params["blocks_0"]["mixer"]
u = np.float64(params["embedding"]["embedding"][tokens] + params["positions"][:length])  # [B, L, D]

print(f"{length} tokens, {len(vocabulary)} different ones, {width} channels")
for name, leaf in sorted(layer.items()):
    shapes = {key: value.shape for key, value in leaf.items()} if isinstance(leaf, dict) else leaf.shape
    print(f"  {name}: {shapes}")

# %% [markdown]
# ## Step 1: projections
#
# A dense layer makes three sequences of every input, and a short filter mixes each channel with its last two
# inputs (FIR, for *finite impulse response*):
#
# $$z = \mathrm{FIR}_3(u W + b), \qquad z \to x_1, x_2, v .$$
#
# $v$ will be carried along the sequence, $x_1$ and $x_2$ are gates. For order $N$ there would be $N$ gates.

# %%
z = dense(layer["in_proj"], u).transpose(0, 2, 1)  # [B, 3 D, L]
z = short_conv(z, layer["short_taps"], layer["short_bias"])
x_1, x_2, v = np.split(z, 3, axis=1)

assert v.shape == (1, width, length)
assert all(np.allclose(a, b) for a, b in zip((x_1, x_2, v), hyena.projections(layer, u, 3), strict=True))

# %% [markdown]
# ## Step 2: twice a convolution, a gate and a residual path
#
# First the layer's input is added, $v \leftarrow v + u$. Then, for $n = 1, 2$,
#
# $$v \;\leftarrow\; v + \frac{x_n}{\lVert x_n \rVert} \odot \big( h_n * v + b_n \odot v \big).$$
#
# $h_n$ is a long filter, as long as the sequence; $b_n$ is a weight for each channel, which lets $v$ itself
# pass; and $\lVert x_n \rVert$ is the length of the gate over the channels at that time, so that no gate can
# be huge. The convolution carries, the gate selects, the old $v$ stays.
#
# The filter combines the first two kinds of [notebook 3](3_filters.ipynb): free taps (`taps`) times a trained
# window $e^{\alpha s/(L-1)} + \beta$ for each channel (`decay` is $\alpha$, negative at the start; `shift` is
# $\beta$). Then the taps at each lag are divided by the sum of their sizes over the channels. So a filter
# need not shrink with the lag: the window decides which channels have the late taps.

# %%
h = filters.windowed(layer["filter"], 2, length, length, mixer_config.filter)  # [N, D, L]
before = v + u.transpose(0, 2, 1)
carried = long_conv(before, h[0], layer["skip"][0])
gate = hyena.normalized(x_1)
after_one = before + gate * carried
after_two = after_one + hyena.normalized(x_2) * long_conv(after_one, h[1], layer["skip"][1])

late = np.abs(h[:, :, length // 2 :]).sum(axis=2)  # [N, D]
assert np.allclose(np.abs(h).sum(axis=1), 1)  # at every lag
assert (layer["filter"]["decay"] < 0).all()
assert (late[:, :2].sum(axis=1) > 0.5 * late.sum(axis=1)).all()  # channels 0 and 1 have the slowest windows

labels = text.replace(" ", "␣")
fig, axes = plt.subplots(2, 3, figsize=(9.6, 4), sharex=True, sharey=True)
panels = {
    "v + u": before,
    "$h_1 * v + b_1 v$: carried along": carried,
    "gate $x_1 / \\Vert x_1 \\Vert$": gate,
    "gate × carried": gate * carried,
    "v after $n = 1$": after_one,
    "v after $n = 2$": after_two,
}
for ax, (title, values) in zip(axes.flat, panels.items(), strict=True):
    scale = np.abs(values).max()
    ax.imshow(values[0], vmin=-scale, vmax=scale)
    ax.set_title(title)
for ax in axes[0]:
    ax.tick_params(bottom=False)
for ax in axes[1]:
    ax.set_xticks(range(length), labels, fontsize=7, family="monospace")
    ax.set_xlabel("time (token)")
for ax in axes[:, 0]:
    ax.set_ylabel("channel")

# %% [markdown]
# Read the rows of a panel from left to right: each is one channel over time. (Each panel has its own scale;
# red is positive, blue negative.)
#
# ## Step 3: output
#
# A last dense layer, with a residual path around it: $y = v + v W_o + b_o$. That is the whole layer. It
# equals the function in `hyena_jax.reference.hyena`, and the Flax module that training uses.

# %%
v = after_two.transpose(0, 2, 1)  # [B, L, D]
y = v + dense(layer["out_proj"], v)
module = AnnotatedHyena(width, length, mixer_config)
from_flax = module.apply({"params": layer}, np.float32(u))

one_document = np.zeros(tokens.shape)  # all tokens belong to one text
in_numpy = hyena.annotated_hyena(mixer_config, layer, u, length, one_document, filters.windowed)

assert np.allclose(y, in_numpy)
assert np.allclose(y, from_flax, atol=1e-4)

# %% [markdown]
# ## Hyena is a matrix that depends on its input
#
# Attention multiplies $v$ by a matrix of weights that it computes from the input. So does Hyena; only, nobody
# needs to write the matrix down. A convolution is the Toeplitz matrix $S_{h_n}$ ([notebook
# 2](2_causal_convolution.ipynb)), a gate is a diagonal matrix $D_n$. For one channel,
#
# $$v_{\text{out}} = M v_{\text{in}}, \qquad M = (I + D_2 C_2)(I + D_1 C_1), \qquad C_n = S_{h_n} + b_n I,$$
#
# where $I$ is the identity, the residual path. The filters are fixed after training. The gates are computed
# from the text, so $M$ changes with the text: here is the matrix of one channel for two texts.

# %%
channel = 3


def matrix_of(x):
    """M [L, L] of the channel, for one layer's input x [1, L, D]."""
    x_1, x_2, _ = hyena.projections(layer, x, 3)
    gates = np.stack([hyena.normalized(x_1)[0, channel], hyena.normalized(x_2)[0, channel]])
    return hyena.hyena_matrix(gates, h[:, channel], layer["skip"][:, channel], is_residual=True)


other_text = "the grass laughs at the long hyena."
other_tokens = np.array([[vocabulary.index(character) for character in other_text]])
other = np.float64(params["embedding"]["embedding"][other_tokens] + params["positions"][:length])
matrices = {
    "filter 1 alone: $S_{h_1}$": toeplitz(h[0, channel]),
    "M, first text": matrix_of(u),
    "M, second text": matrix_of(other),
}
fig, axes = plt.subplots(1, 3, figsize=(8.4, 3), sharey=True, layout="compressed")
for ax, (title, matrix) in zip(axes, matrices.items(), strict=True):
    shown = matrix if "S_" in title else matrix - np.eye(length)
    scale = np.abs(shown).max()
    ax.imshow(shown, vmin=-scale, vmax=scale, aspect="equal")
    ax.set(title=title, xlabel="input time s")
axes[0].set_ylabel("output time t")

matrix = matrices["M, first text"]
assert np.allclose(matrix @ before[0, channel], after_two[0, channel])
assert (np.triu(matrix, 1) == 0).all()  # causal
assert np.allclose(matrix[:4], matrices["M, second text"][:4])
assert not np.allclose(matrix[4:], matrices["M, second text"][4:])

# %% [markdown]
# (Without the identity, which would outshine the rest.) On the left every diagonal has one colour: the filter
# treats all times alike. On the right the gates make every row different: what a token collects from the past
# depends on the token. Two texts of the same words in another order have different matrices. (Their first
# four rows agree, for both begin with `the `, and no token sees a later one: above the diagonal everything is
# zero.)
#
# ## Hyena as published
#
# The paper's own code, and this package's mixer `hyena`, have no residual paths inside the layer and do not
# divide the gates by their norm. A dense layer and a short filter make $x_0$, $x_1$ and $v$. For order 2
# there is one long filter, one less than gates, for $v$ is gated before the first convolution:
#
# $$y = x_0 \odot \big( h * (x_1 \odot v) + b \; x_1 \odot v \big).$$

# %%
published = HyenaConfig(filter=ImplicitFilterConfig(emb_dim=5, width=16))
module = Hyena(width, length, published)
weights = jax.tree.map(np.asarray, module.init(jax.random.key(0), np.float32(u))["params"])
x_0, x_1, v = hyena.projections(weights, u, 3)
h = filters.implicit(weights["filter"], 1, length, length, published.filter)  # [1, D, L]
y = x_0 * long_conv(x_1 * v, h[0], weights["skip"][0])  # long_conv adds b times its input

out = dense(weights["out_proj"], y.transpose(0, 2, 1))
in_numpy = hyena.hyena(published, weights, u, length, one_document, filters.implicit)

assert np.allclose(out, in_numpy)
assert np.allclose(out, module.apply({"params": weights}, np.float32(u)), atol=1e-4)

# %% [markdown]
# ## The whole model in NumPy
#
# Embedding, layers, a last norm (none in this config), and the embedding again as the output head:
# `reference.language_models` puts the pieces together. It gives the logits of the Flax model. So it does for
# two other members of the family: Hyena as published, and the *gated* variant, in which $v$ and $g$ are two
# projections of the layer's input $u$ and weigh a long convolution against a short one,
# $y = (h * v) \odot g + \mathrm{FIR}(u) \odot (1 - g)$. As $g$ is linear in $u$, it is not kept between 0 and
# 1. (Its filter is computed from a learned table; the code is `hyena.gated_hyena`.)

# %%
sizes = {"n_layers": 2, "d_model": width, "max_len": length, "vocab_size": len(vocabulary)}
gated = GatedHyenaConfig(filter=LookupFilterConfig(width=8))
family = {
    "annotated_hyena": config,
    "hyena": LanguageModelConfig(pattern=(published,), d_ff=24, **sizes),
    "gated_hyena": LanguageModelConfig(pattern=(gated,), d_ff=24, ffn="gelu", **sizes),
}
for name, member in family.items():
    flax_model = models.build(member)
    weights = flax_model.init(jax.random.key(0), tokens)["params"]
    from_flax = flax_model.apply({"params": weights}, tokens)
    in_numpy = getattr(language_models, name)(jax.tree.map(np.asarray, weights), tokens, member)
    assert np.allclose(in_numpy, from_flax, atol=1e-4 * np.abs(in_numpy).max())
    print(f"{name}: logits {in_numpy.shape} of NumPy and of Flax agree")

# %% [markdown]
# ## Causality, seen from outside
#
# Change one token in the middle, a blank, and compare the logits. Nothing before it moves, exactly;
# everything after it may.

# %%
changed = tokens.copy()
changed[0, 16] = vocabulary.index("e")
logits, new_logits = (language_models.annotated_hyena(params, ids, config) for ids in (tokens, changed))
effect = np.abs(new_logits - logits).max(axis=-1)[0]

fig, ax = plt.subplots(figsize=(7.2, 2))
bars = ax.bar(range(length), effect)
bars[16].set_color("C1")
ax.set_xticks(range(length), labels, fontsize=9, family="monospace")
ax.set(xlabel="time (token)", ylabel="largest change\nof a logit", title="token 16 changed from ␣ to e")

assert text[16] == " "
assert (effect[:16] == 0).all()
assert (effect[16:] > 0).all()

# %% [markdown]
# ## What to take along
#
# - Hyena: project, then alternate long convolutions and gates. The annotated variant adds residual paths and
#   tames the gates by their norm.
# - As a matrix it is a product of Toeplitz and diagonal matrices, which depends on the input as attention
#   does, and costs three FFTs for each convolution in place of $L^2$ weights.
#
# Next: [Hawk](5_hawk.ipynb), which keeps a state instead.
