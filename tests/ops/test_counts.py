"""Counts of operations and bytes against hand-computed numbers and against each other."""

import jax
import jax.numpy as jnp
import pytest
from grid import grid_but
from jax.experimental import pallas as pl

from hyena_jax import config as configs
from hyena_jax.config import MIXER_CONFIGS, MixerConfig
from hyena_jax.mixers import mixer_class
from hyena_jax.ops.counts import count

X = jax.ShapeDtypeStruct((3, 8), jnp.float32)
W = jax.ShapeDtypeStruct((8, 5), jnp.float32)
Z = jax.ShapeDtypeStruct((3, 8), jnp.complex64)


def of(function, *args):
    work = count(function, *args)
    return work.products, work.transforms, work.other


def doubled(ref, out):
    out[...] = 2 * ref[...]


def counted(x, stop):
    return jax.lax.while_loop(lambda c: c[0] < stop, lambda c: (c[0] + 3, jnp.sin(c[1])), (1, x))


# name: function, arguments, (products, transforms, other)
BY_HAND = {
    "product": (jnp.matmul, (X, W), (2 * 3 * 8 * 5, 0, 0)),
    "complex product": (lambda z, w: z @ w.astype(jnp.complex64), (Z, W), (8 * 3 * 8 * 5, 0, 0)),
    "convolution": (
        lambda x: jax.lax.conv_general_dilated(
            x[None], jnp.ones((3, 1, 4)), (1,), "SAME", feature_group_count=3
        ),
        (X,),
        (2 * 3 * 8 * 4, 0, 0),
    ),
    "real transform": (jnp.fft.rfft, (X,), (0, 3 * 2.5 * 8 * 3, 0)),
    "complex transform": (jnp.fft.ifft, (Z,), (0, 3 * 5 * 8 * 3, 0)),
    "elementwise": (lambda x: jnp.tanh(2 * x), (X,), (0, 0, 2 * 24)),
    "complex elementwise": (lambda z: z * z + z, (Z,), (0, 0, 8 * 24)),
    "sum": (lambda x: x.sum(), (X,), (0, 0, 24)),
    "running sum": (lambda x: jnp.cumsum(x, 1), (X,), (0, 0, 24)),
    "added updates": (lambda x: x.at[1].add(jnp.zeros(8)), (X,), (0, 0, 8)),
    "moves and masks": (
        lambda x: jnp.where(jnp.arange(24).reshape(8, 3) % 2 == 0, x.T, 0.0)[:5].astype(jnp.bfloat16),
        (X,),
        (0, 0, 0),
    ),
    "jit and remat": (jax.checkpoint(jax.jit(jnp.exp)), (X,), (0, 0, 24)),
    "scan": (lambda x: jax.lax.scan(lambda c, _: (2 * c, None), x, None, 7), (X,), (0, 0, 7 * 24)),
    "for": (lambda x: jax.lax.fori_loop(0, 7, lambda i, c: 2 * c, x), (X,), (0, 0, 7 * 24)),
    "while": (lambda x: counted(x, 12), (X,), (0, 0, 4 * 24)),
    "no round": (lambda x: counted(x, 0), (X,), (0, 0, 0)),
    "branches": (
        lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ x.T, lambda x: x[:, :3] + 1, x),
        (X,),
        (2 * 3 * 8 * 3, 0, 0),
    ),
    "solve": (
        lambda x: jax.lax.custom_linear_solve(
            lambda y: 2 * y, x, lambda _, b: jnp.sin(b) + b, lambda _, b: b
        ),
        (X,),
        (0, 0, 2 * 24),
    ),
    "kernel": (
        pl.pallas_call(
            doubled,
            grid=(3,),
            in_specs=[pl.BlockSpec((1, 8), lambda i: (i, 0))],
            out_specs=pl.BlockSpec((1, 8), lambda i: (i, 0)),
            out_shape=X,
        ),
        (X,),
        (0, 0, 24),
    ),
    # Two products with the cotangent, and their sum; nothing depends on x x and on its sum.
    "derivative": (jax.grad(lambda x: (x * x).sum()), (X,), (0, 0, 3 * 24)),
}


@pytest.mark.parametrize(("function", "args", "expected"), BY_HAND.values(), ids=BY_HAND)
def test_by_hand(function, args, expected):
    assert of(function, *args) == expected


def test_shards_count_on_every_device():
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")
    shard = jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)
    assert of(shard, jax.ShapeDtypeStruct((8, 3), jnp.float32)) == (0, 0, 24)


def test_a_loop_of_unknown_length_counts_once_and_is_reported():
    work = count(counted, X, jax.ShapeDtypeStruct((), jnp.int32))
    assert (work.other, work.open_loops) == (24, 1)
    assert count(lambda x: counted(x, 12), X).open_loops == 0


def test_bytes_are_those_of_ends_and_of_what_is_not_fused():
    """Counted: x, W, the product x W and the result, but not the array inside the loop."""
    work = count(lambda x, w: jax.lax.fori_loop(0, 9, lambda i, y: jnp.sin(y), x @ w) + 1, X, W)
    assert work.bytes == 4 * (24 + 40 + 15 + 15 + 15)
    half = count(lambda x: jnp.cos(2 * x), jax.ShapeDtypeStruct((3, 8), jnp.bfloat16))
    assert half.bytes == 2 * (24 + 24)


def forward(config: MixerConfig, length: int, d_model: int = 16):
    """A mixer as a function, and its arguments at batch size 1."""
    module = mixer_class(config)(d_model, length, config, 1, None)
    x = jax.ShapeDtypeStruct((1, length, d_model), jnp.float32)
    params = jax.eval_shape(module.init, jax.random.key(0), x)["params"]
    return lambda params, x: module.apply({"params": params}, x), (params, x)


@pytest.mark.wide
@pytest.mark.parametrize("name", grid_but(MIXER_CONFIGS, "hyena", "hawk", "fastmax"))
def test_every_mixer_is_counted(name):
    """The backward pass is about twice the work; four times the length is 4 to 16 times the work."""
    function, (params, x) = forward(MIXER_CONFIGS[name](), 64)
    once = count(function, params, x)

    def both(params, x):
        y, pullback = jax.vjp(function, params, x)
        return y, pullback(y)

    twice = count(both, params, x)
    assert 1.9 * once.flops < twice.flops < 4.6 * once.flops
    assert once.bytes < twice.bytes
    function, args = forward(MIXER_CONFIGS[name](), 256)
    longer = count(function, *args)
    assert 2.5 * once.flops < longer.flops < 17 * once.flops
    assert once.open_loops == twice.open_loops == 0


def test_attention_counts_its_products():
    """x W_qkv and y W_o; scores and weighted values of 64^2 pairs, or of the pairs that a mask keeps."""
    function, args = forward(configs.AttentionConfig(2), 64)
    products = count(function, *args).products
    ends, all_pairs = 2 * 64 * 16 * (48 + 16), 4 * 16 * 64**2
    assert ends + all_pairs / 2 <= products <= ends + 1.1 * all_pairs
