from functools import partial

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
    rng = np.random.default_rng(length)
    return tuple(
        rng.standard_normal(shape, np.float32) for shape in ((BATCH, length, WIDTH), (FILTERS, length))
    )


def expected(u, h):
    """The convolution by its definition, in float64."""
    rows = np.asarray(u, np.float64).transpose(0, 2, 1)
    return long_conv(rows, np.tile(h, (GROUPS, 1)), np.zeros(WIDTH)).transpose(0, 2, 1)


@partial(jax.jit, static_argnames=("has_tiles", "block_len"))
def history_of(u, h, position, has_tiles=True, first=(0, 0), block_len=None):
    """The history of the inputs before `position`."""
    inputs = jnp.where(jnp.arange(u.shape[1])[:, None] < position, u, 0)
    history = History(
        online_conv.filter_taps(h, None, block_len),
        jnp.int32(position),
        jnp.stack(first).astype(jnp.int32),
        inputs,
        None,
    )
    return online_conv.open_tiles(history) if has_tiles else history


@jax.jit
def advance(history, u):
    """The output of one input u [B, W], and the next history."""
    y, inputs = online_conv.step(history, u.T[..., None])
    return y[..., 0].T, history._replace(position=history.position + 1, inputs=inputs)


@partial(jax.jit, static_argnames="size")
def absorb(history, size):
    return online_conv.absorb(history, size)


def run(history, u, tile_at=online_conv.due_size):
    """Outputs from the history's position on."""
    origin, length = int(history.position), u.shape[1]
    outputs = []
    for t in range(origin, length):
        y, history = advance(history, u[:, t])
        outputs.append(np.asarray(y))
        size = tile_at(t + 1 - origin)
        if size and t + 1 < length:
            history = absorb(history, size)
    return np.stack(outputs, axis=1)


@pytest.mark.parametrize("length", [37, *in_grid(1, 2, 7, 16)])
def test_any_start_equals_the_definition(length):
    u, h = example(length)
    y = expected(u, h)
    for start in {0, min(1, length - 1), length // 2, length - 1}:
        assert_close(run(history_of(u, h, start), u), y[:, start:])


def test_lazy_steps_equal_the_definition():
    u, h = example(13)
    assert_close(run(history_of(u, h, 0, has_tiles=False), u, tile_at=lambda n: 0), expected(u, h))


def test_blocks_of_rows_are_convolved_by_themselves():
    """Rows whose blocks of 5 steps begin at different positions."""
    u, h = example(23)
    first, length = np.array([3, 1]), 5
    y = run(history_of(u, h, 6, first=tuple(first), block_len=length), u)
    for row in range(BATCH):
        for t in range(6, 23):
            begin = t - (t - first[row]) % length
            alone = expected(u[row : row + 1, begin : t + 1], h[:, : t + 1 - begin])
            assert_close(y[row, t - 6], alone[0, -1])


def test_taps_turn_back_into_filters():
    h = np.random.default_rng(0).standard_normal((3, 4, 11), np.float32)
    np.testing.assert_array_equal(online_conv.forward_taps(online_conv.reversed_taps(h)), h)


def test_sizes_are_those_of_the_schedule():
    assert [online_conv.due_size(n) for n in range(9)] == [0, 0, 2, 0, 4, 0, 2, 0, 8]
    assert online_conv.tile_sizes(16) == (2, 4, 8)
    assert online_conv.tile_sizes(17) == (2, 4, 8, 16)
    assert online_conv.tile_sizes(2) == ()


def test_a_forgotten_tile_makes_outputs_nan():
    u, h = example(9)
    y = run(history_of(u, h, 0), u, tile_at=lambda n: 0)
    assert np.isfinite(y[:, :2]).all()
    assert np.isnan(y[:, 2:]).all()


def test_float64_stays():
    with jax.enable_x64(True):
        u, h = (np.float64(x) for x in example(8))
        y = run(history_of(u, h, 3), u)
        np.testing.assert_allclose(y, expected(u, h)[:, 3:], rtol=0, atol=1e-12)
