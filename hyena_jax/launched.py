"""A process that `hyena-jax launch` starts: it runs the command, and stops once its launcher has ended.

While it has nothing to save, a signal ends it at once and without a message: the launcher prints one for all.
"""

import os
import sys
import threading

from hyena_jax.interruption import stop_and_end, take_signals


def main() -> int:
    """Runs the command of the process's arguments; the first is the pipe that the launcher holds open."""
    take_signals()
    threading.Thread(target=_end_with_launcher, args=(int(sys.argv.pop(1)),), daemon=True).start()
    from hyena_jax import cli

    return cli.main()


def _end_with_launcher(pipe: int) -> None:
    os.read(pipe, 1)  # nothing is ever written: this returns once the write end is closed
    stop_and_end()


if __name__ == "__main__":
    sys.exit(main())
