"""`hyena-jax bench operators | model | decode`: checks against oracles, measures, prints and writes."""

import os
from collections.abc import Sequence

from hyena_jax.benchmark.settings import Decode, Model, Operators, Settings
from hyena_jax.cli.base import fail, table_console
from hyena_jax.startup import import_jax, keep_freed_memory, start_devices


def run(settings: Settings, arguments: Sequence[str]) -> int:
    """Measures; returns exit code 1 if a value differs from its oracle.

    Each row is printed and kept as soon as it is measured. Compiled programs are not kept: a benchmark also
    times the compiler.
    """
    import_jax()
    start_devices()
    keep_freed_memory()
    settings.check()
    # PyTorch's idle threads would otherwise spin for more work, and slow down whatever runs next.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

    from hyena_jax.benchmark import decode, model, operators
    from hyena_jax.benchmark.report import Report
    from hyena_jax.benchmark.verify import Mismatch

    report = Report(settings, table_console(), ["hyena-jax", *arguments])
    try:
        match settings:
            case Operators():
                operators.run(settings, report)
            case Model():
                model.run(settings, report)
            case Decode():
                decode.run(settings, report)
    except Mismatch as error:
        return fail(error, 1)
    return 0
