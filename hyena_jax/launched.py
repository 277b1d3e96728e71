"""A process that `hyena-jax launch` starts: it runs the command, and stops once its launcher has ended.

While it has nothing to save, a signal ends it at once and without a message: the launcher prints one for all.
"""

import os
import signal
import sys
import threading
import time

from hyena_jax.interruption import STOPPING

PATIENCE = 30.0
"""Seconds that a process has to stop and save once its launcher is gone."""


def main() -> int:
    """Runs the command of the process's arguments; the first is the pipe that the launcher holds open."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # KeyboardInterrupt would need the interpreter
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)  # the launcher blocked them
    threading.Thread(target=_end_with_launcher, args=(int(sys.argv.pop(1)),), daemon=True).start()
    from hyena_jax import cli

    return cli.main()


def _end_with_launcher(pipe: int) -> None:
    os.read(pipe, 1)  # nothing is ever written: this returns once the write end is closed
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PATIENCE)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
