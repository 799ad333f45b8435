"""From a format and a carrier to the numbers of the rounding rule: *format ∩ carrier*."""

from __future__ import annotations

import functools
from fractions import Fraction

from qinductor.errors import ConfigError

from .carrier import Carrier, Word, floor_log2
from .formats import FixedPoint, FloatingPoint, Nans, Overflow
from .rounding import (
    Deep,
    Grid,
    Lane,
    Lanes,
    Rounding,
    maximum,
    minimum,
    normalised,
    round_magnitude,
    where,
)
from .scaled import MX, BlockFloatingPoint, ScaleRule


@functools.lru_cache(maxsize=4096)
def grid_of(fmt: FloatingPoint | FixedPoint, carrier: Carrier, mode: Rounding) -> Grid:
    """The grid of an element format in a carrier, with the mode's overflow rule.

    Raises:
        ConfigError: nothing but zero lies in both the format and the carrier.
    """
    word = carrier.word
    man, q = _precision(fmt, carrier)
    smallest = fmt.exact_step
    if isinstance(fmt, FixedPoint) or fmt.subnormals:
        smallest = max(smallest, Fraction(2) ** q)
    else:
        step = Fraction(2) ** max(floor_log2(smallest) - carrier.man, carrier.qmin)
        smallest = -(-smallest // step) * step
    limits = tuple(
        _bound(bound, man, q, smallest, carrier) for bound in (fmt.exact_max, -fmt.exact_min)
    )
    if max(limits) == 0:
        raise ConfigError(
            f"{fmt} has no value but zero in a {carrier.dtype} tensor. Use a wider dtype."
        )
    # One object where the sides are equal: by_sign() then needs no selection.
    limit = (word.pattern(limits[0]), word.pattern(limits[1]))
    limit = (limit[0], limit[0]) if limit[0] == limit[1] else limit
    beyond = _beyond(fmt, word)
    infinity = limit if beyond is None else (beyond, beyond)
    inward = mode.inward
    overflow = (
        limit[0] if inward[0] else infinity[0],
        limit[1] if inward[1] else infinity[1],
    )
    overflow = (overflow[0], overflow[0]) if overflow[0] == overflow[1] else overflow
    half = word.floor(smallest / 2)
    half_exact = smallest / 2 >= Fraction(2) ** word.qmin
    unit = _power_of_two_part(smallest)
    wrap = None
    if isinstance(fmt, FixedPoint) and fmt.overflow is Overflow.WRAP:
        wrap = (fmt.wl, fmt.fl, fmt.signed)
    return Grid(
        d0=word.man - man,
        c1=q + word.bias + word.man,
        flip=_parity_flip(fmt, man, q, word),
        floor=word.pattern(smallest),
        half_low=half,
        half_high=half if half_exact else half + 1,
        unit=unit,
        floor_odd=int(smallest / Fraction(2) ** unit),
        limit=limit,
        overflow=overflow,
        infinity=overflow if overflow == infinity else infinity,
        keep_sign=-1 if fmt.negative_zero else 0,
        wrap=wrap,
        deep=_deep(man, q, carrier),
    )


def _precision(fmt: FloatingPoint | FixedPoint, carrier: Carrier) -> tuple[int, int]:
    """(mantissa bits, exponent of the smallest step) of format ∩ carrier."""
    if isinstance(fmt, FixedPoint):
        return carrier.man, max(-fmt.fl, carrier.qmin)
    man = min(fmt.man, carrier.man)
    return man, max(fmt.emin - fmt.man, carrier.qmin) if fmt.subnormals else carrier.qmin


def _bound(bound: Fraction, man: int, q: int, smallest: Fraction, carrier: Carrier) -> Fraction:
    """Largest value of the grid not above ``bound``."""
    bound = min(bound, carrier.max)
    if bound < smallest:
        return Fraction(0)
    step = Fraction(2) ** max(floor_log2(bound) - man, q)
    return bound // step * step


def _beyond(fmt: FloatingPoint | FixedPoint, word: Word) -> int | None:
    """Bits of what lies beyond the range: infinity, NaN, or None where it saturates."""
    if isinstance(fmt, FixedPoint) or fmt.saturate:
        return None
    return word.inf if fmt.nans is Nans.IEEE else word.nan


def _deep(man: int, q: int, carrier: Carrier) -> Deep:
    """Whether normal numbers of the grid are subnormal in the word."""
    if man == carrier.man or q + man >= 1 - carrier.word.bias:
        return Deep.NO
    return Deep.YES if man else Deep.POWERS


def _power_of_two_part(x: Fraction) -> int:
    """Largest z such that x is an integer multiple of 2^z."""
    n = x.numerator
    return (n & -n).bit_length() - 1 - (x.denominator.bit_length() - 1)


def _parity_flip(fmt: FloatingPoint | FixedPoint, man: int, q: int, word: Word) -> int:
    """See Grid.flip: the bit above the discarded ones is an exponent bit only where d = man.

    That is the binade [2^q, 2^(q+1)), whose significand is 1, odd; and with man = 0 every binade,
    where the parity is the code's, that is the exponent field's.
    """
    if isinstance(fmt, FloatingPoint) and man == 0:
        return ((word.bias ^ fmt.bias) & 1) << word.man
    return ((q + word.bias + 1) & 1) << word.man


def pow2_bits(m: Lanes, q: Lane, word: Word) -> Lane:
    """Bits of 2^q; of the smallest subnormal number below, of infinity above the range."""
    e = minimum(m, q + word.bias, 2 * word.bias + 1)
    shift = minimum(m, maximum(m, q - word.qmin, 0), word.man)
    return where(m, e >= 1, maximum(m, e, 0) << word.man, (q * 0 + 1) << shift)


def scaled_bits(m: Lanes, bits: int, x: Lane, word: Word) -> Lane:
    """Bits of v·2^x rounded toward zero, v > 0 normal with these bits; the largest at most."""
    e = (bits >> word.man) + x
    fraction = bits & (word.implicit - 1)
    normal = (minimum(m, maximum(m, e, 0), 2 * word.bias + 1) << word.man) | fraction
    right = minimum(m, maximum(m, 1 - e, 0), word.man + 1)
    subnormal = (right * 0 + (fraction | word.implicit)) >> right
    return minimum(m, where(m, e >= 1, normal, subnormal), word.inf - 1)


def scaled_grid(m: Lanes, fmt: MX | BlockFloatingPoint, carrier: Carrier, x: Lane) -> Grid:
    """The grid of a block whose elements are the element format's values times 2^x."""
    word, element = carrier.word, fmt.element
    if isinstance(element, FloatingPoint):
        own_man, own_q = element.man, element.emin - element.man
    else:
        own_man, own_q = carrier.man, -element.fl
    man = min(own_man, carrier.man)
    q = maximum(m, x + own_q, carrier.qmin)
    if isinstance(element, FloatingPoint) and man == 0:
        flip = ((x + (word.bias ^ element.bias)) & 1) << word.man
    else:
        flip = ((q + word.bias + 1) & 1) << word.man
    floor, half = pow2_bits(m, q, word), pow2_bits(m, q - 1, word)
    grid = Grid(
        d0=word.man - man,
        c1=q + (word.bias + word.man),
        flip=flip,
        floor=floor,
        half_low=half,
        half_high=half,
        unit=q,
        floor_odd=1,
        limit=(0, 0),
        overflow=(0, 0),
        infinity=(0, 0),
        keep_sign=-1 if element.negative_zero else 0,
        deep=_deep(man, max(own_q - 127, carrier.qmin), carrier),
    )
    largest = scaled_bits(m, word.floor(element.exact_max), x, word)
    largest = minimum(m, largest, word.pattern(carrier.max))
    limit = round_magnitude(m, largest, 0, grid, Rounding.TOWARD_ZERO, word, None)
    pair = (limit, limit)
    return grid._replace(limit=pair, overflow=pair, infinity=pair)


def block_exponent(m: Lanes, amax: Lane, fmt: MX | BlockFloatingPoint, word: Word) -> Lane:
    """X of a block from the bits of its largest finite magnitude (0: far below every other)."""
    n = normalised(m, amax, word)
    if isinstance(fmt, BlockFloatingPoint):
        return (n >> word.man) - word.bias
    fraction = n & (word.implicit - 1)
    e = (n >> word.man) - word.bias
    match fmt.scale_rule:
        case ScaleRule.FLOOR:
            x = e - fmt.emax
        case ScaleRule.CEIL:
            x = e + m.where(fraction > 0, 1, 0) - fmt.emax
        case ScaleRule.RCEIL:
            own = word.pattern(fmt.element.exact_max) & (word.implicit - 1)
            x = e + m.where(fraction > own, 1, 0) - fmt.emax
        case ScaleRule.EVEN:
            half = word.implicit >> (fmt.man + 1)
            x = ((n + half) >> word.man) - word.bias - fmt.emax
    return m.minimum(m.maximum(x, -127), 127)
