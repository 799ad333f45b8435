"""The scalar oracle: what every quantizer must return, on exact rationals, one element at a time.

Readable rather than fast, and written from the definitions, not from the package's rule: it looks
for the two neighbours of x in *format ∩ carrier*, and chooses one. It shares only the formats'
fields with the package.
"""

from __future__ import annotations

import bisect
import functools
import math
from dataclasses import dataclass
from fractions import Fraction

from qinductor.numerics.format_base import ElementFormat
from qinductor.numerics.formats import FixedPoint, FloatingPoint, Nans, Overflow, Posit, Table
from qinductor.numerics.rounding import Rounding
from qinductor.numerics.scaled import MX, BlockFloatingPoint, ScaleRule

INF = float("inf")
NAN = float("nan")


@dataclass(frozen=True)
class Carrier:
    """A binary dtype: k·2^q with |k| < 2^(man+1), q >= qmin, at most ``max``."""

    man: int
    qmin: int
    max: Fraction

    def floor(self, x: Fraction) -> Fraction:
        """Largest carrier value not above x >= 0."""
        if x == 0:
            return x
        step = Fraction(2) ** max(floor_log2(x) - self.man, self.qmin)
        return min(x // step * step, self.max)

    def holds(self, x: Fraction) -> bool:
        return self.floor(abs(x)) == abs(x)


def _ieee(man: int, emin: int, emax: int) -> Carrier:
    return Carrier(man, emin - man, (2 - Fraction(1, 2**man)) * Fraction(2) ** emax)


CARRIERS = {
    "float64": _ieee(52, -1022, 1023),
    "float32": _ieee(23, -126, 127),
    "bfloat16": _ieee(7, -126, 127),
    "float16": _ieee(10, -14, 15),
}


def floor_log2(x: Fraction) -> int:
    """⌊log2 x⌋ of a positive rational, exact."""
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e if Fraction(2) ** e <= x else e - 1


@dataclass(frozen=True)
class Place:
    """Where a magnitude lies: lo <= x < hi, f = its position between them, whether lo is even."""

    lo: Fraction
    hi: Fraction
    f: Fraction
    even: bool


@dataclass(frozen=True)
class Grid:
    """k·2^max(E−man, qmin), and nothing between 0 and ``floor``; ``bias`` only where man = 0."""

    man: int
    qmin: int
    floor: Fraction
    bias: int = 0

    def place(self, x: Fraction) -> Place:
        if x < self.floor:
            return Place(Fraction(0), self.floor, x / self.floor, True)
        e = floor_log2(x)
        step = Fraction(2) ** max(e - self.man, self.qmin)
        k = x // step
        even = (e + self.bias) % 2 == 0 if self.man == 0 else k % 2 == 0
        return Place(k * step, (k + 1) * step, x / step - k, even)


@functools.cache
def grid_of(fmt: FloatingPoint | FixedPoint, c: Carrier) -> Grid:
    if isinstance(fmt, FixedPoint):
        q = max(-fmt.fl, c.qmin)
        return Grid(c.man, q, Fraction(2) ** q)
    man = min(fmt.man, c.man)
    if fmt.subnormals:
        q = max(fmt.emin - fmt.man, c.qmin)
        return Grid(man, q, Fraction(2) ** q, fmt.bias)
    smallest = fmt.exact_step
    if not c.holds(smallest):
        step = Fraction(2) ** max(floor_log2(smallest) - c.man, c.qmin)
        smallest = (smallest // step + 1) * step
    return Grid(man, c.qmin, smallest, fmt.bias)


def position_in_code(x: Fraction) -> Fraction:
    """log2 of a posit's magnitude, made linear within each binade: what its code counts."""
    e = floor_log2(x)
    return e + x / Fraction(2) ** e - 1


@functools.cache
def posits(fmt: Posit, c: Carrier) -> tuple[list[int], list[Fraction]]:
    """Positive codes whose values the carrier holds, and the values (listed, so n <= 16)."""
    codes = [k for k in range(1, 2 ** (fmt.n - 1)) if c.holds(fmt.magnitude(k))]
    return codes, [fmt.magnitude(k) for k in codes]


def posit_place(fmt: Posit, x: Fraction, c: Carrier) -> Place:
    """Neighbours among the posits that the carrier holds, for x between the first and last."""
    codes, values = posits(fmt, c)
    i = bisect.bisect_right(values, x) - 1
    lo, low, hi, high = codes[i], values[i], codes[i + 1], values[i + 1]
    width = position_in_code(high) - position_in_code(low)
    f = (position_in_code(x) - position_in_code(low)) / width
    even = lo % 2 == 0 if hi == lo + 1 else position_in_code(low) / width % 2 == 0
    return Place(low, high, f, even)


def goes_up(mode: Rounding, p: Place, negative: bool, u: int, r: int) -> bool:
    """Whether the magnitude goes to ``hi``: the seven modes."""
    half = Fraction(1, 2)
    match mode:
        case Rounding.TIES_TO_EVEN:
            return p.f > half or (p.f == half and not p.even)
        case Rounding.TIES_TO_AWAY:
            return p.f >= half
        case Rounding.TOWARD_ZERO:
            return False
        case Rounding.UPWARD:
            return p.f > 0 and not negative
        case Rounding.DOWNWARD:
            return p.f > 0 and negative
        case Rounding.TO_ODD:
            return p.f > 0 and p.even
        case Rounding.STOCHASTIC:
            return u + math.floor(p.f * 2**r) >= 2**r
    raise AssertionError(mode)


def quantize(
    x: float, fmt: ElementFormat, mode: Rounding, carrier: str = "float32", u: int = 0, r: int = 32
) -> float:
    """q(x) for an element format; ``u`` is the r-bit random integer."""
    if math.isnan(x):
        return NAN
    c = CARRIERS[carrier]
    negative = math.copysign(1.0, x) < 0
    if isinstance(fmt, Table):
        return table_quantize(x, fmt, mode, c, u, r)
    if isinstance(fmt, Posit) and math.isinf(x):
        return NAN
    bound = largest(fmt, c, negative)
    if math.isinf(x):
        if isinstance(fmt, FixedPoint) and fmt.overflow is Overflow.WRAP:
            return NAN
        return _signed(infinity(fmt, bound), negative, fmt)
    magnitude = abs(Fraction(x))
    if magnitude == 0:
        return _signed(Fraction(0), negative, fmt)
    if isinstance(fmt, Posit):
        smallest = posits(fmt, c)[1][0]
        if magnitude <= smallest:
            return _signed(smallest, negative, fmt)
        if magnitude >= bound:
            return _signed(bound, negative, fmt)
        place = posit_place(fmt, magnitude, c)
    else:
        assert isinstance(fmt, FloatingPoint | FixedPoint)
        place = grid_of(fmt, c).place(magnitude)
    result = place.hi if goes_up(mode, place, negative, u, r) else place.lo
    if isinstance(fmt, FixedPoint) and fmt.overflow is Overflow.WRAP:
        return wrap(-result if negative else result, fmt)
    if result > bound:
        return _signed(overflow(fmt, mode, bound, negative), negative, fmt)
    return _signed(result, negative, fmt)


@functools.cache
def largest(fmt: ElementFormat, c: Carrier, negative: bool) -> Fraction:
    """Largest magnitude on one side in format ∩ carrier."""
    if isinstance(fmt, Posit):
        return posits(fmt, c)[1][-1]
    bound = -fmt.exact_min if negative else fmt.exact_max
    if c.holds(bound):
        return bound
    assert isinstance(fmt, FloatingPoint | FixedPoint)
    return grid_of(fmt, c).place(c.floor(bound)).lo


def infinity(fmt: ElementFormat, bound: Fraction) -> Fraction | float:
    """What an infinite input becomes."""
    if isinstance(fmt, FloatingPoint) and not fmt.saturate:
        return INF if fmt.nans is Nans.IEEE else NAN
    return bound


def overflow(
    fmt: ElementFormat, mode: Rounding, bound: Fraction, negative: bool
) -> Fraction | float:
    """What a finite input becomes whose rounded magnitude is above ``bound``."""
    inward = {
        Rounding.TOWARD_ZERO: True,
        Rounding.TO_ODD: True,
        Rounding.UPWARD: negative,
        Rounding.DOWNWARD: not negative,
    }
    return bound if inward.get(mode, False) else infinity(fmt, bound)


def wrap(x: Fraction, fmt: FixedPoint) -> float:
    k = x / fmt.exact_step
    assert k.denominator == 1 or fmt.exact_step < 1
    k = k.numerator // k.denominator
    half = 2 ** (fmt.wl - 1) if fmt.signed else 0
    return float(((k + half) % 2**fmt.wl - half) * fmt.exact_step)


def _signed(magnitude: Fraction | float, negative: bool, fmt: ElementFormat) -> float:
    if magnitude == 0 and not fmt.negative_zero:
        return 0.0
    return -float(magnitude) if negative else float(magnitude)


def table_quantize(x: float, fmt: Table, mode: Rounding, c: Carrier, u: int, r: int) -> float:
    """A grid with its own neighbours on either side of zero; even is an even index."""
    grid = [Fraction(v) for v in fmt.grid if c.holds(Fraction(v))]
    if x >= grid[-1] or x <= grid[0]:
        return float(grid[-1] if x >= grid[-1] else grid[0])
    value = Fraction(x)
    i = max(k for k, v in enumerate(grid) if v <= value)
    below, above = grid[i], grid[i + 1]
    f = (value - below) / (above - below)
    if value == below:
        return float(below)
    # Away from zero is away from zero as a number: for x < 0 the outer neighbour is `below`.
    negative = value < 0
    inner, outer = (i + 1, i) if negative else (i, i + 1)
    f = 1 - f if negative else f
    place = Place(grid[inner], grid[outer], f, inner % 2 == 0)
    return float(grid[outer] if goes_up(mode, place, negative, u, r) else grid[inner])


def block_exponent(xs: list[float], fmt: MX | BlockFloatingPoint) -> int | None:
    """X of a block; None for a block floating point block without a finite non-zero element."""
    finite = [abs(Fraction(x)) for x in xs if math.isfinite(x)]
    a = max(finite, default=Fraction(0))
    if isinstance(fmt, BlockFloatingPoint):
        return floor_log2(a) if a else None
    if a == 0:
        return -127
    e = floor_log2(a)
    match fmt.scale_rule:
        case ScaleRule.FLOOR:
            x = e - fmt.emax
        case ScaleRule.CEIL:
            x = e + (a != Fraction(2) ** e) - fmt.emax
        case ScaleRule.RCEIL:
            ratio = a / fmt.element.exact_max
            low = floor_log2(ratio)
            x = low + (ratio != Fraction(2) ** low)
        case ScaleRule.EVEN:
            x = floor_log2(a + Fraction(2) ** (e - fmt.man - 1)) - fmt.emax
    return max(-127, min(127, x))


def block_quantize(
    xs: list[float],
    fmt: MX | BlockFloatingPoint,
    mode: Rounding,
    carrier: str = "float32",
    us: list[int] | None = None,
    r: int = 32,
) -> list[float]:
    """q of one block."""
    exponent = block_exponent(xs, fmt)
    c = CARRIERS[carrier]
    element = fmt.element
    us = us or [0] * len(xs)
    out = []
    for x, u in zip(xs, us, strict=True):
        negative = math.copysign(1.0, x) < 0
        if math.isnan(x):
            out.append(NAN)
            continue
        if exponent is None:
            out.append(0.0)
            continue
        scale = Fraction(2) ** exponent
        if isinstance(element, FloatingPoint):
            own_man, own_q, bias = element.man, element.emin - element.man, element.bias
        else:
            own_man, own_q, bias = 10**4, -element.fl, 0
        q = max(own_q + exponent, c.qmin)
        grid = Grid(min(own_man, c.man), q, Fraction(2) ** q, bias - exponent)
        bound = c.floor(element.exact_max * scale)
        bound = grid.place(bound).lo if bound else bound
        if math.isinf(x):
            result = bound
        else:
            place = grid.place(abs(Fraction(x)))
            result = min(place.hi if goes_up(mode, place, negative, u, r) else place.lo, bound)
        out.append(_signed(result, negative, element))
    return out
