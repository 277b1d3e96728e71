"""PyTorch's causal attention on this device, which `run.py` shows beside ours: results as `bench` keeps them.

python experiments/accelerators/torch_attention.py --lengths 2048 8192 --output FOLDER

One row, 12 heads of 64 channels, bfloat16; a CPU is timed in float32. Medians of runs, each waited for.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hyena_jax.cli.base import note, script_flags
from hyena_jax.system.files import write_text

HEADS, HEAD_DIM = 12, 64
LEAST_RUNS, SECONDS = 5, 0.3


@dataclass(frozen=True)
class Flags:
    """Measure `scaled_dot_product_attention`."""

    output: Path
    """Folder of results.json."""
    lengths: tuple[int, ...] = (2048, 8192)
    """Tokens of a row."""


def main(flags: Flags) -> int:
    try:
        import torch
    except ImportError:
        note("PyTorch's attention: not measured, as torch is not installed")
        return 3
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"

    def timed(run: Callable[[], object]) -> dict[str, float]:
        seconds: list[float] = []
        run()  # once for its kernels
        while len(seconds) < LEAST_RUNS or sum(seconds) < SECONDS:
            began = time.perf_counter()
            run()
            if on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        return {"median": statistics.median(seconds), "runs": len(seconds)}

    rows = []
    for length in flags.lengths:
        shape, dtype = (3, 1, HEADS, length, HEAD_DIM), torch.bfloat16 if on_gpu else torch.float32
        qkv = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)

        def forward(qkv: torch.Tensor = qkv) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)

        def both(qkv: torch.Tensor = qkv) -> torch.Tensor:
            return torch.autograd.grad(forward(qkv).sum(), qkv)[0]

        with torch.no_grad():
            passes = {"forward": {"seconds": timed(forward)}}
        passes["forward_backward"] = {"seconds": timed(both)}
        rows.append(
            {"method": "PyTorch's attention, without projections", "length": length, "passes": passes}
        )
    flags.output.mkdir(parents=True, exist_ok=True)
    write_text(flags.output / "results.json", json.dumps({"torch": torch.__version__, "rows": rows}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(script_flags(Flags)))
