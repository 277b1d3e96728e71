"""Checkpoints in a bucket; runs with them are tested with the training."""

from types import SimpleNamespace
from unittest.mock import Mock

from hyena_jax.system.storage.bucket_steps import BucketSteps


def test_a_start_deletes_unfinished_steps_and_nothing_else():
    names = ("500/manifest.json", "500/state/a", "600/state/a", "500_backup/state/a", "best/a", "notes.txt")
    bucket = Mock()
    bucket.below.return_value = [SimpleNamespace(name=name) for name in names]
    BucketSteps(bucket, Mock()).begin()
    bucket.delete.assert_called_once_with(["600/state/a"])
