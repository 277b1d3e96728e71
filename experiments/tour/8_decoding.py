# %% [markdown]
# # 8. Decoding long filters: online, and distilled
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
import jax.numpy as jnp
import numpy as np
import show
from loops import linear_convolution, modal_convolution, online_convolution

from hyena_jax.config import HyenaConfig, ImplicitFilterConfig
from hyena_jax.distillation import modal_fit
from hyena_jax.filters import build_filter
from hyena_jax.mixers import Hyena
from hyena_jax.ops import hankel, modal_conv, online_conv

rng = np.random.default_rng(0)

# %% [markdown]
# ## The exact way: tiles
#
# Done naively, output $y_t$ sums over all $t$ earlier inputs: $L^2/2$ multiplications for $L$ tokens, as in
# attention. An FFT is cheaper but needs a whole block of inputs. The idea of *relaxed multiplication* (van
# der Hoeven 2002) is to use an FFT for whatever is already known. After $i$ inputs, let $U$ be the largest
# power of two that divides $i$. Add the contribution of the last $U$ inputs to the next $U$ outputs:
#
# $$y_{i+j} \;\leftarrow\; y_{i+j} + \sum_{s=i-U}^{i-1} h_{i+j-s} \, u_s, \qquad j = 0, \dots, U - 1 .$$
#
# [Oncescu et al. 2024](https://arxiv.org/abs/2410.12982). Oracle:
# [`online_convolution`](loops.py). Code:
# [`absorb`](../../hyena_jax/ops/online_conv.py), and [`step`](../../hyena_jax/ops/online_conv.py).
#
# So after an odd number of inputs there is one input to add to one output; after 2, 6, 10, ... two to two;
# after 8, 24, ... eight to eight; and so on. Each of these **tiles** is a small convolution.

# %%
show.code(online_convolution)

# %% [markdown]
# The picture draws the tiles where they work: column $s$ is an input, row $t$ an output. The yellow squares
# on the diagonal are the current input, $h_0 u_t$.

# %%
length = 32
ringing = np.exp(-np.arange(length) / 6) * np.cos(np.arange(length) / 2)
decoded = online_convolution(ringing, first=1.0, respond=lambda y: np.tanh(2 * y) + 0.1)

sizes, times = np.where(np.eye(length), 0, np.nan), np.eye(length, dtype=int)
for tile in decoded.tiles:
    sizes[tile.last : tile.end, tile.first : tile.last] = 1 + np.log2(tile.last - tile.first)
    times[tile.last : tile.end, tile.first : tile.last] += 1
labels = {"bar": "n, in a tile of $2^{n-1}$ inputs", "xlabel": "input time s", "ylabel": "output time t"}
show.matrices({"": sizes}, cmap="viridis_r", height=3.2, **labels)

# %% [markdown]
# The tiles and the diagonal cover the triangle without a gap and without overlap, and no tile needs an input
# that does not exist yet. In this example each input depends on the output before it,
# $u_{t+1} = \tanh(2 y_t) + 0.1$, as a token depends on the prediction before it. All the same the result is
# the convolution.
#
# What does it cost? There are $L/(2U)$ tiles of size $U$. By FFTs of $2U$ points a tile takes about
# $2U \log_2(2U) + 2U$ complex multiplications: two transforms and a product with the filter's spectrum, which
# is computed once. A complex multiplication is four real ones. Summed over all sizes that grows as
# $L \log^2 L$.

# %%
lengths = 2 ** np.arange(5, 17)
naive = lengths * (lengths - 1) // 2
tiled = []
for n in lengths:
    sizes = 2 ** np.arange(int(np.log2(n)))
    by_fft = 4 * (2 * sizes * np.log2(2 * sizes) + 2 * sizes)
    tiled.append((n / (2 * sizes) * np.minimum(by_fft, sizes**2)).sum())  # small tiles directly

print(f"{lengths[-1]:,} tokens: {naive[-1]:,} multiplications, or {tiled[-1]:,.0f} with tiles")
curves = {"sums over the whole history": naive, "tiles": tiled}
show.lines(curves, lengths, (".-", ".-"), "xy", xlabel="tokens L", ylabel="real multiplications")

# %% [markdown]
# The package's tiles are of at least 64 inputs; the fewer inputs since the last tile are summed directly.
# `later` are the outputs to come, as far as tiles have contributed to them. `absorb` is called when a tile is
# due:

# %%
show.code(online_conv.step, online_conv.absorb)

# %%
u, taps = rng.normal(size=256).astype(np.float32), np.float32(np.exp(-np.arange(256) / 60))
kept = online_conv.filter_taps(jnp.asarray(taps[None]), None, None)
history = online_conv.History(
    kept, jnp.int32(0), jnp.zeros(1, jnp.int32), online_conv.no_inputs(kept, 1, 1), None
)
history, in_tiles = online_conv.open_tiles(history), []
step = jax.jit(online_conv.step)
for t in range(256):
    y, inputs = step(history, u[None, None, t : t + 1])
    history = history._replace(inputs=inputs, position=history.position + 1)
    if size := online_conv.due_size(t + 1) if t < 255 else 0:
        history = online_conv.absorb(history, size)
    in_tiles.append(y[0, 0, 0])

# %% [markdown]
# Every mixer decodes through the same three methods: `init_state`, `prefill` for the prompt, and `step` for a
# token. Here is a Hyena layer, with a prompt of 40 tokens and 24 single steps:

# %%
module = Hyena(8, 64, HyenaConfig(filter=ImplicitFilterConfig(emb_dim=5, width=16)))
x = rng.normal(size=(1, 64, 8)).astype(np.float32)
parallel, variables = module.init_with_output(jax.random.key(0), x)

state = module.bind(variables).init_state(1, 64)
state, y = module.apply(variables, state, x[:, :40], method="prefill")
outputs = [y]
step = jax.jit(lambda state, token: module.apply(variables, state, token, method="step"))
for t in range(40, 64):
    state, y = step(state, x[:, t])
    outputs.append(y[:, None])

# %% [markdown]
# Exact, but the layer has to keep all its inputs: the memory grows with the text.
#
# ## The short way: distil the filter into a recurrence
#
# Notebook 3 had filters that *are* recurrences: sums of decaying waves, $\sum_n R_n \lambda_n^s$. Any filter
# can be approximated by such a sum. $h_0$ is kept as it is; the others become waves of complex **modes**
# $\lambda_n$ with **residues** $R_n$:
#
# $$h_{s+1} \approx \mathrm{Re} \sum_{n=1}^{d} R_n \lambda_n^{s}, \qquad |\lambda_n| < 1 .$$
#
# [Massaroli et al. 2023, section 3](https://arxiv.org/abs/2310.18780). Oracle:
# [`modal_convolution`](loops.py). Code:
# [`fit`](../../hyena_jax/distillation/modal_fit.py), [`step`](../../hyena_jax/ops/modal_conv.py).
#
# How many modes are needed? Write the filter into a **Hankel matrix**, $H_{ij} = h_{i+j+1}$. If the input
# stops after time $t$, the output $i + 1$ steps later is $\sum_j H_{ij} \, u_{t-j}$: row $i$ turns the past,
# the latest input first, into an output to come. The rank of $H$ is the size of the smallest recurrence that
# rings like $h$, and its singular values say how much is lost at least with a smaller one. Here is an
# implicit filter of 256 taps, as Hyena starts with it.

# %%
length = 256
implicit = build_filter(1, 4, length, ImplicitFilterConfig(emb_dim=9, width=32))
of_channel = np.float64(implicit.init_with_output(jax.random.key(0), length)[0][0, 1])
h = of_channel / abs(of_channel).max()
tail = h[None, 1:]  # [1 channel, lags 1 .. L-1]
spectrum = hankel.spectrum(tail, 128)
matrix = hankel.dense(tail, tail.shape[1] // 2)[0]

left, right = show.panels(2, width_ratios=[1, 1.6])
show.matrices({"Hankel matrix": matrix}, ax=left, xlabel="j", ylabel="i")
shares = spectrum.values[0, :40] / spectrum.values[0, 0]
labels = {"title": "singular values, relative to the first", "xlabel": "number", "ylabel": "size"}
show.lines(shares, 1 + np.arange(40), (".-",), "y", ax=right, **labels)

# %% [markdown]
# They fall steeply: this filter is almost a small recurrence. A complex mode counts for two, so $d$ modes
# reach about as far as $2d$ singular values. `fit` starts from the Hankel matrix and refines the modes by
# least squares. The singular values after the $2d$-th give a lower bound on the error of any $d$ modes.

# %%
counts, errors, bounds, fits = (1, 2, 3, 4, 6, 8), [], [], {"filter": h[:128]}
for n_modes in counts:
    fitted = modal_fit.response(modal_fit.fit(tail, n_modes), tail.shape[1])
    errors.append(np.linalg.norm(fitted - tail) / np.linalg.norm(tail))
    bounds.append(hankel.least_error(spectrum, tail.shape[1], 2 * n_modes)[0] / np.linalg.norm(tail))
    if n_modes in (1, 2, 8):
        fits[f"d = {n_modes}"] = np.append(h[0], fitted[0, :127])

left, right = show.panels(2, width_ratios=[1.6, 1])
show.lines(fits, styles=("thick", "--", "--", "--"), ax=left, xlabel="lag s", ylabel="$h_s$")
labels = {"title": "relative error", "xlabel": "modes d"}
show.lines({"fit": errors, "lower bound": bounds}, counts, (".-", ".--"), "y", ax=right, **labels)

# %% [markdown]
# And now the decoding is a recurrence: output first, then the update of the state, eight complex numbers, at
# any length. The two functions are the oracle and the package's; the second has the skip in `lag_zero`.

# %%
show.code(modal_convolution, modal_conv.step)

# %%
modes = modal_fit.fit(tail, 8)
mode = np.exp(-np.exp(modes.log_decay[0]) + 1j * modes.angle[0])
noise = rng.normal(size=length)
distilled = modal_convolution(noise, h[0], modes.residue[0], mode)
exact = linear_convolution(noise, h)[:length]

curves = {"all earlier inputs": exact, "8 modes": distilled}
show.lines(curves, styles=("thick", "--"), xlabel="time t", ylabel="$y_t$")

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
# Next: [a mixer of your own](9_own_mixer.ipynb), which gets all of this from two lines.
#
# ## Checks

# %%
# Each pair s <= t is in one tile, and the answers are the convolution of the inputs that they caused.
assert (times == np.tri(32, dtype=int)).all()
assert np.allclose(decoded.u[1:], np.tanh(2 * decoded.y[:-1]) + 0.1)
assert np.allclose(decoded.y, linear_convolution(decoded.u, ringing)[:32])
# Tiles never cost much more than sums, and at last 40 times less.
assert (tiled <= 1.1 * naive).all()
assert tiled[-1] < naive[-1] / 40
# The package's tiles are the convolution; a layer decodes what it computes in parallel.
assert np.allclose(in_tiles, linear_convolution(u, taps)[:256], atol=1e-4)
assert np.allclose(np.concatenate(outputs, axis=1), parallel, atol=1e-4 * abs(parallel).max())
# The Hankel matrix turns the past into the answers to come, once the input has stopped.
past = rng.normal(size=len(matrix))
assert np.allclose(matrix @ past[::-1], linear_convolution(past, h)[len(past) : 2 * len(past)])
# Its singular values fall steeply, and bound the errors.
assert shares[16] < 1e-3
assert all(error >= bound for error, bound in zip(errors, bounds, strict=True))
assert errors[-1] < 0.01
# Eight modes fade, and answer nearly as the filter does.
assert (abs(mode) < 1).all()
assert np.linalg.norm(distilled - exact) < 0.02 * np.linalg.norm(exact)
