"""The entry point: a signal ends the process with one line at any time, even during imports."""

import signal
import sys

from hyena_jax.system.malloc import restart_with_large_pages
from hyena_jax.system.signals import STOPPED_CODE, STOPPING, end_at_once, watch_signals


def main() -> int:
    """Runs the command that sys.argv names; returns its exit code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # until their handlers are set
    if sys.argv[1:2] in (["train"], ["sweep"], ["distill"], ["bench"]):
        restart_with_large_pages()
    watch_signals()
    end_at_once(signal.SIGINT, 130, "interrupted")
    if sys.argv[1:2] in (["train"], ["sweep"]):  # with this exit code, a scheduler requeues the run
        for number in (signal.SIGTERM, signal.SIGHUP):
            end_at_once(number, STOPPED_CODE, f"stopped by {number.name}; rerun the command to continue")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    from hyena_jax import cli

    code = cli.main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done, but Python's shutdown takes a moment
    return code


if __name__ == "__main__":
    sys.exit(main())
