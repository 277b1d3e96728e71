"""`hyena-jax bench operators | model | decode`: check first, then measure, print and write."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hyena_jax.benchmark.settings import Decode, Model, Operators, Settings, flags
from hyena_jax.config import MIXER_CONFIGS

if TYPE_CHECKING:
    from rich.console import Console

    from hyena_jax.benchmark.operators import Row
    from hyena_jax.benchmark.roofline import Roofline


def run(settings: Settings, console: "Console", command: Sequence[str] = ()) -> None:
    """Measures what the settings say; prints the table, and writes the files where a folder is given.

    Args:
      command: the command line, for the record.

    Raises:
      UserError: for settings that cannot be run; nothing has been measured then.
      Mismatch: if something differs from its oracle; nothing has been printed then.
      OSError: if the files cannot be written.
    """
    settings.check()
    # Idle threads of PyTorch would otherwise spin for more work, and slow whatever runs next.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    match settings:
        case Operators():
            _operators(settings, console, command)
        case Model():
            _model(settings, console, command)
        case Decode():
            _decode(settings, console, command)


def _operators(settings: Operators, console: "Console", command: Sequence[str]) -> None:
    from hyena_jax.benchmark import operators, report

    configs = {name: MIXER_CONFIGS[name]() for name in settings.chosen}
    chosen = operators.methods(configs, settings.baseline)
    sizes = operators.Sizes(settings.batch_size, 0, settings.d_model, settings.dtype)
    notes: list[str] = []
    with _Progress(len(chosen) * (1 + len(settings.lengths))) as advance:
        for method in chosen:
            if not operators.verify_method(method, settings.d_model, settings.dtype):
                notes.append(f"values not checked: {method.name} has no oracle")
            advance()
        roofline = _measure_roofline(settings.dtype)
        rows = list(
            operators.bench_lengths(
                chosen, settings.lengths, sizes, _effort(settings), roofline, advance, notes.append
            )
        )
    console.print(report.operators_table(rows))
    scaling = _scaling(rows)
    _print_notes(console, [*notes, *_describe(scaling, max(settings.lengths)), _describe_roofline(roofline)])
    if settings.output is not None:
        results = _results(settings, command, rows, notes) | {"roofline": roofline._asdict()} | scaling
        memory = report.memory_curves(rows, operators.BOTH)
        titles = ("forward + backward", "memory of forward + backward", "length")
        report.write(settings.output, results, report.time_curves(rows, operators.BOTH), memory, titles)
        _print_notes(console, [f"results: {settings.output}"])


def _model(settings: Model, console: "Console", command: Sequence[str]) -> None:
    from hyena_jax.benchmark import model, report, verify

    subject = model.subject(settings)
    notes: list[str] = []
    with _Progress(1 + len(subject.batches)) as advance:
        if not verify.verify_model(settings.config, subject.experiment.model):
            notes.append(f"values not checked: {settings.config} has no oracle, or a part of it has none")
        advance()
        rows = list(model.bench_model(subject, _effort(settings), advance, notes.append))
    console.print(report.model_table(rows, subject.unit))
    parameters = [f"{rows[0].n_params:,} parameters, batch {rows[0].batch}"] if rows else []
    _print_notes(console, [*notes, *parameters])
    if settings.output is not None:
        time, memory = report.model_curves(rows)
        results = _results(settings, command, rows, notes)
        report.write(settings.output, results, time, memory, ("time of a batch", "memory", "length"))
        _print_notes(console, [f"results: {settings.output}"])


def _decode(settings: Decode, console: "Console", command: Sequence[str]) -> None:
    from hyena_jax.benchmark import decode, report, verify

    chosen, notes = decode.with_state(settings)
    n_rows = len(chosen) * len(settings.contexts) * len(settings.batch)
    with _Progress(len(chosen) + n_rows) as advance:
        for mixer in chosen:
            if not verify.verify_mixer(mixer, MIXER_CONFIGS[mixer](), settings.d_model, settings.dtype):
                notes.append(f"values not checked: {mixer} has no oracle")
            verify.verify_decoding(mixer, decode.model_config(mixer, settings, max(settings.contexts)))
            advance()
        rows = list(decode.bench_decode(settings, chosen, _effort(settings), advance, notes.append))
    console.print(report.decode_table(rows))
    _print_notes(console, notes)
    if settings.output is not None:
        time, memory = report.decode_curves(rows)
        results = _results(settings, command, rows, notes)
        report.write(settings.output, results, time, memory, ("time of a token", "state", "context"))
        _print_notes(console, [f"results: {settings.output}"])


def _effort(settings: Settings) -> Any:
    from hyena_jax.benchmark.programs import Effort

    return Effort(settings.seconds, settings.least_runs, settings.max_seconds)


def _measure_roofline(dtype: str) -> "Roofline":
    from hyena_jax.benchmark.roofline import measure_roofline

    return measure_roofline(dtype)


def _scaling(rows: "Sequence[Row]") -> dict[str, Any]:
    """Exponents of both passes by method, and lengths from which a method beats attention."""
    from hyena_jax.benchmark import operators, report
    from hyena_jax.benchmark.scaling import crossover, fitted_exponent

    times = {part: report.time_curves(rows, part) for part in (operators.FORWARD, operators.BOTH)}
    exponents = {
        part: {method: fitted_exponent(points) for method, points in by_method.items()}
        for part, by_method in times.items()
    }
    both = times[operators.BOTH]
    others = dict.fromkeys(row.method for row in rows if row.mixer != "attention")
    crossovers = {
        reference: {method: crossover(both[method], both[reference]) for method in others}
        for reference in ("attention", "attention (torch)")
        if reference in both
    }
    return {"exponents": exponents, "crossovers": crossovers}


def _describe(scaling: dict[str, Any], longest: int) -> list[str]:
    lines = []
    for part, exponents in scaling["exponents"].items():
        fitted = [f"{method} {value:.2f}" for method, value in exponents.items() if value is not None]
        if fitted:
            lines.append(f"time of {part} grows as length to the power, from 4,096 on: {', '.join(fitted)}")
    for reference, lengths in scaling["crossovers"].items():
        found = [
            f"{method} {'none up to ' + format(longest, ',') if at is None else format(round(at), ',')}"
            for method, at in lengths.items()
        ]
        if found:
            lines.append(f"faster than {reference}, forward and backward, from length: {', '.join(found)}")
    return lines


def _describe_roofline(roofline: "Roofline") -> str:
    flops, n_bytes = roofline.flops_per_second / 1e9, roofline.bytes_per_second / 1e9
    return f"this machine: {flops:,.1f} GFLOP/s in a matrix product, {n_bytes:,.1f} GB/s in a copy"


def _results(settings: Settings, command: Sequence[str], rows: Sequence[Any], notes: Sequence[str]) -> dict:
    from hyena_jax.benchmark.machine import describe_machine, describe_versions

    return {
        "command": " ".join(command),
        "settings": flags(settings),
        "machine": describe_machine(),
        "versions": describe_versions("torch" in getattr(settings, "baseline", ())),
        "notes": list(notes),
        "rows": list(rows),
    }


def _print_notes(console: "Console", lines: Sequence[str]) -> None:
    for line in lines:
        console.print(line, soft_wrap=True)


class _Progress:
    """A bar with the time left on the standard error, which goes when it is done."""

    def __init__(self, total: int):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(file=sys.stderr), transient=True)
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Callable[[], None]:
        self._bar.start()
        return lambda: self._bar.advance(self._task)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
