"""A process that `hyena-jax launch` starts: python -m hyena_jax.cli.launched PIPE COMMAND ...

It stops and saves once its launcher, which holds the pipe open, has ended. While it has nothing to save, a
signal ends it at once and without a message: the launcher prints one for all.
"""

import sys

from hyena_jax import cli
from hyena_jax.system.signals import end_with, take_signals

if __name__ == "__main__":
    take_signals()
    end_with(int(sys.argv.pop(1)))
    sys.exit(cli.main())
