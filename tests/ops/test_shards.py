"""Every operator with its sequence sharded over four fake devices equals its form on one device, and so does
every gradient."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from derivative_modes import check_modes
from jax.sharding import Mesh
from tolerances import assert_close

from hyena_jax.ops import aft, attention, fastmax, few_taps, long_conv, shards, short_conv
from hyena_jax.ops.documents import documents
from hyena_jax.ops.fast.blocked_attention import BLOCK_ROWS
from hyena_jax.ops.linear_recurrence import linear_recurrence
from hyena_jax.ops.mesh import over_shards

AXES = ("data", "fsdp", "sequence")
AXIS = "sequence"
BATCH, LENGTH = 3, 12
IDS = np.array([[4] * 5 + [1] * 2 + [2] * 5, [0] * 12, [3] * 6 + [5] * 6], np.int32)


def mesh_of(*shape: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), AXES)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def check(whole, over_devices, *args, mesh: Mesh | None = None) -> None:
    """`over_devices` on a mesh equals `whole` of the same arguments, as do the gradients of all floats."""
    floats = tuple(i for i, x in enumerate(args) if x is not None and x.dtype.kind == "f")

    def results(f):
        def loss(*args):
            y = f(*args)
            return jnp.vdot(y, normal(*y.shape, seed=1).astype(y.dtype)), y

        (_, y), gradients = jax.jit(jax.value_and_grad(loss, floats, has_aux=True))(*args)
        return y, *gradients

    expected = results(whole)
    with jax.set_mesh(mesh or mesh_of(1, 1, 4)):
        actual = results(over_devices)
    for a, b in zip(actual, expected, strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("groups", [3, pytest.param(1, marks=pytest.mark.sequence)])
@pytest.mark.parametrize("block_len", [None, pytest.param(5, marks=pytest.mark.sequence)])
def test_long_conv(groups, block_len):
    def whole(u, h, skip, future):
        return long_conv.blockwise_conv(u, h, skip, block_len, future)

    def over(u, h, skip, future):
        return shards.blockwise_conv(u, h, skip, block_len, future, sequence_axis=AXIS)

    u, h, future = normal(groups, 8, BATCH, LENGTH), normal(8, LENGTH), normal(8, LENGTH, seed=1)
    check(whole, over, u, h, normal(8), future)


@pytest.mark.parametrize("n_taps", [8, *[pytest.param(n, marks=pytest.mark.sequence) for n in (3, 1)]])
@pytest.mark.parametrize("ids", [None, IDS], ids=["one_document", "documents"])
def test_short_conv(n_taps, ids):
    """Also with taps that reach over several devices, or over all."""

    def whole(x, taps, bias, ids):
        return short_conv.short_conv(x, taps, bias, -1, None, ids)

    def over(x, taps, bias, ids):
        return shards.short_conv(x, taps, bias, -1, ids, AXIS)

    check(whole, over, normal(2, BATCH, LENGTH), normal(n_taps, 2, 1, 1), normal(2, 1, 1), ids)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("n_taps", "ids"),
    [
        (8, IDS),
        *[
            pytest.param(n, ids, marks=pytest.mark.sequence)
            for n, ids in ((3, None), (8, None), (40, None), (1, IDS))
        ],
    ],
)
def test_few_taps(n_taps, ids):
    """Also with taps that reach over several devices, or over all."""

    over = partial(shards.few_taps_conv, sequence_axis=AXIS)
    args = normal(2, 4, BATCH, LENGTH), normal(4, n_taps), normal(4), ids
    check(few_taps.few_taps_conv, over, *args)


@pytest.mark.parametrize(
    ("reverse", "has_start"),
    [
        *[(False, True), (True, False)],
        *[pytest.param(flag, flag, marks=pytest.mark.sequence) for flag in (False, True)],
    ],
)
def test_linear_recurrence(reverse, has_start):
    def whole(a, x, h0):
        return linear_recurrence(a, x, h0, reverse)[0]

    def over(a, x, h0):
        return shards.linear_recurrence(a, x, h0, reverse, sequence_axis=AXIS)

    a = np.tanh(normal(BATCH, LENGTH, 2))
    a[0, 4] = 0  # a product of factors that is exactly 0
    h0 = normal(BATCH, 2) if has_start else None
    check(whole, over, a, normal(BATCH, LENGTH, 2, seed=2), h0)


def test_linear_recurrence_in_bfloat16_keeps_its_state_in_float32():
    with jax.set_mesh(mesh_of(1, 1, 4)):
        ones = jnp.ones((1, 1200, 1), jnp.bfloat16)
        h = jax.jit(partial(shards.linear_recurrence, sequence_axis=AXIS))(ones, ones)
    assert h.dtype == jnp.bfloat16
    np.testing.assert_array_equal(h[0, :, 0], jnp.arange(1, 1201).astype(jnp.bfloat16))


@pytest.mark.parametrize(
    ("window", "ids"),
    [
        pytest.param(4, IDS, id="4-documents"),
        pytest.param(20, None, id="20-one_document"),
        pytest.param(4, None, id="4-one_document", marks=pytest.mark.sequence),
        pytest.param(20, IDS, id="20-documents", marks=pytest.mark.sequence),
    ],
)
def test_local_attention(window, ids):
    """Also with windows over several devices, or over all."""

    def whole(q, k, v, ids):
        return attention.local_attention(q, k, v, window, None, ids)

    def over(q, k, v, ids):
        return shards.local_attention(q, k, v, window, ids, sequence_axis=AXIS)

    q, k, v = normal(BATCH, LENGTH, 4, 2), normal(BATCH, LENGTH, 2, 2, seed=1), normal(BATCH, LENGTH, 2, 2)
    check(whole, over, q, k, v, ids)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("ids", [None, IDS], ids=["one_document", "documents"])
def test_softmax_attention(is_causal, ids):
    def whole(q, k, v, ids):
        ids = None if ids is None else (ids, ids)
        return attention.softmax_attention(q, k, v, is_causal, segment_ids=ids)

    def over(q, k, v, ids):
        return shards.softmax_attention(q, k, v, is_causal, ids, sequence_axis=AXIS)

    q, k, v = normal(BATCH, LENGTH, 4, 2), normal(BATCH, LENGTH, 2, 2, seed=1), normal(BATCH, LENGTH, 2, 2)
    check(whole, over, q, k, v, ids)


def test_softmax_attention_in_blocks():
    """With more than one block of queries on a device."""

    def whole(q, k, v):
        return attention.softmax_attention(q, k, v, True, method=attention.plain_attention)

    def over(q, k, v):
        return shards.softmax_attention(q, k, v, True, sequence_axis=AXIS)

    length = 4 * (BLOCK_ROWS + 1)
    q, k, v = (normal(1, length, 1, 2, seed=seed) for seed in range(3))
    check(whole, over, q, k, v)


@pytest.mark.grid
@pytest.mark.parametrize("is_causal", [pytest.param(False, marks=pytest.mark.sequence), True])
def test_fastmax(is_causal):
    def whole(q, k, v):
        if is_causal:
            return fastmax.fastmax_causal(q, k, v, 2, fastmax.no_sums(k, 2))[0]
        return fastmax.fastmax_bidirectional(q, k, v, 2)

    form = shards.fastmax_causal if is_causal else shards.fastmax_bidirectional
    parts = (normal(BATCH, LENGTH, 2, 3, seed=seed) for seed in range(3))
    check(whole, lambda q, k, v: form(q, k, v, 2, AXIS), *parts)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("n", "erases", "by_channel", "ids"),
    [
        (1, True, True, IDS),
        pytest.param(2, True, False, IDS, marks=pytest.mark.sequence),
        pytest.param(1, False, False, IDS, marks=pytest.mark.sequence),
        pytest.param(2, False, True, IDS, marks=pytest.mark.sequence),
        *[pytest.param(1, erases, False, None, marks=pytest.mark.sequence) for erases in (False, True)],
    ],
)
def test_delta_rule(n, erases, by_channel, ids):
    """Also with a document over several devices, and several in one."""

    def whole(q, k, v, log_a, read, write, starts):
        return shards.delta_rule(q, k, v, -jnp.exp(log_a), read, write, starts, 5)

    def over(q, k, v, log_a, read, write, starts):
        return shards.delta_rule(q, k, v, -jnp.exp(log_a), read, write, starts, 2, AXIS)

    rows = (BATCH, n * LENGTH)
    q, k, v = normal(BATCH, LENGTH, 2, 3), normal(*rows, 2, 3, seed=1) / 2, normal(*rows, 4, 2)
    read = (1 + np.tanh(normal(*rows, 4, 1))) * np.repeat(k, 2, axis=2) if erases else None
    write = np.repeat(k, 2, axis=2) / 2 if erases and by_channel else None
    starts = None if ids is None else np.diff(ids, axis=1, prepend=ids[:, :1]) != 0
    log_a = normal(BATCH, LENGTH, 4, *[3] * by_channel)
    check(whole, over, q, k, v, log_a, read, write, starts)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("spread", "ids"),
    [
        pytest.param(60, IDS, id="60-documents"),
        pytest.param(1, None, id="1-one_document", marks=pytest.mark.sequence),
        pytest.param(1, IDS, id="1-documents", marks=pytest.mark.sequence),
        pytest.param(60, None, id="60-one_document", marks=pytest.mark.sequence),
    ],
)
def test_aft_simple(spread, ids):
    """Also where the exponents of one device vanish next to another's."""
    numbers = np.zeros((BATCH, LENGTH), np.int32) if ids is None else np.asarray(documents(ids).number)

    def whole(keys, values, documents):
        return aft.mean(aft.running_sums(keys, values, aft.no_sums(keys, values), documents))

    def over(keys, values, documents):
        return aft.mean(shards.running_sums(keys, values, documents, AXIS))

    keys, values = spread * normal(BATCH, LENGTH, 1, 2), normal(BATCH, LENGTH, 1, 2, seed=1)
    check(whole, over, keys, values, numbers)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("shape", "batch"),
    [
        ((1, 2, 2), 2),
        ((2, 1, 2), 3),
        *[pytest.param(s, 4, marks=pytest.mark.sequence) for s in ((2, 1, 2), (4, 1, 1))],
    ],
)
def test_rows_are_shared_out_over_the_other_axes_where_these_divide_them(shape, batch):
    def whole(x, taps, bias):
        return short_conv.short_conv(x, taps, bias, -1)

    def over(x, taps, bias):
        return shards.short_conv(x, taps, bias, -1, None, AXIS)

    args = normal(2, batch, 8), normal(3, 2, 1, 1), normal(2, 1, 1)
    check(whole, over, *args, mesh=mesh_of(*shape))


def reverse_recurrence(a, x, h0, sequence_axis):
    return shards.linear_recurrence(a, x, h0, True, sequence_axis=sequence_axis)


def short_conv_of_three(x, taps, bias, sequence_axis):
    return shards.short_conv(x, taps, bias, -1, None, sequence_axis)


@pytest.mark.parametrize("n", [2, *[pytest.param(n, marks=pytest.mark.sequence) for n in (0, 1, 5, 40)]])
def test_shift(n):
    """Also by more tokens than a device has, and than there are."""

    def whole(x):
        return jnp.pad(x, [(0, 0), (n, 0), (0, 0)])[:, :LENGTH]

    x = normal(BATCH, LENGTH, 2)
    check(whole, partial(shards.shift, n=n), x)
    check(whole, partial(shards.shift, n=n, sequence_axis=AXIS), x)


OPERATORS = {
    "recurrence": (shards.linear_recurrence, [(2, 8, 3), (2, 8, 3), (2, 3)]),
    "reverse": (reverse_recurrence, [(2, 8, 3), (2, 8, 3), (2, 3)]),
    "short_conv": (short_conv_of_three, [(3, 2, 8), (3, 3, 1, 1), (3, 1, 1)]),
    "fastmax": (partial(shards.fastmax_causal, p=2), [(2, 8, 1, 2)] * 3),
    "long_conv": (shards.blockwise_conv, [(1, 4, 2, 8), (4, 8)]),
}
DEFAULT = ("long_conv",)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in DEFAULT else pytest.mark.sequence) for n in OPERATORS]
)
def test_derivatives_in_both_modes(name):
    operator, shapes = OPERATORS[name]
    args = tuple(np.tanh(normal(*shape, seed=i)) for i, shape in enumerate(shapes))
    with jax.enable_x64(True), jax.set_mesh(mesh_of(1, 1, 4)):
        check_modes(lambda args: operator(*args, sequence_axis=AXIS), args, is_thorough=name not in DEFAULT)


def test_what_does_not_fit_is_refused():
    def f(x, h):
        return x

    mapped = over_shards(f, AXIS, ("BL", "CT"), "BL")
    with pytest.raises(ValueError, match=r"sequence_axis must be an axis of the ambient mesh"):
        mapped(jnp.ones((1, 8)), jnp.ones((4, 8)))
    with jax.set_mesh(mesh_of(1, 1, 4)):
        with pytest.raises(ValueError, match="sequence length must be a multiple of the 4 devices.*got 6"):
            mapped(jnp.ones((1, 6)), jnp.ones((4, 6)))
        with pytest.raises(ValueError, match="channels of a filter must be a multiple of the 4 .*got 3"):
            mapped(jnp.ones((1, 8)), jnp.ones((3, 8)))
