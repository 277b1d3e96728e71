"""`hyena-jax bench operators | model | decode | function | compare`: checks, measures, prints, compares."""

import json
import math
import os
import re
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from hyena_jax.benchmark.settings import Decode, Function, Model, Operators
from hyena_jax.cli.base import Command, OfConfig, fail, note, table_console
from hyena_jax.config import AtLeast, AtMost
from hyena_jax.config.flags import positional
from hyena_jax.system.errors import UserError, require
from hyena_jax.system.files import require_free
from hyena_jax.system.malloc import keep_freed_memory
from hyena_jax.system.startup import import_jax, start_devices

if TYPE_CHECKING:
    from hyena_jax.benchmark.comparison import Difference
    from hyena_jax.benchmark.runner import Benchmark


class Bench(Command):
    """What the benchmarks share."""

    def prepare(self) -> "Benchmark":
        """What is measured; must fit the flags."""
        from hyena_jax.benchmark import decode, function, model, operators

        benchmarks = {
            "operators": operators.OperatorsBenchmark,
            "model": model.ModelBenchmark,
            "decode": decode.DecodeBenchmark,
            "function": function.FunctionBenchmark,
        }
        return benchmarks[self.benchmark](self)

    def run(self, arguments: Sequence[str]) -> int:
        import_jax()  # and keeps no compiled programs: a benchmark also times the compiler
        start_devices()
        keep_freed_memory()
        self.check()
        # The idle threads of PyTorch, in a file of the user's, would otherwise spin for more work.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")

        from hyena_jax.benchmark import runner
        from hyena_jax.benchmark.results import Report
        from hyena_jax.benchmark.verify import Mismatch

        report = Report(self, table_console(), ["hyena-jax", *arguments])
        try:
            runner.run(self.prepare(), self, report)
        except Mismatch as error:
            return fail(error, 1)
        return 0


@dataclass(frozen=True)
class BenchOperators(Operators, Bench):
    """Time mixers, forward and with their gradients, over lengths."""


@dataclass(frozen=True)
class BenchModel(Model, Bench, OfConfig):
    """Time a config's model on random data: forward, loss and gradient, and the whole training step.

    The first two run on one device. The step runs with pmap on all, whatever the config's strategy is.
    """


@dataclass(frozen=True)
class BenchDecode(Decode, Bench):
    """Time the prefill of a prompt and then the decoding loop, in language models of one mixer each."""


@dataclass(frozen=True)
class BenchFunction(Function, Bench):
    """Time functions of your own file, forward and with the gradients of their inputs, over sizes.

    The file has `make_inputs(size)`, which returns the arguments as a tuple of arrays; and, if the values are
    to be checked first, `oracle(*arguments)`, which returns them as NumPy computes them in float64.
    """


@dataclass(frozen=True)
class BenchCompare(Command):
    """Compare two benchmarks row by row: B against A. Both are results folders, commits, or FILE.py:NAME.

    Commits are those of the repository around the working directory, which may be your own; each is put into
    a git work tree. Functions are as in `bench function`. These measure in turns (A B B A ...), every time in
    a new process. Exit code 1: a row is slower by more than the threshold.
    """

    a: str = field(metadata=positional("A"))
    """A folder of `bench ... --output`, a commit, or a function of a file."""
    b: str = field(metadata=positional("B"))
    """The other one."""
    bench: str = ""
    """Of commits: what follows `hyena-jax bench`, such as `operators --mixers hyena --lengths 1024`; of
    functions: the options of `hyena-jax bench function`, as in `--bench="--sizes 1024"`."""
    rounds: Annotated[int, AtLeast(2), AtMost(100)] = 5
    """Of commits and functions: processes that measure each of them."""
    threshold: Annotated[float, AtLeast(0.0)] = 0.05
    """The share of A's time by which B may be slower."""
    allow_different: bool = False
    """Compare results of different machines or versions of JAX all the same."""
    output: Path | None = None
    """Of commits and functions: a new folder for what every process measured, `a/1`, `b/1`, `a/2`, ..."""
    json: bool = False
    """Print the comparison as JSON."""

    def run(self, arguments: Sequence[str]) -> int:
        from hyena_jax.benchmark import comparison

        if all(Path(side).is_dir() for side in (self.a, self.b)):
            require(not self.bench, "bench", self.bench, "absent with folders, which were measured before")
            require(self.output is None, "output", str(self.output), "absent with folders")
            found = self._compare(Path(self.a), Path(self.b), {})
        else:
            found = self._measure()
        slower = [one for one in found if one.verdict == comparison.SLOWER and one.ratio > 1 + self.threshold]
        if self.json:  # a bound that does not exist is null
            rows = (
                {k: None if v in (math.inf, 0.0) else v for k, v in one._asdict().items()} for one in found
            )
            print(json.dumps(list(rows), indent=1))
        else:
            self._print(found)
        if slower:
            worst = max(slower, key=lambda one: one.ratio)
            return fail(
                f"{len(slower)} of {len(found)} programs slower by more than {self.threshold:g}:"
                f" {worst.row}, {worst.part} takes {worst.ratio:.3f} of the time"
                + (" (or the machine was slower: each side is one process)" if worst.processes == 1 else ""),
                1,
            )
        return 0

    def _measure(self) -> "list[Difference]":
        from hyena_jax.benchmark.comparison import Side, commit, measure

        try:
            arguments = shlex.split(self.bench)
        except ValueError as error:
            raise UserError(f"must be a command line, got {self.bench!r}: {error}", "bench") from error
        names, renamed = (self.a, self.b), {}
        if all(re.search(r"\.py:[\w,]+$", name) for name in names):
            sides = [Side(name, ["function", name, *arguments]) for name in names]
            of_a, of_b = (name.rpartition(":")[2].split(",") for name in names)
            require(len(of_a) == len(of_b), "B", self.b, f"as many functions as A={self.a!r}")
            renamed = dict(zip(of_b, of_a, strict=True))
        else:
            hashes = {name: commit(name) for name in names}
            unknown = sorted((n for n in names if hashes[n] is None), key=lambda name: Path(name).is_dir())
            if unknown:
                allowed = "both must be results folders, commits of the repository here, or FILE.py:NAME"
                what = "no commit" if Path(unknown[0]).is_dir() else "neither a folder nor a commit"
                raise UserError(f"{unknown[0]!r} is {what}; {allowed}")
            require(bool(arguments), "bench", self.bench, "the benchmark that both commits run")
            sides = [Side(f"commit {hashes[name][:10]}", arguments, hashes[name]) for name in names]
        if self.output is not None:
            require_free("output", self.output)
            self.output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="hyena_jax_bench_") as scratch:
            folder = self.output or Path(scratch)
            measure(*sides, self.rounds, folder)
            return self._compare(folder / "a", folder / "b", renamed)

    def _compare(self, a: Path, b: Path, names: Mapping[str, str]) -> "list[Difference]":
        """B against A; `names` are what methods of B are called in A."""
        from hyena_jax.benchmark import comparison

        of_a = comparison.read_all(a)
        of_b = [comparison.renamed(results, names) for results in comparison.read_all(b)]
        for results in (*of_a[1:], *of_b):
            comparison.require_comparable(of_a[0], results, self.allow_different)
        found = comparison.differences(of_a, of_b)
        if found[0].processes == 1 and (drift := comparison.drift(of_a[0], of_b[0])) is not None:
            note(drift)
        return found

    def _print(self, found: "list[Difference]") -> None:
        from rich.table import Table

        from hyena_jax.benchmark import comparison

        table = Table("row", "pass", "A ms", "B ms", "B / A", "interval", "visible", "verdict", box=None)
        for one in found:
            times = (f"{1e3 * seconds:.4g}" for seconds in (one.a, one.b))
            ratios = f"{one.ratio:.3f}", f"{one.lower:.3f}-{one.upper:.3f}", f"{one.visible:.3f}"
            may_drift = one.processes == 1 and one.verdict in (comparison.SLOWER, comparison.FASTER)
            verdict = one.verdict + (", or the machine was" if may_drift else "")
            table.add_row(one.row, one.part.replace("_", " "), *times, *ratios, verdict)
        console = table_console()
        console.print(table)
        console.print(
            "Intervals hold for all rows at once in 95% of comparisons. A difference as large as `visible`"
            " would have been seen in 80%.",
            soft_wrap=True,
        )
        if found[0].processes == 1:
            console.print(
                "Each side is one process, measured at another time: the intervals know the spread within a"
                " process, not how much faster the machine was in one of them. Equal programs may differ by"
                " more; for a claim, compare two commits, which take turns.",
                soft_wrap=True,
            )
