import shutil
from pathlib import Path

import pytest

from hyena_jax.interop.convert import convert
from hyena_jax.interop.family import Options

STORED = Path(__file__).parent / "stored"


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
