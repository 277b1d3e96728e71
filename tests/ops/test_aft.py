from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from derivative_modes import check_modes
from grid import grid_but, in_grid
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tolerances import assert_close

from hyena_jax.ops import aft
from hyena_jax.ops.documents import documents
from hyena_jax.ops.fast import aft_blocks
from hyena_jax.reference import aft as reference

LENGTH, WIDTH, WINDOW = 19, 2, 5
VARIANTS = ("simple", "window", "full")
ONE_DOCUMENT = np.zeros((1, LENGTH), np.int32)
TWO_DOCUMENTS = np.array([[7] * 11 + [3] * 8], np.int32)
anywhere = settings(max_examples=30, deadline=None, derandomize=True)


def exponents(*shape):
    """Exponents of keys and of bias factors that overflow, vanish, or do neither."""
    return arrays(np.float32, shape, elements=st.floats(-100, 100, width=32))


def mean(variant, keys, values, u, v, ids, window=WINDOW):
    """keys and values [1, L, D], u and v [L, 1], ids [1, L]."""
    keys, values = keys[:, :, None], values[:, :, None]
    number, positions, _ = documents(ids)
    if variant == "simple":
        return aft.mean(aft.running_sums(keys, values, aft.no_sums(keys, values), number))[:, :, 0]
    bias = aft.low_rank_bias(u, v)
    if variant == "full":
        sums = aft_blocks.blockwise_sums(keys, values, bias, positions)
    else:
        before = aft_blocks.no_window(keys, values, window)
        sums, _ = aft_blocks.window_sums(keys, values, bias, positions, before, window)
    return aft.mean(sums)[:, :, 0]


@cache
def run(variant):
    """(keys, values, u, v, ids, weight) -> mean, and the gradients of its product with weight."""

    def loss(*args):
        y = mean(variant, *args[:-1])
        return (y * args[-1]).sum(), y

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))


def expected(variant, keys, values, u, v, ids):
    params = {"position_queries": u, "position_keys": v}
    w = {
        "simple": np.zeros((LENGTH, LENGTH)),
        "window": reference.local_biases(params, LENGTH, WINDOW),
        "full": reference.full_biases(params, LENGTH),
    }[variant]
    keys, values = np.float64(keys), np.float64(values)
    # sigmoid(0) = 1/2 is the gate.
    return 2 * reference.aft(np.zeros_like(keys), keys, values, np.stack([w] * WIDTH), ids)


@pytest.mark.grid
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("ids", "scale"), [(ONE_DOCUMENT, 1), (TWO_DOCUMENTS, 40)])
def test_derivatives_in_both_modes(variant, ids, scale):
    """Over several blocks of queries, with keys that differ by less and by more than PRODUCT_RANGE."""
    rng = np.random.default_rng(0)
    shapes = ((1, LENGTH, WIDTH), (1, LENGTH, WIDTH), (LENGTH, 1), (LENGTH, 1))
    keys, values, u, v = (rng.standard_normal(shape) for shape in shapes)
    with jax.enable_x64(True):
        check_modes(lambda args: mean(variant, *args, ids), (scale * keys, values, u, v), scale > 1)


@pytest.mark.parametrize("variant", grid_but(VARIANTS, "window"))
@pytest.mark.parametrize("ids", [TWO_DOCUMENTS, *in_grid(ONE_DOCUMENT)])
@anywhere
@given(exponents(1, LENGTH, WIDTH), exponents(LENGTH, 1), st.integers(0, 2**31))
def test_extreme_exponents(variant, ids, keys, u, seed):
    """Values equal the definition, and nothing overflows, forwards or backwards."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(keys.shape).astype(np.float32)
    v = rng.choice(np.float32([-1, 0.5, 1]), u.shape)
    weight = rng.standard_normal(keys.shape).astype(np.float32)
    (_, y), gradients = run(variant)(keys, values, u, v, ids, weight)
    np.testing.assert_allclose(y, expected(variant, keys, values, u, v, ids), rtol=0, atol=1e-4)
    assert all(np.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.wide
@pytest.mark.parametrize("variant", grid_but(VARIANTS, "window"))
def test_nothing_comes_from_later(variant):
    """Not even through the size of a later key, as in a running maximum that looks ahead."""
    rng = np.random.default_rng(0)
    keys, values, weight = rng.standard_normal((3, 1, LENGTH, WIDTH)).astype(np.float32)
    u, v = rng.standard_normal((2, LENGTH, 1)).astype(np.float32)
    weight[:, 9:] = 0
    y, gradients = [], []
    for later in (-1e4, 0, 1e4):
        keys[:, 9:] = later
        (_, mean), grads = run(variant)(keys, values, u, v, ONE_DOCUMENT, weight)
        y.append(mean[:, :9])
        gradients.append(grads)
    for other in y[1:]:
        np.testing.assert_array_equal(other, y[0])
    for keys_bar, values_bar, *_ in gradients:
        assert not np.any(keys_bar[:, 9:])
        assert not np.any(values_bar[:, 9:])
        assert np.all(values_bar[:, :9])


def test_rows_without_a_key_are_zero():
    keys = np.full((1, LENGTH, WIDTH), aft.EMPTY, np.float32)
    y = jax.jit(mean, static_argnums=0)("simple", keys, np.ones_like(keys), None, None, ONE_DOCUMENT)
    assert not np.any(y)


def test_matrix_products_give_the_same_where_keys_differ_little():
    """Also where the largest key is hidden from the queries, and the largest bias meets the smallest key."""
    rng = np.random.default_rng(0)
    keys = np.float32(rng.uniform(0, aft_blocks.PRODUCT_RANGE, (1, 6, 1, 2)))
    values = np.float32(rng.standard_normal(keys.shape))
    bias = np.float32(rng.uniform(-100, 100, (1, 4, 6, 1)))
    bias[:, :, np.argmax(keys[0, :, 0, 0])] = aft.EMPTY

    @jax.jit
    def both(*args):
        return [aft.mean(sums(*args)) for sums in (aft_blocks.product_sums, aft.weighted_sums)]

    products, direct = both(keys, values, bias)
    assert_close(products, direct)


def test_only_biases_of_keys_count():
    """A block whose window begins before the first key has weights as if nothing were there."""
    length, window = 40, 32
    keys, u = np.zeros((1, length, 1), np.float32), np.ones((length, 1), np.float32)
    values = np.float32(np.random.default_rng(0).standard_normal(keys.shape))
    v = np.float32(np.repeat([3, 0, 120, 0], [16, 9, 7, 8]))[:, None]  # positions before 0 would read the end
    ids = np.zeros((1, length), np.int32)
    w = reference.local_biases({"position_queries": u, "position_keys": v}, length, window)
    expected = 2 * reference.aft(np.zeros_like(keys), keys, values, w[None], ids)
    assert_close(jax.jit(mean, static_argnums=(0, 6))("window", keys, values, u, v, ids, window), expected)


def test_a_bias_that_opposes_its_key_in_the_block_of_the_query():
    """Keys of the query's own block are in no product, so their biases scale none."""
    length = 64
    values = np.arange(length, dtype=np.float32)[None, :, None]
    v = np.zeros((length, 1), np.float32)
    v[-16:] = 100
    weight = np.zeros((1, length, 1), np.float32)
    weight[:, -1] = 1
    args = -v[None], values, np.ones_like(v), v, np.zeros((1, length), np.int32), weight
    (_, y), gradients = run("full")(*args)
    assert_close(y[0, -1, 0], 31.5)
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    assert_close(gradients[1][0, :, 0], np.full(length, 1 / length))


def test_standard_taps_and_that_one_has_no_deviation():
    @jax.jit
    def results(taps, *affine):
        w, pull_back = jax.vjp(lambda taps: aft.standardize_taps(taps, *affine), taps)
        return w, *pull_back(w)

    taps = np.float32([[1, 2, 3, 6]])
    assert not np.any(results(taps, np.zeros(1, np.float32), np.zeros(1, np.float32))[0])
    w = results(taps, np.float32([2]), np.float32([5]))[0]
    np.testing.assert_allclose([w.mean(), w.std()], [5, 2], rtol=1e-6)
    one = np.ones((1, 1), np.float32)
    np.testing.assert_array_equal(results(one, one[0], one[0]), [[[1]], [[0]]])


@pytest.mark.grid
def test_memory_of_aft_full_grows_about_linearly():
    """The gradient's temporary memory, also where keys differ too much for matrix products."""
    width = 64

    def temporary(length: int) -> int:
        shapes = [(1, length, width)] * 2 + [(length, 4)] * 2
        args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        gradient = jax.grad(
            lambda *args: mean("full", *args, jnp.zeros((1, length), jnp.int32)).sum(), (0, 1, 2, 3)
        )
        return jax.jit(gradient).lower(*args).compile().memory_analysis().temp_size_in_bytes

    short, long = temporary(1024), temporary(4096)
    assert long < 5 * short
    assert short < 1024**2 * width  # a quarter of an array [B, L, L, D]


@pytest.mark.parametrize("dtype", ["float32", *in_grid("float64")])
def test_a_bias_of_the_keys_cancels(dtype):
    """Its gradient is 0: what there is of it is rounding, beside the gradients of the keys themselves."""
    with jax.enable_x64(dtype == "float64"):
        keys, values, weight = np.random.default_rng(0).standard_normal((3, 2, 61, 3, 4)).astype(dtype)
        documents = jnp.zeros((1, 61), jnp.int32)

        def total(keys, bias):
            keys = keys + bias
            return (
                weight * aft.mean(aft.running_sums(keys, values, aft.no_sums(keys, values), documents))
            ).sum()

        of_keys, of_bias = jax.jit(jax.grad(total, (0, 1)))(keys, np.zeros((3, 4), dtype))
    most = np.abs(of_keys).max()
    assert most > 0.1
    assert np.abs(of_bias).max() < {"float64": 1e-13, "float32": 1e-5}[dtype] * most
