"""The process of a command: a signal ends it with one line at any moment, also while it imports."""

import signal
import sys

from hyena_jax.interruption import end_at_once, watch_signals


def main() -> int:
    """Runs the command of the process's arguments; returns its exit code."""
    watch_signals()
    end_at_once(signal.SIGINT, 130, "interrupted")
    if sys.argv[1:2] == ["train"]:  # by this code, a scheduler puts the run back into its queue
        for number in (signal.SIGTERM, signal.SIGHUP):
            end_at_once(number, 75, f"stopped by {number.name}; rerun the command to continue")
    from hyena_jax import cli

    code = cli.main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done; what Python does at its end takes a moment
    return code


if __name__ == "__main__":
    sys.exit(main())
