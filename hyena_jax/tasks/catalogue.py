"""The tasks of this package, by the class of their settings."""

from collections.abc import Mapping
from types import MappingProxyType

from hyena_jax.config import TASK_CONFIGS, TaskConfig
from hyena_jax.tasks import arithmetic, copying, mad, recall, states, strings
from hyena_jax.tasks.task import Task

TASKS: Mapping[type[TaskConfig], Task] = MappingProxyType(
    {
        TASK_CONFIGS["recall"]: recall.RECALL,
        TASK_CONFIGS["mqar"]: recall.MQAR,
        TASK_CONFIGS["induction"]: recall.INDUCTION,
        TASK_CONFIGS["selective_copying"]: copying.SELECTIVE_COPYING,
        TASK_CONFIGS["copying"]: strings.COPYING,
        TASK_CONFIGS["prefix_ngram"]: strings.PREFIX_NGRAM,
        TASK_CONFIGS["memorisation"]: copying.MEMORISATION,
        TASK_CONFIGS["mad_recall"]: mad.MAD_RECALL,
        TASK_CONFIGS["mad_noisy_recall"]: mad.MAD_NOISY_RECALL,
        TASK_CONFIGS["mad_fuzzy_recall"]: mad.MAD_FUZZY_RECALL,
        TASK_CONFIGS["mad_selective_copying"]: mad.MAD_SELECTIVE_COPYING,
        TASK_CONFIGS["mad_compression"]: mad.MAD_COMPRESSION,
        TASK_CONFIGS["mad_memorisation"]: mad.MAD_MEMORISATION,
        TASK_CONFIGS["parity"]: states.PARITY,
        TASK_CONFIGS["modular_arithmetic"]: states.MODULAR_ARITHMETIC,
        TASK_CONFIGS["modular_addition"]: states.MODULAR_ADDITION,
        TASK_CONFIGS["permutation_words"]: states.PERMUTATION_WORDS,
        TASK_CONFIGS["majority"]: arithmetic.MAJORITY,
        TASK_CONFIGS["counting"]: arithmetic.COUNTING,
        TASK_CONFIGS["addition"]: arithmetic.ADDITION,
    }
)
