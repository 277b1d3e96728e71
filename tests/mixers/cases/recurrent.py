"""Gated linear recurrences."""

from cases.case import Case, D, make_case
from hyena_jax.config import HawkConfig


def hawk_case(**options) -> Case:
    config = HawkConfig(**options)
    return make_case(config, {"W": config.width or D, "H": config.gate_blocks, "K": config.short_filter_len})


CASES = {
    "hawk": hawk_case(),
    "hawk_griffin": hawk_case(
        width=12,
        gate_blocks=3,
        projection_bias=True,
        gate_bias=True,
        ring="a_to_c",
        reset_at_start=True,
        gelu="tanh",
    ),
}
OPTIONS = {
    "hawk_reset_at_start": hawk_case(reset_at_start=True, short_filter_len=1),
    "hawk_gate_blocks": hawk_case(gate_blocks=4, gate_bias=True),
    "hawk_ring_a_to_c": hawk_case(ring="a_to_c", gelu="tanh"),
    "hawk_shifted": hawk_case(sign="shifted", min_radius=0.3, reset_at_start=True),
    "hawk_sign_gate": hawk_case(sign="gate", gate_blocks=2),
}
