# %% [markdown]
# # 4. Hyena, step by step and as a matrix
#
# Hyena (Poli et al. 2023) replaces attention by long convolutions with gates between them. This notebook
# takes the operator as it was published, runs one layer of it step by step, writes it as a matrix, looks at
# three variants, and ends with a whole language model in plain NumPy that equals the Flax module with the
# same weights.
#
# In this notebook $B$ is the number of sequences, $L$ their length, $D$ the number of channels: a batch of
# activations is an array $[B, L, D]$. Convolutions run along time, so they work on $[B, D, L]$.

# %%
import jax
import numpy as np
import show
from loops import toeplitz

from hyena_jax import models
from hyena_jax.config import (
    AnnotatedHyenaConfig,
    GatedHyenaConfig,
    HyenaConfig,
    ImplicitFilterConfig,
    LanguageModelConfig,
)
from hyena_jax.inspect import trace
from hyena_jax.mixers import Hyena, mixer_class, mixer_oracle
from hyena_jax.reference import filters, hyena
from hyena_jax.reference.convolution import long_conv
from hyena_jax.reference.layers import dense
from hyena_jax.reference.models import language_model

# %% [markdown]
# ## The operator
#
# A dense layer makes three sequences of every input $u$, and a short filter mixes each channel with its last
# two inputs (FIR, for *finite impulse response*). $v$ will be carried along the sequence, $x_0$ and $x_1$ are
# gates. Then $v$ is gated, convolved with a long filter $h$, and gated again:
#
# $$x_0, x_1, v = \mathrm{FIR}_3(u W + c), \qquad
#   y = x_0 \odot \big( h * (x_1 \odot v) + b \odot x_1 \odot v \big), \qquad
#   \text{output} = y \, W_o + c_o .$$
#
# [Poli et al. 2023, section 3](https://arxiv.org/abs/2302.10866). Oracle:
# [`hyena`](../../hyena_jax/reference/hyena.py). Code: [`Hyena`](../../hyena_jax/mixers/hyena.py), with
# [`long_conv`](../../hyena_jax/ops/long_conv.py).
#
# $h$ is an implicit filter ([notebook 3](3_filters.ipynb)), as long as the sequence; $b$ is a weight for each
# channel, which lets the convolution's own input pass (the *skip*). The convolution carries, the gates
# select. This is *order* 2. Order $N$ has gates $x_0, \dots, x_{N-1}$, and repeats gate and convolution
# $N - 1$ times, each time with its own filter, before $x_0$ gates the result.
#
# In the code below `seq` has everything that happens along the sequence ([notebook 9](9_own_mixer.ipynb)):
# `seq.filters` evaluates $h$, and `seq.conv` is the convolution with its skip. `_over_head` and `_mix_heads`
# are for options that this notebook leaves alone. The published operator is the part after `else`.

# %%
show.code(Hyena.mix)

# %% [markdown]
# ## A text and a model
#
# Tokens are characters here. The model embeds each of them and sends the result through two layers. It is not
# trained: this notebook is about what is computed, not about what is learned. `trace` gives what enters each
# layer.

# %%
text, other_text = "the hyena laughs at the long grass.", "the grass laughs at the long hyena."
vocabulary = sorted(set(text))
tokens, other_tokens = (np.array([[vocabulary.index(c) for c in words]]) for words in (text, other_text))
length, width = tokens.shape[1], 12


def model_of(mixer_config):
    """A model of two layers with this mixer, its config, and its parameters."""
    sizes = {"n_layers": 2, "d_model": width, "d_ff": 24, "max_len": length, "vocab_size": len(vocabulary)}
    config = LanguageModelConfig(pattern=(mixer_config,), **sizes)
    model = models.build(config)
    return model, config, jax.tree.map(np.asarray, model.init(jax.random.key(0), tokens)["params"])


small = ImplicitFilterConfig(emb_dim=5, width=16)
published = HyenaConfig(order=2, gating="gate_first", filter=small, init="torch")
model, config, params = model_of(published)
u, other_u = (
    np.float64(trace(model, params, ids).layers[0].inputs) for ids in (tokens, other_tokens)
)  # [B, L, D]
layer = params["blocks_0"]["mixer"]

print(f"{length} tokens, {len(vocabulary)} different ones, {width} channels")
for path, leaf in jax.tree.leaves_with_path(layer):
    print(f"  {jax.tree_util.keystr(path, simple=True, separator='/')}: {leaf.shape}")

# %% [markdown]
# ## Step by step
#
# Each line is one of the equation. `projections` is the dense layer with the FIR.

# %%
x_0, x_1, v = hyena.projections(layer, u, 3)  # each [B, D, L]
h, b = filters.implicit(layer["filter"], 1, length, length, published.filter)[0], layer["skip"][0]
gated = x_1 * v
carried = long_conv(gated, h, b)  # h * gated + b gated
y = x_0 * carried
output = dense(layer["out_proj"], y.transpose(0, 2, 1))

steps = {
    "v": v[0],
    "gate $x_1$": x_1[0],
    "$x_1 v$": gated[0],
    "h * $x_1 v$: carried along": long_conv(gated, h, 0 * b)[0],
    "gate $x_0$": x_0[0],
    "y": y[0],
}
letters = text.replace(" ", "␣")
labels = {"xlabel": "time (token)", "ylabel": "channel", "names": letters}
show.matrices(steps, n_rows=2, height=3.6, aspect="auto", **labels)

# %% [markdown]
# Read the rows of a panel from left to right: each is one channel over time. (Each panel has its own scale;
# red is positive, blue negative.) What is carried along is smoother in time than $x_1 v$: the filters start
# smooth. That is the whole layer.
#
# ## Hyena is a matrix that depends on its input
#
# Attention multiplies $v$ by a matrix of weights that it computes from the input. So does Hyena; only, nobody
# needs to write the matrix down. A convolution is the Toeplitz matrix $S_h$ ([notebook
# 2](2_causal_convolution.ipynb)), a gate is a diagonal matrix. For one channel,
#
# $$y = M v, \qquad M = D_0 \, (S_h + b I) \, D_1, \qquad M_{t,s} = x_0[t] \; h_{t-s} \; x_1[s] \ (s < t).$$
#
# [Poli et al. 2023, section 3.2](https://arxiv.org/abs/2302.10866). Oracle:
# [`toeplitz`](loops.py). Code, for any mixer:
# [`mixing`](../../hyena_jax/inspect/mixers.py).
#
# The filters are fixed after training. The gates are computed from the text, so $M$ changes with the text:
# here is the matrix of one channel for two texts of the same words.

# %%
channel = 3


def matrix_of(x):
    """M [L, L] of the channel, for one layer's input x [1, L, D]."""
    x_0, x_1, _ = (part[0, channel] for part in hyena.projections(layer, x, 3))
    return np.diag(x_0) @ (toeplitz(h[channel]) + b[channel] * np.eye(length)) @ np.diag(x_1)


matrix, other_matrix = matrix_of(u), matrix_of(other_u)
panels = {
    "filter alone: $S_h$": toeplitz(h[channel]),
    "M, first text": matrix,
    "M, second text": other_matrix,
}
below = {title: np.tril(values, -1) for title, values in panels.items()}
show.matrices(below, height=2.9, xlabel="input time s", ylabel="output time t")

# %% [markdown]
# (Without the diagonal, the skip, which would outshine the rest.) On the left every diagonal has one colour:
# the filter treats all times alike. On the right the gates make every row and column different: what a token
# collects from the past depends on the token, and on what is there. Two texts of the same words in another
# order have different matrices. They agree where the words do, at the start and within `laughs at the long`,
# because these gates see three tokens. And no token sees a later one: above the diagonal everything is zero.
#
# ## Three variants
#
# **Convolution first.** The paper's definition convolves before it gates, and so has a filter for each gate:
#
# $$v \;\leftarrow\; x_n \odot ( h_n * v + b_n \odot v ), \qquad n = 1, \dots, N .$$
#
# **Annotated.** The same with residual paths, and with each gate divided by its length over the channels, so
# that no gate can be huge. First the layer's input is added, $v \leftarrow v + u$; then
#
# $$v \;\leftarrow\; v + \frac{x_n}{\lVert x_n \rVert} \odot ( h_n * v + b_n \odot v ), \qquad
#   \text{output} = v + v W_o + c_o .$$
#
# **Gated.** $v$ and $g$ are two projections of $u$; $g$, which is not kept between 0 and 1, weighs a long
# convolution against a short one:
#
# $$y = (h * v) \odot g + \mathrm{FIR}(u) \odot (1 - g) .$$
#
# The first is equation 6 of [Poli et al. 2023](https://arxiv.org/abs/2302.10866). Oracles:
# [`hyena`](../../hyena_jax/reference/hyena.py), [`annotated_hyena`](../../hyena_jax/reference/hyena.py),
# [`gated_hyena`](../../hyena_jax/reference/hyena.py). Code: [`Hyena`](../../hyena_jax/mixers/hyena.py),
# [`AnnotatedHyena`](../../hyena_jax/mixers/hyena.py),
# [`GatedHyena`](../../hyena_jax/mixers/hyena.py).
#
# Each variant is a few lines in NumPy, such as this one:

# %%
show.code(hyena.annotated_hyena)

# %%
variants = {
    "published": published,
    "convolution first": HyenaConfig(gating="conv_first", filter=small),
    "annotated": AnnotatedHyenaConfig(),
    "gated": GatedHyenaConfig(),
}
layer_errors = {}
for name, variant in variants.items():
    module = mixer_class(variant)(width, length, variant)
    in_flax, weights = module.init_with_output(jax.random.key(0), np.float32(u))
    in_numpy = mixer_oracle(variant)(weights["params"], u, length)
    layer_errors[name] = np.abs(in_flax - in_numpy).max()

# %% [markdown]
# ## The whole model in NumPy
#
# Embedding, blocks of a mixer and a feed-forward layer, a last norm, and the embedding again as the output
# head: `language_model` puts the pieces together, around any mixer's oracle. It gives the logits of the Flax
# model.


# %%
def logits_of(params, tokens, config):
    """The logits [B, L, V] of a model whose layers have one kind of mixer, in NumPy."""
    oracle = mixer_oracle(config.pattern[0])
    return language_model(params, tokens, config, [lambda params, x: oracle(params, x, length)])


logit_errors = {}
for name, variant in variants.items():
    flax_model, its_config, weights = model_of(variant)
    from_flax = flax_model.apply({"params": weights}, tokens)
    logit_errors[name] = np.abs(logits_of(weights, tokens, its_config) - from_flax).max()
    print(f"{name}: logits {from_flax.shape} of NumPy and of Flax differ by at most {logit_errors[name]:.0e}")

# %% [markdown]
# ## Causality, seen from outside
#
# Change one token in the middle, a blank, and compare the logits. Nothing before it moves, exactly;
# everything after it may.

# %%
changed = tokens.copy()
changed[0, 16] = vocabulary.index("e")
effect = np.abs(logits_of(params, changed, config) - logits_of(params, tokens, config)).max(axis=-1)[0]

labels = {"xlabel": "time (token)", "ylabel": "largest change of a logit"}
show.bars(effect, letters, marked=16, title="token 16 changed from ␣ to e", **labels)

# %% [markdown]
# ## What to take along
#
# - Hyena: project, then alternate gates and long convolutions.
# - As a matrix it is a product of Toeplitz and diagonal matrices, which depends on the input as attention
#   does, and costs three FFTs for each convolution in place of $L^2$ weights.
# - Variants move the gate, add residual paths or tame the gates by their norm.
#
# Next: [Hawk](5_hawk.ipynb), which keeps a state instead.
#
# ## Checks

# %%
# The steps are the layer: of the oracle, and of the Flax module.
assert np.allclose(output, mixer_oracle(published)(layer, u, length))
module = Hyena(width, length, published)
assert np.allclose(output, module.apply({"params": layer}, np.float32(u)), atol=1e-5)
# What is carried along changes less from token to token, relative to its size.
before, after = (np.std(np.diff(steps[name])) / np.std(steps[name]) for name in list(steps)[2:4])
assert after < 0.7 * before
# The matrix is the channel; it is causal, and depends on the text.
assert np.allclose(matrix @ v[0, channel], y[0, channel])
assert (np.triu(matrix, 1) == 0).all()
start, middle = slice(0, 4), slice(11, 29)
assert all(np.allclose(matrix[same, same], other_matrix[same, same]) for same in (start, middle))
assert not np.allclose(matrix[4:11], other_matrix[4:11])
# NumPy and Flax agree, in layers and in whole models.
assert max(layer_errors.values()) < 1e-4
assert max(logit_errors.values()) < 1e-4
# No token sees a later one.
assert text[16] == " "
assert (effect[:16] == 0).all()
assert (effect[16:] > 0).all()
