"""Whether the forms of a mixer agree: checked once before a mixer of the user's own is trained.

Axes: B batch, L length, D channels.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import numpy as np

from hyena_jax.config import UserError
from hyena_jax.mixers import Mixer, has_state

N_TOKENS = 5
TOLERANCE = 1e-4
"""Largest difference of two outputs, relative to the largest output; rounding is a hundred times smaller."""


def check_consistency(mixer: nn.Module) -> None:
    """Compares the forms of a mixer on a few random tokens, in float32, with perturbed initial parameters.

    For a causal mixer: no output depends on a later token, and its state, if it has one, continues a sequence
    as the parallel form does. For a `Mixer` that accepts segment_ids: a document among others is computed as
    alone.

    Args:
      mixer: unbound; see the contract in `hyena_jax.mixers`.

    Raises:
      UserError: if two forms differ.
      Exception: what the mixer itself raises.
    """
    name, length, rng = type(mixer).__name__, min(N_TOKENS, mixer.max_len), np.random.default_rng(0)
    x = rng.standard_normal((2, length, mixer.d_model)).astype(np.float32)
    with jax.default_matmul_precision("highest"):
        params = jax.jit(mixer.init)(jax.random.key(0), x).get("params", {})
        # A projection that starts as zeros would hide everything.
        params = jax.tree.map(
            lambda p: np.asarray(p) + (0.1 * rng.standard_normal(p.shape)).astype(p.dtype), params
        )

        @jax.jit
        def whole(x: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
            return mixer.apply({"params": params}, x, segment_ids)

        y = np.asarray(whole(x))

        def check(other: np.ndarray, expected: np.ndarray, fault: str) -> None:
            if not np.abs(other - expected).max() <= TOLERANCE * np.abs(y).max():
                raise UserError(
                    f"mixer {name} {fault}: along the sequence, use nothing but the operators of `seq`"
                    " (shift, fir, recur, update, attend, conv, scan, or carry for your own)"
                )

        if mixer.config.causal:
            for t in range(1, length):
                later = np.concatenate([x[:, :t], x[:, t:] + 1], axis=1)
                fault = f"must be causal, but output {t - 1} depends on token {t} or later ones"
                check(np.asarray(whole(later))[:, :t], y[:, :t], fault)
            if has_state(type(mixer)):
                fault = "decodes other values than it computes over whole sequences"
                _check_decoding(mixer, params, x, whole, lambda *values: check(*values, fault))
        if isinstance(mixer, Mixer) and length == N_TOKENS:
            ids = np.int32([[0, 0, 1, 1, 1]] * 2)
            try:
                packed = np.asarray(whole(x, ids))
            except UserError:  # it refuses documents
                return
            alone = np.concatenate([whole(x[:, :2]), whole(x[:, 2:])], axis=1)
            fault = "mixes documents that share a row, and does not refuse them by seq.refuse_documents()"
            check(packed, alone, fault)


def _check_decoding(
    mixer: nn.Module,
    params: dict,
    x: np.ndarray,
    whole: Callable[[np.ndarray], jax.Array],
    check: Callable[[np.ndarray, np.ndarray], None],
) -> None:
    """Compares steps from the start; and a prefill where row 1 begins a token later, a step and a prefill."""
    length = x.shape[1]

    @jax.jit
    def steps(x: jax.Array) -> list[jax.Array]:
        bound, outputs = mixer.bind({"params": params}), []
        state = bound.init_state(2, length)
        for t in range(length):
            state, y = bound.step(state, x[:, t])
            outputs.append(y)
        return outputs

    check(np.stack(steps(x), axis=1), np.asarray(whole(x)))
    if length < N_TOKENS:
        return

    @jax.jit
    def pieces(x: jax.Array) -> tuple[jax.Array, ...]:
        bound = mixer.bind({"params": params})
        state, first = bound.prefill(bound.init_state(2, length), x[:, :2], np.int32([2, 1]))
        state, middle = bound.step(state, x[:, 2])
        return first, middle[:, None], bound.prefill(state, x[:, 3:])[1]

    y = np.concatenate(pieces(x), axis=1)
    check(y[0], np.asarray(whole(x))[0])
    check(y[1, 1:], np.asarray(whole(x[:, 1:]))[1])
