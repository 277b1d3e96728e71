"""A tracker: a table in the run's folder, with one line for each value."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass

from hyena_jax.config import TrackerConfig, register
from hyena_jax.training.trackers import Start, Tracker


@dataclass(frozen=True)
class CsvFileConfig(TrackerConfig):
    """Writes lines `step,name,value`."""

    file: str = "metrics.csv"
    """Name of the file in the run's folder."""


class CsvFile(Tracker):
    """Lines of steps that will be repeated are dropped when the run continues."""

    def __init__(self, config: CsvFileConfig, start: Start):
        path = start.workdir / config.file
        earlier = path.read_text().splitlines(keepends=True) if path.exists() else []
        whole = [line for line in earlier if line.endswith("\n")]  # a kill may have cut the last one short
        kept = [line for line in whole if int(line.split(",")[0]) < start.first_step]
        path.write_text("".join(kept))
        self._file = path.open("a", newline="")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        table = csv.writer(self._file, lineterminator="\n")
        table.writerows([step, name, value] for name, value in values.items())

    def sync(self) -> None:
        self._file.flush()

    def close(self, failed: bool) -> None:
        self._file.close()


register("csv_file", CsvFileConfig, CsvFile)
