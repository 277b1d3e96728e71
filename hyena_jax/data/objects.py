"""Files of a folder, or objects below a name in a bucket, alike: read in ranges, and written whole.

TensorStore reads and writes both. A file or an object appears whole or not at all.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyena_jax.system.errors import UserError
from hyena_jax.system.files import MAX_JSON, read_bytes
from hyena_jax.system.storage.bucket import RETRIES, Bucket
from hyena_jax.system.storage.location import Location, is_url

if TYPE_CHECKING:
    import tensorstore as ts

DRAFT = ".__lock"
"""How the name ends under which TensorStore writes a file before it is whole."""
IN_FLIGHT = 256
"""Most ranges that are read from a bucket at the same time: a range takes tens of milliseconds to arrive."""


class Objects:
    """What lies in one folder or bucket; names are below it."""

    def __init__(self, where: str, argument: str):
        """Opens `where`, a folder, which need not exist, or gs://BUCKET/NAME.

        OSError if there are no credentials for the bucket; other errors name `argument`.
        """
        import tensorstore as ts

        self.argument = argument
        if is_url(where):
            location = Location.parse(where, argument)
            self.where, self._bucket = str(location), Bucket(location, argument)
            path = f"{location.name}/" if location.name else ""
            spec = {"driver": "gcs", "bucket": location.bucket, "path": path}
            context = {
                "gcs_request_concurrency": {"limit": IN_FLIGHT},
                "gcs_request_retries": {"max_retries": RETRIES},
            }
        else:
            self.where = where
            spec, context = {"driver": "file", "path": os.path.join(os.path.abspath(where), "")}, {}
        with self._explained(""):
            self._store = ts.KvStore.open(spec, context=ts.Context(context)).result()

    def __truediv__(self, name: str) -> str:
        return f"{self.where.rstrip('/')}/{name}"

    def read(self, name: str, most: int = MAX_JSON) -> bytes | None:
        """The content of an object; None if there is none. UserError if a file has more bytes, or is none."""
        if not is_url(self.where):  # TensorStore would wait for the writer of a pipe
            path = Path(self.where, name)
            return read_bytes(self.argument, path, most) if os.path.lexists(path) else None
        with self._explained(name):
            found = self._store.read(name).result()
        return None if found.state == "missing" else found.value

    def read_all(self, names: Iterable[str]) -> list[bytes]:
        """The contents of objects; UserError if one does not exist."""
        begun = [(name, self._store.read(name)) for name in names]
        return [self.finish(name, future) for name, future in begun]

    def begin(self, name: str, start: int, stop: int) -> "ts.Future[Any]":
        """Begins to read bytes start to stop; `finish` waits for them."""
        return self._store.read(name, byte_range=slice(start, stop))

    def finish(self, name: str, future: "ts.Future[Any]") -> bytes:
        """The bytes that `begin` reads; UserError if there are fewer, or none."""
        try:
            found = future.result()
        except ValueError as error:
            if str(error).startswith("OUT_OF_RANGE"):
                raise UserError(
                    f"{self / name} is shorter than expected: it was changed", self.argument
                ) from error
            raise OSError(f"{self / name} cannot be read: {error}") from error
        if found.state == "missing":
            raise UserError(f"{self / name} does not exist", self.argument)
        return found.value

    def write(self, name: str, data: bytes, replace: bool = True) -> None:
        """Writes an object whole; it replaces an earlier one, or without `replace` changes nothing there."""
        with self._explained(name):
            generation = None
            if not replace:
                there = self._store.read(name).result() if self.read(name) is None else None
                if there is None or there.state != "missing":
                    return
                generation = there.stamp.generation
            self._store.write(name, data, if_equal=generation).result()

    def sizes(self) -> dict[str, int]:
        """The size of every object in bytes, by name, of a folder only those directly in it."""
        if is_url(self.where):
            return {found.name: found.size for found in self._bucket.below()}
        try:
            with os.scandir(self.where) as entries:
                files = [one for one in entries if one.is_file() and not one.name.endswith(DRAFT)]
                return {one.name: one.stat().st_size for one in files}
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise UserError(f"{self.where!r} cannot be read: {error}", self.argument) from error

    @contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        try:
            yield
        except ValueError as error:  # of every cause: permissions, a bucket that does not exist, the network
            raise OSError(f"{self / name} cannot be read or written: {error}") from error


def split(path: str) -> tuple[str, str]:
    """The folder of a path or URL, and its last part."""
    if is_url(path):
        folder, _, name = path.rpartition("/")
        return folder, name
    return str(Path(path).parent), Path(path).name
