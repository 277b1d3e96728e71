# %% [markdown]
# # 1. Products, convolutions and the Fourier transform
#
# Hyena, and the models around it, combine sequences in two ways: by a **product** of their entries, and by a
# **convolution**. A convolution of long sequences is cheap only because of the fast Fourier transform (FFT).
# This notebook builds all of it from sums that you could do by hand.
#
# A *sequence* is a list of numbers $u_0, u_1, \dots, u_{L-1}$. Its index $t$ is the time, or the place of a
# token in a text; $L$ is its length. All plain NumPy code of the tour is imported from `hyena_jax.reference`.
# It is written to be read: open [convolution.py](../../hyena_jax/reference/convolution.py) and
# [fourier.py](../../hyena_jax/reference/fourier.py) next to this page.

# %%
import matplotlib.pyplot as plt
import numpy as np

from hyena_jax.reference.convolution import circular_convolution, linear_convolution
from hyena_jax.reference.fourier import dft, dft_operations, fft, inverse_dft, real_fft

plt.style.use("tour.mplstyle")
rng = np.random.default_rng(0)

# %% [markdown]
# ## The element-wise product is a gate
#
# $$y_t = x_t \, u_t \qquad \text{written } y = x \odot u.$$
#
# Each time is treated by itself: nothing moves along the sequence. Where $x_t$ is near 0 the entry $u_t$ is
# closed off, where $x_t$ is near 1 it passes. So $x$ is called a **gate**.

# %%
t = np.arange(48)
u = np.sin(0.9 * t)
x = 1 / (1 + np.exp(-(t - 24) / 2))  # opens around time 24
gated = x * u

fig, ax = plt.subplots()
ax.plot(t, u, ".-", color="0.75", label="input u")
ax.plot(t, x, "--", color="C1", label="gate x")
ax.plot(t, gated, ".-", color="C0", label="product x ⊙ u")
ax.set(xlabel="time t", ylabel="value")
ax.set_ylim(-1.15, 1.7)
ax.legend(loc="upper center", ncols=3)

assert np.abs(gated[:12]).max() < 0.01  # closed
assert np.abs(gated[-12:] - u[-12:]).max() < 0.01  # open

# %% [markdown]
# ## The convolution moves things along
#
# $$y_t = \sum_{s} h_s \, u_{t-s} \qquad \text{written } y = h * u.$$
#
# $h$ is the **filter** and its entries are **taps**: $h_s$ is the weight of the input from $s$ steps ago. The
# number $s$ is called a *lag*. Read from the side of the input, it is even simpler: *every sample $u_t$
# starts a copy of the filter at time $t$, scaled by $u_t$, and the copies are added*.

# %%
u = np.array([1.0, 2.0, 0.0, 3.0])
h = np.array([4.0, 2.0, 1.0])

total = np.zeros(6)
for start, sample in enumerate(u):
    copy = np.zeros(6)
    copy[start : start + 3] = sample * h
    print(f"u_{start} = {sample:.0f} starts   ", "".join(f"{value:4.0f}" for value in copy))
    total += copy
print("their sum is    ", "".join(f"{value:4.0f}" for value in total))

assert (total == [4, 10, 5, 14, 6, 3]).all()
assert (total == linear_convolution(u, h)).all()

# %% [markdown]
# In the picture each colour is one copy. You have done this sum before: multiplying the polynomials
# $1 + 2x + 3x^3$ and $4 + 2x + x^2$ adds up the same products, and so does multiplying 3021 by 124 on paper
# (the digits backwards, and without carrying).

# %%
fig, ax = plt.subplots()
bottom = np.zeros(6)
for start, sample in enumerate(u):
    copy = np.zeros(6)
    copy[start : start + 3] = sample * h
    ax.bar(
        np.arange(6), copy, bottom=bottom, color=f"C{start}", label=f"started by $u_{start}$ = {sample:.0f}"
    )
    bottom += copy
ax.set(xlabel="time t", ylabel="$y_t$")
ax.legend(loc="upper right")

assert (np.polymul([3, 0, 2, 1], [1, 2, 4])[::-1] == total).all()  # NumPy has the highest power first
assert np.polyval(total[::-1], 10) == 3021 * 124  # x = 10

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
# $k$ is the **frequency**: wave $k$ turns $k$ times in $n$ steps. $X$ is the **spectrum**. The second formula
# is the inverse: it adds the waves up again, and nothing is lost.

# %%
n = 64
t = np.arange(n)
x = np.cos(2 * np.pi * 3 * t / n) + 0.5 * np.sin(2 * np.pi * 10 * t / n)
spectrum = dft(x)

fig, (left, right) = plt.subplots(1, 2)
left.plot(t, x, ".-")
left.set(xlabel="time t", ylabel="$x_t$", title="two waves in time ...")
right.stem(t, np.abs(spectrum), basefmt=" ")
right.set(xlabel="frequency k", ylabel="$|X_k|$", title="... are four lines in frequency")

assert np.allclose(inverse_dft(spectrum), x)
assert np.allclose(spectrum, np.fft.fft(x))
assert set(np.flatnonzero(np.abs(spectrum) > 1e-9)) == {3, 10, n - 10, n - 3}

# %% [markdown]
# Two waves, but four lines: a real wave is the sum of two complex ones that turn in opposite directions, $k$
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
# One detail matters. The waves go round in $n$ steps, and the shifts do, too: this is the **circular**
# convolution, in which the past of time 0 is the end of the sequence. [Notebook
# 2](2_causal_convolution.ipynb) deals with that.

# %%
u = rng.normal(size=n)
h = np.exp(-t / 4)
y = inverse_dft(dft(h) * dft(u)).real

fig, axes = plt.subplots(2, 3, figsize=(7.2, 3.6), sharex="row")
rows = ((u, h, y), tuple(np.abs(dft(signal)) for signal in (u, h, y)))
for row, signals in enumerate(rows):
    for column, (signal, title) in enumerate(zip(signals, ("u", "h", "h * u"), strict=True)):
        ax = axes[row, column]
        ax.plot(signal, color=f"C{column}")
        ax.set(title=title if row == 0 else None, xlabel=("time t", "frequency k")[row])
axes[0, 0].set_ylabel("value")
axes[1, 0].set_ylabel("size of spectrum")

assert np.allclose(y, circular_convolution(u, h))

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
# Both halves of the spectrum share the product $w^k O_k$. Do the same to $E$ and $O$, and so on, until single
# samples are left. With $n = 2^m$ there are $m = \log_2 n$ rounds of $n/2$ multiplications:
# **$\frac{n}{2} \log_2 n$ in place of $n^2$**. `fft` counts them as it goes.

# %%
sizes = [2**m for m in range(1, 13)]
fast, slow = [], []
for size in sizes:
    x = rng.normal(size=size)
    spectrum, operations = fft(x)
    assert np.allclose(spectrum, np.fft.fft(x))
    assert operations.multiplications == size // 2 * np.log2(size)
    assert operations.additions == size * np.log2(size)
    fast.append(operations.multiplications)
    slow.append(dft_operations(size).multiplications)

for size in (8, 256, 4096):
    i = sizes.index(size)
    print(f"n = {size:4}: {slow[i]:>10,} multiplications by definition, {fast[i]:>6,} by the FFT")

fig, ax = plt.subplots()
ax.loglog(sizes, slow, ".-", base=2, color="C1", label="by definition: $n^2$")
ax.loglog(sizes, fast, ".-", base=2, color="C0", label=r"FFT: $(n/2) \log_2 n$")
ax.set(xlabel="points n", ylabel="complex multiplications")
ax.legend()

# %% [markdown]
# ## Real sequences need half of it
#
# Our sequences are real, and their spectra are symmetric: frequencies $0 \dots n/2$ say everything.
# `real_fft` packs the even samples into the real parts and the odd samples into the imaginary parts of a
# sequence of $n/2$ points, transforms that, and separates the two by their symmetry.

# %%
x = rng.normal(size=1024)
half, operations = real_fft(x)
_, full_operations = fft(x)
print(f"complex FFT: {sum(full_operations):,} operations; real FFT: {sum(operations):,}")

assert len(half) == 1024 // 2 + 1
assert np.allclose(half, np.fft.rfft(x))
assert 0.5 < sum(operations) / sum(full_operations) < 0.65

# %% [markdown]
# ## What to take along
#
# - A product $x \odot u$ gates each time by itself; a convolution $h * u$ carries values along the sequence.
# - In frequency a convolution is a product. Transform, multiply, transform back: three FFTs, about $L \log L$
#   in place of $L^2$ operations.
# - What an FFT computes is circular: its end meets its start. Next: [how to stop
#   that](2_causal_convolution.ipynb).
