"""Hyena in its published forms, and the other mixers with long convolutions."""

from cases.case import MAX_LEN, Case, D, make_case
from hyena_jax.config import (
    FILTER_CONFIGS,
    AnnotatedHyenaConfig,
    FilterConfig,
    FIRConfig,
    GatedHyenaConfig,
    H3Config,
    HyenaConfig,
    ImplicitFilterConfig,
    LookupFilterConfig,
    RealModalFilterConfig,
    S4DConfig,
    S4DFilterConfig,
    ShortFilterConfig,
    WindowedFilterConfig,
)

IMPLICIT = ImplicitFilterConfig(emb_dim=5, width=8)
FILTERS = {
    "siren": {"width": 8, "n_hidden": 1, "frequency": 20.0},
    "windowed": {},
    "explicit": {"n_taps": 9},
    "short": {"n_taps": 3},
    "ckconv": {"emb_dim": 5, "width": 8},
    "fno": {"n_modes": 8},
    "transfer_function": {"n_state": 2},
    "s4d": {"n_state": 4},
    "modal": {"n_modes": 3},
    "real_modal": {"n_modes": 3},
    "lookup": {"width": 5},
    "stu": {"n_vectors": 4},
}


def hyena_case(
    filter_config: FilterConfig = IMPLICIT, max_len: int = MAX_LEN, exactly_causal: bool = False, **options
) -> Case:
    config = HyenaConfig(filter=filter_config, **options)
    letters = {
        "N": config.order,
        "F": config.order - (config.gating == "gate_first"),
        "H": config.n_heads,
        "K": config.short_filter_len,
        "W": config.inner_factor * D,
    }
    return make_case(config, letters, max_len, exactly_causal=exactly_causal)


def annotated_case(config: AnnotatedHyenaConfig) -> Case:
    return make_case(config, {"N": config.order, "K": config.short_filter_len}, exactly_causal=False)


def gated_case(config: GatedHyenaConfig) -> Case:
    return make_case(config, {"K": config.short_filter_len}, exactly_causal=False)


def h3_case(config: H3Config) -> Case:
    letters = {"M": config.n_taps, "H": D // config.head_dim}
    return make_case(config, letters, exactly_causal=False)


def plain_case(config: S4DConfig | FIRConfig) -> Case:
    return make_case(config, {}, exactly_causal=False)


# The forms of StripedHyena 2 have neither a bias before their gates nor, with 7 taps, a skip.
STRIPED = {"in_bias": False, "short_bias": False}
CASES = {
    "hyena": hyena_case(),
    "hyena_short": hyena_case(
        ShortFilterConfig(), exactly_causal=True, filter_groups=4, skip=False, **STRIPED
    ),
    "annotated_hyena": annotated_case(AnnotatedHyenaConfig()),
    "gated_hyena": gated_case(GatedHyenaConfig(filter=LookupFilterConfig(width=5))),
    "h3": h3_case(H3Config(n_taps=5, filter=S4DFilterConfig(n_state=4))),
    "s4d": plain_case(S4DConfig(S4DFilterConfig(n_state=4))),
    "fir": plain_case(FIRConfig()),
}
OPTIONS = {
    "hyena_gate_first_3": hyena_case(order=3),
    "hyena_conv_first_3": hyena_case(order=3, gating="conv_first", short_filter_len=4),
    "hyena_conv_first_1": hyena_case(order=1, gating="conv_first"),
    "hyena_heads": hyena_case(n_heads=2, inner_factor=3, post_order_ffn=True),
    "hyena_outer_mixing": hyena_case(order=3, n_heads=4, outer_mixing=True, activation="gelu"),
    "hyena_conv_first_heads": hyena_case(
        order=2, gating="conv_first", n_heads=2, outer_mixing=True, post_order_ffn=True, activation="silu"
    ),
    "hyena_blocks": hyena_case(n_blocks=8, max_len=128),
    "hyena_bidirectional": hyena_case(order=3, bidirectional=True, n_heads=2),
    "hyena_bidirectional_blocks": hyena_case(bidirectional=True, n_blocks=8, max_len=128),
    "hyena_medium": hyena_case(ShortFilterConfig(40, decay=(0.5, 50.0)), filter_groups=4, **STRIPED),
    "hyena_long": hyena_case(RealModalFilterConfig(n_modes=3), filter_groups=2, **STRIPED),
    "hyena_lfm2": hyena_case(
        ShortFilterConfig(3),
        exactly_causal=True,
        short_filter_len=0,
        in_bias=False,
        out_bias=False,
        skip=False,
    ),
    "hyena_groups_in_heads": hyena_case(order=3, n_heads=2, filter_groups=2),
    "hyena_short_in_blocks": hyena_case(
        ShortFilterConfig(5, deviation=0.3), n_blocks=8, max_len=128, filter_groups=2
    ),
    **{
        f"hyena_{name}_filter": hyena_case(FILTER_CONFIGS[name](**options), order=3)
        for name, options in FILTERS.items()
    },
    # With documents, too.
    "annotated_hyena_short": annotated_case(AnnotatedHyenaConfig(filter=ShortFilterConfig(3))),
    "gated_hyena_short": gated_case(GatedHyenaConfig(filter=ShortFilterConfig(3))),
    "h3_short": h3_case(H3Config(head_dim=2, n_taps=5, filter=ShortFilterConfig(3))),
    "s4d_short": plain_case(S4DConfig(ShortFilterConfig(3))),
    "fir_short": plain_case(FIRConfig(ShortFilterConfig(3))),
    "annotated_hyena_3": annotated_case(AnnotatedHyenaConfig(3, 4, WindowedFilterConfig(norm_axis="length"))),
    "gated_hyena_centred": gated_case(GatedHyenaConfig(5, causal=False)),
    "h3_heads": h3_case(H3Config(head_dim=4, n_taps=5, filter=S4DFilterConfig(n_state=4))),
}
