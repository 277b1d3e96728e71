"""The config of low-rank adaptation (LoRA)."""

import re
from dataclasses import dataclass, fields
from typing import Annotated

from hyena_jax.config.checks import Above, AtLeast, Checked
from hyena_jax.errors import UserError, require


@dataclass(frozen=True)
class LoRAConfig(Checked):
    """Low-rank adaptation of a trained model: kernels W become W + s A B, and only A and B are trained."""

    rank: Annotated[int | None, AtLeast(1)] = None
    """Rank r of the update of each target, at most the smaller side of its kernel; None trains all
    parameters."""
    alpha: Annotated[float, Above(0)] = 16.0
    """The update is scaled by s = alpha / r."""
    rank_stabilised: bool = False
    """Scale by s = alpha / sqrt(r) instead."""
    targets: str = r"(in_proj|gate_proj|out_proj|qkv_proj)/kernel"
    """Regular expression, searched in the paths of dense kernels such as `blocks_0/mixer/in_proj/kernel`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            re.compile(self.targets)
        except (re.error, OverflowError, RecursionError) as error:
            raise UserError(
                f"must be a regular expression, got {self.targets!r}: {error}", "targets"
            ) from error
        for field in fields(self):
            value = getattr(self, field.name)
            allowed = f"{field.default!r} without lora.rank"
            require(self.rank is not None or value == field.default, field.name, value, allowed)

    @property
    def scale(self) -> float:
        """The factor s of the update."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilised else self.rank)
