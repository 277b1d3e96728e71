import os
import shutil
from pathlib import Path

import pytest
from references import STORED

from hyena_jax.interop.convert import convert
from hyena_jax.interop.family import Options


@pytest.fixture(autouse=True, scope="module")
def _without_fsync():
    """A run folder has hundreds of files, which need not survive a crash of this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def stored(tmp_path):
    """copy(family): a copy of its stored folder, to be harmed."""
    return lambda family: Path(shutil.copytree(STORED / family, tmp_path / family))


@pytest.fixture(scope="session")
def converted(tmp_path_factory):
    """run(family): the run folder of the stored model, not to be changed.

    Of a family with two forms, `NAME_transformers` is the one of transformers.
    """
    made = {}

    def run(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp("converted") / family
            format = family.removesuffix("_transformers")
            convert(format, STORED / family, made[family], Options())
        return made[family]

    return run
