"""Names in a bucket: `gs://BUCKET/NAME`, of an object or of a folder.

Most code reads a folder in a bucket through a local copy of its small files, a path that ends in
`gs:/BUCKET/NAME`: who has the path knows the location.
"""

import atexit
import re
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

from hyena_jax.system.errors import COPY, require

SCHEME = "gs://"
_BUCKET = r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]"
# Not `?*[]#`, which gcsfs takes for patterns and generations, nor what would have to be escaped in a URL.
_PART = r"(?!\.\.?(?:/|$))[A-Za-z0-9._=,+@:;~()-]{1,255}"
_URL = re.compile(rf"{SCHEME}({_BUCKET})((?:/{_PART})*)/?")
ALLOWED = (
    "gs://BUCKET/NAME, with 3 to 63 lower-case letters, digits and ._- in BUCKET, and letters, digits and"
    " ._=,+@:;~()- in NAME"
)


class Location(NamedTuple):
    """An object or a folder in a bucket. A bucket has no folders: they are the beginnings of names."""

    bucket: str
    name: str
    """Without a slash at its ends; empty for the whole bucket."""

    @classmethod
    def parse(cls, url: str, argument: str) -> "Location":
        """Reads `gs://BUCKET/NAME`; a slash at the end changes nothing. Errors name `argument`."""
        match = _URL.fullmatch(url)
        require(match is not None, argument, url, ALLOWED)
        return cls(match[1], match[2].strip("/"))

    def __str__(self) -> str:
        return f"{SCHEME}{self.bucket}/{self.name}".rstrip("/")

    def __truediv__(self, name: str) -> "Location":
        return Location(self.bucket, f"{self.name}/{name}".strip("/"))


def is_url(text: object) -> bool:
    """Whether a text names something in a bucket, rightly or wrongly spelled."""
    return str(text).startswith(SCHEME)


def new_copy(location: Location) -> Path:
    """The path of a new local copy, which does not exist yet; removed when the process ends."""
    root = tempfile.mkdtemp(prefix="hyena_jax_copy_")
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return Path(root, "gs:", location.bucket, location.name)


def location_of(path: Path) -> Location | None:
    """What a path in a local copy names in the bucket; None for any other path."""
    found = COPY.search(str(path))
    return None if found is None else Location(*str(path)[found.end() :].partition("/")[::2])
