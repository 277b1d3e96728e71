import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import in_grid
from tolerances import assert_close

from hyena_jax.ops import online_conv
from hyena_jax.ops.online_conv import Window
from hyena_jax.reference.convolution import long_conv

BATCH, GROUPS, FILTERS = 2, 3, 2
WIDTH = GROUPS * FILTERS


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """So that short sequences have tiles of many sizes."""
    monkeypatch.setattr(online_conv, "TILE", 2)


def example(length):
    keys = jax.random.split(jax.random.key(length), 2)
    u = jax.random.normal(keys[0], (BATCH, length, WIDTH))
    return u, jax.random.normal(keys[1], (FILTERS, length))


def expected(u, h):
    """By the definition, in float64."""
    rows = np.asarray(u, np.float64).transpose(0, 2, 1)
    return long_conv(rows, np.tile(h, (GROUPS, 1)), np.zeros(WIDTH)).transpose(0, 2, 1)


UNLIMITED = Window(jnp.int32(0), jnp.int32(10**9))


def run_with_tiles(u, h, start, window=lambda position: UNLIMITED, tile_at=online_conv.due_size):
    """Outputs from `start` on, the earlier inputs absorbed at once."""
    length = u.shape[1]
    taps, spectra = online_conv.reversed_taps(h), online_conv.tile_spectra(h)
    inputs = u.at[:, start:].set(0)
    later = online_conv.open_tiles(inputs, h, jnp.int32(start), window(start))
    origin, outputs = start, []
    for t in range(origin, length):
        inputs = inputs.at[:, t].set(u[:, t])
        position, last = jnp.int32(t), jnp.int32(start)
        y = online_conv.near_output(inputs, later, taps, position, last, window(t).begin)
        outputs.append(y)
        size = tile_at(t + 1 - origin)
        if size and t + 1 < length:
            spectrum = spectra[online_conv.tile_sizes(length).index(size)]
            later = online_conv.absorb(inputs, later, spectrum, position + 1, window(t + 1))
            start = t + 1
    return jnp.stack(outputs, axis=1) if outputs else jnp.zeros((BATCH, 0, WIDTH))


@pytest.mark.parametrize("length", [37, *in_grid(1, 2, 7, 16)])
def test_any_start_equals_the_definition(length):
    u, h = example(length)
    y = expected(u, h)
    for start in {0, 1, length // 2, length - 1}:
        assert_close(run_with_tiles(u, h, start), y[:, start:])


def test_lazy_steps_equal_the_definition():
    u, h = example(13)
    taps = online_conv.reversed_taps(h)
    steps = [online_conv.lazy_output(u, taps, jnp.int32(t), jnp.int32(0)) for t in range(13)]
    assert_close(jnp.stack(steps, axis=1), expected(u, h))


def test_windows_of_rows_are_kept():
    """Rows whose blocks of 5 steps begin at different positions."""
    u, h = example(23)
    first, length = np.array([3, 1]), 5

    def window(position):
        begin = position - (position - first) % length
        return Window(jnp.asarray(begin), jnp.asarray(begin + length))

    y = run_with_tiles(u, h, 6, window)
    for row in range(BATCH):
        for t in range(6, 23):
            begin = t - (t - first[row]) % length
            alone = expected(u[row : row + 1, begin : t + 1], h[:, : t + 1 - begin])
            assert_close(y[row, t - 6], alone[0, -1])


def test_taps_turn_back_into_filters():
    h = jax.random.normal(jax.random.key(0), (3, 4, 11))
    np.testing.assert_array_equal(online_conv.filters(online_conv.reversed_taps(h)), h)


def test_sizes_are_those_of_the_schedule():
    assert [online_conv.due_size(n) for n in range(9)] == [0, 0, 2, 0, 4, 0, 2, 0, 8]
    assert online_conv.tile_sizes(16) == (2, 4, 8)
    assert online_conv.tile_sizes(17) == (2, 4, 8, 16)
    assert online_conv.tile_sizes(2) == ()


def test_a_forgotten_tile_makes_outputs_nan():
    u, h = example(9)
    y = run_with_tiles(u, h, 0, tile_at=lambda n: 0)
    assert np.isfinite(y[:, :2]).all()
    assert np.isnan(y[:, 2:]).all()


def test_float64_stays():
    with jax.enable_x64(True):
        u, h = (jnp.asarray(np.float64(x)) for x in example(37))
        np.testing.assert_allclose(run_with_tiles(u, h, 3), expected(u, h)[:, 3:], rtol=0, atol=1e-12)
