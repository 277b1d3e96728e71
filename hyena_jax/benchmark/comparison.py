"""Two benchmarks compared row by row: ratios of times, their intervals, and what that shows.

Of two folders of results; or of two commits or files' functions, which are measured first, in turns.
"""

import math
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from hyena_jax.benchmark.settings import RESULTS
from hyena_jax.system.errors import UserError, printable
from hyena_jax.system.files import memory_size, parse_json, read_bytes
from hyena_jax.system.output import watched
from hyena_jax.system.signals import raising

FASTER, SLOWER, UNSEEN, TOO_FEW = "faster", "slower", "no difference seen", "too few runs"
ERROR_RATE = 0.05
"""The share of comparisons of equal programs in which any row of the table is faster or slower."""
POWER = 0.8
"""The share of comparisons in which the smallest difference that could be seen is seen."""
LEAST_RUNS = 3
LEAST, MOST = 1e-12, 1e12
"""Seconds beyond which a file holds no times; and the most runs."""

# Settings that say how it was measured or which rows there are, not what a row measures.
NOT_OF_A_ROW = """
    seconds least_runs max_seconds output json profile plugins mixers lengths baseline contexts batch seq_len
    sizes target experiment.training experiment.logging experiment.parallel experiment.seed experiment.data
""".split()
RATES = ("flops_per_second", "bytes_per_second")
SIZES = ("length", "context", "batch", "size")


class Difference(NamedTuple):
    """One program, in B against A. Times are medians, seconds; ratios are of B's time to A's."""

    row: str
    part: str
    a: float
    b: float
    ratio: float
    lower: float
    upper: float
    visible: float
    """The ratio above 1 that would have been seen in POWER of all comparisons."""
    verdict: str
    processes: int
    """Of each side; with one, a slower program and a slower moment of the machine look the same."""


def read_all(folder: Path) -> list[dict[str, Any]]:
    """The results in a folder, one for each process: its results.json, or those of subfolders 1, 2, ..."""
    files = [folder / RESULTS]
    if not files[0].exists():
        numbered = (path for path in folder.iterdir() if path.name.isdecimal())
        files = [path / RESULTS for path in sorted(numbered, key=lambda path: int(path.name))]
    if not files:
        raise UserError(f"{str(folder)!r} has no {RESULTS}; `hyena-jax bench ... --output` writes one")
    found = []
    for file in files:
        try:
            results = parse_json(read_bytes("results", file, memory_size()))
            for key, value in times_by_program(results).items():
                is_order = LEAST <= value["lower"] <= value["median"] <= value["upper"] <= MOST
                if not is_order or not 1 <= value["runs"] <= MOST:
                    raise ValueError(f"the times of {key}")
            parts = [kind_of(results), *(results[name] for name in ("settings", "machine", "versions"))]
            if [type(part) for part in parts] != [str, dict, dict, dict]:
                raise ValueError("what was measured, and where")
            rates = results.get("roofline")
            if rates is not None and not all(LEAST < rates[name] < MOST**2 for name in RATES):
                raise ValueError(f"the roofline {rates}")
            found.append(results)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            reason = error if isinstance(error, UserError) else repr(error)
            raise UserError(f"{file} is not the results of a benchmark: {reason}") from error
    return found


def kind_of(results: Mapping[str, Any]) -> str:
    """The benchmark that was run, such as `operators`."""
    return results.get("benchmark") or results["command"].split()[2]


def times_by_program(results: Mapping[str, Any]) -> dict[tuple[str, str], Mapping[str, float]]:
    """The times of all programs, by what they measure: a method at its sizes, and a pass."""
    found = {}
    for row in results["rows"]:
        passes = row.get("passes")
        if passes is None:  # of `decode`, before it had passes
            passes = {"prefill": row["prefill"], "step": {"seconds": row["step"]}}
        sizes = [f"{name} {row[name]:,}" for name in SIZES if name in row]
        name = printable(", ".join([row.get("method") or results["settings"]["config"], *sizes]))
        found |= {(name, part): measured["seconds"] for part, measured in passes.items()}
    return found


def renamed(results: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The results with other names of methods."""
    rows = [{**row, "method": names.get(row.get("method"), row.get("method"))} for row in results["rows"]]
    return {**results, "rows": rows}


def require_comparable(a: Mapping[str, Any], b: Mapping[str, Any], allow_different: bool) -> None:
    """Raises UserError unless both measured the same, on the same kind of machine, with the same JAX.

    With `allow_different`, machines and versions may differ.
    """
    kinds = [kind_of(results) for results in (a, b)]
    if kinds[0] != kinds[1]:
        listed = f"A is of `bench {kinds[0]}` and B of `bench {kinds[1]}`"
        raise UserError(printable(f"{listed}; compare two of one kind"))
    for path, (x, y) in _unequal(a["settings"], b["settings"]):
        if not any(path == name or path.startswith(f"{name}.") for name in NOT_OF_A_ROW):
            raise UserError(f"A and B do not measure the same: {path} is {x!r} in A and {y!r} in B")
    parts = [
        {
            "machine": {name: value for name, value in results["machine"].items() if name != "system"},
            "versions": {name: results["versions"].get(name) for name in ("jax", "jaxlib")},
        }
        for results in (a, b)
    ]
    for path, (x, y) in _unequal(*parts):
        if not allow_different:
            how = "measure both on one machine, or give --allow-different"
            raise UserError(f"A and B cannot be compared: {path} is {x!r} in A and {y!r} in B; {how}")


def drift(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    """A line about the machine's own speed at both; None unless both measured it."""
    of_a, of_b = a.get("roofline"), b.get("roofline")
    if of_a is None or of_b is None:
        return None
    product, copy = (f"{of_a[name] / of_b[name]:.3f}" for name in RATES)
    return f"at B, the machine took {product} of A's time for a matrix product, and {copy} for a copy"


def _unequal(a: Mapping, b: Mapping, before: str = "") -> Iterator[tuple[str, tuple]]:
    """The paths that both have with different values."""
    for name in a:
        if name in b and a[name] != b[name]:
            if isinstance(a[name], dict) and isinstance(b[name], dict):
                yield from _unequal(a[name], b[name], f"{before}{name}.")
            else:
                yield f"{before}{name}", (a[name], b[name])


def differences(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """All programs that both have, in the order of A, given the results by process.

    With several processes each, which took turns: the t-test of the logarithms of the ratios of their
    medians, pair by pair. With one process each, the spread of its runs, which knows nothing of differences
    between processes. The interval covers all rows at once (Bonferroni).
    """
    of_a, of_b = ([times_by_program(results) for results in side] for side in (a, b))
    pairs = min(len(of_a), len(of_b))
    sides = of_a[:pairs] + of_b[:pairs]
    common = [key for key in of_a[0] if all(key in found for found in sides)]
    if not common:
        raise UserError("A and B have no row in common: run the same benchmark for both")
    found = []
    for row, part in common:
        x, y = ([times[row, part] for times in side[:pairs]] for side in (of_a, of_b))
        ratios = [math.log(after["median"] / before["median"]) for before, after in zip(x, y, strict=True)]
        if pairs > 1:
            error, freedom = statistics.stdev(ratios) / math.sqrt(pairs), float(pairs - 1)
        else:
            error, freedom = _error_of_runs(x[0], y[0])
        medians = (statistics.median(times["median"] for times in side) for side in (x, y))
        verdict = _verdict(statistics.fmean(ratios), error, freedom, len(common))
        found.append(Difference(row, part, *medians, *verdict, pairs))
    return found


def _verdict(log_ratio: float, error: float, freedom: float, n_rows: int) -> tuple:
    """Ratio, interval, visible ratio and verdict, given the standard error of the ratio's logarithm."""
    from scipy.stats import t

    if math.isnan(error):
        return math.exp(log_ratio), 0.0, math.inf, math.inf, TOO_FEW
    critical = float(t.ppf(1 - ERROR_RATE / n_rows / 2, freedom))
    ends = (_exp(log_ratio - critical * error), _exp(log_ratio + critical * error))
    visible = _exp((critical + float(t.ppf(POWER, freedom))) * error)
    verdict = SLOWER if ends[0] > 1 else FASTER if ends[1] < 1 else UNSEEN
    return math.exp(log_ratio), *ends, visible, verdict


def _exp(x: float) -> float:
    return math.inf if x > 700 else math.exp(x)


def _error_of_runs(a: Mapping[str, float], b: Mapping[str, float]) -> tuple[float, float]:
    """Standard error of the logarithm of a ratio of medians, from quartiles; and its degrees of freedom.

    As if the logarithms of the times were normal: Blom's expected quartiles, and 0.37 as the efficiency of a
    standard deviation from quartiles. NaN with fewer than LEAST_RUNS runs.
    """
    if min(a["runs"], b["runs"]) < LEAST_RUNS:
        return math.nan, 1.0
    variances, freedoms = [], []
    for times in (a, b):
        n = times["runs"]
        upper = statistics.NormalDist().inv_cdf((1 + 0.75 * (n - 1) - 0.375) / (n + 0.25))
        deviation = math.log(times["upper"] / times["lower"]) / (2 * upper)
        variances.append(math.pi / 2 * deviation**2 / n)
        freedoms.append(max(0.37 * (n - 1), 1.0))
    total = sum(variances)
    if total == 0:
        return 0.0, min(freedoms)
    freedom = total**2 / sum(v**2 / f for v, f in zip(variances, freedoms, strict=True))  # Welch
    return math.sqrt(total), freedom


def commit(name: str) -> str | None:
    """The hash of a commit of the repository around the working directory; None if there is none."""
    ended = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    return ended.stdout.strip() if ended.returncode == 0 else None


class Side(NamedTuple):
    """What one side measures: `arguments` of `hyena-jax bench`, in the files of a commit, or those here."""

    name: str
    arguments: Sequence[str]
    commit: str | None = None


def measure(a: Side, b: Side, rounds: int, folder: Path) -> None:
    """Measures both sides `rounds` times each, in the order A B B A A B ..., each time in a new process.

    `folder` gets a/1, b/1, a/2, ..., each with the output of one process. A side that refuses its arguments
    or finds a wrong value is a UserError.
    """
    folder = folder.resolve()  # the processes run in the work trees
    order = [side for i in range(rounds) for side in ("ab" if i % 2 == 0 else "ba")]
    with (
        raising(signal.SIGINT, KeyboardInterrupt()),
        _work_tree(a.commit, folder / "tree-a") as tree_a,
        _work_tree(b.commit, folder / "tree-b") as tree_b,
    ):
        for i, letter in enumerate(watched("measuring", order, len(order))):
            side, tree = (a, tree_a) if letter == "a" else (b, tree_b)
            output = folder / letter / str(i // 2 + 1)
            output.parent.mkdir(exist_ok=True)
            command = [sys.executable, "-m", "hyena_jax", "bench", *side.arguments]
            path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
            ended = subprocess.run(
                [*command, "--output", str(output)],
                cwd=tree,
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
            if ended.returncode:
                reason = (ended.stderr.strip().splitlines() or ["no output"])[-1]
                line = f"{side.name}: {reason}"
                raise UserError(line) if ended.returncode in (1, 2) else OSError(line)


@contextmanager
def _work_tree(commit: str | None, folder: Path) -> Iterator[Path]:
    """The files of a commit, in a folder that is removed in the end; without a commit those that are here."""
    if commit is None:
        yield Path.cwd()
        return
    made = _git("worktree", "add", "--detach", "--quiet", str(folder), commit)
    if made.returncode:
        raise OSError(f"git worktree add: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        _git("worktree", "remove", "--force", str(folder))


def _git(*arguments: str) -> subprocess.CompletedProcess:
    try:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UserError("git is not installed, which commits are compared with") from None
