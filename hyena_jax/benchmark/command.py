"""`hyena-jax bench operators | model | decode`: check first, then measure, print and write."""

import os
import signal
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from hyena_jax.benchmark.settings import PLOT, Decode, Model, Operators, Settings, flags
from hyena_jax.config import MIXER_CONFIGS
from hyena_jax.interruption import EndAtOnce, end_at_once

if TYPE_CHECKING:
    from rich.console import Console

    from hyena_jax.benchmark.operators import Row
    from hyena_jax.benchmark.report import Cells
    from hyena_jax.benchmark.roofline import Roofline

Results = Callable[[Sequence[Any]], dict[str, Any]]
"""results(rows) -> what results.json holds."""
Curves = Callable[[Sequence[Any]], tuple]
"""curves(rows) -> what `report.draw` draws."""


def run(settings: Settings, console: "Console", command: Sequence[str] = ()) -> None:
    """Measures what the settings say; prints each row when it comes, and keeps it where a folder is given.

    Args:
      command: the command line, for the record.

    Raises:
      UserError: for settings that cannot be run; nothing has been measured then.
      Mismatch: if something differs from its oracle; nothing has been printed then.
      OSError: if the files cannot be written; the folder is tried before anything is measured.
    """
    from hyena_jax.benchmark.report import check_writable

    settings.check()
    # Idle threads of PyTorch would otherwise spin for more work, and slow whatever runs next.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if settings.output is not None:
        check_writable(settings.output)
    match settings:
        case Operators():
            _operators(settings, console, command)
        case Model():
            _model(settings, console, command)
        case Decode():
            _decode(settings, console, command)


def _operators(settings: Operators, console: "Console", command: Sequence[str]) -> None:
    from hyena_jax.benchmark import operators, report
    from hyena_jax.training.progress import bar

    configs = {name: MIXER_CONFIGS[name]() for name in settings.chosen}
    chosen = operators.methods(configs, settings.baseline)
    sizes = operators.Sizes(settings.batch_size, 0, settings.d_model, settings.dtype)
    notes: list[str] = []

    def results(rows: Sequence[Any]) -> dict[str, Any]:
        shared = _results(settings, command, rows, notes)
        return shared | {"roofline": roofline._asdict()} | _scaling(rows)

    def curves(rows: Sequence[Any]) -> tuple:
        memory = report.memory_curves(rows, operators.BOTH)
        titles = ("forward + backward", "memory of forward + backward", "length")
        return report.time_curves(rows, operators.BOTH), memory, titles

    with bar("measuring", len(chosen) * (1 + len(settings.lengths)), console) as advance:
        for method in chosen:
            if not operators.verify_method(method, settings.d_model, settings.dtype):
                notes.append(f"values not checked: {method.name} has no oracle")
            advance()
        roofline = _measure_roofline(settings.dtype)
        measured = operators.bench_lengths(
            chosen, settings.lengths, sizes, _effort(settings), roofline, advance, notes.append
        )
        rows = _kept(measured, settings, console, report.operators_cells, results)
    found = _describe(_scaling(rows), max(settings.lengths))
    _end(settings, console, rows, [*notes, *found, _describe_roofline(roofline)], results, curves)


def _model(settings: Model, console: "Console", command: Sequence[str]) -> None:
    from hyena_jax.benchmark import model, report, verify
    from hyena_jax.training.progress import bar

    subject = model.subject(settings)
    notes: list[str] = []

    def results(rows: Sequence[Any]) -> dict[str, Any]:
        return _results(settings, command, rows, notes)

    def curves(rows: Sequence[Any]) -> tuple:
        return *report.model_curves(rows), ("time of a batch", "memory", "length")

    with bar("measuring", 1 + len(subject.batches), console) as advance:
        if not verify.verify_model(settings.config, subject.experiment.model):
            notes.append(f"values not checked: {settings.config} has no oracle, or a part of it has none")
        advance()
        measured = model.bench_model(subject, _effort(settings), advance, notes.append)
        cells = partial(report.model_cells, subject.unit)
        rows = _kept(measured, settings, console, cells, results)
    parameters = [f"{rows[0].n_params:,} parameters, batch {rows[0].batch}"] if rows else []
    _end(settings, console, rows, [*notes, *parameters], results, curves)


def _decode(settings: Decode, console: "Console", command: Sequence[str]) -> None:
    from hyena_jax.benchmark import decode, report, verify
    from hyena_jax.training.progress import bar

    chosen, notes = decode.with_state(settings)

    def results(rows: Sequence[Any]) -> dict[str, Any]:
        return _results(settings, command, rows, notes)

    def curves(rows: Sequence[Any]) -> tuple:
        return *report.decode_curves(rows), ("time of a token", "state", "context")

    n_rows = len(chosen) * len(settings.contexts) * len(settings.batch)
    with bar("measuring", len(chosen) + n_rows, console) as advance:
        for mixer in chosen:
            if not verify.verify_mixer(mixer, MIXER_CONFIGS[mixer](), settings.d_model, settings.dtype):
                notes.append(f"values not checked: {mixer} has no oracle")
            verify.verify_decoding(mixer, decode.model_config(mixer, settings, max(settings.contexts)))
            advance()
        measured = decode.bench_decode(settings, chosen, _effort(settings), advance, notes.append)
        rows = _kept(measured, settings, console, report.decode_cells, results)
    _end(settings, console, rows, notes, results, curves)


def _kept(
    measured: Iterable[Any],
    settings: Settings,
    console: "Console",
    cells: "Callable[[Any], Iterable[Cells]]",
    results: Results,
) -> list[Any]:
    """All rows; each is printed, and written with those before it, when it comes."""
    from hyena_jax.benchmark import report

    rows: list[Any] = []
    for row in measured:
        lines = list(cells(row))
        if not rows:
            lines.insert(0, {name: name for name in lines[0]})
        for line in lines:
            console.print(report.line(line), soft_wrap=True)
        rows.append(row)
        if settings.output is not None:
            (settings.output / PLOT).unlink(missing_ok=True)  # it shows an earlier benchmark
            report.write(settings.output, results(rows))
            if isinstance(signal.getsignal(signal.SIGINT), EndAtOnce):
                kept = f"{len(rows)} rows measured so far are" if len(rows) > 1 else "row measured so far is"
                end_at_once(signal.SIGINT, 130, f"interrupted; the {kept} in {settings.output}")
    return rows


def _end(
    settings: Settings,
    console: "Console",
    rows: Sequence[Any],
    lines: Sequence[str],
    results: Results,
    curves: Curves,
) -> None:
    """Prints what is said below the rows, and writes the files with all of it."""
    from hyena_jax.benchmark import report

    _print_notes(console, lines)
    if settings.output is not None:
        report.write(settings.output, results(rows))
        report.draw(settings.output / PLOT, *curves(rows))
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
