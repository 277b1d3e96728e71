"""Gated linear recurrences."""

import jax.numpy as jnp
import numpy as np

from cases.case import Case, D, make_case
from hyena_jax.config import (
    GatedDelta2Config,
    GatedDeltaConfig,
    HawkConfig,
    KDAConfig,
    Mamba2Config,
    Mamba3Config,
    RWKV7Config,
)
from hyena_jax.mixers import RWKV7


class LaterRWKV7(RWKV7):
    """A layer after the first, whose values are a function of the token here."""

    def mix(self, x, seq, deterministic):
        seq.handed |= {"rwkv7_v": jnp.tanh(x[..., ::-1])}
        return super().mix(x, seq, deterministic)


def rwkv7_case(**options) -> Case:
    config = RWKV7Config(chunk=8, **options)
    ranks = {f"R{name}": rank for name, rank in zip("wavg", config.ranks(D), strict=True)}
    return make_case(config, {"H": config.n_heads, "K": D // config.n_heads, **ranks})


def later_rwkv7_case() -> Case:
    config = RWKV7Config(n_heads=4, chunk=8, decay_rank=2, rate_rank=3, value_rank=4, gate_rank=5)
    letters = {"H": 4, "K": 2, "Rw": 2, "Ra": 3, "Rv": 4, "Rg": 5}
    return make_case(config, letters, handed=lambda x: {"rwkv7_v": np.tanh(x[..., ::-1])}, module=LaterRWKV7)


def hawk_case(**options) -> Case:
    config = HawkConfig(**options)
    return make_case(config, {"W": config.width or D, "H": config.gate_blocks, "K": config.short_filter_len})


def delta_case(config_class=GatedDeltaConfig, n_heads=2, **options) -> Case:
    config = config_class(n_heads, chunk=8, **options)
    sizes = dict(zip("HGKV", config.sizes(D), strict=True))
    letters = {"n": getattr(config, "factors", 1), "R": getattr(config, "gate_rank", None) or sizes["V"]}
    letters |= {**sizes, "J": config.short_filter_len}
    return make_case(config, letters, is_sensitive=config.negative_eigenvalues)


def mamba2_case(n_heads=4, **options) -> Case:
    config = Mamba2Config(n_heads, chunk=8, d_state=5, **options)
    sizes = {"W": config.inner_factor * D, "H": n_heads, "G": config.n_groups, "N": config.d_state}
    return make_case(config, {**sizes, "J": config.short_filter_len})


def mamba3_case(n_heads=4, **options) -> Case:
    config = Mamba3Config(n_heads, chunk=8, d_state=6, **options)
    width = config.inner_factor * D
    sizes = {"W": width, "H": n_heads, "P": width // n_heads, "G": config.n_groups, "N": config.d_state}
    return make_case(config, {**sizes, "R": config.n_inputs, "S": config.n_planes})


CASES = {
    "rwkv7": rwkv7_case(n_heads=2),
    "mamba3": mamba3_case(n_groups=2),
    "mamba2": mamba2_case(n_groups=2),
    "gated_delta": delta_case(n_value_heads=4, value_dim=3),
    "kda": delta_case(KDAConfig, n_value_heads=4, value_dim=3),
    "gated_delta2": delta_case(GatedDelta2Config, n_value_heads=4, value_dim=3, gate_rank=2),
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
    "rwkv7_later_layer": later_rwkv7_case(),
    "mamba2_dt_limit": mamba2_case(inner_factor=1, dt_limit=(0.01, 0.1), short_filter_len=1),
    "mamba3_three_inputs": mamba3_case(
        n_heads=2, n_inputs=3, rotary_fraction=1.0, rate="heavy_tail", out_norm=True
    ),
    "gated_delta_two_factors": delta_case(factors=2, negative_eigenvalues=True),
    "delta_net": delta_case(decay=False, gate=False, key_dim=3, short_filter_len=1),
    "kda_bounded": delta_case(KDAConfig, decay_bound=-5.0, gate_bias=False, negative_eigenvalues=True),
    "gated_delta2_sigmoid": delta_case(
        GatedDelta2Config, gate="sigmoid", gate_bias=False, negative_eigenvalues=True
    ),
    "hawk_reset_at_start": hawk_case(reset_at_start=True, short_filter_len=1),
    "hawk_gate_blocks": hawk_case(gate_blocks=4, gate_bias=True),
    "hawk_ring_a_to_c": hawk_case(ring="a_to_c", gelu="tanh"),
    "hawk_shifted": hawk_case(sign="shifted", min_radius=0.3, reset_at_start=True),
    "hawk_sign_gate": hawk_case(sign="gate", gate_blocks=2),
}
