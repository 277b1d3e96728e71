# %% [markdown]
# # 2. Causal convolutions
#
# A language model predicts the next token from the earlier ones. Its convolutions must not look ahead: output
# $y_t$ may depend on $u_0 \dots u_t$ alone. That is called **causal**. This notebook tells a convolution from
# its mirror image, shows how an FFT breaks causality, mends it in two ways, and writes it all as matrices.

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np

from hyena_jax.ops import long_conv as ops
from hyena_jax.reference.convolution import (
    circular_convolution,
    cross_correlation,
    linear_convolution,
    toeplitz,
    wrapped_convolution,
)
from hyena_jax.reference.fourier import dft, inverse_dft

plt.style.use("tour.mplstyle")
rng = np.random.default_rng(0)

# %% [markdown]
# ## Convolution and cross-correlation
#
# They differ by one sign:
#
# $$\text{convolution: } y_t = \sum_s h_s \, u_{t-s} \qquad\qquad
#   \text{cross-correlation: } c_t = \sum_s h_s \, u_{t+s}.$$
#
# A convolution *answers*: every input starts a copy of $h$ after it. A correlation *searches*: it lays the
# pattern $h$ on the sequence from time $t$ on, and $c_t$ is large where they agree. Reverse the taps, and one
# becomes the other.

# %%
pattern = np.array([1.0, 3.0, 2.0, 1.0])  # steep rise, slow fall
u = np.zeros(56)
u[8:12] = pattern
u[25:29] = pattern
convolved = linear_convolution(u, pattern)[:56]
correlated = cross_correlation(u, pattern)[3:]  # the first three belong to times -3, -2 and -1

fig, (top, bottom) = plt.subplots(2, 1, figsize=(7.2, 3.6), sharex=True)
top.bar(np.arange(56), u, color="0.6")
top.set(ylabel="$u_t$", title="the pattern starts at 8 and at 25")
bottom.plot(convolved, ".-", label="convolution: starts at 8, ends late")
bottom.plot(correlated, ".-", label="correlation: largest at 8 and 25")
bottom.set(xlabel="time t", ylabel="output")
bottom.legend(loc="upper right")

assert set(np.argsort(correlated)[-2:]) == {8, 25}
assert np.allclose(linear_convolution(u, pattern[::-1]), cross_correlation(u, pattern))
assert np.flatnonzero(convolved)[0] == 8  # nothing comes out before the first input
assert np.flatnonzero(correlated)[0] == 8 - 3  # the correlation looks ahead

# %% [markdown]
# Two places where this matters:
#
# - The layers called `Conv1d` in deep-learning libraries compute correlations. For learned taps that is only
#   a matter of names, until you convert weights: in this package's short filters (`short_taps` in [notebook
#   4](4_hyena.ipynb)) the first tap meets the current input, there the last one does.
# - The gradient of a convolution is a correlation. If output $y_t$ reacts to inputs up to $t$, then input
#   $u_t$ is blamed by outputs from $t$ on. With $g_t$ the gradient with respect to $y_t$, the gradient with
#   respect to $u_t$ is $\sum_s h_s \, g_{t+s}$.

# %%
h = rng.normal(size=16)
u, g = rng.normal(size=(2, 16))
gradient = jax.grad(lambda u: (g * ops.direct_conv(u, np.float32(h))).sum())(np.float32(u))

correlated = cross_correlation(g, h)[15:]  # from time 0 on: 16 taps reach back to time -15
assert np.allclose(gradient, correlated, atol=1e-4)

# %% [markdown]
# ## The end leaks into the start
#
# The convolution theorem holds for the circular convolution. In a sequence of $n$ steps, the copy that an
# input starts near the end runs over the edge and comes back in at the front. For a language model this is
# cheating: the first words would know the last ones.

# %%
length = 64
u = np.zeros(length)
u[[6, 52]] = 1.0, 1.5
h = np.exp(-np.arange(length) / 10)
circular = inverse_dft(dft(h) * dft(u)).real
causal = linear_convolution(u, h)[:length]

fig, ax = plt.subplots()
ax.plot(circular, color="C1", label="circular: product of two DFTs of 64 points")
ax.plot(causal, color="C0", label="causal")
ax.fill_between(
    np.arange(length), causal, circular, color="C1", alpha=0.25, label="the end, leaked into the start"
)
ax.set(xlabel="time t", ylabel="$y_t$")
ax.legend(loc="upper center")

assert np.allclose(circular, circular_convolution(u, h))
assert circular[0] > 0.4
assert causal[0] == 0  # before the first input

# %% [markdown]
# ## First remedy: zeros
#
# Append $L$ zeros to both sequences and transform $2L$ points. What runs over the edge now falls into the
# zeros, and we cut it off. This is what most code does. It transforms twice as many points as there are data.

# %%
padded = [np.concatenate([signal, np.zeros(length)]) for signal in (u, h)]
with_zeros = inverse_dft(dft(padded[0]) * dft(padded[1])).real

fig, ax = plt.subplots()
ax.plot(with_zeros, color="C0")
ax.axvspan(length, 2 * length, color="0.9")
ax.text(1.5 * length, 1.0, "what ran over the edge:\ncut off", ha="center")
ax.set(xlabel="time t", ylabel="$y_t$")

assert np.allclose(with_zeros[:length], causal)

# %% [markdown]
# ## Second remedy: a right angle
#
# Instead of keeping the overflow away, mark it. Choose $w$ with $w^L = i$, the imaginary unit: $w$ is a
# quarter of a turn, in $L$ steps. Multiply both sequences by $w^t$, convolve them circularly, and divide by
# $w^t$. A term that does not wrap has $w^s w^{t-s} / w^t = 1$: unchanged. A term that wraps has
# $w^s w^{L+t-s} / w^t = w^L = i$:
#
# $$y_t = \sum_{s \le t} h_s \, u_{t-s} \; + \; i \sum_{s > t} h_s \, u_{L+t-s}.$$
#
# For real sequences the two sums stand at a right angle in the complex plane. **The real part is the causal
# convolution**, the imaginary part is everything that leaked, and no zeros were needed: $L$ complex points in
# place of $2L$ real ones. (Crandall and Fagin 1994 used such weights to multiply huge integers.)

# %%
w = np.exp(1j * np.pi / 2 / length) ** np.arange(length)
twisted = inverse_dft(dft(w * h) * dft(w * u)) / w

fig, ax = plt.subplots()
ax.plot(twisted.real, color="C0", label="real part: causal")
ax.plot(twisted.imag, color="C1", label="imaginary part: what wrapped around")
ax.set(xlabel="time t", ylabel="$y_t$")
ax.legend(loc="upper center")

assert np.allclose(twisted, wrapped_convolution(u, h, 1j))
assert np.allclose(twisted.real, causal)
assert np.allclose(twisted.real + twisted.imag, circular)

# %% [markdown]
# This is how `hyena_jax.ops.long_conv.fft_conv` works, the convolution behind every long filter on a CPU or
# GPU:

# %%
fast = ops.fft_conv(np.float32(u), np.float32(h))

assert np.allclose(fast, causal, atol=1e-5)

# %% [markdown]
# ## Convolutions are matrices
#
# A causal convolution is linear in $u$, so it is a matrix: $y = S_h u$ with $S_h[t, s] = h_{t-s}$ on and
# below the diagonal, and zeros above it. Every diagonal is constant. Such a matrix is called **Toeplitz**;
# zeros above the diagonal *are* causality. The circular convolution fills the upper triangle with the wrapped
# taps, and the right angle turns that triangle imaginary.

# %%
size = 12
h = np.exp(-np.arange(size) / 4)
causal_matrix = toeplitz(h)
columns = np.eye(size)
circulant = np.stack([circular_convolution(column, h) for column in columns], axis=1)
right_angle = np.stack([wrapped_convolution(column, h, 1j) for column in columns], axis=1)

fig, axes = plt.subplots(1, 4, figsize=(8, 2.4), sharey=True, layout="compressed")
panels = {
    "causal: Toeplitz $S_h$": causal_matrix,
    "circular": circulant,
    "right angle: real part": right_angle.real,
    "right angle: imaginary": right_angle.imag,
}
for ax, (title, matrix) in zip(axes, panels.items(), strict=True):
    image = ax.imshow(matrix, vmin=0, vmax=1, cmap="Blues", aspect="equal")
    assert (matrix > -1e-12).all()  # no weight is negative
    ax.set(title=title, xlabel="input time s", xticks=[0, 5, 10], yticks=[0, 5, 10])
axes[0].set_ylabel("output time t")
fig.colorbar(image, ax=axes, label="weight")

u = rng.normal(size=size)
assert np.allclose(causal_matrix @ u, linear_convolution(u, h)[:size])
assert np.allclose(right_angle.real, causal_matrix)
assert (np.triu(causal_matrix, 1) == 0).all()

# %% [markdown]
# As matrices the facts of notebook 1 read as follows, with $F$ the matrix of the DFT:
#
# - two filters in a row are one filter: $S_g S_h = S_{g*h} = S_h S_g$, in any order;
# - waves are the eigenvectors of a circular convolution: with $C_h$ its matrix, the second one in the
#   picture, $F C_h F^{-1}$ is diagonal, with the spectrum of $h$ on it.

# %%
g = rng.normal(size=size)
both = toeplitz(linear_convolution(g, h)[:size])
fourier = dft(np.eye(size))
diagonal = fourier @ circulant @ np.linalg.inv(fourier)

assert np.allclose(toeplitz(g) @ toeplitz(h), both)
assert np.allclose(toeplitz(h) @ toeplitz(g), both)
assert np.allclose(diagonal, np.diag(dft(h)))

# %% [markdown]
# ## What to take along
#
# - A convolution looks back, a correlation looks ahead; gradients of one are the other.
# - An FFT wraps around. Zeros keep the overflow away; a quarter turn of the weights moves it into the
#   imaginary part.
# - A causal filter is a lower-triangular Toeplitz matrix that nobody has to write down.
#
# Next: [where long filters come from](3_filters.ipynb).
