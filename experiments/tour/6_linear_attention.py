# %% [markdown]
# # 6. Fastmax and AFT: two relatives of attention
#
# Attention compares every token with every other. This notebook looks at two relatives that reach the same
# goal, a weighted mean of values: **fastmax** changes the weight to a polynomial, which factorises; **AFT**
# drops the comparison and keeps one key per channel. Fastmax, and AFT in its simple form, never form the
# $L \times L$ matrix of weights.
#
# Every token $t$ has a query $q_t$, a key $k_t$ and a value $v_t$, vectors of $d$ channels. All means are
# causal: token $t$ sees the tokens $s \le t$.

# %%
import math

import jax
import matplotlib.pyplot as plt
import numpy as np

from hyena_jax.config import AFTFullConfig, AFTSimpleConfig, FastmaxConfig
from hyena_jax.mixers import AFTFull, AFTSimple, Fastmax
from hyena_jax.ops import fastmax as ops
from hyena_jax.reference import aft
from hyena_jax.reference.attention import softmax_attention
from hyena_jax.reference.fastmax import attention, fastmax, features, running_sums, standardize

plt.style.use("tour.mplstyle")
rng = np.random.default_rng(0)
LENGTH, WIDTH = 40, 4
q, k, v = rng.normal(size=(3, LENGTH, WIDTH))
one_document = np.zeros((1, LENGTH))  # all tokens belong to one text

# %% [markdown]
# ## Softmax attention
#
# $$o_t = \frac{\sum_{s \le t} e^{q_t \cdot k_s / \sqrt d} \; v_s}
#              {\sum_{s \le t} e^{q_t \cdot k_s / \sqrt d}} .$$
#
# The weight of token $s$ grows with the product $q_t \cdot k_s$, a number for each *pair* of tokens. With
# $o = A v$, the matrix $A$ of all weights has $L^2 / 2$ entries, and each row sums to 1. To read any
# operator's matrix we feed it one impulse at each time as values.

# %%
impulses = np.eye(LENGTH)


def matrix_of(operator):
    """The matrix of weights: the outputs for an impulse at each time."""
    return np.stack([operator(np.tile(column[:, None], WIDTH))[:, 0] for column in impulses], axis=1)


def one_head(x):
    """x [L, d] as one sequence with one head, [1, L, 1, d]."""
    return x[None, :, None]


def softmax(values):
    return softmax_attention(one_head(q), one_head(k), one_head(values), one_document)[0, :, 0]


weights = matrix_of(softmax)

assert np.allclose(weights.sum(axis=1), 1)
assert np.allclose(weights @ v, softmax(v))

# %% [markdown]
# ## A polynomial in place of the exponential
#
# The exponential forces us to look at each pair, because $e^{q \cdot k}$ does not split into a part of $q$
# and a part of $k$ with few numbers. Its Taylor polynomial does. Fastmax (Gerami et al. 2024) takes
#
# $$f(x) = 1 + x + \tfrac{1}{2} x^2 \approx e^x, \qquad x = q_t \cdot k_s / \sqrt d .$$
#
# It is never below $\frac12$, so all weights are positive and the sum that we divide by is safe. (Every even
# degree stays positive; odd degrees do not.) The polynomial is close to the exponential near 0. To keep $x$
# around 1 in size for most pairs, queries and keys are *standardised*: each token's $d$ channels get mean 0
# and variance 1. (The largest $|x|$ that is left is $\sqrt d$.)

# %%
x = np.linspace(-3, 3, 200)
fig, ax = plt.subplots(figsize=(7.2, 2.4))
ax.plot(x, np.exp(x), color="0.5", label="$e^x$")
ax.plot(x, 1 + x + x**2 / 2, color="C0", label="degree 2: at least 1/2")
ax.plot(x, 1 + x + x**2 / 2 + x**3 / 6, color="C1", label="degree 3: negative below x = -1.6")
ax.axhline(0, color="0.8", linewidth=0.8)
ax.set(xlabel="x", ylabel="f(x)", ylim=(-3, 12))
ax.legend()

assert np.isclose((1 + x + x**2 / 2).min(), 0.5, atol=1e-3)
assert (1 + x + x**2 / 2 + x**3 / 6 < 0)[x < -1.6].all()
wide = np.linspace(-20, 20, 1000)
for degree in range(1, 8):
    terms = [wide**power / math.factorial(power) for power in range(degree + 1)]
    assert (sum(terms).min() > 0) == (degree % 2 == 0)

standard_q, standard_k = standardize(q, eps=1e-5), standardize(k, eps=1e-5)
of_pairs = standard_q @ standard_k.T / np.sqrt(WIDTH)
assert 0.8 < np.sqrt((of_pairs**2).mean()) < 1.25
assert np.abs(of_pairs).max() <= np.sqrt(WIDTH)

# %% [markdown]
# ## The factorisation
#
# Write $x = q \cdot k$ with the scale $1/\sqrt d$ already in $q$. Each power of a dot product is a dot
# product of longer vectors, $(q \cdot k)^2 = \sum_{ij} (q_i q_j)(k_i k_j)$. So there is a map $\varphi$ with
#
# $$f(q \cdot k) = \varphi(q) \cdot \varphi(k), \qquad
#   \varphi(x) = \Big( 1,\; x_1, \dots, x_d,\; \tfrac{1}{\sqrt 2} x_1 x_1, \tfrac{1}{\sqrt 2} x_1 x_2, \dots,
#   \tfrac{1}{\sqrt 2} x_d x_d \Big) .$$
#
# $\varphi(x)$ are the **features** of a vector $x$; there are $M = 1 + d + d^2$ of them. Now the sum over $s$
# can be done first, for all queries at once:
#
# $$o_t = \frac{\sum_{s \le t} \varphi(q_t) \cdot \varphi(k_s)\, v_s}
#              {\sum_{s \le t} \varphi(q_t) \cdot \varphi(k_s)}
#       = \frac{\varphi(q_t) \cdot S_t}{\varphi(q_t) \cdot z_t}, \qquad
#   S_t = S_{t-1} + \varphi(k_t)\, v_t^{\top}, \quad z_t = z_{t-1} + \varphi(k_t) .$$
#
# The brackets moved, nothing else. But where there was a matrix of pairs there is now a recurrence with a
# state of $M (d + 1)$ numbers: attention has become linear in the length.

# %%
scaled_q = standard_q / np.sqrt(WIDTH)
phi_q, phi_k = features(scaled_q[7], p=2), features(standard_k[3], p=2)
product = scaled_q[7] @ standard_k[3]


def by_pairs(values):
    """The mean by its definition, with the weight of each pair."""
    heads = one_head(scaled_q), one_head(standard_k), one_head(values)
    return fastmax(*heads, p=2, segment_ids=one_document, causal=True, floor=1e-3)[0, :, 0]


def by_sums(values):
    """The mean by running sums."""
    return running_sums(scaled_q, standard_k, values, p=2)


print(
    f"f(q·k) = {1 + product + product**2 / 2:.6f}, features' product = {phi_q @ phi_k:.6f}, M = {len(phi_q)}"
)

assert np.isclose(phi_q @ phi_k, 1 + product + product**2 / 2)
assert np.allclose(by_sums(v), by_pairs(v))

# %% [markdown]
# Here are the matrices of softmax and of fastmax for the same standardised queries and keys. Both are read
# off by impulses; fastmax never forms its own. The polynomial is flatter than the exponential: the largest
# weight of a row is smaller, on average. So fastmax cannot look at one token as sharply, which is the price.


# %%
def standard_softmax(values):
    heads = one_head(standard_q), one_head(standard_k), one_head(values)
    return softmax_attention(*heads, one_document)[0, :, 0]


panels = {"softmax": matrix_of(standard_softmax), "fastmax, degree 2": matrix_of(by_sums)}
fig, axes = plt.subplots(1, 2, figsize=(6.4, 3), sharey=True, layout="compressed")
for ax, (title, matrix) in zip(axes, panels.items(), strict=True):
    image = ax.imshow(matrix, vmin=0, vmax=0.4, cmap="Blues", aspect="equal")
    ax.set(title=title, xlabel="key time s")
    assert np.allclose(matrix.sum(axis=1), 1)
    assert (matrix >= 0).all()
    assert (np.triu(matrix, 1) == 0).all()
axes[0].set_ylabel("query time t")
fig.colorbar(image, ax=axes, label="weight", extend="max")  # the first row has the weight 1

largest = [matrix[10:].max(axis=1).mean() for matrix in panels.values()]
print(f"largest weight of a row from 10 on, mean: softmax {largest[0]:.2f}, fastmax {largest[1]:.2f}")
assert largest[1] < 0.8 * largest[0]

# %% [markdown]
# When does it pay? By pairs, a head takes about $L^2 d$ multiplications for the weights and as many for the
# values (half, if it skips later tokens); by sums, $2 L M d$. With all products of two channels counted once,
# $M = (d+1)(d+2)/2$, which is what `hyena_jax.ops.fastmax` does. So the sums win from a length of about $2M$
# on (the dots): soon for narrow heads, late for wide ones. The picture counts pairs that skip later tokens.

# %%
lengths = 2 ** np.arange(6, 17)
fig, ax = plt.subplots()
for index, d in enumerate((8, 32, 64)):
    n_features = ops.features(np.zeros(d, np.float32), 2).size
    ax.loglog(lengths, 2 * lengths * n_features * d, base=2, color=f"C{index}", label=f"sums, d = {d}")
    ax.loglog(
        lengths, lengths.astype(float) ** 2 * d, "--", base=2, color=f"C{index}", label=f"pairs, d = {d}"
    )
    equal = 2 * n_features
    ax.plot(equal, equal**2 * d, "o", color=f"C{index}", markersize=7)
    assert n_features == (d + 1) * (d + 2) // 2
    assert 2 * equal * n_features * d == equal**2 * d
ax.set(xlabel="length L", ylabel="multiplications for one head")
ax.legend(ncols=3)

# %% [markdown]
# The whole layer adds a dense layer for $q, k, v$ and one for the output. NumPy and the Flax module agree:

# %%
x = rng.normal(size=(1, LENGTH, 8)).astype(np.float32)


def compare(module, config, oracle):
    """The largest difference between the Flax module and the NumPy function with the same parameters."""
    params = module.init(jax.random.key(1), x)["params"]
    in_numpy = oracle(config, jax.tree.map(np.asarray, params), x, LENGTH, one_document)
    return np.abs(module.apply({"params": params}, x) - in_numpy).max()


config = FastmaxConfig(n_heads=2)

assert compare(Fastmax(8, LENGTH, config), config, attention) < 1e-5

# %% [markdown]
# ## AFT: no products of queries and keys at all
#
# The attention-free transformer (Zhai et al. 2021) gives each channel its own weighted mean. The key alone is
# the exponent, plus a learned bias $w_{t,s}$ for the two positions; the query only gates the result:
#
# $$y_t = \sigma(q_t) \odot
#   \frac{\sum_{s \le t} e^{k_s + w_{t,s}} \odot v_s}{\sum_{s \le t} e^{k_s + w_{t,s}}} .$$
#
# Everything is element-wise over the channels. The variants differ in $w$. *Full* learns all pairs of
# positions, as a product of two thin matrices. *Local* keeps $w$ in a window and has 0 (not $-\infty$!)
# outside. *Conv* lets $w$ depend on the lag $t - s$ alone, and has 0 after its taps. *Simple* has $w = 0$.
#
# Only *simple* is nothing but running sums. *Local* and *conv* are running sums over the keys before the
# window, and a sum over the pairs within it. *Full* does work for all pairs of positions, as attention does.

# %%
u_rows, v_rows = rng.normal(size=(2, LENGTH, 3))
factors = {"position_queries": u_rows, "position_keys": v_rows}
taps = {
    "position_taps": rng.normal(size=(1, 9)),
    "position_scale": np.ones(1),
    "position_bias": np.zeros(1),
}
biases = {
    "full": aft.full_biases(factors, LENGTH),
    "local, window 9": aft.local_biases(factors, LENGTH, 9),
    "conv, 9 taps": aft.conv_biases(taps, LENGTH, eps=1e-8)[0],
    "simple": np.zeros((LENGTH, LENGTH)),
}
fig, axes = plt.subplots(1, 4, figsize=(8.4, 2.4), sharey=True, layout="compressed")
for ax, (name, w) in zip(axes, biases.items(), strict=True):
    image = ax.imshow(np.tril(w), vmin=-4, vmax=4, aspect="equal")
    ax.set(title=f"w: {name}", xlabel="key time s")
axes[0].set_ylabel("query time t")
fig.colorbar(image, ax=axes, label="bias $w_{t,s}$", extend="both")

assert all((np.tril(biases[name], -9) == 0).all() for name in ("local, window 9", "conv, 9 taps"))
assert (np.tril(biases["full"], -9) != 0).sum() == (LENGTH - 9) * (LENGTH - 8) // 2  # all earlier pairs

# %% [markdown]
# With $w = 0$ numerator and denominator are running sums: a recurrence with two numbers for each channel. One
# trap is left. $e^{k_s}$ overflows for large keys, and subtracting the largest key of the whole sequence
# would look ahead. The remedy is a third number, the largest key *so far*; when it moves, the two sums are
# rescaled.

# %%
one_channel_each = np.zeros((WIDTH, LENGTH, LENGTH))
by_definition = aft.aft(q[None], k[None], v[None], one_channel_each, one_document)[0]
huge = 1000 * k
with_overflow = aft.simple(q, huge, v)

assert np.allclose(aft.simple(q, k, v), by_definition)
assert np.isfinite(with_overflow).all()
assert np.allclose(with_overflow, aft.aft(q[None], huge[None], v[None], one_channel_each, one_document)[0])

simple, full = AFTSimpleConfig(), AFTFullConfig(rank=4)

assert compare(AFTSimple(8, LENGTH, simple), simple, aft.aft_simple) < 1e-5
assert compare(AFTFull(8, LENGTH, full), full, aft.aft_full) < 1e-5

# %% [markdown]
# ## What to take along
#
# - If the weight of a pair is a dot product of features, sum over keys first: a fixed state replaces the
#   matrix.
# - Fastmax's features are the monomials of a Taylor polynomial; there are about $d^2/2$ of them, so heads
#   stay narrow.
# - AFT-simple is a running mean, weighted by $e^{k}$; the running maximum keeps it finite and causal.
#
# Next: [decoding](7_decoding.ipynb), one token at a time.
