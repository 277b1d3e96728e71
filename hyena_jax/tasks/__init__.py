"""Synthetic tasks, one family a file: config, how a row is drawn, what chance scores, published settings.

Every file in this folder is imported with `hyena_jax.config`, and registers its tasks. Your own task is
written in the same way, in a file of yours: see configs/README.md.
"""

import hyena_jax.config  # noqa: F401 (first, since it imports the tasks)
from hyena_jax.config.tasks import TaskConfig
from hyena_jax.tasks.task import Preset, Row, Task, next_tokens, register_task, row

__all__ = ["Preset", "Row", "Task", "TaskConfig", "next_tokens", "register_task", "row"]
