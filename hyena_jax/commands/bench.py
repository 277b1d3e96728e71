"""`hyena-jax bench`."""

from collections.abc import Sequence

from hyena_jax.benchmark.settings import Settings
from hyena_jax.commands import fail, table_console
from hyena_jax.startup import import_jax, keep_freed_memory, start_devices


def run(settings: Settings, arguments: Sequence[str]) -> int:
    """Measures; exit code 1 if what is to be timed differs from its oracle.

    Compiled programs are not kept: a benchmark also times the compiler.
    """
    import_jax()
    start_devices()
    keep_freed_memory()

    from hyena_jax.benchmark import command
    from hyena_jax.benchmark.verify import Mismatch

    try:
        command.run(settings, table_console(), ["hyena-jax", *arguments])
    except Mismatch as error:
        return fail(error, 1)
    return 0
