"""How much work a mixer is, counted by hand from its equations, to be read beside what XLA counts.

The conventions are those of `work`. XLA's own count differs where it sees otherwise: of an FFT it counts
nothing, or what a matrix product in its place takes; of a loop's body one round; and of causal attention all
pairs of tokens, where here only those with key <= query count. Axes: B batch, L length, D channels, W inner
width, F filters.
"""

from collections.abc import Callable
from math import comb

from hyena_jax import config as configs
from hyena_jax.benchmark.work import Work, dense, elementwise, long_conv, pairs, short_conv, transform
from hyena_jax.config import FilterConfig, HawkConfig, MixerConfig
from hyena_jax.ops.fastmax import CHUNK


def count(config: MixerConfig, batch: int, length: int, d_model: int) -> Work:
    """The work of one mixer on x [B, L, D], with Lmax = L; its long filter included."""
    ends = Work(activations=2 * batch * length * d_model)
    return ends + COUNTS[type(config)](config, batch, length, d_model)


def count_filter(config: FilterConfig, n_filters: int, channels: int, length: int) -> Work:
    """The work of making h [F, W, L]."""
    taps = n_filters * channels * length
    made = Work(activations=taps)
    match config:
        case configs.CKConvFilterConfig():  # the implicit filter is one, under a window
            hidden = length * config.width
            inner = config.emb_dim + config.n_hidden * config.width
            window = 4 * taps if isinstance(config, configs.ImplicitFilterConfig) else 0
            sines = 2 * (config.n_hidden + 1) * hidden
            return made + Work(products=2 * hidden * inner + 2 * config.width * taps, other=sines + window)
        case configs.WindowedFilterConfig():
            return made + Work(other=5 * taps)
        case configs.ExplicitFilterConfig():
            return made
        case configs.FNOFilterConfig():
            return made + Work(transforms=n_filters * channels * transform(length))
        case configs.TransferFunctionFilterConfig():
            spectra = 3 * n_filters * channels * transform(length)
            return made + Work(transforms=spectra, other=4 * taps)
        case configs.S4DFilterConfig() | configs.ModalFilterConfig():
            modes = config.n_state // 2 if isinstance(config, configs.S4DFilterConfig) else config.n_modes
            # lambda^t = exp(t log lambda), a complex product with the weight, and the sum over modes
            return made + Work(other=11 * modes * taps)
        case configs.LookupFilterConfig():
            dense = 2 * length * config.width * channels + 2 * channels * taps
            return made + Work(products=dense, other=8 * length * channels)
    raise TypeError(f"no count for {type(config).__name__}")


def _hyena(config: configs.HyenaConfig, batch: int, length: int, d_model: int) -> Work:
    n_tokens, width = batch * length, config.inner_factor * d_model
    n_filters = config.order - (config.gating == "gate_first")
    projected, head = (config.order + 1) * width, width // config.num_heads
    work = dense(n_tokens, d_model, projected) + short_conv(n_tokens, projected, config.short_filter_len)
    directions = 1 + config.bidirectional
    work += count_filter(config.filter, directions * n_filters, head, length)
    for _ in range(n_filters):
        work += long_conv(batch, length, width, directions * head)
        if config.post_order_ffn:
            work += dense(n_tokens * head, config.num_heads, config.num_heads)
    for _ in range(config.order):
        work += elementwise(n_tokens, width)
    return work + dense(n_tokens, width, d_model)


def _annotated_hyena(config: configs.AnnotatedHyenaConfig, batch: int, length: int, d_model: int) -> Work:
    n_tokens, projected = batch * length, (config.order + 1) * d_model
    work = dense(n_tokens, d_model, projected) + short_conv(n_tokens, projected, config.short_filter_len)
    work += count_filter(config.filter, config.order, d_model, length)
    for _ in range(config.order):  # each gate is normalised, multiplied and added
        work += long_conv(batch, length, d_model, d_model) + elementwise(n_tokens, d_model, 5)
    return work + dense(n_tokens, d_model, d_model)


def _gated_hyena(config: configs.GatedHyenaConfig, batch: int, length: int, d_model: int) -> Work:
    n_tokens = batch * length
    work = dense(n_tokens, d_model, 2 * d_model) + short_conv(n_tokens, d_model, config.short_filter_len)
    work += count_filter(config.filter, 1, d_model, length) + long_conv(batch, length, d_model, d_model)
    return work + elementwise(n_tokens, d_model, 4) + dense(n_tokens, d_model, d_model)


def _h3(config: configs.H3Config, batch: int, length: int, d_model: int) -> Work:
    n_tokens, n_heads = batch * length, d_model // config.head_dim
    outer = d_model * config.head_dim
    work = dense(n_tokens, d_model, 3 * d_model) + short_conv(n_tokens, d_model, config.n_taps)
    work += count_filter(config.filter, 1, n_heads, length)
    work += elementwise(n_tokens, outer) + long_conv(batch, length, outer, n_heads)
    return work + elementwise(n_tokens, d_model, 2 * config.head_dim) + dense(n_tokens, d_model, d_model)


def _s4d(config: configs.S4DConfig, batch: int, length: int, d_model: int) -> Work:
    n_tokens = batch * length
    work = count_filter(config.filter, 1, d_model, length) + long_conv(batch, length, d_model, d_model)
    work += elementwise(n_tokens, d_model, 8) + dense(n_tokens, d_model, 2 * d_model)
    return work + elementwise(n_tokens, d_model, 4)


def _fir(config: configs.FIRConfig, batch: int, length: int, d_model: int) -> Work:
    ends = dense(batch * length, d_model, d_model) + dense(batch * length, d_model, d_model)
    made = count_filter(config.filter, 1, d_model, length)
    return ends + made + long_conv(batch, length, d_model, d_model)


def _hawk(config: HawkConfig, batch: int, length: int, d_model: int) -> Work:
    n_tokens, width = batch * length, config.width or d_model
    work = dense(n_tokens, d_model, 2 * width) + short_conv(n_tokens, width, config.short_filter_len)
    for _ in range(2):
        work += dense(n_tokens * config.gate_blocks, width // config.gate_blocks, width // config.gate_blocks)
    # Two sigmoids, a and sqrt(1 - a^2), the input's two factors, the recurrence, a GELU and its product.
    return work + elementwise(n_tokens, width, 26) + dense(n_tokens, width, d_model)


def _attention(
    config: configs.AttentionConfig | configs.LocalAttentionConfig, batch: int, length: int, d_model: int
) -> Work:
    n_tokens, head_dim = batch * length, d_model // config.n_heads
    n_kv_heads = config.n_kv_heads or config.n_heads
    work = dense(n_tokens, d_model, (config.n_heads + 2 * n_kv_heads) * head_dim)
    n_pairs = batch * config.n_heads * pairs(length, config.causal, getattr(config, "window", None))
    turned = 3 * config.rotary_fraction * n_tokens * (config.n_heads + n_kv_heads) * head_dim
    attend = Work(products=4 * head_dim * n_pairs, other=5 * n_pairs + turned, activations=n_tokens * d_model)
    return work + attend + dense(n_tokens, d_model, d_model)


def _fastmax(config: configs.FastmaxConfig, batch: int, length: int, d_model: int) -> Work:
    n_tokens, n_heads, head_dim = batch * length, config.n_heads, d_model // config.n_heads
    n_features = comb(head_dim + config.p, config.p)
    n_pairs, sums = n_heads * batch * pairs(length, config.causal), Work()
    if config.factorized:
        sums = Work(
            products=4 * n_tokens * n_heads * n_features * (head_dim + 1),
            other=4 * n_tokens * n_heads * n_features,
        )
        whole, rest = divmod(length, CHUNK)
        in_chunks = whole * pairs(CHUNK) + pairs(rest) if config.causal else 0
        n_pairs = n_heads * batch * in_chunks
    direct = Work(products=4 * head_dim * n_pairs, other=2 * config.p * n_pairs)
    ends = dense(n_tokens, d_model, 3 * d_model) + dense(n_tokens, d_model, d_model)
    return ends + sums + direct + elementwise(n_tokens, d_model)


def _aft(config: MixerConfig, batch: int, length: int, d_model: int) -> Work:
    n_tokens = batch * length
    n_keys = config.n_heads if isinstance(config, configs.AFTConvConfig) else d_model
    work = dense(n_tokens, d_model, 2 * d_model + n_keys) + dense(n_tokens, d_model, d_model)
    running = Work(other=10 * n_tokens * d_model)  # the sums with w = 0, before the window
    match config:
        case configs.AFTConvConfig():
            n_pairs = pairs(length, window=config.n_taps - 1)
            mixed = running + Work(other=batch * n_pairs * (3 * n_keys + 2 * d_model))
        case configs.AFTLocalConfig():
            n_pairs = pairs(length, window=config.window - 1)
            mixed = running + Work(products=2 * config.rank * n_pairs, other=6 * batch * n_pairs * d_model)
        case configs.AFTFullConfig():
            n_pairs = pairs(length)
            mixed = Work(products=2 * config.rank * n_pairs + 4 * batch * n_pairs * d_model, other=n_pairs)
        case _:
            mixed = running
    return work + mixed + elementwise(n_tokens, d_model, 4)


COUNTS: dict[type, Callable[..., Work]] = {
    configs.HyenaConfig: _hyena,
    configs.AnnotatedHyenaConfig: _annotated_hyena,
    configs.GatedHyenaConfig: _gated_hyena,
    configs.HawkConfig: _hawk,
    configs.AttentionConfig: _attention,
    configs.LocalAttentionConfig: _attention,
    configs.FastmaxConfig: _fastmax,
    configs.AFTFullConfig: _aft,
    configs.AFTLocalConfig: _aft,
    configs.AFTSimpleConfig: _aft,
    configs.AFTConvConfig: _aft,
    configs.H3Config: _h3,
    configs.S4DConfig: _s4d,
    configs.FIRConfig: _fir,
}
