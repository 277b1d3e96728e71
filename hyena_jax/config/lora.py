"""The config of low-rank adaptation (LoRA)."""

import re
from dataclasses import dataclass, fields

from hyena_jax.config.checks import Checked, require_at_least
from hyena_jax.errors import UserError, require


@dataclass(frozen=True)
class LoRAConfig(Checked):
    """Low-rank adaptation of a trained model: kernels W become W + s A B, and only A and B are trained."""

    rank: int | None = None
    """Rank r of the update of each target, at most the smaller side of its kernel; None trains all
    parameters."""
    alpha: float = 16.0
    """The update is scaled by s = alpha / r."""
    rank_stabilised: bool = False
    """Scale by s = alpha / sqrt(r) instead."""
    targets: str = r"(in_proj|gate_proj|out_proj|qkv_proj)/kernel"
    """Regular expression, searched in the paths of dense kernels such as `blocks_0/mixer/in_proj/kernel`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, self, "rank")
        require(self.alpha > 0, "alpha", self.alpha, "above 0")
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
