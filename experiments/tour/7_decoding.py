# %% [markdown]
# # 7. Decoding long filters: online, and distilled
#
# A language model writes one token at a time. Each token is needed as the input before the next can be
# computed. In training an FFT convolved the whole sequence at once; now the sequence does not exist yet. A
# recurrence like Hawk has no trouble with that, a long filter does. This notebook shows two ways out: an
# exact one that cuts the work into tiles, and one that replaces the filter by a small recurrence.
#
# As before $u_t$ is the input, $h_s$ the filter, $y_t = \sum_{s=0}^{t} h_s u_{t-s}$ the output, $L$ the
# length.

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np

from hyena_jax.config import HyenaConfig, ImplicitFilterConfig
from hyena_jax.distillation import hankel, modal_fit
from hyena_jax.filters import build_filter
from hyena_jax.mixers import Hyena
from hyena_jax.reference.convolution import linear_convolution
from hyena_jax.reference.decoding import modal_convolution, online_convolution

plt.style.use("tour.mplstyle")
rng = np.random.default_rng(0)

# %% [markdown]
# ## The exact way: tiles
#
# Done naively, output $y_t$ sums over all $t$ earlier inputs: $L^2/2$ multiplications for $L$ tokens, as in
# attention. An FFT is cheaper but needs a whole block of inputs. The idea of *relaxed multiplication* (van
# der Hoeven 2002) is to use an FFT for whatever is already known:
#
# > After $i$ inputs, let $U$ be the largest power of two that divides $i$. Add the contribution of the last
# > $U$ inputs to the next $U$ outputs.
#
# So after an odd number of inputs there is one input to add to one output; after 2, 6, 10, ... two to two;
# after 8, 24, ... eight to eight; and so on. Each of these **tiles** is a small convolution. The picture
# draws them where they work: column $s$ is an input, row $t$ an output, the colour is the size $U$.

# %%
length = 32
h = np.exp(-np.arange(length) / 6) * np.cos(np.arange(length) / 2)
decoded = online_convolution(h, first=1.0, respond=lambda y: np.tanh(2 * y) + 0.1)

size, times = np.full((length, length), np.nan), np.eye(length, dtype=int)
for tile in decoded.tiles:
    size[tile.last : tile.end, tile.first : tile.last] = np.log2(tile.last - tile.first)
    times[tile.last : tile.end, tile.first : tile.last] += 1

fig, ax = plt.subplots(figsize=(4.2, 3.3))
image = ax.imshow(size, cmap="viridis_r", aspect="equal")
ax.plot(range(length), range(length), "s", color="0.7", markersize=3)
ax.set(xlabel="input time s", ylabel="output time t")
bar = fig.colorbar(image, ticks=range(5))
bar.ax.set_yticklabels([str(2**power) for power in range(5)])
bar.set_label("tile size U")

assert (times == np.tri(length, dtype=int)).all()  # every pair s <= t exactly once

# %% [markdown]
# The tiles and the grey diagonal (the current input, $h_0 u_t$) cover the triangle without a gap and without
# overlap, and no tile needs an input that does not exist yet. In this example each input depends on the
# output before it, $u_{t+1} = \tanh(2 y_t) + 0.1$, as a token depends on the prediction before it. All the
# same the result is the convolution:

# %%
assert np.allclose(decoded.u[1:], np.tanh(2 * decoded.y[:-1]) + 0.1)
assert np.allclose(decoded.y, linear_convolution(decoded.u, h)[:length])

# %% [markdown]
# What does it cost? There are $L/(2U)$ tiles of size $U$. By FFTs of $2U$ points a tile takes about
# $2U \log_2(2U) + 2U$ complex multiplications: two transforms and a product with the filter's spectrum, which
# is computed once. A complex multiplication is four real ones. Summed over all sizes that grows as
# $L \log^2 L$.

# %%
lengths = 2 ** np.arange(5, 17)
naive = [n * (n - 1) // 2 for n in lengths]
tiled = []
for n in lengths:
    sizes = 2 ** np.arange(int(np.log2(n)))
    by_fft = 4 * (2 * sizes * np.log2(2 * sizes) + 2 * sizes)
    tiled.append((n / (2 * sizes) * np.minimum(by_fft, sizes**2)).sum())  # small tiles directly

fig, ax = plt.subplots()
ax.loglog(lengths, naive, ".-", base=2, color="C1", label="sums over the whole history")
ax.loglog(lengths, tiled, ".-", base=2, color="C0", label="tiles")
ax.set(xlabel="tokens L", ylabel="real multiplications")
ax.legend()

print(f"{lengths[-1]:,} tokens: {naive[-1]:,} multiplications, or {tiled[-1]:,.0f} with tiles")
assert all(few <= many * 1.1 for few, many in zip(tiled, naive, strict=True))
assert tiled[-1] < naive[-1] / 40

# %% [markdown]
# `hyena_jax.ops.online_conv` works like this, and every mixer decodes through the same three methods:
# `init_state`, `prefill` for the prompt, and `step` for a token. A Hyena layer, with a prompt of 40 tokens
# and 24 single steps, gives the values of the parallel form:

# %%
config = HyenaConfig(filter=ImplicitFilterConfig(emb_dim=5, width=16))
module = Hyena(8, 64, config)
x = rng.normal(size=(1, 64, 8)).astype(np.float32)
variables = {"params": module.init(jax.random.key(0), x)["params"]}
parallel = module.apply(variables, x)

state = module.bind(variables).init_state(1, 64)
state, y = module.apply(variables, state, x[:, :40], method="prefill")
outputs = [y]
step = jax.jit(lambda state, token: module.apply(variables, state, token, method="step"))
for t in range(40, 64):
    state, y = step(state, x[:, t])
    outputs.append(y[:, None])

scale = np.abs(parallel).max()
assert np.allclose(np.concatenate(outputs, axis=1), parallel, atol=1e-4 * scale)

# %% [markdown]
# Exact, but the layer has to keep all its inputs: the memory grows with the text.
#
# ## The short way: distil the filter into a recurrence
#
# Notebook 3 had filters that *are* recurrences: sums of decaying waves, $\sum_n R_n \lambda_n^s$. Any filter
# can be approximated by such a sum (Massaroli et al. 2023). $h_0$ is kept as it is; for the others
#
# $$h_{s+1} \approx \mathrm{Re} \sum_{n=1}^{d} R_n \lambda_n^{s}, \qquad |\lambda_n| < 1,$$
#
# with complex **residues** $R_n$ and **modes** $\lambda_n$. How many modes are needed? Write the filter into
# a **Hankel matrix**, $H_{ij} = h_{i+j+1}$. If the input stops after time $t$, the output $i + 1$ steps later
# is $\sum_j H_{ij} \, u_{t-j}$: row $i$ turns the past, the latest input first, into an output to come. The
# rank of $H$ is the size of the smallest recurrence that rings like $h$, and its singular values say how much
# is lost at least with a smaller one. Here is an implicit filter of 256 taps, as Hyena starts with it.

# %%
length = 256
filter_config = ImplicitFilterConfig(emb_dim=9, width=32)
implicit = build_filter(1, 4, length, filter_config)
taps = implicit.init_with_output(jax.random.key(0), length)[0][0, 1]
taps = np.float64(taps) / np.abs(taps).max()
tail = taps[None, 1:]  # [1 channel, lags 1 .. L-1]
spectrum = hankel.spectrum(tail, 128)

fig, (left, right) = plt.subplots(1, 2, width_ratios=[1, 1.6])
matrix = hankel.dense(tail, tail.shape[1] // 2)[0]
left.imshow(matrix, vmin=-1, vmax=1, aspect="equal")
left.set(title="Hankel matrix", xlabel="j", ylabel="i")
right.semilogy(1 + np.arange(40), spectrum.values[0, :40] / spectrum.values[0, 0], ".-")
right.set(title="singular values, relative to the first", xlabel="number", ylabel="size")

past = rng.normal(size=len(matrix))
to_come = linear_convolution(past, taps)[len(past) : 2 * len(past)]  # the input has stopped
assert np.allclose(matrix @ past[::-1], to_come)
assert (matrix == matrix.T).all()
assert spectrum.values[0, 16] < 1e-3 * spectrum.values[0, 0]

# %% [markdown]
# They fall steeply: this filter is almost a small recurrence. A complex mode counts for two, so $d$ modes
# reach about as far as $2d$ singular values. `modal_fit.fit` starts from the Hankel matrix and refines the
# modes by least squares. The singular values after the $2d$-th give a lower bound on the error of any $d$
# modes.

# %%
fig, (left, right) = plt.subplots(1, 2, width_ratios=[1.6, 1])
left.plot(taps, color="0.7", linewidth=4, label="filter")
counts, errors, bounds = (1, 2, 3, 4, 6, 8), [], []
for n_modes in counts:
    fitted = modal_fit.response(modal_fit.fit(tail, n_modes), tail.shape[1])
    errors.append(np.linalg.norm(fitted - tail) / np.linalg.norm(tail))
    bounds.append(hankel.least_error(spectrum, tail.shape[1], 2 * n_modes)[0] / np.linalg.norm(tail))
    if n_modes in (1, 2, 8):
        left.plot(np.append(taps[0], fitted[0]), "--", linewidth=1.2, label=f"d = {n_modes}")
left.set(title="filter and fits, the first half of the lags", xlabel="lag s", ylabel="$h_s$", xlim=(-2, 128))
left.legend()
right.semilogy(counts, errors, ".-", color="C0", label="fit")
right.semilogy(counts, bounds, ".--", color="0.5", label="lower bound")
right.set(title="error of the fit", xlabel="modes d", ylabel="relative error")
right.legend()

assert all(error >= bound for error, bound in zip(errors, bounds, strict=True))
assert errors[-1] < 0.01

# %% [markdown]
# And now the decoding is a recurrence: output first, then the update of the state, eight complex numbers, at
# any length.

# %%
modes = modal_fit.fit(tail, 8)
mode = np.exp(-np.exp(modes.log_decay[0]) + 1j * modes.angle[0])
u = rng.normal(size=length)
distilled = modal_convolution(u, taps[0], modes.residue[0], mode)
exact = linear_convolution(u, taps)[:length]

fig, ax = plt.subplots(figsize=(7.2, 2))
ax.plot(exact, color="0.7", linewidth=3, label="all earlier inputs")
ax.plot(distilled, "--", color="C0", label="8 modes")
ax.set(xlabel="time t", ylabel="$y_t$")
ax.legend(ncols=2)

assert np.linalg.norm(distilled - exact) < 0.02 * np.linalg.norm(exact)
assert (np.abs(mode) < 1).all()  # it fades

# %% [markdown]
# Filters of trained models are rougher and need more modes. `hyena-jax distill RUN` fits all filters of a
# model, measures how far the next-token probabilities move, and picks a size.
#
# ## What to take along
#
# - Exact decoding: tiles of every power of two, $L \log^2 L$ work, and all inputs kept.
# - Distilled decoding: a few modes per channel, a state of fixed size, and an error that the Hankel singular
#   values bound from below.
#
# Last: [train a model and look into it](8_training.ipynb).
