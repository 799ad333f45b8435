"""The oracle over whole arrays, for formats that list their values.

The neighbours come from the sorted list of the format's values in the carrier. All differences and
midpoints below are exact in float64: neighbours and the elements between them share their leading
bits. test_number_rounding.py checks it against the Fraction oracle.
"""

from __future__ import annotations

import functools
from fractions import Fraction

import numpy as np
import oracle
import torch

from qinductor.numerics import FixedPoint, FloatingPoint, Nans, Rounding

MODES = tuple(Rounding)


@functools.cache
def magnitudes(fmt, dtype):
    """(values ascending from 0 as float64, whether each is even): those of format ∩ carrier."""
    if isinstance(fmt, FloatingPoint):
        code = np.arange(fmt._top_code + 1)
        e, m = code >> fmt.man, code & (2**fmt.man - 1)
        normal = (e > 0) | (fmt.zero_binade & (m > 0))
        tail = np.where(normal, m + 2**fmt.man, m if fmt.subnormals else 0)
        lowest = 0 if fmt.zero_binade else 1
        values = np.ldexp(tail.astype(np.float64), np.maximum(e, lowest) - fmt.bias - fmt.man)
        even = code % 2 == 0
    else:
        k = np.arange(max(fmt.kmax, -fmt.kmin) + 1)
        values, even = np.ldexp(k.astype(np.float64), -fmt.fl), k % 2 == 0
    values, first = np.unique(values, return_index=True)
    even = even[first]
    held = torch.from_numpy(values).to(dtype).double().numpy() == values
    even = even[held]
    if not held.all() and getattr(
        fmt, "man", 1
    ):  # The carrier cuts bits: the grid is regular, and zero is even.
        even = np.arange(held.sum()) % 2 == 0
    return values[held], even


def beyond(fmt, values):
    """The grid with one value past its end, as if the exponent were unbounded."""
    step = values[-1] if getattr(fmt, "man", None) == 0 else values[-1] - values[-2]
    return np.append(values, values[-1] + step)


def expected(x, fmt, mode, u=None, r=32):
    """float64 array: q of a tensor by the oracle; u: r-bit integers of x's shape."""
    values, even = magnitudes(fmt, x.dtype)
    wide = x.double().numpy()
    a = np.abs(wide)
    negative = np.signbit(wide)
    grid = beyond(fmt, values)
    inside = np.where(a < grid[-1], a, 0)
    i = np.searchsorted(grid, inside, side="right") - 1
    lo, hi = grid[i], grid[i + 1]
    even = even[i]
    twice, middle = 2 * (inside - lo), hi - lo
    inexact = inside != lo
    match mode:
        case Rounding.TIES_TO_EVEN:
            up = (twice > middle) | ((twice == middle) & ~even)
        case Rounding.TIES_TO_AWAY:
            up = twice >= middle
        case Rounding.TOWARD_ZERO:
            up = np.zeros_like(inexact)
        case Rounding.UPWARD:
            up = inexact & ~negative
        case Rounding.DOWNWARD:
            up = inexact & negative
        case Rounding.TO_ODD:
            up = inexact & even
        case Rounding.STOCHASTIC:
            up = u.numpy() + _floor_fraction(inside - lo, middle, r) >= 2**r
    result = np.where(up, hi, lo)
    over = (result > values[-1]) | (a >= grid[-1])
    carrier = oracle.CARRIERS[str(x.dtype)[6:]]
    for sign in (False, True):
        limit = oracle.largest(fmt, carrier, sign)
        outward = oracle.overflow(fmt, mode, limit, sign)
        here = (negative == sign) & (over | (result > float(limit)))
        result[here] = float(outward)
        result[np.isinf(a) & (negative == sign)] = float(oracle.infinity(fmt, limit))
    result = np.where(negative, -result, result)
    if not fmt.negative_zero:
        result = np.where(result == 0, 0.0, result)
    return np.where(np.isnan(a), np.nan, result)


def _floor_fraction(part, whole, r):
    """⌊part/whole·2^r⌋. Division by a power of two is exact; other steps go by rationals."""
    result = np.floor(part / whole * 2.0**r).astype(np.int64)
    for k in np.flatnonzero(np.frexp(whole)[0] != 0.5):
        result[k] = Fraction(part[k]) * 2**r // Fraction(whole[k])
    return result


def same(got, want):
    """Bit equality of a tensor and a float64 array, all NaN alike; returns the mismatches."""
    g = got.double().numpy()
    equal = (g == want) & (np.signbit(g) == np.signbit(want))
    return np.flatnonzero(~(equal | (np.isnan(g) & np.isnan(want))))


def all_16_bit(dtype):
    """Every value of a 16-bit dtype, all NaN included."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def random_patterns(count, seed, dtype=torch.float32):
    """Uniform bit patterns: NaN payloads, infinities, subnormals; the specials first."""
    g = torch.Generator().manual_seed(seed)
    if dtype == torch.float32:
        bits = torch.randint(-(2**31), 2**31, (count,), generator=g, dtype=torch.int64)
        x = bits.to(torch.int32).view(torch.float32)
    else:
        bits = torch.randint(-(2**63), 2**63 - 1, (count,), generator=g, dtype=torch.int64)
        x = bits.view(torch.float64)
    special = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 2.0**-149, -(2.0**-149)]
    x[: len(special)] = torch.tensor(special, dtype=dtype)
    return x


def near_range(fmt, count, seed, dtype=torch.float32):
    """Random values spread over a format's binades, and a little beyond either end."""
    g = torch.Generator().manual_seed(seed)
    low = np.log2(float(fmt.exact_step)) - 3
    high = np.log2(float(max(fmt.exact_max, -fmt.exact_min))) + 2
    e = torch.rand(count, generator=g, dtype=torch.float64) * (high - low) + low
    sign = torch.randint(0, 2, (count,), generator=g) * 2 - 1
    return (torch.exp2(e) * sign).to(dtype)


def boundaries(fmt, dtype=torch.float32):
    """Every value (at most 600 magnitudes, evenly), every midpoint, and one ulp either side."""
    values, _ = magnitudes(fmt, dtype)
    grid = beyond(fmt, values)
    middles = (grid[1:] + grid[:-1]) / 2
    points = np.concatenate([grid, middles])
    points = points[:: max(1, len(points) // 1200)]
    points = np.concatenate([points, [values[-1], values[1], values[1] / 2, grid[-1], middles[-1]]])
    x = torch.tensor(points, dtype=dtype)
    inf = torch.full_like(x, float("inf"))
    x = torch.cat([x, torch.nextafter(x, inf), torch.nextafter(x, -inf)])
    return torch.cat([x, -x])


ELEMENT_FORMATS = {
    "fixed(8,4)": FixedPoint(8, 4),
    "fixed(8,4,symmetric)": FixedPoint(8, 4, symmetric=True),
    "fixed(8,4,unsigned)": FixedPoint(8, 4, signed=False),
    "fixed(12,-3)": FixedPoint(12, -3),
    "fixed(4,20)": FixedPoint(4, 20),
    "no_subnormals": FloatingPoint(4, 3, subnormals=False),
    "qpytorch(4,3)": FloatingPoint(4, 3, nans=Nans.NONE, saturate=True),
    "man0": FloatingPoint(5, 0),
    "man0_bias": FloatingPoint(4, 0, bias=2, nans=Nans.NONE),
    "exp1": FloatingPoint(1, 3, nans=Nans.NONE),
    "deep": FloatingPoint(8, 2, bias=140),
    "deep_powers": FloatingPoint(7, 0, bias=147),
    "wide": FloatingPoint(6, 8, bias=40),
}
