"""Whether the forms of a mixer agree: checked once before a mixer of the user's own is trained.

Axes: B batch, L length, D channels.
"""

from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hyena_jax.mixers import Mixer, has_state
from hyena_jax.system.errors import UserError, describe_fault, require

N_TOKENS = 5
N_LONG = 48
"""Tokens of one more comparison, in which lags beyond N_TOKENS show."""
TOLERANCE = 1e-4
"""Largest difference of two outputs, relative to the largest output; rounding is a hundred times smaller."""

USE_SEQ = (
    "along the sequence, take nothing but the operators of `seq` (shift, fir, recur, update, attend, conv,"
    " scan, or carry for your own)"
)


def check_consistency(mixer: nn.Module) -> None:
    """Compares the forms of a mixer on a few random tokens, in float32, with perturbed initial parameters.

    No row of a batch sees another. For a causal mixer: no output depends on a later token, and its state, if
    it has one, continues a sequence as the parallel form does. For a `Mixer` that accepts segment_ids: a
    document among others is computed as alone. Narrow dtypes and sharded sequences are not compared.

    `mixer` is unbound. Raises UserError if two forms differ, or a state grows that is declared not to.
    """
    name, length, rng = type(mixer).__name__, min(N_TOKENS, mixer.max_len), np.random.default_rng(0)
    x, other = rng.standard_normal((2, 2, length, mixer.d_model)).astype(np.float32)
    with jax.default_matmul_precision("highest"):
        params = jax.jit(mixer.init)(jax.random.key(0), x).get("params", {})
        # A projection that starts as zeros would hide everything.
        params = jax.tree.map(lambda p: p + (0.1 * rng.standard_normal(p.shape)).astype(p.dtype), params)

        @jax.jit
        def whole(x: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
            return mixer.apply({"params": params}, x, segment_ids)

        def require_equal(found: np.ndarray, expected: np.ndarray, fault: str) -> None:
            if not np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max():
                raise UserError(f"mixer {name} {fault}")

        y = np.asarray(whole(x))
        require_equal(whole(x[1:]), y[1:], "mixes the rows of a batch: a row must not see another")
        if mixer.config.causal:
            for t in range(1, length):
                later = np.concatenate([x[:, :t], other[:, t:]], axis=1)
                fault = f"must be causal, but output {t - 1} depends on token {t} or later ones: {USE_SEQ}"
                require_equal(whole(later)[:, :t], y[:, :t], fault)
            if has_state(type(mixer)):
                _check_decoding(mixer, params, x, whole, require_equal)
        if isinstance(mixer, Mixer) and length == N_TOKENS:
            try:
                packed = whole(x, np.int32([[0, 0, 1, 1, 1]] * 2))
            except UserError:  # it refuses documents
                return
            alone = np.concatenate([whole(x[:, :2]), whole(x[:, 2:])], axis=1)
            fault = (
                "mixes documents that share a row: take seq.positions in place of seq.index, or call"
                " seq.refuse_documents() where they cannot be kept apart"
            )
            require_equal(packed, alone, fault)


def check_float64(mixer: nn.Module) -> None:
    """Whether float64 stays float64 in a mixer, as the contract test asks, which compares digits in it.

    `mixer` is unbound, and is only traced. Raises UserError if it casts to float32; training needs no more.
    """
    x = jnp.zeros((2, min(N_TOKENS, mixer.max_len), mixer.d_model))
    params = jax.eval_shape(mixer.init, jax.random.key(0), x).get("params", {})
    params, x = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, np.float64), (params, x))
    try:
        with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
            y = jax.eval_shape(lambda params, x: mixer.apply({"params": params}, x), params, x)
        found = f"its output is {y.dtype}"
    except (TypeError, ValueError) as error:  # dtypes that are mixed: in float32 it has been traced already
        found = describe_fault(error)
    if not found.endswith("float64"):
        raise UserError(
            f"mixer {type(mixer).__name__} casts to float32 what is float64: cast to x.dtype, and sums to"
            f" jnp.promote_types(x.dtype, jnp.float32) ({found})"
        )


def _check_decoding(
    mixer: nn.Module,
    params: dict,
    x: np.ndarray,
    whole: Callable[[np.ndarray], jax.Array],
    require_equal: Callable[[np.ndarray, np.ndarray, str], None],
) -> None:
    """Compares steps; a prefill where row 1 begins later, a step, a prefill; and two long prefills."""
    length, bound = x.shape[1], mixer.bind({"params": params})
    states = (jax.eval_shape(partial(bound.init_state, 2, n)) for n in (1, mixer.max_len))
    sizes = [jax.tree.map(jnp.shape, state) for state in states]
    declares = getattr(type(mixer), "is_unbounded", lambda config: False)(mixer.config)
    what, allowed = f"is_unbounded of {type(mixer).__name__}", "False where the state grows with max_len"
    require(not declares or sizes[0] == sizes[1], what, True, allowed)

    @jax.jit
    def steps(x: jax.Array) -> jax.Array:
        state, outputs = bound.init_state(2, length), []
        for t in range(length):
            state, y = bound.step(state, x[:, t])
            outputs.append(y)
        return jnp.stack(outputs, axis=1)

    @jax.jit
    def pieces(x: jax.Array) -> jax.Array:
        state, first = bound.prefill(bound.init_state(2, length), x[:, :2], np.int32([2, 1]))
        state, middle = bound.step(state, x[:, 2])
        return jnp.concatenate([first, middle[:, None], bound.prefill(state, x[:, 3:])[1]], axis=1)

    @jax.jit
    def halves(x: jax.Array) -> jax.Array:
        state, first = bound.prefill(bound.init_state(2, x.shape[1]), x[:, : x.shape[1] // 2])
        return jnp.concatenate([first, bound.prefill(state, x[:, x.shape[1] // 2 :])[1]], axis=1)

    fault = f"decodes other values than it computes over whole sequences: {USE_SEQ}"
    require_equal(steps(x), whole(x), fault)
    if length == N_TOKENS:
        y = pieces(x)
        require_equal(y[0], whole(x)[0], fault)
        unaligned = "decodes other values in a row shorter than others: take seq.masked where padding counts"
        require_equal(y[1, 1:], whole(x[:, 1:])[1], unaligned)
    if mixer.max_len > N_TOKENS:
        shape = (2, min(N_LONG, mixer.max_len), mixer.d_model)
        x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
        require_equal(halves(x), whole(x), fault)
