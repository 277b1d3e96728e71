# %% [markdown]
# # 7. Matrix memories: from linear attention to the delta rule
#
# Notebook 6 ended with a state $S$ that adds up products of keys and values. This notebook takes that state
# literally: it is a **memory**, written with keys and read with queries, of a fixed size. We see how much
# fits in, how the **delta rule** replaces what is old, how a decay forgets, and how all of it is computed in
# chunks by products of matrices. Gated DeltaNet and Mamba-2 are such memories.
#
# Every token $t$ has a query $q_t$ and a key $k_t$ of $K$ channels, and a value $v_t$ of $V$ channels.

# %%
import jax
import numpy as np
import show

from hyena_jax.config import GatedDeltaConfig, Mamba2Config
from hyena_jax.mixers import GatedDelta, mixer_class, mixer_oracle
from hyena_jax.ops import delta_rule as ops
from hyena_jax.reference.delta_rule import delta_rule

rng = np.random.default_rng(0)


def unit(x):
    """Vectors [..., K] divided by their lengths."""
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


# %% [markdown]
# ## A matrix that remembers pairs
#
# Take a matrix $S$ of $K \times V$ numbers, at first 0. *Write* a pair by adding $k v^\top$, *read* with a
# query by $S^\top q$:
#
# $$S_t = S_{t-1} + k_t v_t^\top, \qquad o_t = S_t^\top q_t = \sum_{s \le t} (q_t \cdot k_s) \, v_s .$$
#
# [Katharopoulos et al. 2020, section 3.4](https://arxiv.org/abs/2006.16236), here without its features and
# its normaliser. Oracle: [`delta_rule`](../../hyena_jax/reference/delta_rule.py) without `read`. Code:
# [`delta_rule`](../../hyena_jax/ops/delta_rule.py).
#
# The sum on the right is attention without its softmax: **linear attention**. The left side shows what it
# remembers. If all keys have length 1 and are at right angles, reading with $k_s$ gives exactly $v_s$. There
# are only $K$ such keys; with more, or with keys in random directions, every other value comes along a
# little.
#
# ## The delta rule: erase, then write
#
# Before it writes a value, the delta rule reads what the memory would answer, and writes the difference:
#
# $$S_t = S_{t-1} + \beta_t \, k_t \big( v_t - S_{t-1}^\top k_t \big)^\top
#   = (I - \beta_t k_t k_t^\top) \, S_{t-1} + \beta_t \, k_t v_t^\top .$$
#
# [Schlag et al. 2021, section 4.2](https://arxiv.org/abs/2102.11174), and for language models [Yang et al.
# 2024](https://arxiv.org/abs/2406.06484). Oracle:
# [`delta_rule`](../../hyena_jax/reference/delta_rule.py). Code:
# [`delta_rule`](../../hyena_jax/ops/delta_rule.py).
#
# With $\beta_t = 1$ and a key of length 1, the memory answers $v_t$ at $k_t$ afterwards, whatever it answered
# before. It is one step of gradient descent, of size $\beta_t$, on half the squared error of that answer.
# With $\beta_t = 0$ nothing is written.
#
# The oracle does this token by token, for all rules of this family. Here `read` are $\beta_t k_t$ and the
# values $\beta_t v_t$; without `read` it is the sum. `log_a` is the logarithm of a decay that we shall need.

# %%
show.code(delta_rule)


# %%
def run(rule, q, k, v, log_a=None, beta=None, state=None, **options):
    """Outputs [L, V] and last memory [K, V] of the oracle or of `ops`, for one head; log_a and beta [L]."""
    state = np.zeros((k.shape[1], v.shape[1])) if state is None else state
    log_a = np.zeros(len(q)) if log_a is None else log_a
    read, v = (None, v) if beta is None else (beta[:, None] * k, beta[:, None] * v)
    heads = [None if x is None else x[None, :, None] for x in (q, k, v, log_a, read)]
    o, memory = rule(*heads, None, state[None, None], np.zeros((1, len(q)), bool), **options)
    return np.asarray(o[0, :, 0]), np.asarray(memory[0, 0])


# %% [markdown]
# How much fits in? We write $n$ pairs with random keys of 16 channels, read all of them back, and take the
# error relative to the values. Then we write the same pairs again and again, for ten rounds in all.

# %%
counts = [1, 2, 4, 8, 12, 16, 24, 32]
stored = {"sum": [], "delta rule": [], "delta rule, 10 rounds": []}
for n in counts:
    k, v = unit(rng.normal(size=(n, 16))), rng.normal(size=(n, 64))
    for name, n_rounds in zip(stored, (1, 1, 10), strict=True):
        keys, values = np.tile(k, (n_rounds, 1)), np.tile(v, (n_rounds, 1))
        beta = None if name == "sum" else np.ones(len(keys))
        _, memory = run(delta_rule, keys, keys, values, beta=beta)
        stored[name].append(np.linalg.norm(k @ memory - v) / np.linalg.norm(v))

labels = {"xlabel": "pairs n, of keys with 16 channels", "ylabel": "error of what is read"}
show.lines(stored, counts, (".-", ".-", ".-"), ylim=(0, 1.6), **labels)

# %% [markdown]
# The sum's error grows with the number of pairs, for each answer contains all other values. The delta rule is
# somewhat better in a single pass. Repeated, it approaches a matrix that answers every key: after ten rounds
# it is there for 8 pairs, close for 12, and still far for 16. With more pairs than channels there is no such
# matrix.
#
# ## Forgetting: the gated delta rule
#
# The delta rule erases only at the key that it writes to. To drop a whole context at once, let the memory
# decay by a factor $a_t$ between 0 and 1 that the token decides:
#
# $$S_t = a_t \, (I - \beta_t k_t k_t^\top) \, S_{t-1} + \beta_t \, k_t v_t^\top .$$
#
# [Yang et al. 2024, equation 10](https://arxiv.org/abs/2412.06464). Oracle:
# [`delta_rule`](../../hyena_jax/reference/delta_rule.py). Code:
# [`delta_rule`](../../hyena_jax/ops/delta_rule.py).
#
# ## Mamba-2: the same without erasing
#
# Mamba-2 comes from state spaces ([notebook 3](3_filters.ipynb)), and has their letters: a state $h$, an
# input $x$, vectors $B$ to write and $C$ to read, a step size $\Delta$ and one rate $A < 0$ for each head.
#
# $$h_t = e^{\Delta_t A} \, h_{t-1} + \Delta_t \, B_t x_t^\top, \qquad o_t = h_t^\top C_t .$$
#
# [Dao and Gu 2024, section 5](https://arxiv.org/abs/2405.21060). Oracle:
# [`mamba2`](../../hyena_jax/reference/delta_rule.py). Code:
# [`delta_rule`](../../hyena_jax/ops/delta_rule.py), from [`Mamba2`](../../hyena_jax/mixers/mamba.py).
#
# Read $k = B$, $q = C$, $v = \Delta x$ and $a = e^{\Delta A}$: it is the gated rule without the matrix in
# brackets. So there are four rules:
#
# | | forgets | erases what it overwrites |
# |---|---|---|
# | linear attention | no | no |
# | Mamba-2 | all at the pace $a_t$ | no |
# | DeltaNet | no | at the key, by $\beta_t$ |
# | gated DeltaNet | all at the pace $a_t$ | at the key, by $\beta_t$ |
#
# An example with one channel of values: at time 5 the value 1 is written at a key, at time 25 the value 3 at
# the same key, and at every other time something at one of 15 other keys, all at right angles. What does the
# memory answer at the first key? The decay is 0.97 at each step.

# %%
length = 50
which = rng.integers(1, 16, length)
which[[5, 25]] = 0
k = np.eye(16)[which]
v = rng.normal(size=(length, 1))
v[[5, 25], 0] = 1.0, 3.0
asked, ones = np.tile(np.eye(16)[0], (length, 1)), np.ones(length)
decay = np.full(length, np.log(0.97))
rules = {
    "sum": (None, None),
    "Mamba-2": (decay, None),
    "delta rule": (None, ones),
    "gated delta rule": (decay, ones),
}
answers = {name: run(delta_rule, asked, k, v, *rule)[0][:, 0] for name, rule in rules.items()}
show.lines(answers, xlabel="time t", ylabel="answer at the key", ylim=(-0.1, 5.6))

# %% [markdown]
# The sum answers 4, the sum of both values. The delta rule answers the value that was written last. A decay
# alone makes the old value smaller, and the new one too.
#
# ## The same four as matrices
#
# A rule is linear in the values, so it is a matrix of weights, as attention is: $o_t = \sum_s M_{t,s} v_s$.
# For the sum $M_{t,s} = q_t \cdot k_s$. Decays multiply that by all factors between $s$ and $t$. What is
# erased later loses weight. The picture has the same random queries and keys for all four.

# %%
length = 32
q, k = unit(rng.normal(size=(2, length, 8)))
beta, decay = rng.uniform(0.2, 1, length), np.log(rng.uniform(0.7, 1, length))
rules = {"sum": (None, None), "Mamba-2": (decay, None), "delta rule": (None, beta), "gated": (decay, beta)}
weights = {name: run(delta_rule, q, k, np.eye(length), *rule)[0] for name, rule in rules.items()}
show.matrices(weights, 1, "weight", height=2.2, xlabel="value's time s", ylabel="query's time t")

# %% [markdown]
# ## In chunks
#
# Token by token, the rule is a long chain of small steps, which no accelerator likes. But within a chunk of
# $C$ tokens it is a few products of matrices. Every token adds a product $k_t u_t^\top$, with
# $u_t = \beta_t (v_t - S_{t-1}^\top k_t)$. With $S_0$ the memory before the chunk, $S_{t-1} = S_0 +
# \sum_{s<t} k_s u_s^\top$, so each $u_t$ depends on the ones before it: a triangular system. For rows $Q$,
# $K$, $V$, $U$ of the chunk and without decays,
#
# $$\big( I + \mathrm{tril}_{-1}(\beta K K^\top) \big)\, U = \beta \, (V - K S_0), \qquad
#   O = Q S_0 + \mathrm{tril}(Q K^\top)\, U, \qquad S_C = S_0 + K^\top U .$$
#
# [Yang et al. 2024, section 3.2](https://arxiv.org/abs/2406.06484). Oracle:
# [`delta_rule`](../../hyena_jax/reference/delta_rule.py), token by token. Code:
# [`delta_rule`](../../hyena_jax/ops/delta_rule.py).
#
# $\mathrm{tril}_{-1}$ keeps what is below the diagonal. In NumPy:


# %%
def of_chunk(q, k, v, beta, memory):
    """Outputs of a chunk, and the memory after it."""
    shared = np.tril(beta[:, None] * (k @ k.T), -1)
    u = np.linalg.solve(np.eye(len(k)) + shared, beta[:, None] * (v - k @ memory))
    return q @ memory + np.tril(q @ k.T) @ u, memory + k.T @ u


# %% [markdown]
# The picture takes all 32 tokens from above as a single chunk. What the keys share is on the left. The
# inverse of the system says how earlier writings change a later one. Together with the queries it is the
# matrix of the delta rule above.

# %%
shared = np.tril(beta[:, None] * (k @ k.T), -1)
inverse = np.linalg.inv(np.eye(length) + shared)
of_queries = np.tril(q @ k.T)
panels = {
    r"$\mathrm{tril}_{-1}(β K K^T)$": shared,
    "inverse of the system": inverse,
    r"$\mathrm{tril}(Q K^T)$": of_queries,
    "all: the delta rule": of_queries @ inverse * beta,
}
show.matrices(panels, 1, "weight", height=2.2, xlabel="time s", ylabel="time t")

# %% [markdown]
# The package's code is the same with batches, heads, decays and documents. `decay.products` are the products
# of two vectors, times the factors between their tokens; `decay.recall` reads the memory before the chunk.
# The loop over chunks passes on the memory alone: $L / C$ steps in place of $L$.

# %%
show.code(ops.delta_rule)

# %% [markdown]
# So the chunk's size changes the speed and nothing else. We run 100 tokens of all four rules in chunks of
# several sizes, some of which do not divide 100, and compare with the oracle.

# %%
q, k = unit(rng.normal(size=(2, 100, 8)))
v, start = rng.normal(size=(100, 6)), rng.normal(size=(8, 6))
beta, decay = rng.uniform(0, 1, 100), np.log(rng.uniform(0.5, 1, 100))
four = {"sum": (None, None), "Mamba-2": (decay, None), "delta rule": (None, beta), "gated": (decay, beta)}
errors = {}
for name, rule in four.items():
    outputs, memory = run(delta_rule, q, k, v, *rule, start)
    for chunk in (1, 7, 16, 64):
        o, last = run(ops.delta_rule, q, k, v, *rule, start, chunk=chunk)
        errors[name, chunk] = max(abs(o - outputs).max(), abs(last - memory).max())
print(f"largest difference from the oracle, of outputs and memory: {max(errors.values()):.0e}")

# %% [markdown]
# ## The layers
#
# [`GatedDelta`](../../hyena_jax/mixers/gated_delta.py) makes queries, keys and values by a dense layer and a
# short filter, divides queries and keys by their length, computes $\beta$ and $a$ from the token, and gates
# the normalised outputs. [`Mamba2`](../../hyena_jax/mixers/mamba.py) does much the same with its letters.
# Both call the rule as `seq.update` ([notebook 9](9_own_mixer.ipynb)), and decode with a memory that does not
# grow.

# %%
show.code(GatedDelta.mix)

# %%
x = rng.normal(size=(2, 50, 16)).astype(np.float32)
layers = []
for config in (GatedDeltaConfig(n_heads=2), Mamba2Config(n_heads=2, d_state=8)):
    module = mixer_class(config)(16, 50, config)
    y, variables = module.init_with_output(jax.random.key(0), x)
    state = module.bind(variables).init_state(2, 50)
    state, before = module.apply(variables, state, x[:, :30], method="prefill")
    state, after = module.apply(variables, state, x[:, 30:], method="prefill")
    layers.append((y, np.hstack([before, after]), mixer_oracle(config)(variables["params"], x, 50)))

# %% [markdown]
# ## What to take along
#
# - Linear attention is a matrix that adds up pairs. It holds about as many as a key has channels, and mixes
#   them up.
# - The delta rule writes the difference to what the memory answers: new values replace old ones.
# - A decay forgets everything a little; Mamba-2 has the decay alone, gated DeltaNet has both.
# - In chunks all of it is products of matrices and one triangular system.
#
# In [notebook 10](10_training.ipynb) such a memory learns to recall. Next: [decoding](8_decoding.ipynb), one
# token at a time, of filters that have no such state.
#
# ## Checks

# %%
# Keys at right angles are read back exactly; otherwise the delta rule is closer, and more so repeated.
pairs = rng.normal(size=(16, 3))
assert np.allclose(run(delta_rule, np.eye(16), np.eye(16), pairs)[1], pairs)
assert all(once < added for added, once in zip(stored["sum"][1:], stored["delta rule"][1:], strict=True))
*few, twelve, sixteen, more, most = stored["delta rule, 10 rounds"]
assert max(few) < 0.02 < twelve < 0.2 < sixteen < more < most
# The sum adds, the delta rule replaces, a decay shrinks.
moments = {name: answer[[5, 25, 49]] for name, answer in answers.items()}
assert np.allclose(moments["sum"], [1, 4, 4])
assert np.allclose(moments["delta rule"], [1, 3, 3])
assert np.allclose(moments["gated delta rule"], [1, 3, 3 * 0.97**24])
assert np.allclose(moments["Mamba-2"], [1, 3 + 0.97**20, (3 + 0.97**20) * 0.97**24])
# The matrices: products of queries and keys, decays between two times, and the system of a chunk.
total = np.cumsum(rules["Mamba-2"][0])
assert np.allclose(weights["sum"], of_queries)
assert np.allclose(weights["Mamba-2"], of_queries * np.exp(np.subtract.outer(total, total)))
assert np.allclose(weights["delta rule"], panels["all: the delta rule"])
# Chunks are the recurrence: ours of 20 tokens, and the package's of any size.
memory, outputs = start, []
for rows in np.split(np.arange(100), 5):
    o, memory = of_chunk(q[rows], k[rows], v[rows], beta[rows], memory)
    outputs.append(o)
expected, after_all = run(delta_rule, q, k, v, None, beta, start)
assert np.allclose(np.concatenate(outputs), expected)
assert np.allclose(memory, after_all)
assert max(errors.values()) < 1e-5
# The layers are their oracles, and continue from a state.
for y, in_pieces, in_numpy in layers:
    assert np.allclose(y, in_numpy, atol=1e-5)
    assert np.allclose(in_pieces, y, atol=1e-5)
