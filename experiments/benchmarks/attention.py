"""Causal softmax attention, float32, B=1 with 4 heads of 64: both forms against PyTorch's.

python experiments/benchmarks/attention.py [--lengths 1024 4096 8192] [--least-runs 5] [--no-plain]

Prints a line for each program. Every ratio compares medians of runs that took turns in this process; leave
the machine idle meanwhile.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
import torch
import torch.nn.functional as F

from hyena_jax.benchmark.timing import interleave, jit_program
from hyena_jax.cli.base import script_flags
from hyena_jax.ops.attention import Attention, Visible, plain_attention
from hyena_jax.ops.fast.blocked_attention import blocked_attention
from hyena_jax.system.malloc import keep_freed_memory, restart_with_large_pages

N_HEADS, HEAD_DIM = 4, 64
N_THREADS = 2


@dataclass(frozen=True)
class Flags:
    """Measures the forms, one length after another."""

    lengths: tuple[int, ...] = (1024, 4096, 8192)
    """L."""
    seconds: float = 2.0
    """Measuring time of each program."""
    least_runs: int = 5
    """Minimum timed runs of each program."""
    plain: bool = True
    """Also measure the form that holds all weights in memory."""


def main(flags: Flags) -> None:
    restart_with_large_pages()
    keep_freed_memory()
    torch.set_num_threads(N_THREADS)
    forms = {"plain": plain_attention} if flags.plain else {}
    forms |= {"blocks": blocked_attention}
    for length in flags.lengths:
        shape = (1, length, N_HEADS, HEAD_DIM)
        arrays = [jax.random.normal(jax.random.key(i), shape) for i in range(4)]
        programs, megabytes = pytorch(arrays), {}
        for name, form in forms.items():
            for part, function in passes(form).items():
                inputs = arrays if part == "both" else arrays[:3]
                program = jit_program(function, *inputs)
                programs[name, part] = program.run
                megabytes[name, part] = program.memory.temporary / 1e6
        for run in programs.values():
            jax.block_until_ready(run())
        for (name, part), timing in (times := interleave(programs, flags.seconds, flags.least_runs)).items():
            ratio = timing.median / times["PyTorch", part].median
            low, median, high = (1e3 * t for t in (timing.lower, timing.median, timing.upper))
            memory = f", {megabytes[name, part]:.0f} MB" if (name, part) in megabytes else ""
            print(f"{length} {name} {part}: {median:.1f} ({low:.1f}-{high:.1f}) ms, {ratio:.2f}{memory}")


def passes(form: Attention) -> dict[str, Callable]:
    """`forward`, and `both`: o with the gradients of q, k and v, given the cotangent of o."""

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return form(q, k, v, Visible(is_causal=True))

    def both(q: jax.Array, k: jax.Array, v: jax.Array, cotangent: jax.Array) -> tuple:
        o, pullback = jax.vjp(forward, q, k, v)
        return o, pullback(cotangent)

    return {"forward": forward, "both": both}


def pytorch(arrays: list[jax.Array]) -> dict[tuple[str, str], Callable]:
    """`scaled_dot_product_attention` on the same q, k, v and cotangent [B, L, H, d]."""
    tensors = [torch.tensor(np.asarray(x)).transpose(1, 2).contiguous() for x in arrays]
    q, k, v = (x.requires_grad_() for x in tensors[:3])
    attend = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)

    def both() -> tuple:
        o = attend()
        return o, torch.autograd.grad(o, (q, k, v), tensors[3])

    return {("PyTorch", "forward"): torch.no_grad()(attend), ("PyTorch", "both"): both}


if __name__ == "__main__":
    main(script_flags(Flags))
