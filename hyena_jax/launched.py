"""A process that `hyena-jax launch` starts: it runs the command, and stops once its launcher has ended.

While it has nothing to save, a signal ends it at once and without a message: the launcher prints one for all.
"""

import sys

from hyena_jax.signals import end_with, take_signals


def main() -> int:
    """Runs the command of the process's arguments; the first is the pipe that the launcher holds open."""
    take_signals()
    end_with(int(sys.argv.pop(1)))
    from hyena_jax import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
