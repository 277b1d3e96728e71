# %% [markdown]
# # 2. Causal convolutions
#
# A language model predicts the next token from the earlier ones. Its convolutions must not look ahead: output
# $y_t$ may depend on $u_0 \dots u_t$ alone. That is called **causal**. This notebook tells a convolution from
# its mirror image, shows how an FFT breaks causality, mends it in two ways, and writes it all as matrices.

# %%
import jax
import numpy as np
import show
from loops import (
    circular_convolution,
    cross_correlation,
    dft,
    inverse_dft,
    linear_convolution,
    toeplitz,
    wrapped_convolution,
)

from hyena_jax.ops import long_conv as ops
from hyena_jax.reference.convolution import long_conv

rng = np.random.default_rng(0)

# %% [markdown]
# ## Convolution and cross-correlation
#
# They differ by one sign:
#
# $$\text{convolution: } y_t = \sum_s h_s \, u_{t-s} \qquad\qquad
#   \text{cross-correlation: } c_t = \sum_s h_s \, u_{t+s}.$$
#
# Oracles: [`linear_convolution`](loops.py),
# [`cross_correlation`](loops.py). Code:
# [`short_conv`](../../hyena_jax/ops/short_conv.py), whose taps are in the order of a convolution. The
# arithmetic of such layers: [Dumoulin and Visin 2016](https://arxiv.org/abs/1603.07285).
#
# A convolution *answers*: every input starts a copy of $h$ after it. A correlation *searches*: it lays the
# pattern $h$ on the sequence from time $t$ on, and $c_t$ is large where they agree. Reverse the taps, and one
# becomes the other.

# %%
pattern = np.array([1.0, 3.0, 2.0, 1.0])  # steep rise, slow fall
twice = np.zeros(56)
twice[8:12] = twice[25:29] = pattern
answer = linear_convolution(twice, pattern)[:56]
search = cross_correlation(twice, pattern)[3:]  # the first three belong to times -3, -2 and -1

top, bottom = show.panels(1, 2, height=3.6, sharex=True)
show.bars(twice, ax=top, ylabel="$u_t$", title="the pattern starts at 8 and at 25")
curves = {"convolution: starts at 8, ends late": answer, "correlation: largest at 8 and 25": search}
show.lines(curves, styles=(".-", ".-"), ax=bottom, xlabel="time t", ylabel="output")

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
taps, signal, blame = rng.normal(size=(3, 16)).astype(np.float32)
gradient = jax.grad(lambda u: (blame * ops.long_conv(u, taps)).sum())(signal)

# %% [markdown]
# ## The end leaks into the start
#
# The convolution theorem holds for the circular convolution,
#
# $$y_t = \sum_{s=0}^{n-1} h_s \, u_{(t-s) \bmod n} .$$
#
# Oracle: [`circular_convolution`](loops.py). Code that avoids it:
# [`fft_conv`](../../hyena_jax/ops/long_conv.py). [Hyena, section 2](https://arxiv.org/abs/2302.10866).
#
# In a sequence of $n$ steps, the copy that an input starts near the end runs over the edge and comes back in
# at the front. For a language model this is cheating: the first words would know the last ones.

# %%
length = 64
u = np.zeros(length)
u[[6, 52]] = 1.0, 1.5
h = np.exp(-np.arange(length) / 10)
circular = inverse_dft(dft(h) * dft(u)).real
causal = linear_convolution(u, h)[:length]

curves = {"circular: product of two DFTs of 64 points": circular, "causal": causal}
show.lines(curves, xlabel="time t", ylabel="$y_t$")

# %% [markdown]
# The two agree from the second input on. Before it the circular one is too large, by the part of the second
# copy that ran over the end.
#
# ## First remedy: zeros
#
# Append $L$ zeros to both sequences and transform $2L$ points. What runs over the edge now falls into the
# zeros, and we cut it off. This is what most code does. It transforms twice as many points as there are data.

# %%
padded = [np.concatenate([signal, np.zeros(length)]) for signal in (u, h)]
with_zeros = inverse_dft(dft(padded[0]) * dft(padded[1])).real

over = np.arange(length, 2 * length)
curves = {"causal": with_zeros[:length], "over the edge: cut off": (over, with_zeros[length:])}
show.lines(curves, xlabel="time t", ylabel="$y_t$")

# %% [markdown]
# ## Second remedy: a right angle
#
# There is a way without zeros. Multiply both sequences by $w^t$ with $w = e^{i \pi / 2L}$, a quarter turn
# spread over the $L$ steps, convolve them circularly, and divide by $w^t$. A term that does not wrap has
# $w^s w^{t-s} / w^t = 1$, as if nothing had happened. A term that wraps has
# $w^s w^{L+t-s} / w^t = w^L = i$:
#
# $$y_t = \sum_{s \le t} h_s \, u_{t-s} \; + \; i \sum_{s > t} h_s \, u_{L+t-s}.$$
#
# Oracle: [`wrapped_convolution`](loops.py). Code:
# [`fft_conv`](../../hyena_jax/ops/long_conv.py). The weights are those of [Crandall and Fagin
# 1994](https://doi.org/10.1090/S0025-5718-1994-1185244-1), who multiply huge integers.
#
# For real sequences the two sums stand at a right angle in the complex plane. **The real part is the causal
# convolution**, the imaginary part is everything that leaked, and no zeros were needed: $L$ complex points in
# place of $2L$ real ones.

# %%
w = np.exp(1j * np.pi / 2 / length) ** np.arange(length)
turned = inverse_dft(dft(w * h) * dft(w * u)) / w

curves = {"real part: causal": turned.real, "imaginary part: what wrapped around": turned.imag}
show.lines(curves, xlabel="time t", ylabel="$y_t$")

# %% [markdown]
# This is the convolution behind every long filter of the package on a CPU or GPU. `h` gets the skip, a weight
# of the input itself, as part of its tap 0. `_spectrum` is the DFT of $w^t x_t$, and `_signal` the way back,
# of which it takes the real part.

# %%
show.code(ops.long_conv, ops.fft_conv, ops._spectrum, ops._signal)

# %% [markdown]
# Its oracle is the definition, two loops:

# %%
show.code(long_conv)

# %% [markdown]
# ## Convolutions are matrices
#
# A causal convolution is linear in $u$, so it is a matrix:
#
# $$y = S_h u, \qquad S_h[t, s] = h_{t-s} \text{ for } s \le t, \text{ and } 0 \text{ above the diagonal.}$$
#
# Oracle: [`toeplitz`](loops.py). Code:
# [`toeplitz_conv`](../../hyena_jax/ops/long_conv.py), for short sequences. [Hyena, section
# 3.2](https://arxiv.org/abs/2302.10866).
#
# Every diagonal is constant. Such a matrix is called **Toeplitz**; zeros above the diagonal *are* causality.
# The circular convolution fills the upper triangle with the wrapped taps, and the right angle turns that
# triangle imaginary.

# %%
size = 12
short = np.exp(-np.arange(size) / 4)
impulses = np.eye(size)
circulant = np.stack([circular_convolution(impulse, short) for impulse in impulses], axis=1)
right_angle = np.stack([wrapped_convolution(impulse, short, 1j) for impulse in impulses], axis=1)

panels = {
    "causal: Toeplitz $S_h$": toeplitz(short),
    "circular": circulant,
    "right angle: real part": right_angle.real,
    "right angle: imaginary": right_angle.imag,
}
labels = {"bar": "weight", "xlabel": "input time s", "ylabel": "output time t"}
show.matrices(panels, limit=1, cmap="Blues", height=2.2, **labels)

# %% [markdown]
# As matrices the facts of notebook 1 read as follows, with $F$ the matrix of the DFT:
#
# - two filters in a row are one filter: $S_g S_h = S_{g*h} = S_h S_g$, in any order;
# - waves are the eigenvectors of a circular convolution: with $C_h$ its matrix, the second one in the
#   picture, $F C_h F^{-1}$ is diagonal, with the spectrum of $h$ on it.

# %%
other = rng.normal(size=size)
both = toeplitz(linear_convolution(other, short)[:size])
fourier = dft(np.eye(size))
diagonal = fourier @ circulant @ np.linalg.inv(fourier)

# %% [markdown]
# ## What to take along
#
# - A convolution looks back, a correlation looks ahead; gradients of one are the other.
# - An FFT wraps around. Zeros keep the overflow away; a quarter turn of the weights moves it into the
#   imaginary part.
# - A causal filter is a lower-triangular Toeplitz matrix that nobody has to write down.
#
# Next: [where long filters come from](3_filters.ipynb).
#
# ## Checks

# %%
# The correlation finds the pattern, and looks ahead; the convolution does not.
assert set(np.argsort(search)[-2:]) == {8, 25}
assert np.flatnonzero(answer)[0] == 8
assert np.flatnonzero(search)[0] == 8 - 3
# The gradient is a correlation: from time 0 on, as 16 taps reach back to time -15.
assert np.allclose(gradient, cross_correlation(blame, taps)[15:], atol=1e-4)
# The product of two DFTs leaks.
assert np.allclose(circular, circular_convolution(u, h))
assert circular[0] > 0.4 > causal[0] == 0  # before the first input
assert np.allclose(circular[52:], causal[52:])
# Both remedies give the causal convolution, and the right angle sets the leak apart.
assert np.allclose(with_zeros[:length], causal)
assert np.allclose(turned.real, causal)
assert np.allclose(turned.real + turned.imag, circular)
assert np.allclose(turned, wrapped_convolution(u, h, 1j))
# So does the package, with a skip and without.
assert np.allclose(ops.long_conv(np.float32(u), np.float32(h)), causal, atol=1e-5)
with_skip = ops.long_conv(np.float32(u), np.float32(h), np.float32(0.5))
assert np.allclose(with_skip, long_conv(u[None, None], h[None], np.array([0.5]))[0, 0], atol=1e-5)
# As matrices.
assert np.allclose(right_angle.real, toeplitz(short))
assert np.allclose(toeplitz(other) @ toeplitz(short), both)
assert np.allclose(toeplitz(short) @ toeplitz(other), both)
assert np.allclose(diagonal, np.diag(dft(short)))
