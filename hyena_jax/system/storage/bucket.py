"""Objects below a name in a bucket: put whole, on a condition where asked for; listed, read, deleted.

Every call is repeated while the bucket is busy or silent, for at most its patience.
"""

import base64
import io
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from hyena_jax.system.errors import UserError
from hyena_jax.system.storage.location import Location

if TYPE_CHECKING:
    from google.cloud.storage import Blob

T, R = TypeVar("T"), TypeVar("R")

ANSWER = 20.0
"""Seconds without a byte after which an answer no longer counts as coming."""
ABSENT = 0
"""As the generation that an object must have: it must not exist."""
AT_ONCE = 8
"""Objects that are read, put or deleted at the same time."""
RETRIES = 8
"""Of a call of gcsfs or TensorStore, after 1, 2, 4, ... and at most 32 s: two minutes."""


class Found(NamedTuple):
    """An object without its content. Objects never change: a replaced one has another generation."""

    name: str
    """Below the name that the bucket was opened with."""
    size: int
    generation: int
    crc32c: str
    updated: datetime
    """By the clock of the server, so that two of them can be compared."""


class Refused(Exception):
    """An object was not put: its generation is not the one asked for, since another process put it."""


class Bucket:
    """The objects below a location."""

    patience = 120.0
    """Seconds for which a call is repeated: a busy bucket may answer 429 or 503 for a minute."""

    def __init__(self, location: Location, argument: str = "workdir"):
        """Does not look at what is there; `argument` is where the location came from, for messages.

        Raises UserError without the packages, OSError without credentials.
        """
        self.location, self.argument = location, argument
        self._prefix = f"{location.name}/" if location.name else ""
        try:
            import fsspec
            from etils.epath import gpath
            from gcsfs import GCSFileSystem  # which Orbax uses
            from gcsfs.retry import retry_request
            from google.cloud import storage
        except ImportError as error:
            raise UserError(
                f"{location} needs the package {error.name}: pip install 'hyena_jax[gcs]'"
            ) from error
        # Where TensorFlow is installed, epath would take its file system, which looks for other credentials.
        os.environ.setdefault("EPATH_USE_TF", "false")
        gpath._is_tf_installed.cache_clear()  # epath may have been used for a local file
        # TensorStore would wait for ever for an answer that was lost.
        os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", "60")
        os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")
        # gcsfs would not see what TensorStore and other machines have written since it looked.
        fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
        # Of itself gcsfs gives up after half a minute, which would end a run in the middle of a checkpoint.
        once = getattr(GCSFileSystem._request, "__wrapped__", None)
        if once is not None:
            GCSFileSystem._request = retry_request(retries=1 + RETRIES)(once)
        with self._explained(""):
            self._bucket = storage.Client(project=None).bucket(location.bucket)

    def put(
        self, name: str, data: bytes, generation: int | None = None, patience: float | None = None
    ) -> Found:
        """Puts an object whole, in place of an earlier one.

        Raises Refused unless the earlier one has this `generation`: ABSENT if there must be none, None for
        any. The call is repeated for `patience` seconds, None for the usual ones.
        """
        from google.api_core.exceptions import PreconditionFailed

        blob = self._bucket.blob(self._prefix + name)
        options = {"if_generation_match": generation, "checksum": "crc32c", **self._until(patience)}
        try:
            with self._explained(name):
                blob.upload_from_file(io.BytesIO(data), size=len(data), **options)
                return self._found(blob)
        except PreconditionFailed as error:
            # The answer to an earlier try may have been lost on its way.
            there = self.stat(name, patience)
            if there is None or (there.size, there.crc32c) != (len(data), checksum(data)):
                raise Refused(f"{self.location / name} was put by another process") from error
            return there

    def put_file(self, name: str, path: Path) -> None:
        """Puts a file of any size as an object, in place of an earlier one."""
        with self._explained(name), open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            blob = self._bucket.blob(self._prefix + name)
            blob.upload_from_file(file, size=size, checksum="crc32c", **self._until())

    def get(self, name: str) -> bytes | None:
        """The content of an object; None if there is none."""
        with self._explained(name), self._unless_absent():
            return self._bucket.blob(self._prefix + name).download_as_bytes(**self._until())
        return None

    def get_file(self, name: str, path: Path) -> None:
        """Writes the content of an object, if there is one, to a file."""
        with self._explained(name), self._unless_absent():
            self._bucket.blob(self._prefix + name).download_to_filename(path, **self._until())

    def stat(self, name: str, patience: float | None = None) -> Found | None:
        """What is known of an object; None if there is none."""
        with self._explained(name):
            blob = self._bucket.get_blob(self._prefix + name, **self._until(patience))
            return None if blob is None else self._found(blob)

    def below(self, prefix: str = "") -> list[Found]:
        """All objects whose names begin so, in the order of their names."""
        return self._listed(prefix, None)[0]

    def level(self) -> tuple[list[Found], list[str]]:
        """The objects directly here, and the names of what a file system would call the folders here."""
        found, folders = self._listed("", "/")
        for name in (*(one.name for one in found), *folders):
            if "/" in name or "\0" in name or name in ("", ".", ".."):  # it may become that of a file
                raise UserError(
                    f"{self.location} lists {name!r}, which is not the name of a file", self.argument
                )
        return found, folders

    def delete(self, names: Iterable[str]) -> None:
        """Deletes objects; those that are gone already do not matter."""

        def delete(name: str) -> None:
            with self._explained(name), self._unless_absent():
                self._bucket.blob(self._prefix + name).delete(**self._until())

        self.each(delete, names)

    def each(self, do: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """The results of `do` for items, several at the same time; raises the first error."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(do, items))

    def _listed(self, prefix: str, delimiter: str | None) -> tuple[list[Found], list[str]]:
        with self._explained(""):
            begin = self._prefix + prefix
            pages = self._bucket.list_blobs(prefix=begin, delimiter=delimiter, **self._until())
            # An empty object `name/` is a folder as consoles and mounted buckets make them.
            found = [self._found(blob) for blob in pages if not blob.name.endswith("/")]
            return found, sorted(name.removeprefix(self._prefix).strip("/") for name in pages.prefixes)

    def _found(self, blob: "Blob") -> Found:
        found = Found(blob.name, blob.size, blob.generation, blob.crc32c, blob.updated)
        if None in (found.size, found.generation, found.updated):
            raise ValueError(f"it says of an object only {found}")
        return found._replace(name=found.name.removeprefix(self._prefix))

    @contextmanager
    def _unless_absent(self) -> Iterator[None]:
        from google.api_core.exceptions import NotFound

        with suppress(NotFound):
            yield

    @contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        """Says on one line what went wrong, but for a condition that does not hold."""
        import requests
        from google.api_core import exceptions
        from google.auth.exceptions import GoogleAuthError, TransportError
        from google.resumable_media.common import DataCorruption

        silent = (
            exceptions.RetryError,
            requests.RequestException,
            TransportError,
            TimeoutError,
            ConnectionError,
        )
        try:
            yield
        except (exceptions.PreconditionFailed, UserError):
            raise
        except exceptions.NotFound as error:
            raise UserError(f"{self.location}: there is no such bucket", self.argument) from error
        except silent as error:
            reason = error.cause if isinstance(error, exceptions.RetryError) and error.cause else error
            raise self._failed(name, f"it does not answer ({_reason(reason)})") from error
        except (exceptions.GoogleAPIError, DataCorruption) as error:
            raise self._failed(name, _reason(error)) from error
        except GoogleAuthError as error:
            raise OSError(f"{self.location} cannot be opened: {_reason(error)}") from error
        except (AttributeError, LookupError, TypeError, ValueError) as error:  # the client trusts its server
            raise self._failed(
                name, f"the answer is not of Cloud Storage ({_reason(repr(error))})"
            ) from error

    def _until(self, patience: float | None = None) -> dict[str, Any]:
        """How long a call waits for answers, and for how long it is repeated."""
        from google.cloud.storage.retry import DEFAULT_RETRY

        repeated = DEFAULT_RETRY.with_delay(0.5, 8.0, 2.0)
        return {"timeout": ANSWER, "retry": repeated.with_timeout(patience or self.patience)}

    def _failed(self, name: str, why: str) -> OSError:
        where = self.location / name if name else self.location
        return OSError(
            f"{where} cannot be read or written: {why}; nothing is lost: run the same command again"
        )


def checksum(data: bytes) -> str:
    """The CRC-32C of an object with this content, as `Found` has it."""
    from google_crc32c import Checksum

    return base64.b64encode(Checksum(data).digest()).decode()


def _reason(error: Any) -> str:
    """What the server said, else what its client says."""
    try:
        text = f"{error.code} {error.response.json()['error']['message']}"
    except (AttributeError, ValueError, KeyError, TypeError):
        text = str(error)
    return " ".join(text.split())[:300]
