"""Hyena in its published forms."""

from cases.case import MAX_LEN, Case
from hyena_jax.config import HyenaConfig, ImplicitFilterConfig
from hyena_jax.reference import hyena as reference


def hyena_case(**options) -> Case:
    config = HyenaConfig(filter=ImplicitFilterConfig(emb_dim=5, width=8), **options)
    n_filters = config.order - (config.gating == "gate_first")

    def oracle(params, x):
        h = reference.implicit_filter(params["filter"], n_filters, x.shape[1], MAX_LEN, config.filter)
        return reference.hyena(params, x, h, config.gating)

    return Case(config, oracle, letters={}, exactly_causal=False)


CASES = {
    "hyena": hyena_case(),
    "hyena_conv_first_3": hyena_case(order=3, gating="conv_first", short_filter_len=4),
}
OPTIONS = {
    "hyena_gate_first_3": hyena_case(order=3),
    "hyena_conv_first_1": hyena_case(order=1, gating="conv_first"),
}
