"""The wheel holds the package and the configs, and works in a folder far from the checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import hyena_jax

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    builder = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(ROOT))
    (path,) = builder.build(directory=str(tmp_path_factory.mktemp("dist")), versions=["standard"])
    return Path(path)


def test_what_the_wheel_holds(wheel):
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
        metadata, entry = (
            opened.read(f"hyena_jax-{hyena_jax.__version__}.dist-info/{name}").decode()
            for name in ("METADATA", "entry_points.txt")
        )
    package = {path.relative_to(ROOT) for path in (ROOT / "hyena_jax").rglob("*.py")}
    configs = {Path("hyena_jax", "configs", path.name) for path in (ROOT / "configs").glob("*.py")}
    assert {Path(name) for name in names if name.endswith(".py")} == package | configs
    assert {name.partition("/")[0] for name in names} == {
        "hyena_jax",
        f"hyena_jax-{hyena_jax.__version__}.dist-info",
    }
    assert f"\nVersion: {hyena_jax.__version__}\n" in metadata
    assert "hyena-jax = hyena_jax.__main__:main" in entry


def test_the_wheel_works_away_from_the_checkout(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(tmp_path / "site")
    (tmp_path / "elsewhere").mkdir()

    def output_of(*arguments):
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path / "elsewhere",
            env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    code = "import hyena_jax; print(hyena_jax.__file__); hyena_jax.load_config('quickstart')"
    assert output_of("-c", code) == f"{tmp_path / 'site' / 'hyena_jax' / '__init__.py'}\n"
    assert output_of("-m", "hyena_jax", "--version") == f"hyena-jax {hyena_jax.__version__}\n"
    assert "quickstart" in output_of("-m", "hyena_jax", "train", "--help")
    assert "recall" in output_of("-m", "hyena_jax", "task", "recall")
