"""`hyena-jax bench operators | model | decode`: checks against oracles, measures, prints and writes."""

import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hyena_jax.benchmark.settings import Decode, Model, Operators
from hyena_jax.cli.base import Command, OfConfig, fail, table_console
from hyena_jax.startup import import_jax, keep_freed_memory, start_devices


class _Bench(Command):
    """What the benchmarks share."""

    module: ClassVar[str]
    """The module of `hyena_jax.benchmark` that measures."""

    def run(self, arguments: Sequence[str]) -> int:
        """Measures; returns exit code 1 if a value differs from its oracle.

        Each row is printed and kept as soon as it is measured. Compiled programs are not kept: a benchmark
        also times the compiler.
        """
        import_jax()
        start_devices()
        keep_freed_memory()
        self.check()
        # PyTorch's idle threads would otherwise spin for more work, and slow down whatever runs next.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")

        from hyena_jax.benchmark.results import Report
        from hyena_jax.benchmark.verify import Mismatch

        report = Report(self, table_console(), ["hyena-jax", *arguments])
        try:
            importlib.import_module(f"hyena_jax.benchmark.{self.module}").run(self, report)
        except Mismatch as error:
            return fail(error, 1)
        return 0


@dataclass(frozen=True)
class BenchOperators(Operators, _Bench):
    """Time mixers, forward and with their gradients, over lengths."""

    module = "operators"


@dataclass(frozen=True)
class BenchModel(Model, _Bench, OfConfig):
    """Time a config's model on random data: forward, loss and gradient, and the whole training step.

    The first two run on one device. The step runs with pmap on all, whatever the config's strategy is.
    """

    module = "model"


@dataclass(frozen=True)
class BenchDecode(Decode, _Bench):
    """Time the prefill of a prompt and then the decoding loop, in language models of one mixer each."""

    module = "decode"
