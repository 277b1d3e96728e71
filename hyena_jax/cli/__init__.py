"""The command line: reads the arguments, runs a command, and turns errors into exit codes.

Exit codes: 0 done; 1 `check` or a benchmark found values that differ from their oracle, or rows that are
slower than in another, a distillation no state size within its bound, a plan that its step does not compile
or fit, or some run of a sweep failed; 2 wrong input; 3 the machine failed (disk full, no permission, another
process lost); 4 the run diverged; 75 a training was asked to stop (SIGINT, SIGTERM, SIGHUP) and saved, or had
nothing to save at SIGTERM or SIGHUP: the same command continues, as EX_TEMPFAIL of sysexits.h says; 130
interrupted by SIGINT with nothing to save.
"""

import errno
import io
import os
import sys
from collections.abc import Sequence

from hyena_jax import config
from hyena_jax.config.plugins import OF_PATHS
from hyena_jax.system.errors import UserError, describe_fault
from hyena_jax.system.startup import quiet_libraries


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    # Here, since other parts of the package import `hyena_jax.config.flags`, and the commands import those.
    from hyena_jax.cli import commands
    from hyena_jax.cli.base import fail, note

    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for name in ("stdout", "stderr"):  # closed, as by `>&-`
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (for as long as the process)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a sample may hold characters that the terminal cannot show
        sys.stdout.reconfigure(errors="replace")
    quiet_libraries()  # before a plugin imports them
    code = 0
    try:
        code = commands.run(arguments)
        _flush()  # here, where a full disk and a closed pipe are handled
        return code
    except UserError as error:
        return fail(error, 2)
    except BrokenPipeError:  # the reader of our output closed it, as `head` does
        sys.stdout = None
        return code
    except KeyboardInterrupt:
        note("interrupted")
        return 130
    except BaseException as error:  # a plugin may also end the process
        is_of_xla = isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
        if isinstance(error, MemoryError) or is_of_xla:
            is_disk = os.strerror(errno.ENOSPC) in str(error)  # as XLA says when it writes a trace
            return fail(f"{'the disk is full' if is_disk else 'out of memory'}: {error}", 3)
        is_of_machine = isinstance(error, OSError) and not isinstance(error, OF_PATHS)
        if not is_of_machine and config.is_of_own_code(error):
            return fail(f"your plugin failed: {describe_fault(error)}", 2)
        if isinstance(error, OSError):
            return fail(error, 3)
        raise


def _flush() -> None:
    """After a failure nothing is left for Python to write as it ends."""
    if sys.stdout is not None:
        try:
            sys.stdout.flush()
        except OSError:
            sys.stdout = None
            raise
