"""Mixers of one's own: a mistake in `mix` is a sentence that says what to do, before anything is trained."""

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import in_grid
from tolerances import assert_close

from hyena_jax.config import HyenaConfig, MixerConfig, ShortFilterConfig
from hyena_jax.filters import ShortFilter
from hyena_jax.mixers import Hyena, Mixer
from hyena_jax.mixers.consistency import check_consistency, check_float64
from hyena_jax.system.errors import UserError

D = 4


@dataclass(frozen=True)
class OwnConfig(MixerConfig):
    pass


class Own(Mixer):
    config: OwnConfig = OwnConfig()


def own(mix):
    """A mixer of this `mix(self, x, seq)`."""
    return type("Own", (Own,), {"mix": nn.compact(lambda self, x, seq, deterministic: mix(self, x, seq))})(
        D, 16
    )


def weight(self, shape=(D,)):
    return self.param("weight", nn.initializers.ones, shape)


def behind_a_projection_of_zeros(mix):
    """It would pass anything with its initial parameters."""
    return lambda self, x, seq: nn.Dense(D, kernel_init=nn.initializers.zeros)(mix(self, x, seq))


def recur(self, x, seq):
    return seq.recur(nn.sigmoid(weight(self)), x)


def maximum(self, x, seq):
    def run(before):
        y = jnp.maximum(jax.lax.cummax(x, axis=1), before[:, None])
        return y, y[:, -1]

    return seq.carry("maximum", lambda: jnp.full_like(x[:, 0], -jnp.inf), run)


def ahead_of_a_norm(x):
    """A constant that is added to later tokens would not be seen."""
    normal = jax.nn.standardize(x, axis=-1)
    return normal + normal[:, ::-1]


def with_a_table(self, x, seq):
    """A parameter that is indexed by position."""
    return x + weight(self, (16, D))[jnp.maximum(seq.positions, 0)]


def scanned(self, x, seq):
    return jax.lax.scan(lambda _, x: (None, seq.recur(0.5, x[:, None])[:, 0]), None, x.swapaxes(0, 1))[1]


def conditional(self, x, seq):
    return jax.lax.cond(x.sum() > 0, lambda: seq.shift(x), lambda: x)


@pytest.mark.wide
@pytest.mark.parametrize(
    "mix", [recur, *in_grid(behind_a_projection_of_zeros(recur), lambda self, x, seq: weight(self) * x)]
)
def test_right_mixers_pass(mix):
    check_consistency(own(mix))


@pytest.mark.grid
@pytest.mark.parametrize("config", [HyenaConfig(), *in_grid(HyenaConfig(bidirectional=True))])
def test_mixers_that_refuse_documents_or_decoding_pass(config):
    check_consistency(Hyena(8, 16, config))


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        (lambda self, x, seq: x + 1e-3 * x[:, ::-1], "must be causal, but output 0 depends on token 1 or"),
        (lambda self, x, seq: ahead_of_a_norm(x), "must be causal"),
        (lambda self, x, seq: x - x.mean(0), "mixes the rows of a batch"),
        (lambda self, x, seq: jnp.pad(x, [(0, 0), (8, 0), (0, 0)])[:, : x.shape[1]], "decodes other values"),
        (lambda self, x, seq: jnp.cumsum(x, axis=1), r"decodes .* over whole .* \(shift, fir, recur"),
        (behind_a_projection_of_zeros(lambda self, x, seq: jnp.cumsum(x, axis=1)), "decodes other values"),
        (maximum, "in a row shorter than others: take seq.masked"),
        (lambda self, x, seq: maximum(self, seq.masked(x, fill=-np.inf), seq), "mixes documents that"),
    ],
)  # fmt: skip
def test_a_mix_that_mixes_by_itself_is_refused(mix, message):
    with pytest.raises(UserError, match=message):
        check_consistency(own(mix))


@pytest.mark.parametrize(
    "mix", [scanned, *in_grid(lambda self, x, seq: jax.jit(lambda x: seq.shift(x))(x), conditional)]
)
def test_operators_inside_of_ones_own_transformations_are_refused(mix):
    with pytest.raises(UserError, match=r"inside of its own scan, vmap, jit or remat: call it outside"):
        jax.eval_shape(lambda: own(mix).bind({}).init_state(2, 7))


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        (
            lambda self, x, seq: seq.shift(seq.shift(x) if x.shape[1] > 1 else x),
            "called shift_1 for the first",
        ),
        (lambda self, x, seq: seq.shift(x) if x.shape[1] == 1 else x, "did not call shift_0 this time"),
    ],
)
def test_calls_that_depend_on_the_number_of_tokens_are_refused(mix, message):
    def run():
        bound = own(mix).bind({})
        return bound.prefill(bound.init_state(2, 7), jnp.zeros((2, 3, D)))

    with pytest.raises(UserError, match=message):
        jax.eval_shape(run)


@pytest.mark.grid
def test_a_state_that_grows_must_not_be_declared_unbounded():
    mixer = own(lambda self, x, seq: seq.attend(*[x[:, :, None]] * 3)[:, :, 0])
    check_consistency(mixer)
    type(mixer).is_unbounded = staticmethod(lambda config: True)
    with pytest.raises(UserError, match="is_unbounded of Own must be False where the state grows"):
        check_consistency(mixer)


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        (lambda self, x, seq: seq.carry("own", lambda: x[:, 0], lambda h: (x, x[:, -1] > h)),
            "the memory own_0 after"),
        (lambda self, x, seq: seq.recur(jnp.ones((2, D)), x),
            r"the shape of a in seq.recur must be \[\], \[C\] or of"),
        (lambda self, x, seq: seq.fir(x, jnp.ones((3, D))),
            rf"the shape of taps in seq.fir must be \[C, K\], K taps for each of the C={D} channels .* \(3,"),
        (lambda self, x, seq: seq.attend(*[x[:, :, None]] * 3, 0), "window in seq.attend must be at least 1"),
        (lambda self, x, seq: seq.fir(x, jnp.ones(D)), rf"the shape of taps in seq.fir .*got \({D},\)"),
        (lambda self, x, seq: seq.fir(x, jnp.ones((D, 3)), jnp.ones((D, 1))),
            rf"the shape of bias in seq.fir must be \[C\], with C={D}, got \({D}, 1\)"),
        (lambda self, x, seq: seq.fir(x, jnp.ones((D, 3)), axis=2),
            r"the shape of x in seq.fir must be \[..., B, T, ...\], with T at axis=-1 and B=2, got"),
    ],
)  # fmt: skip
def test_memories_and_factors_of_other_shapes_or_types_are_refused(mix, message):
    with pytest.raises(UserError, match=message):
        jax.eval_shape(lambda: own(mix).bind({}).init_state(2, 7))


def test_a_cache_without_room_is_not_a_number():
    bound = own(lambda self, x, seq: seq.cache(x)[:, -1:] if seq.is_online else x).bind({})
    state, step = jax.jit(lambda: bound.init_state(1, 4))(), jax.jit(bound.step)
    for t in range(5):
        state, y = step(state, np.ones((1, D), np.float32))
        assert np.isfinite(y).all() == (t < 4)


def test_padding_does_not_advance_a_scan_and_lengths_of_a_later_prefill_are_not_numbers():
    def count(self, x, seq):
        return seq.scan(lambda sums, x: (sums + x, sums + x), jnp.zeros(x.shape[::2]), x)

    @jax.jit
    def run():
        bound, x, lengths = own(count).bind({}), jnp.ones((2, 3, D)), np.int32([2, 3])
        state, _ = bound.prefill(bound.init_state(2, 7), x, lengths)
        return bound.step(state, x[:, 0])[1], bound.prefill(state, x, lengths)[1]

    step, later = run()
    np.testing.assert_array_equal(step, [[3] * D, [4] * D])
    assert np.isnan(later).all()


@pytest.mark.grid
def test_one_filter_serves_two_convolutions_and_names_are_ones_own():
    """A user's operator may have the name of one of ours."""

    def mix(self, x, seq):
        filters = seq.filters(ShortFilter(1, D, 16, ShortFilterConfig(3), name="filter"), None)
        once = seq.conv(x.transpose(2, 0, 1), filters, 0)
        own = seq.carry("conv", lambda: jnp.zeros(len(x)), lambda n: (x, n + 1))
        return seq.conv(once, filters, 0).transpose(1, 2, 0) + own

    check_consistency(own(mix))


@pytest.mark.grid
def test_many_taps_of_channels_on_several_axes():
    """More taps than shifted windows pay off for, with the time last."""

    def mixed(n_taps):
        def mix(self, x, seq):
            taps = jnp.zeros((D, n_taps)).at[:, :3].set(jnp.arange(3.0 * D).reshape(D, 3))
            heads = jnp.moveaxis(x, -1, 0).reshape(2, D // 2, *x.shape[:2])
            y, again = seq.fir([heads[:1], heads[1:]], taps, jnp.arange(1.0 * D), axis=-1)
            return jnp.moveaxis(jnp.concatenate([y, again]).reshape(D, *x.shape[:2]), 0, -1)

        return own(mix)

    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 12, D)), jnp.float32)
    few, many = (mixed(n_taps).apply({}, x) for n_taps in (3, 20))
    assert_close(many, few)


def test_a_mixer_that_casts_to_float32_is_told_so_in_float64():
    check_float64(own(lambda self, x, seq: seq.recur(nn.sigmoid(weight(self)).astype(x.dtype), x)))
    casts = "^mixer Own casts to float32 what is float64: cast to x.dtype, and sums to jnp.promote"
    for mix in (
        lambda self, x, seq: seq.shift(x).astype(jnp.float32),
        lambda self, x, seq: seq.shift(x).astype(jnp.float32) + x,
        lambda self, x, seq: seq.scan(lambda h, x: (h + x, h), jnp.zeros((len(x), D), jnp.float32), x),
    ):
        with pytest.raises(UserError, match=casts) as error:
            check_float64(own(mix))
        assert "\n" not in str(error.value)
        assert "output is float32" in str(error.value) or "test_own_mixers.py:" in str(error.value)
    check_consistency(own(lambda self, x, seq: seq.shift(x).astype(jnp.float32) + x))
