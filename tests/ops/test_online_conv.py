import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import in_grid
from tolerances import assert_close

from hyena_jax.ops import online_conv
from hyena_jax.ops.online_conv import History
from hyena_jax.reference.convolution import long_conv

BATCH, GROUPS, FILTERS = 2, 3, 2
WIDTH = GROUPS * FILTERS


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """Small tiles, so that short sequences have tiles of many sizes."""
    monkeypatch.setattr(online_conv, "TILE", 2)


def example(length):
    keys = jax.random.split(jax.random.key(length), 2)
    u = jax.random.normal(keys[0], (BATCH, length, WIDTH))
    return u, jax.random.normal(keys[1], (FILTERS, length))


def expected(u, h):
    """The convolution by its definition, in float64."""
    rows = np.asarray(u, np.float64).transpose(0, 2, 1)
    return long_conv(rows, np.tile(h, (GROUPS, 1)), np.zeros(WIDTH)).transpose(0, 2, 1)


def history_of(u, h, position, first=(0, 0), block_len=None):
    """The history of the inputs before `position`."""
    filters, _ = online_conv.empty(h[None], None, BATCH, WIDTH, block_len)
    inputs = (u.at[:, position:].set(0),)
    return History(filters, jnp.int32(position), jnp.array(first, jnp.int32), inputs, None)


def run(history, u, tile_at=online_conv.due_size):
    """Outputs from the history's position on."""
    origin, length = int(history.position), u.shape[1]
    outputs = []
    for t in range(origin, length):
        y, inputs = online_conv.step(history)(u[:, t].T[..., None], 0)
        history = history._replace(position=history.position + 1, inputs=(inputs,))
        outputs.append(y[..., 0].T)
        size = tile_at(t + 1 - origin)
        if size and t + 1 < length:
            history = online_conv.absorb(history, size)
    return jnp.stack(outputs, axis=1)


@pytest.mark.parametrize("length", [37, *in_grid(1, 2, 7, 16)])
def test_any_start_equals_the_definition(length):
    u, h = example(length)
    y = expected(u, h)
    for start in {0, min(1, length - 1), length // 2, length - 1}:
        assert_close(run(online_conv.open_tiles(history_of(u, h, start)), u), y[:, start:])


def test_lazy_steps_equal_the_definition():
    u, h = example(13)
    assert_close(run(history_of(u, h, 0), u, tile_at=lambda n: 0), expected(u, h))


def test_blocks_of_rows_are_convolved_by_themselves():
    """Rows whose blocks of 5 steps begin at different positions."""
    u, h = example(23)
    first, length = np.array([3, 1]), 5
    y = run(online_conv.open_tiles(history_of(u, h, 6, first, length)), u)
    for row in range(BATCH):
        for t in range(6, 23):
            begin = t - (t - first[row]) % length
            alone = expected(u[row : row + 1, begin : t + 1], h[:, : t + 1 - begin])
            assert_close(y[row, t - 6], alone[0, -1])


def test_taps_turn_back_into_filters():
    h = jax.random.normal(jax.random.key(0), (3, 4, 11))
    np.testing.assert_array_equal(online_conv.forward_taps(online_conv.reversed_taps(h)), h)


def test_sizes_are_those_of_the_schedule():
    assert [online_conv.due_size(n) for n in range(9)] == [0, 0, 2, 0, 4, 0, 2, 0, 8]
    assert online_conv.tile_sizes(16) == (2, 4, 8)
    assert online_conv.tile_sizes(17) == (2, 4, 8, 16)
    assert online_conv.tile_sizes(2) == ()


def test_a_forgotten_tile_makes_outputs_nan():
    u, h = example(9)
    y = run(online_conv.open_tiles(history_of(u, h, 0)), u, tile_at=lambda n: 0)
    assert np.isfinite(y[:, :2]).all()
    assert np.isnan(y[:, 2:]).all()


def test_float64_stays():
    with jax.enable_x64(True):
        u, h = (jnp.asarray(np.float64(x)) for x in example(37))
        y = run(online_conv.open_tiles(history_of(u, h, 3)), u)
        np.testing.assert_allclose(y, expected(u, h)[:, 3:], rtol=0, atol=1e-12)
