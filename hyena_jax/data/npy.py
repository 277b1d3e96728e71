"""The header of a .npy file, read before any memory is allocated for the array."""

import math
from typing import BinaryIO, NamedTuple

import numpy as np

from hyena_jax.config import UserError, require


class Header(NamedTuple):
    """Shape, order and dtype of the array."""

    shape: tuple[int, ...]
    is_fortran: bool
    dtype: np.dtype


def read_header(argument: str, file: BinaryIO, size: int) -> Header:
    """Reads the header at the start of `file`, which has `size` bytes, and stops after it.

    Raises:
      UserError: if there is no such header, it declares Python objects, or another size than what follows.
    """
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    try:
        header = Header(*readers[np.lib.format.read_magic(file)](file))
    except Exception as error:  # the header is a Python literal, which fails in many ways
        raise UserError(f"{argument} must begin with the header of a .npy file: {error!r:.200}") from error
    require(not header.dtype.hasobject, argument, str(header.dtype), "an array of numbers")
    declared, found = math.prod(header.shape) * header.dtype.itemsize, size - file.tell()
    shown = f"{header.dtype}[{', '.join(map(str, header.shape))}]"
    must = f"{declared} bytes of {shown}, as its header says"
    require(min(header.shape, default=0) >= 0 and declared == found, argument, f"{found} bytes", must)
    return header
