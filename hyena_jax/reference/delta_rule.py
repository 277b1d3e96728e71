"""The gated delta rule, token by token, and the layers of gated DeltaNet and Mamba-2.

Axes: B batch, L tokens, n updates a token, H heads of queries and keys, G heads of values, K channels of a
key, V channels of a value.
"""

import numpy as np


def delta_rule(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    log_a: np.ndarray,
    beta: np.ndarray | None,
    state: np.ndarray,
    starts: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Outputs [B, L, G, V], last memory [B, G, K, V]; 2412.06464, equation 10, with n updates a token.

    q [B, L, H, K], k [B, n L, H, K], v [B, n L, G, V], log_a [B, L, G], beta [B, n L, G], or None for a sum
    of k v^T that erases nothing; state [B, G, K, V]; starts [B, L], True where the memory is reset.
    """
    q, k, v, log_a = (np.asarray(x, np.float64) for x in (q, k, v, log_a))
    batch, length, n_heads = log_a.shape
    n_updates, shared = k.shape[1] // length, n_heads // k.shape[2]
    o, last = np.zeros((batch, length, n_heads, v.shape[3])), np.array(state, np.float64)
    for b in range(batch):
        for head in range(n_heads):
            memory, keys = last[b, head], k[b, :, head // shared]
            for t in range(length):
                memory = np.exp(log_a[b, t, head]) * memory
                if starts[b, t]:
                    memory = np.zeros_like(memory)
                for row in range(n_updates * t, n_updates * (t + 1)):
                    u = v[b, row, head]
                    if beta is not None:
                        u = beta[b, row, head] * (u - keys[row] @ memory)
                    memory = memory + np.outer(keys[row], u)
                o[b, t, head] = q[b, t, head // shared] @ memory
            last[b, head] = memory
    return o, last
