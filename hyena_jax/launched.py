"""One of the processes that `launch` starts: the command, which ends when its launcher has ended, however.

As long as it has nothing to save, a signal ends it at once and without a line: the launcher has one for all.
"""

import os
import signal
import sys
import threading
import time

from hyena_jax.launch import STOPPING

PATIENCE = 30.0
"""Seconds to stop and save for a process whose launcher is gone."""


def main() -> int:
    """Runs the command of the process's arguments, the first of which is the pipe that the launcher holds."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # for KeyboardInterrupt, the interpreter would be needed
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)  # the launcher blocked them
    threading.Thread(target=_end_with_launcher, args=(int(sys.argv.pop(1)),), daemon=True).start()
    from hyena_jax import cli

    return cli.main()


def _end_with_launcher(pipe: int) -> None:
    os.read(pipe, 1)  # nothing is written: this returns when the last end to write to is closed
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PATIENCE)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
