"""Gated linear recurrences."""

from cases.case import Case, D
from hyena_jax.config import HawkConfig
from hyena_jax.reference import recurrence as reference


def hawk_case(**options) -> Case:
    config = HawkConfig(**options)

    def oracle(params, x):
        return reference.hawk(params, x, config)

    def resets(params, x, segment_ids):
        return reference.hawk(params, x, config, segment_ids)

    letters = {"W": config.width or D, "H": config.gate_blocks, "K": config.short_filter_len}
    return Case(config, oracle, letters, resets=resets)


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
}
