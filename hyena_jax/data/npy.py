"""The header of a .npy file, read before any memory is allocated for the array."""

import math
from typing import BinaryIO

import numpy as np

from hyena_jax.config import UserError, require


def read_header(argument: str, file: BinaryIO, size: int) -> tuple[tuple[int, ...], np.dtype]:
    """The array's shape and dtype, from the start of `file` of `size` bytes; stops where the array begins.

    Raises:
      UserError: if there is no such header, it declares Python objects, or another size than what follows.
    """
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    try:
        shape, _, dtype = readers[np.lib.format.read_magic(file)](file)
    except Exception as error:  # the header is a Python literal, which fails in many ways
        raise UserError(f"{argument} must begin with the header of a .npy file: {error!r:.200}") from error
    require(not dtype.hasobject, argument, str(dtype), "an array of numbers")
    declared, found = math.prod(shape) * dtype.itemsize, size - file.tell()
    must = f"{declared} bytes of {dtype}[{', '.join(map(str, shape))}], as its header says"
    require(min(shape, default=0) >= 0 and declared == found, argument, f"{found} bytes", must)
    return shape, dtype
