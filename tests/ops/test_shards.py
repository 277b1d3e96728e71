"""Every operator with its sequence sharded over four fake devices equals its form on one device, and so does
every gradient."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from derivative_modes import check_modes
from differences import assert_equal_differences
from jax.sharding import Mesh
from tolerances import assert_close

from hyena_jax.ops import aft, attention, fastmax, few_taps, long_conv, shards, short_conv
from hyena_jax.ops.documents import documents
from hyena_jax.ops.fast.blocked_attention import BLOCK_ROWS
from hyena_jax.ops.linear_recurrence import linear_recurrence
from hyena_jax.ops.mesh import over_shards
from hyena_jax.reference import attention as reference
from hyena_jax.reference.delta_rule import delta_rule

AXES = ("data", "fsdp", "sequence")
AXIS = "sequence"
BATCH, LENGTH = 3, 12
IDS = np.array([[4] * 5 + [1] * 2 + [2] * 5, [0] * 12, [3] * 6 + [5] * 6], np.int32)


def mesh_of(*shape: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), AXES)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def results(f, arrays: dict, **options):
    """f of all arguments, and the gradients of a weighted sum of it with respect to all floats."""
    floats = {name: x for name, x in arrays.items() if x is not None and x.dtype.kind == "f"}
    others = {name: x for name, x in arrays.items() if name not in floats} | options

    def loss(floats):
        y = f(**floats, **others)
        return jnp.vdot(y, normal(*y.shape, seed=1).astype(y.dtype)), y

    gradients, y = jax.jit(jax.grad(loss, has_aux=True))(floats)
    return y, gradients


def check(whole, over_devices, arrays: dict, mesh: Mesh | None = None, **options) -> None:
    """`over_devices` on a mesh equals `whole` of the same arguments, as do all gradients."""
    expected = results(whole, arrays, **options)
    with jax.set_mesh(mesh or mesh_of(1, 1, 4)):
        actual = results(over_devices, arrays, sequence_axis=AXIS, **options)
    jax.tree.map(assert_close, actual, expected)


def check_definition(definition, over_devices, arrays: dict, **options) -> None:
    """The same with an oracle in NumPy, for operators that compile slowly; gradients by differences."""
    with jax.set_mesh(mesh_of(1, 1, 4)):
        y, gradients = results(over_devices, arrays, sequence_axis=AXIS, **options)
    assert_close(y, definition(**arrays))
    weight, names = normal(*y.shape, seed=1), sorted(gradients)
    assert_equal_differences(
        [gradients[name] for name in names],
        lambda *floats: (weight * definition(**arrays | dict(zip(names, floats, strict=True)))).sum(),
        tuple(np.float64(arrays[name]) for name in names),
        tolerance=1e-4,
    )


def in_sequence(*cases):
    """Cases that run under the marker `sequence` alone."""
    return [pytest.param(*case, marks=pytest.mark.sequence) for case in cases]


def queries_keys_and_values() -> dict:
    """Four heads of queries, two of keys and values."""
    q, k = normal(BATCH, LENGTH, 4, 2), normal(BATCH, LENGTH, 2, 2, seed=1)
    return {"q": q, "k": k, "v": normal(BATCH, LENGTH, 2, 2)}


@pytest.mark.parametrize(("groups", "block_len"), [(3, None), *in_sequence((1, None), (3, 5), (1, 5))])
def test_long_conv(groups, block_len):
    h, future = normal(8, LENGTH), normal(8, LENGTH, seed=1)
    arrays = {"u": normal(groups, 8, BATCH, LENGTH), "h": h, "skip": normal(8), "future": future}
    check(long_conv.blockwise_conv, shards.blockwise_conv, arrays, block_len=block_len)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("n_taps", "ids"), [(8, None), (8, IDS), *in_sequence((3, None), (3, IDS), (1, None), (1, IDS))]
)
def test_short_conv(n_taps, ids):
    """Also with taps that reach over several devices, or over all."""
    arrays = {"x": normal(2, BATCH, LENGTH), "taps": normal(n_taps, 2, 1, 1), "bias": normal(2, 1, 1)}
    check(short_conv.short_conv, shards.short_conv, arrays | {"segment_ids": ids}, axis=-1)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("n_taps", "ids"), [(8, IDS), *in_sequence((3, None), (8, None), (40, None), (1, IDS))]
)
def test_few_taps(n_taps, ids):
    """Also with taps that reach over several devices, or over all."""
    arrays = {"u": normal(2, 4, BATCH, LENGTH), "h": normal(4, n_taps), "skip": normal(4)}
    check(few_taps.few_taps_conv, shards.few_taps_conv, arrays | {"segment_ids": ids})


@pytest.mark.parametrize(
    ("reverse", "has_start"), [(False, True), *in_sequence((True, False), (False, False), (True, True))]
)
def test_linear_recurrence(reverse, has_start):
    a = np.tanh(normal(BATCH, LENGTH, 2))
    a[0, 4] = 0  # a product of factors that is exactly 0
    arrays = {"a": a, "x": normal(BATCH, LENGTH, 2, seed=2), "h0": normal(BATCH, 2) if has_start else None}
    check(lambda **args: linear_recurrence(**args)[0], shards.linear_recurrence, arrays, reverse=reverse)


def test_linear_recurrence_in_bfloat16_keeps_its_state_in_float32():
    with jax.set_mesh(mesh_of(1, 1, 4)):
        ones = np.ones((1, 1200, 1), jnp.bfloat16)
        h = jax.jit(partial(shards.linear_recurrence, sequence_axis=AXIS))(ones, ones)
    assert h.dtype == jnp.bfloat16
    np.testing.assert_array_equal(h[0, :, 0], np.arange(1, 1201).astype(jnp.bfloat16))


@pytest.mark.parametrize(("window", "ids"), [(4, IDS), (20, None), *in_sequence((4, None), (20, IDS))])
def test_local_attention(window, ids):
    """Also with windows over several devices, or over all."""
    arrays = queries_keys_and_values() | {"segment_ids": ids}
    check(attention.local_attention, shards.local_attention, arrays, window=window)


@pytest.mark.parametrize(
    ("is_causal", "ids"), [(False, None), (True, IDS), *in_sequence((False, IDS), (True, None))]
)
def test_softmax_attention(is_causal, ids):
    def whole(segment_ids, **args):
        return attention.softmax_attention(segment_ids=None if ids is None else (ids, ids), **args)

    arrays = queries_keys_and_values() | {"segment_ids": ids}
    check(whole, shards.softmax_attention, arrays, is_causal=is_causal)


def test_softmax_attention_in_blocks():
    """With more than one block of queries on a device."""
    shape = (1, 4 * (BLOCK_ROWS + 1), 1, 2)
    arrays = {name: normal(*shape, seed=seed) for seed, name in enumerate("qkv")}
    whole = partial(attention.softmax_attention, method=attention.plain_attention)
    check(whole, shards.softmax_attention, arrays, is_causal=True)


@pytest.mark.parametrize("is_causal", [True, *in_sequence((False,))])
def test_fastmax(is_causal):
    def definition(q, k, v):
        ids = np.zeros((BATCH, LENGTH))
        return reference.fastmax(q, k, v, 2, ids, is_causal, fastmax.LEAST_WEIGHT)

    form = shards.fastmax_causal if is_causal else shards.fastmax_bidirectional
    arrays = {name: normal(BATCH, LENGTH, 2, 3, seed=seed) for seed, name in enumerate("qkv")}
    check_definition(definition, partial(form, p=2), arrays)


@pytest.mark.parametrize(
    ("n", "erases", "by_channel", "ids"),
    [
        (1, True, True, IDS),
        *in_sequence((2, True, False, IDS), (1, False, False, IDS), (2, False, True, IDS)),
        *in_sequence((1, False, False, None), (1, True, False, None)),
    ],
)
def test_delta_rule(n, erases, by_channel, ids):
    """Also with a document over several devices, and several in one."""

    def run(log_a, sequence_axis, **args):
        return shards.delta_rule(log_a=-jnp.exp(log_a), chunk=2, sequence_axis=sequence_axis, **args)

    def definition(log_a, starts, **args):
        starts = np.zeros((BATCH, LENGTH), bool) if starts is None else starts
        return delta_rule(log_a=-np.exp(log_a), state=np.zeros((BATCH, 4, 3, 2)), starts=starts, **args)[0]

    rows = (BATCH, n * LENGTH)
    q, k, v = normal(BATCH, LENGTH, 2, 3), normal(*rows, 2, 3, seed=1) / 2, normal(*rows, 4, 2)
    read = (1 + np.tanh(normal(*rows, 4, 1))) * np.repeat(k, 2, axis=2) if erases else None
    write = np.repeat(k, 2, axis=2) / 2 if erases and by_channel else None
    starts = None if ids is None else np.diff(ids, axis=1, prepend=ids[:, :1]) != 0
    arrays = {"q": q, "k": k, "v": v, "log_a": normal(BATCH, LENGTH, 4, *[3] * by_channel)}
    arrays |= {"read": read, "write": write, "starts": starts}
    check_definition(definition, run, arrays)


@pytest.mark.wide
@pytest.mark.parametrize(("spread", "ids"), [(60, IDS), *in_sequence((1, None), (1, IDS), (60, None))])
def test_aft_simple(spread, ids):
    """Also where the exponents of one device vanish next to another's."""
    numbers = np.zeros((BATCH, LENGTH), np.int32) if ids is None else np.asarray(documents(ids).number)

    def whole(keys, values, documents):
        return aft.mean(aft.running_sums(keys, values, aft.no_sums(keys, values), documents))

    def over(sequence_axis, **args):
        return aft.mean(shards.running_sums(**args, sequence_axis=sequence_axis))

    keys, values = spread * normal(BATCH, LENGTH, 1, 2), normal(BATCH, LENGTH, 1, 2, seed=1)
    check(whole, over, {"keys": keys, "values": values, "documents": numbers})


@pytest.mark.grid
@pytest.mark.parametrize(
    ("shape", "batch"), [((1, 2, 2), 2), ((2, 1, 2), 3), *in_sequence(((2, 1, 2), 4), ((4, 1, 1), 4))]
)
def test_rows_are_shared_out_over_the_other_axes_where_these_divide_them(shape, batch):
    arrays = {"x": normal(2, batch, 8), "taps": normal(3, 2, 1, 1), "bias": normal(2, 1, 1)}
    check(short_conv.short_conv, shards.short_conv, arrays, mesh_of(*shape), axis=-1)


@pytest.mark.parametrize("n", [2, *in_sequence((0,), (1,), (5,), (40,))])
def test_shift(n):
    """Also by more tokens than a device has, and than there are; with and without a sequence axis."""

    def whole(x):
        return jnp.pad(x, [(0, 0), (n, 0), (0, 0)])[:, :LENGTH]

    x = {"x": normal(BATCH, LENGTH, 2)}
    check(whole, partial(shards.shift, n=n), x)
    check(whole, lambda x, sequence_axis: shards.shift(x, n), x)


OPERATORS = {
    "recurrence": (shards.linear_recurrence, [(2, 8, 3), (2, 8, 3), (2, 3)]),
    "reverse": (partial(shards.linear_recurrence, reverse=True), [(2, 8, 3), (2, 8, 3), (2, 3)]),
    "short_conv": (partial(shards.short_conv, axis=-1), [(3, 2, 8), (3, 3, 1, 1), (3, 1, 1)]),
    "fastmax": (partial(shards.fastmax_causal, p=2), [(2, 8, 1, 2)] * 3),
    "long_conv": (shards.blockwise_conv, [(1, 4, 2, 8), (4, 8)]),
}


@pytest.mark.sequence
@pytest.mark.parametrize("name", OPERATORS)
def test_derivatives_in_both_modes(name):
    operator, shapes = OPERATORS[name]
    args = tuple(np.tanh(normal(*shape, seed=i)) for i, shape in enumerate(shapes))
    with jax.enable_x64(True), jax.set_mesh(mesh_of(1, 1, 4)):
        check_modes(lambda args: operator(*args, sequence_axis=AXIS), args, is_thorough=True)


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
