"""How times grow with length, and the length from which one method is faster than another."""

import math
from collections.abc import Mapping

# At shorter lengths fixed costs dominate, and an exponent would describe them.
LEAST_LENGTH, LEAST_POINTS = 4096, 3


def fitted_exponent(times: Mapping[int, float], least_length: int = LEAST_LENGTH) -> float | None:
    """The exponent e of the least-squares fit time = c length^e in logarithms.

    Args:
      times: by length, in any unit; lengths below `least_length` are left out.

    Returns:
      None with fewer than LEAST_POINTS lengths.
    """
    points = [(math.log(length), math.log(time)) for length, time in times.items() if length >= least_length]
    if len(points) < LEAST_POINTS:
        return None
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return covariance / sum((x - mean_x) ** 2 for x, _ in points)


def crossover(times: Mapping[int, float], other: Mapping[int, float]) -> float | None:
    """The length from which `times` stays below `other` at all longer lengths that both have.

    Between two measured lengths, the logarithm of their ratio is interpolated linearly in the logarithm of
    the length.

    Returns:
      None if `other` is still ahead at the longest common length, or there is no common length; the shortest
      common length if `times` is below at all of them.
    """
    lengths = sorted(times.keys() & other.keys())
    ratios = {length: math.log(times[length] / other[length]) for length in lengths}
    if not lengths or ratios[lengths[-1]] >= 0:
        return None
    slower = [length for length in lengths if ratios[length] >= 0]
    if not slower:
        return float(lengths[0])
    before = slower[-1]
    after = lengths[lengths.index(before) + 1]
    part = ratios[before] / (ratios[before] - ratios[after])
    return math.exp(math.log(before) + part * math.log(after / before))
