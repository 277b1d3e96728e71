# %% [markdown]
# # 6. Fastmax and AFT: two relatives of attention
#
# Attention compares every token with every other. This notebook looks at two relatives that reach the same
# goal, a weighted mean of values, without a matrix of weights: **fastmax** changes the weight to a
# polynomial, which factorises; **AFT** drops the comparison and keeps one key per channel.
#
# Every token $t$ has a query $q_t$, a key $k_t$ and a value $v_t$, vectors of $d$ channels. All means are
# causal: token $t$ sees the tokens $s \le t$.

# %%
import math

import jax
import numpy as np
import show
from loops import features, running_sums, simple

from hyena_jax.config import AFTFullConfig, AFTSimpleConfig, FastmaxConfig
from hyena_jax.mixers import mixer_class, mixer_oracle
from hyena_jax.ops import fastmax as ops
from hyena_jax.reference import aft
from hyena_jax.reference.attention import fastmax, softmax_attention, standardize

rng = np.random.default_rng(0)
LENGTH, WIDTH = 40, 4
q, k, v = rng.normal(size=(3, LENGTH, WIDTH))
one_document = np.zeros((1, LENGTH))  # all tokens belong to one text


def heads(*sequences):
    """Each [L, d] as one sequence with one head, [1, L, 1, d]."""
    return (x[None, :, None] for x in sequences)


def matrix_of(operator):
    """The weights [L, L] of an operator on values: its answers to an impulse at each time."""
    answers = [operator(np.tile(impulse[:, None], WIDTH))[:, 0] for impulse in np.eye(LENGTH)]
    return np.stack(answers, axis=1)


# %% [markdown]
# ## Softmax attention
#
# $$o_t = \frac{\sum_{s \le t} e^{q_t \cdot k_s / \sqrt d} \; v_s}
#              {\sum_{s \le t} e^{q_t \cdot k_s / \sqrt d}} .$$
#
# [Vaswani et al. 2017, section 3.2](https://arxiv.org/abs/1706.03762). Oracle:
# [`softmax_attention`](../../hyena_jax/reference/attention.py). Code:
# [`softmax_attention`](../../hyena_jax/ops/attention.py).
#
# The weight of token $s$ grows with the product $q_t \cdot k_s$, a number for each *pair* of tokens. With
# $o = A v$, the matrix $A$ of all weights has $L^2 / 2$ entries, and each row sums to 1. To read any
# operator's matrix we feed it one impulse at each time as values; that is `matrix_of`.
#
# ## A polynomial in place of the exponential
#
# The exponential forces us to look at each pair, because $e^{q \cdot k}$ does not split into a part of $q$
# and a part of $k$ with few numbers. Its Taylor polynomial does. Fastmax takes
#
# $$f(x) = 1 + x + \tfrac{1}{2} x^2 \approx e^x, \qquad x = q_t \cdot k_s / \sqrt d .$$
#
# [Gerami et al. 2024](https://arxiv.org/abs/2402.07901). Oracle:
# [`fastmax`](../../hyena_jax/reference/attention.py). Code:
# [`fastmax_quadratic`](../../hyena_jax/ops/fastmax.py).
#
# It is never below $\frac12$, so all weights are positive and the sum that we divide by is safe. (Every even
# degree stays positive; odd degrees do not.) The polynomial is close to the exponential near 0. To keep $x$
# around 1 in size for most pairs, queries and keys are *standardised*: each token's $d$ channels get mean 0
# and variance 1. (The largest $|x|$ that is left is $\sqrt d$.)

# %%
x = np.linspace(-3, 3, 200)


def taylor(x, degree):
    return sum(x**power / math.factorial(power) for power in range(degree + 1))


curves = {"$e^x$": np.exp(x), "degree 2: at least 1/2": taylor(x, 2)}
curves |= {"degree 3: negative below x = -1.6": taylor(x, 3)}
show.lines(curves, x, ("thick",), xlabel="x", ylabel="f(x)", ylim=(-3, 12))

# %% [markdown]
# ## The factorisation
#
# Write $x = q \cdot k$ with the scale $1/\sqrt d$ already in $q$. Each power of a dot product is a dot
# product of longer vectors, $(q \cdot k)^2 = \sum_{ij} (q_i q_j)(k_i k_j)$. So there is a map $\varphi$ with
# $f(q \cdot k) = \varphi(q) \cdot \varphi(k)$,
#
# $$\varphi(x) = \Big( 1,\; x_1, \dots, x_d,\; \tfrac{1}{\sqrt 2} x_1 x_1, \tfrac{1}{\sqrt 2} x_1 x_2, \dots,
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
# [Katharopoulos et al. 2020, section 3.3](https://arxiv.org/abs/2006.16236), and Gerami et al. for this
# $\varphi$. Oracles: [`features`](loops.py),
# [`running_sums`](loops.py). Code:
# [`fastmax_causal`](../../hyena_jax/ops/fastmax.py).
#
# The brackets moved, nothing else. But where there was a matrix of pairs there is now a recurrence with a
# state of $M (d + 1)$ numbers: attention has become linear in the length.

# %%
show.code(features, running_sums)

# %%
standard_q, standard_k = standardize(q, eps=1e-5), standardize(k, eps=1e-5)
scaled_q = standard_q / np.sqrt(WIDTH)


def by_pairs(values):
    """The mean by its definition, with the weight of each pair."""
    inputs = heads(scaled_q, standard_k, values)
    return fastmax(*inputs, p=2, segment_ids=one_document, causal=True, floor=1e-3)[0, :, 0]


def by_sums(values):
    """The mean by running sums."""
    return running_sums(scaled_q, standard_k, values, p=2)


def softmax(values):
    """The mean with exponential weights."""
    return softmax_attention(*heads(standard_q, standard_k, values), one_document)[0, :, 0]


# %% [markdown]
# Here are the matrices of softmax and of fastmax for the same standardised queries and keys. Both are read
# off by impulses; fastmax never forms its own. The polynomial is flatter than the exponential: the largest
# weight of a row is smaller, on average. So fastmax cannot look at one token as sharply, which is the price.

# %%
weights = {"softmax": matrix_of(softmax), "fastmax, degree 2": matrix_of(by_sums)}
show.matrices(weights, 0.4, "weight", "Blues", height=3, xlabel="key time s", ylabel="query time t")

sharpest = [matrix[10:].max(axis=1).mean() for matrix in weights.values()]
print("largest weight of a row from 10 on, mean: softmax {:.2f}, fastmax {:.2f}".format(*sharpest))

# %% [markdown]
# When does it pay? By pairs, a head takes about $L^2 d$ multiplications, $L^2 d / 2$ for the weights and as
# many for the values; by sums, $2 L M d$. With all products of two channels counted once,
# $M = (d+1)(d+2)/2$, which is what `hyena_jax.ops.fastmax` does. So the sums win from a length of about $2M$
# on: 90 for heads of 8 channels, 4,290 for heads of 64.

# %%
lengths = 2.0 ** np.arange(6, 17)
crossings, curves = {}, {}
for d in (8, 64):
    n_features = ops.features(np.zeros(d, np.float32), 2).size
    crossings[d] = 2 * n_features
    curves[f"pairs, d = {d}"] = lengths**2 * d
    curves[f"sums, d = {d}"] = 2 * lengths * n_features * d
styles = ("--", "-", "--", "-")
show.lines(curves, lengths, styles, "xy", xlabel="length L", ylabel="multiplications for one head")

# %% [markdown]
# ## AFT: no products of queries and keys at all
#
# The attention-free transformer gives each channel its own weighted mean. The key alone is the exponent, plus
# a learned bias $w_{t,s}$ for the two positions; the query only gates the result:
#
# $$y_t = \sigma(q_t) \odot
#   \frac{\sum_{s \le t} e^{k_s + w_{t,s}} \odot v_s}{\sum_{s \le t} e^{k_s + w_{t,s}}} .$$
#
# [Zhai et al. 2021, section 3](https://arxiv.org/abs/2105.14103). Oracles:
# [`aft`](../../hyena_jax/reference/aft.py), [`simple`](loops.py). Code:
# [`running_sums`](../../hyena_jax/ops/aft.py).
#
# The variants differ in $w$. *Full* learns it for all pairs of positions, and works for all of them as
# attention does; *local* learns it within a window, *conv* for the first lags; *simple* has $w = 0$. Then
# numerator and denominator are running sums, two numbers for each channel. One trap is left: $e^{k_s}$
# overflows for large keys, and subtracting the largest key of the whole sequence would look ahead. The remedy
# is a third number, the largest key *so far*; when it moves, the two sums are rescaled.

# %%
show.code(simple)

# %%
errors = {}
x = rng.normal(size=(1, LENGTH, 8)).astype(np.float32)
for config in (FastmaxConfig(n_heads=2), AFTSimpleConfig(), AFTFullConfig(rank=4)):
    y, variables = mixer_class(config)(8, LENGTH, config).init_with_output(jax.random.key(1), x)
    errors[type(config).__name__] = np.abs(mixer_oracle(config)(variables["params"], x, LENGTH) - y).max()

# %% [markdown]
# ## What to take along
#
# - If the weight of a pair is a dot product of features, sum over keys first: a fixed state replaces the
#   matrix.
# - Fastmax's features are the monomials of a Taylor polynomial; there are about $d^2/2$ of them, so heads
#   stay narrow.
# - AFT-simple is a running mean, weighted by $e^{k}$; the running maximum keeps it finite and causal.
#
# Next: [what the state $S$ remembers](7_matrix_memories.ipynb), and how to make it forget.
#
# ## Checks

# %%
# The matrices are the operators: rows of weights that sum to 1, and no token sees a later one.
assert np.allclose(weights["softmax"] @ v, softmax(v))
for matrix in weights.values():
    assert np.allclose(matrix.sum(axis=1), 1)
    assert (matrix >= 0).all()
    assert (np.triu(matrix, 1) == 0).all()
# Even degrees are positive, and standardised products are around 1.
assert np.isclose(taylor(x=np.linspace(-3, 3, 200), degree=2).min(), 0.5, atol=1e-3)
assert taylor(-1.59, 3) > 0 > taylor(-1.6, 3)
wide = np.linspace(-20, 20, 1000)
assert [degree for degree in range(1, 8) if taylor(wide, degree).min() > 0] == [2, 4, 6]
products = scaled_q @ standard_k.T
assert 0.8 < np.sqrt((products**2).mean()) < 1.25
assert abs(products).max() <= np.sqrt(WIDTH)
# The features' product is the polynomial; sums and pairs agree; fastmax is less sharp.
assert np.isclose(features(scaled_q[7], 2) @ features(standard_k[3], 2), taylor(products[7, 3], 2))
assert np.allclose(by_sums(v), by_pairs(v))
assert sharpest[1] < 0.8 * sharpest[0]
assert crossings == {8: 90, 64: 4290}
# AFT by three numbers is AFT by definition, also where exponentials overflow.
no_bias = np.zeros((WIDTH, LENGTH, LENGTH))
for scale in (1, 1000):
    by_definition = aft.aft(q[None], scale * k[None], v[None], no_bias, one_document)[0]
    assert np.allclose(simple(q, scale * k, v), by_definition)
# The layers are their oracles.
assert max(errors.values()) < 1e-5
