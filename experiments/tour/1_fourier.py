# %% [markdown]
# # 1. Products, convolutions and the Fourier transform
#
# Hyena, and the models around it, combine sequences in two ways: by a **product** of their entries, and by a
# **convolution**. A convolution of long sequences is cheap only because of the fast Fourier transform (FFT).
# This notebook builds all of it from sums that you could do by hand.
#
# A *sequence* is a list of numbers $u_0, u_1, \dots, u_{L-1}$. Its index $t$ is the time, or the place of a
# token in a text; $L$ is its length. Plain NumPy code, written to be read, is imported from
# `hyena_jax.reference` and `loops.py`; `show` draws the pictures. Below every equation are its source, its
# *oracle* (the NumPy function that the package is tested against) and the fast code. What a notebook claims
# is checked in its last cell.

# %%
import numpy as np
import show
from loops import circular_convolution, dft, dft_operations, fft, inverse_dft, linear_convolution, real_fft

rng = np.random.default_rng(0)

# %% [markdown]
# ## The element-wise product is a gate
#
# The product of two sequences is $y_t = x_t \, u_t$, written $y = x \odot u$. Each time is treated by itself:
# nothing moves along the sequence. Where $x_t$ is near 0 the entry $u_t$ is closed off, where $x_t$ is near 1
# it passes. So $x$ is called a **gate**.

# %%
t = np.arange(48)
wave = np.sin(0.9 * t)
gate = 1 / (1 + np.exp(-(t - 24) / 2))  # opens around time 24
gated = gate * wave

curves = {"input u": wave, "gate x": gate, "product x ⊙ u": gated}
show.lines(curves, styles=("pale", "--", ".-"), xlabel="time t", ylabel="value", ylim=(-1.1, 2))

# %% [markdown]
# ## The convolution moves things along
#
# $$y_t = \sum_{s} h_s \, u_{t-s} \qquad \text{written } y = h * u.$$
#
# Oracle: [`linear_convolution`](loops.py). Code:
# [`direct_conv`](../../hyena_jax/ops/long_conv.py). Such a layer with filters as long as the text: [Romero et
# al. 2021](https://arxiv.org/abs/2102.02611).
#
# $h$ is the **filter** and its entries are **taps**: $h_s$ is the weight of the input from $s$ steps ago. The
# number $s$ is called a *lag*. Read from the side of the input, it is even simpler: *every sample $u_t$
# starts a copy of the filter at time $t$, scaled by $u_t$, and the copies are added*.

# %%
few, taps = np.array([1.0, 2.0, 0.0, 3.0]), np.array([4.0, 2.0, 1.0])
copies = np.zeros((4, 6))
for start, sample in enumerate(few):
    copies[start, start : start + 3] = sample * taps
    print(f"u_{start} = {sample:.0f} starts   ", "".join(f"{value:4.0f}" for value in copies[start]))
total = copies.sum(axis=0)
print("their sum is    ", "".join(f"{value:4.0f}" for value in total))

# %% [markdown]
# In the picture each colour is one copy. You have done this sum before: multiplying the polynomials
# $1 + 2x + 3x^3$ and $4 + 2x + x^2$ adds up the same products, and so does multiplying 3021 by 124 on paper
# (the digits backwards, and without carrying).

# %%
stacks = {f"started by $u_{start}$ = {few[start]:.0f}": copy for start, copy in enumerate(copies)}
show.bars(stacks, xlabel="time t", ylabel="$y_t$", ylim=(0, 20))

# %% [markdown]
# A filter as long as the sequence needs $L^2$ products, or about half of them if the output, too, ends after
# $L$ steps. For $L = 8192$ the $L^2$ are 67 million, for every channel of every layer. We need a shorter way.
#
# ## The discrete Fourier transform
#
# The DFT asks how much of each wave is in a sequence of $n$ points:
#
# $$X_k = \sum_{t=0}^{n-1} x_t \, e^{-2\pi i k t / n}, \qquad
#   x_t = \frac{1}{n} \sum_{k=0}^{n-1} X_k \, e^{2\pi i k t / n}.$$
#
# Oracles: [`dft`](loops.py) and
# [`inverse_dft`](loops.py). Code: `jnp.fft`, in
# [`fft_conv`](../../hyena_jax/ops/long_conv.py). Convolution layers by the DFT: [Mathieu et al.
# 2013](https://arxiv.org/abs/1312.5851).
#
# $k$ is the **frequency**: wave $k$ turns $k$ times in $n$ steps. $X$ is the **spectrum**. The second formula
# is the inverse: it adds the waves up again, and nothing is lost.

# %%
n = 64
t = np.arange(n)
two_waves = np.cos(2 * np.pi * 3 * t / n) + 0.5 * np.sin(2 * np.pi * 10 * t / n)
of_waves = dft(two_waves)

left, right = show.panels(2)
show.lines(two_waves, ax=left, xlabel="time t", ylabel="$x_t$", title="two waves in time ...")
show.bars(abs(of_waves), ax=right, xlabel="frequency k", ylabel="$|X_k|$", title="... are four in frequency")

# %% [markdown]
# Two waves, but four bars: a real wave is the sum of two complex ones that turn in opposite directions, $k$
# and $n - k$. That is so for every real sequence, $X_{n-k} = \overline{X_k}$ (the bar is the complex
# conjugate), and at the end of this page it will save us half of the work.
#
# ## The convolution theorem
#
# Shift a wave by $s$ steps and it stays the same wave, times a number:
# $e^{2\pi i k (t-s)/n} = e^{-2\pi i k s/n} \, e^{2\pi i k t/n}$. A convolution is a sum of shifts, so it
# multiplies wave $k$ by $\sum_s h_s e^{-2\pi i k s/n}$. But that number is $H_k$, the DFT of the filter. So
#
# $$Y_k = H_k \, U_k : \qquad \textbf{a convolution in time is a product in frequency.}$$
#
# Oracle: [`circular_convolution`](loops.py). Code:
# [`fft_conv`](../../hyena_jax/ops/long_conv.py). Used by [Hyena, section
# 2](https://arxiv.org/abs/2302.10866).
#
# One detail matters. The waves go round in $n$ steps, and the shifts do, too: this is the **circular**
# convolution, in which the past of time 0 is the end of the sequence. [Notebook
# 2](2_causal_convolution.ipynb) deals with that.

# %%
noise, fading = rng.normal(size=n), np.exp(-t / 4)
smooth = inverse_dft(dft(fading) * dft(noise)).real

axes = show.panels(3, 2, height=3.6)
for column, (title, signal) in enumerate({"u": noise, "h": fading, "h * u": smooth}.items()):
    show.lines(signal, ax=axes[0, column], xlabel="time t", title=title)
    show.lines(abs(dft(signal)), ax=axes[1, column], xlabel="frequency k", title="size of its spectrum")

# %% [markdown]
# The filter's spectrum is large at low frequencies (both ends of the axis, as $n - k$ is the partner of $k$)
# and small in the middle. The product keeps the slow part of the noise: above, $h * u$ is smoother than $u$.
#
# ## The fast Fourier transform
#
# By its definition the DFT takes $n^2$ multiplications, so nothing is won yet. Now split the samples into
# even and odd ones, with DFTs $E$ and $O$ of $n/2$ points each, and let $w = e^{-2\pi i/n}$. Then, for
# $k < n/2$,
#
# $$X_k = E_k + w^k O_k, \qquad X_{k + n/2} = E_k - w^k O_k .$$
#
# [Cooley and Tukey 1965](https://doi.org/10.1090/S0025-5718-1965-0178586-1). Oracle:
# [`fft`](loops.py). Code: `jnp.fft`, and as products of matrices
# [FlashFFTConv](https://arxiv.org/abs/2311.05908), which is
# [`matmul_fft_conv`](../../hyena_jax/ops/fast/matmul_fft.py).
#
# Both halves of the spectrum share the product $w^k O_k$. Do the same to $E$ and $O$, and so on, until single
# samples are left. This is the whole algorithm; `fft` also counts what it does:

# %%
show.code(fft)

# %% [markdown]
# With $n = 2^m$ there are $m = \log_2 n$ rounds of $n/2$ multiplications: **$\frac{n}{2} \log_2 n$ in place
# of $n^2$**.

# %%
sizes = 2 ** np.arange(1, 13)
samples = [rng.normal(size=size) for size in sizes]
transforms = [fft(x) for x in samples]
fast = [operations.multiplications for _, operations in transforms]
slow = [dft_operations(size).multiplications for size in sizes]

for i in (2, 7, 11):
    print(f"n = {sizes[i]:4}: {slow[i]:>10,} multiplications by definition, {fast[i]:>6,} by the FFT")
curves = {"by definition: $n^2$": slow, r"FFT: $(n/2) \log_2 n$": fast}
show.lines(curves, sizes, (".-", ".-"), "xy", xlabel="points n", ylabel="complex multiplications")

# %% [markdown]
# ## Real sequences need half of it
#
# Our sequences are real, and their spectra are symmetric: frequencies $0 \dots n/2$ say everything.
# [`real_fft`](loops.py) packs the even samples into the real parts and the
# odd samples into the imaginary parts of a sequence of $n/2$ points, transforms that, and separates the two
# by their symmetry.

# %%
half, half_operations = real_fft(samples[-1])
share = sum(half_operations) / sum(transforms[-1][1])
print(f"operations of the real FFT of {sizes[-1]:,} points: {share:.0%} of the complex one's")

# %% [markdown]
# ## What to take along
#
# - A product $x \odot u$ gates each time by itself; a convolution $h * u$ carries values along the sequence.
# - In frequency a convolution is a product. Transform, multiply, transform back: three FFTs, about $L \log L$
#   in place of $L^2$ operations.
# - What an FFT computes is circular: its end meets its start. Next: [how to stop
#   that](2_causal_convolution.ipynb).
#
# ## Checks

# %%
# The gate is closed at first and open at last.
assert abs(gated[:12]).max() < 0.01
assert abs(gated[-12:] - wave[-12:]).max() < 0.01
# The copies add up to the convolution, and to the product of two polynomials.
assert (total == linear_convolution(few, taps)).all()
assert np.polyval(total[::-1], 10) == 3021 * 124  # at x = 10
# Two waves have four frequencies, and the inverse loses nothing.
assert set(np.flatnonzero(abs(of_waves) > 1e-9)) == {3, 10, n - 10, n - 3}
assert np.allclose(inverse_dft(of_waves), two_waves)
# The convolution theorem.
assert np.allclose(smooth, circular_convolution(noise, fading))
# The FFT is the DFT, with fewer operations; for real sequences about half of them are left.
assert all(np.allclose(fft(x)[0], np.fft.fft(x)) for x in (two_waves, *samples))
assert fast == [size // 2 * np.log2(size) for size in sizes]
assert np.allclose(half, np.fft.rfft(samples[-1]))
assert 0.5 < share < 0.65
