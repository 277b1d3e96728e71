"""The causal long convolution as Pallas kernels for TPUs (Mosaic): `fused_conv`, one kernel each way.

Axes: G groups of channels with the same filters, C channels, B batch, L length, R rows and 128 columns of a
transform of n = 128 R >= L points, S channels of a block.

The arithmetic is that of `fast.matmul_fft`, kept in VMEM: u, h and y cross HBM once each. Time is t = 128 r +
c and frequency k = j + R l. Weighting by w^t with w^n = i (see `long_conv`) shifts all
frequencies by a quarter,

    X_k = sum_t x_t exp(-2 pi i t (k - 1/4) / n),

so that it only changes the constants of the transform's three steps:

1. Over r: factors exp(2 pi i r / 4R), then an FFT of R points. A row r is 128 lanes of a block [S, L], whole
   registers, so that nothing moves within a register.
2. Twiddles exp(-2 pi i c (j - 1/4) / n).
3. Over c: a product with the Fourier matrix [128, 128].

A spectrum is [R S, 256], real parts beside imaginary parts: Mosaic has no complex numbers. The matrix unit
multiplies bfloat16; a float32 factor is split into a sum of two or three bfloat16 parts.
The product over c could be three real products instead of four; as one product with [256, 256] it also fills
the wider matrix unit of v6e.

The kernels do not multiply by a mixer's gates: those products take part in other fusions, and these kernels
are bound by the matrix unit, not by HBM. The skip is part of h_0.

Estimated by `plan.kernels`, not measured on a device: forward with C=768, B=8, L=2,048 on v5e, the matrix
unit takes 0.83 ms at "highest" and 0.42 ms at "high", the vector unit 0.24 and 0.18 ms, HBM 0.13 ms. On a CPU
the kernels run only with `interpret=True`.
"""

from fractions import Fraction
from functools import lru_cache, partial, reduce
from math import cos, pi, prod, sin
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from hyena_jax.ops.fast.derivatives import own_derivative
from hyena_jax.ops.fast.matmul_fft import matmul_fft_conv
from hyena_jax.ops.long_conv import fft_len
from hyena_jax.ops.mesh import shape_like

Precision = Literal["high", "highest"]
Complex = tuple[jax.Array, jax.Array]  # real and imaginary part

# A register of a TPU.
SUBLANES, LANES = 8, 128
# The most entries of a block of u, 1 MiB. The backward pass holds six such blocks, and fits into 16 MiB.
BLOCK_SIZE = 2**18
# A product has at least this many rows if there are enough channels: loading its matrix takes as long as
# multiplying 128 rows, and is overlapped with products.
PRODUCT_ROWS = 256
# The bfloat16 parts of a factor. Parts i and j are multiplied where i + j is less than their number.
PARTS = {"high": 2, "highest": 3}


def fused_conv(
    u: jax.Array, h: jax.Array, precision: Precision = "highest", interpret: bool = False
) -> jax.Array:
    """y = h * u, causal, as one kernel, for float32 u [..., C, B, L] and h [C, 1, L].

    Other dtypes and shapes of h go to `matmul_fft_conv`. Gradients in reverse mode are one kernel as well;
    forward mode and second derivatives are those of `matmul_fft_conv`. `precision` "highest" rounds like
    float32 and multiplies 6 pairs of bfloat16 parts; "high" multiplies 3 pairs: in the tests its errors are
    below 1e-5 of the largest entry.
    """
    if u.ndim < 3 or h.shape != (u.shape[-3], 1, u.shape[-1]) or u.dtype != jnp.float32:
        return matmul_fft_conv(u, h)
    channels, batch, length = u.shape[-3:]
    missing = LANES * fft_len(-(-length // LANES)) - length
    # XLA lays the products of `ops.fast.dense` out as [B, C, L] in memory: exchanging the axes is free.
    rows = u.reshape(-1, channels, batch, length).swapaxes(1, 2)
    rows = jnp.pad(rows, [(0, 0), (0, 0), (0, 0), (0, missing)])
    filters = jnp.pad(h.reshape(channels, length), [(0, 0), (0, missing)])
    y = _sharded_conv(rows, filters, precision, interpret)[..., :length]
    return y.swapaxes(1, 2).reshape(u.shape)


def _prime_factors(n: int) -> list[int]:
    for prime in (2, 3, 5):
        if n % prime == 0:
            return [prime, *_prime_factors(n // prime)]
    return []


def _sharded_conv(u: jax.Array, h: jax.Array, precision: Precision, interpret: bool) -> jax.Array:
    """y [G, B, C, n] of u [G, B, C, n] and h [C, n].

    Where XLA shards arrays, which it cannot do inside a kernel, each device convolves its rows.
    """

    def forward(u: jax.Array, h: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        return _convolve(u, h, precision, interpret), (u, h)

    def pull_back(args: tuple[jax.Array, jax.Array], y_bar: jax.Array) -> list[jax.Array]:
        return _call(_backward_kernel, 3, (*args, y_bar), args, precision, interpret)

    conv = own_derivative(forward, pull_back)
    mesh = jax.sharding.get_abstract_mesh()
    axes = mesh.auto_axes
    if not axes:
        return conv(u, h)
    n_devices = prod(mesh.shape[name] for name in axes)
    by_batch = u.shape[1] % n_devices == 0
    by_channel = not by_batch and u.shape[2] % n_devices == 0
    u_spec = PartitionSpec(None, axes if by_batch else None, axes if by_channel else None)
    h_spec = PartitionSpec(axes if by_channel else None)
    local = jax.shard_map(conv, in_specs=(u_spec, h_spec), out_specs=u_spec, axis_names=set(axes))
    return local(u, h)


@partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _convolve(u: jax.Array, h: jax.Array, precision: Precision, interpret: bool) -> jax.Array:
    """y = h * u by the kernel; its derivative, for forward mode and second derivatives, is plain JAX."""
    return _call(_forward_kernel, 2, (u, h), (u,), precision, interpret)[0]


@_convolve.defjvp
def _tangent(precision: Precision, interpret: bool, args: tuple, args_dot: tuple) -> tuple:
    _, y_dot = jax.jvp(matmul_fft_conv, args, args_dot)
    return _convolve(*args, precision, interpret), y_dot


def _call(
    kernel: Any,
    n_transforms: int,
    inputs: tuple[jax.Array, ...],
    outputs_like: tuple[jax.Array, ...],
    precision: Precision,
    interpret: bool,
) -> list[jax.Array]:
    """Launches a kernel on blocks of sequences [B, S, n] and filters [S, n].

    The filters' blocks are the slowest axis of the grid, so that a filter's spectrum is computed once and the
    sum of its gradient stays in VMEM. `n_transforms` of each sequence are for the cost.
    """
    u = inputs[0]
    groups, batch, channels, n = u.shape
    n_rows = n // LANES
    block_channels = SUBLANES * min(max(1, PRODUCT_ROWS // (SUBLANES * n_rows)), pl.cdiv(channels, SUBLANES))
    block_batch = min(batch, BLOCK_SIZE // (block_channels * n))
    twiddles, matrices = (_vary_like(x, u) for x in _tables(n_rows, PARTS[precision]))
    sequences = pl.BlockSpec(
        (None, block_batch, block_channels, n), lambda c, g, b: (g, b, c, 0), memory_space=pltpu.VMEM
    )
    filters = pl.BlockSpec((block_channels, n), lambda c, g, b: (c, 0), memory_space=pltpu.VMEM)

    def spec(x: jax.Array) -> pl.BlockSpec:
        return sequences if x.ndim == 4 else filters

    def whole(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda c, g, b: (0,) * x.ndim, memory_space=pltpu.VMEM)

    spectrum = pltpu.VMEM((n_rows * block_channels, 2 * LANES), jnp.float32)
    return pl.pallas_call(
        partial(kernel, batch),
        out_shape=[shape_like(x) for x in outputs_like],
        grid=(pl.cdiv(channels, block_channels), groups, pl.cdiv(batch, block_batch)),
        in_specs=[whole(twiddles), whole(matrices), *map(spec, inputs)],
        out_specs=[spec(x) for x in outputs_like],
        scratch_shapes=[spectrum] * len(outputs_like),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        cost_estimate=_cost(n_transforms, inputs, outputs_like, precision),
        interpret=interpret,
        name="long_conv",
    )(twiddles, matrices, *inputs)


def _vary_like(x: np.ndarray, u: jax.Array) -> jax.Array:
    """x; under `shard_map` cast to vary along the same mesh axes as u, as a kernel's inputs must."""
    axes = tuple(jax.typeof(u).manual_axis_type.varying)
    return jax.lax.pcast(jnp.asarray(x), axes, to="varying") if axes else jnp.asarray(x)


def _cost(
    n_transforms: int, inputs: tuple[jax.Array, ...], outputs: tuple[jax.Array, ...], precision: Precision
) -> pl.CostEstimate:
    """The products on the matrix unit, each pair of parts counted, and the arrays in HBM."""
    passes = PARTS[precision] * (PARTS[precision] + 1) // 2
    points = n_transforms * inputs[0].size
    return pl.CostEstimate(
        flops=2 * passes * points * 4 * LANES,
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*inputs, *outputs)),
        transcendentals=0,
    )


@lru_cache
def _tables(n_rows: int, n_parts: int) -> tuple[np.ndarray, np.ndarray]:
    """The constants of a transform and its inverse.

    Twiddles [2, R, 1, 128]: real and imaginary parts at (j, c). Matrices [2, parts, 256, 256], bfloat16: the
    parts of [[Re F, Im F], [-Im F, Re F]] with the Fourier matrix F, by which the rows (Re x, Im x) of a
    spectrum are multiplied; and of its inverse over R.
    """
    n = n_rows * LANES
    j, c = np.arange(n_rows)[:, None, None], np.arange(LANES)
    twiddles = np.exp(-2j * np.pi / n * c * (j - 0.25))
    fourier = np.exp(-2j * np.pi / LANES * (np.outer(c, c) % LANES))
    matrix = np.block([[fourier.real, fourier.imag], [-fourier.imag, fourier.real]])
    rest, parts = np.stack([matrix, matrix.T / n]), []
    for _ in range(n_parts):
        parts.append(rest.astype(jnp.bfloat16))
        rest = rest - parts[-1].astype(np.float64)
    return np.float32([twiddles.real, twiddles.imag]), np.stack(parts, axis=1)


def _forward_kernel(
    batch: int,
    twiddles: Any,
    matrices: Any,
    u_ref: Any,
    h_ref: Any,
    y_ref: Any,
    h_spectrum: Any,
) -> None:
    @pl.when(_is_first())
    def _() -> None:
        h_spectrum[...] = _spectrum(h_ref, twiddles, matrices)

    def convolve(b: jax.Array, _: None) -> None:
        product = _times(_spectrum(u_ref.at[b], twiddles, matrices), h_spectrum[...])
        y_ref[b] = _signal(product, twiddles, matrices)

    jax.lax.fori_loop(0, _rows_in_block(u_ref, batch), convolve, None)


def _backward_kernel(
    batch: int,
    twiddles: Any,
    matrices: Any,
    u_ref: Any,
    h_ref: Any,
    y_bar_ref: Any,
    u_bar_ref: Any,
    h_bar_ref: Any,
    h_spectrum: Any,
    h_bar_spectrum: Any,
) -> None:
    """The transpose of a convolution multiplies by a conjugate spectrum; h's gradient sums over G and B."""

    @pl.when(_is_first())
    def _() -> None:
        h_spectrum[...] = _spectrum(h_ref, twiddles, matrices)
        h_bar_spectrum[...] = jnp.zeros_like(h_bar_spectrum)

    def correlate(b: jax.Array, _: None) -> None:
        y_bar = _spectrum(y_bar_ref.at[b], twiddles, matrices)
        u_bar_ref[b] = _signal(_times_conj(y_bar, h_spectrum[...]), twiddles, matrices)
        h_bar_spectrum[...] += _times_conj(y_bar, _spectrum(u_ref.at[b], twiddles, matrices))

    jax.lax.fori_loop(0, _rows_in_block(u_ref, batch), correlate, None)

    is_last = (pl.program_id(1) == pl.num_programs(1) - 1) & (pl.program_id(2) == pl.num_programs(2) - 1)

    @pl.when(is_last)
    def _() -> None:
        h_bar_ref[...] = _signal(h_bar_spectrum[...], twiddles, matrices)


def _is_first() -> jax.Array:
    """Whether this is the first block of its filters."""
    return (pl.program_id(1) == 0) & (pl.program_id(2) == 0)


def _rows_in_block(u_ref: Any, batch: int) -> jax.Array:
    """The rows of the batch in this block; the last block may have fewer."""
    rows = u_ref.shape[0]
    return jnp.minimum(rows, batch - pl.program_id(2) * rows)


def _spectrum(x_ref: Any, twiddles: Any, matrices: Any) -> jax.Array:
    """The spectrum [R S, 256] of x [S, n]; frequency j + R l of sequence s is at (S j + s, l)."""
    n_rows, n_sequences = x_ref.shape[1] // LANES, x_ref.shape[0]
    rows = []
    for r in range(n_rows):
        x, angle = x_ref[:, r * LANES : (r + 1) * LANES][None], pi / 2 * r / n_rows
        rows.append((x * cos(angle), x * sin(angle)))
    (re, im), (c, s) = _fft(rows, -1), twiddles[...]
    turned = jnp.concatenate([re * c - im * s, re * s + im * c], axis=-1)
    return _product(turned.reshape(n_rows * n_sequences, 2 * LANES), matrices.at[0])


def _signal(spectrum: jax.Array, twiddles: Any, matrices: Any) -> jax.Array:
    """The sequences [S, n] of a spectrum [R S, 256]: the inverse of `_spectrum`."""
    n_rows = twiddles.shape[1]
    z, (c, s) = _product(spectrum, matrices.at[1]).reshape(n_rows, -1, 2 * LANES), twiddles[...]
    re, im = z[..., :LANES], z[..., LANES:]
    re, im = re * c + im * s, im * c - re * s
    re, im = _fft([(re[j : j + 1], im[j : j + 1]) for j in range(n_rows)], 1)
    angles = [pi / 2 * r / n_rows for r in range(n_rows)]
    return jnp.concatenate([re[r] * cos(a) + im[r] * sin(a) for r, a in enumerate(angles)], axis=-1)


def _fft(rows: list[Complex], sign: int) -> Complex:
    """sum_r exp(sign 2 pi i j r / R) rows_r for j = 0..R-1: [m R, S, 128] of R rows [m, S, 128].

    With R = p q, r = q a + b and j = k + p l: the sums over a are transforms of p points with frequencies k.
    Those over b are transforms of q points with frequencies l, of p times as many sequences: k becomes the
    slowest index of their first axis, so that the frequencies end in order.
    """
    n_rows = len(rows)
    if n_rows == 1:
        return rows[0]
    p = _prime_factors(n_rows)[0]
    q = n_rows // p
    merged = []
    for b in range(q):
        sums = _dft(rows[b::q], sign)
        turned = [_turned(z, Fraction(sign * b * k, n_rows)) for k, z in enumerate(sums)]
        merged.append(tuple(map(jnp.concatenate, zip(*turned, strict=True))))
    return _fft(merged, sign)


def _dft(terms: list[Complex], sign: int) -> list[Complex]:
    """The transform of a prime number of terms, by its definition."""
    n = len(terms)

    def total(k: int) -> Complex:
        turned = (_turned(z, Fraction(sign * k * i, n)) for i, z in enumerate(terms))
        return reduce(lambda a, b: (a[0] + b[0], a[1] + b[1]), turned)

    return [total(k) for k in range(n)]


def _turned(z: Complex, turns: Fraction) -> Complex:
    """z exp(2 pi i turns); a multiple of a quarter turn takes no product."""
    re, im = z
    quarters = 4 * turns % 4
    if quarters == 0:
        return re, im
    if quarters == 1:
        return -im, re
    if quarters == 2:
        return -re, -im
    if quarters == 3:
        return im, -re
    c, s = cos(2 * pi * turns), sin(2 * pi * turns)
    return re * c - im * s, re * s + im * c


def _times(a: jax.Array, b: jax.Array) -> jax.Array:
    (a_re, a_im), (b_re, b_im) = _pair(a), _pair(b)
    return jnp.concatenate([a_re * b_re - a_im * b_im, a_re * b_im + a_im * b_re], axis=-1)


def _times_conj(a: jax.Array, b: jax.Array) -> jax.Array:
    """The product of a spectrum and the conjugate of another."""
    (a_re, a_im), (b_re, b_im) = _pair(a), _pair(b)
    return jnp.concatenate([a_re * b_re + a_im * b_im, a_im * b_re - a_re * b_im], axis=-1)


def _pair(spectrum: jax.Array) -> Complex:
    return spectrum[:, :LANES], spectrum[:, LANES:]


def _product(x: jax.Array, matrix_parts: Any) -> jax.Array:
    """x @ the sum of `matrix_parts` [parts, 256, 256], the small products first."""
    n_parts = matrix_parts.shape[0]
    x_parts = _bfloat16_parts(x, n_parts)
    pairs = [(i, total - i) for total in reversed(range(n_parts)) for i in reversed(range(total + 1))]
    products = [jnp.dot(x_parts[i], matrix_parts[j], preferred_element_type=jnp.float32) for i, j in pairs]
    return reduce(jnp.add, products)


def _bfloat16_parts(x: jax.Array, n_parts: int) -> list[jax.Array]:
    """x as a sum of bfloat16 arrays, each the rest of x rounded.

    Rounding is done on the bits: XLA for CPUs may drop a conversion to bfloat16 and back, which would leave
    nothing for the next parts.
    """
    parts = []
    for _ in range(n_parts - 1):
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
        rounded = (bits + np.uint32(0x8000)) & np.uint32(0xFFFF0000)
        head = jax.lax.bitcast_convert_type(rounded, jnp.float32)
        parts.append(head.astype(jnp.bfloat16))
        x = x - head
    return [*parts, x.astype(jnp.bfloat16)]
