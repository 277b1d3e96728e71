"""`python -m hyena_jax.cli` is `python -m hyena_jax`."""

import sys

from hyena_jax.__main__ import main

sys.exit(main())
