"""The attention-free transformer's variants."""

from cases.case import Case, D, make_case
from hyena_jax.config import AFTConvConfig, AFTFullConfig, AFTLocalConfig, AFTSimpleConfig


def aft_case(config: AFTConvConfig | AFTFullConfig | AFTLocalConfig | AFTSimpleConfig) -> Case:
    letters = {"H": getattr(config, "n_heads", 1), "K": getattr(config, "n_taps", 1)}
    return make_case(config, letters | {"R": getattr(config, "rank", 1)})


CASES = {
    "aft_simple": aft_case(AFTSimpleConfig()),
    "aft_conv": aft_case(AFTConvConfig(n_heads=2, n_taps=5)),
    "aft_local": aft_case(AFTLocalConfig(rank=3, window=20)),
    "aft_full": aft_case(AFTFullConfig(rank=3)),
}
OPTIONS = {
    "aft_simple_torch": aft_case(AFTSimpleConfig(init="torch")),
    "aft_conv_1_tap": aft_case(AFTConvConfig(n_heads=D, n_taps=1, init="xavier")),
    "aft_conv_more_taps_than_tokens": aft_case(AFTConvConfig(n_heads=1, n_taps=40)),
    "aft_local_window_1": aft_case(AFTLocalConfig(rank=2, window=1)),
    "aft_local_window_beyond_the_end": aft_case(AFTLocalConfig(rank=2, window=200, init="griffin")),
}
