"""The one rounding rule: seven modes, any grid, integer arithmetic on the carrier's bits.

The rule is written once, over *lanes*: whatever supports ``+ - & | ^ ~ << >>`` and comparisons,
with a :class:`Lanes` object for selection. The same lines therefore run on tensors (aten), build
Inductor IR, and print the C++ of the kernels. Python ints are lanes too, so what is known when
the rule is instantiated is folded then.

Magnitudes are handled as bit patterns a: for D discarded bits, adding an addend in [0, 2^D) and
clearing the low D bits rounds the significand, and a carry into the exponent is what it should be.
The modes differ in the addend only.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple, Protocol

from .carrier import Word

Lane = Any
"""A torch.Tensor, an expression of another backend, or a Python int."""


class Rounding(enum.Enum):
    """Rounding modes. Names are IEEE 754's where it has them."""

    TIES_TO_EVEN = "nearest, ties to the even significand"
    TIES_TO_AWAY = "nearest, ties away from zero"
    TOWARD_ZERO = "truncation"
    UPWARD = "toward +infinity"
    DOWNWARD = "toward -infinity"
    TO_ODD = "inexact values go to the odd neighbour (von Neumann, jamming)"
    STOCHASTIC = "away from zero iff u + floor(f·2^r) >= 2^r, u an r-bit random integer"

    @property
    def inward(self) -> tuple[bool, bool]:
        """Whether overflow stops at the maximum: (of positive, of negative values)."""
        inward = self in (Rounding.TOWARD_ZERO, Rounding.TO_ODD)
        return inward or self is Rounding.DOWNWARD, inward or self is Rounding.UPWARD


class Lanes(Protocol):
    """What the rule needs beside operators. Conditions come from comparisons of lanes."""

    def where(self, condition: Lane, a: Lane, b: Lane) -> Lane:
        """A where the condition holds, else b."""

    def minimum(self, a: Lane, b: Lane) -> Lane:
        """Smaller of two signed integers."""

    def maximum(self, a: Lane, b: Lane) -> Lane:
        """Larger of two signed integers."""

    def wide(self, a: Lane) -> Lane:
        """The same integer in 64 bits."""

    def narrow(self, a: Lane, word: Word) -> Lane:
        """The low bits of a 64-bit integer as the word's integer."""

    def float_bits(self, a: Lane, word: Word) -> Lane:
        """Bits of an integer below 2^(man+1) converted to the word's float."""


class Deep(enum.Enum):
    """Whether normal numbers of a grid are subnormal in the word, and are not aligned there."""

    NO = "no"
    YES = "yes"
    POWERS = "yes, and the grid is the powers of two: the parity is the exponent's"


class Grid(NamedTuple):
    """A set of reals as the rule sees it: k·2^max(E−man, q), |x| in [floor, limit], and zero.

    Every field is an int or a lane of the word's integers; "bits" are those of a magnitude.
    """

    d0: Lane
    """Discarded bits of a normal number: the word's mantissa less the format's."""
    c1: Lane
    """Discarded bits of a number of exponent field e are at least c1 − e."""
    flip: Lane
    """XOR that makes the bit above the discarded ones the parity of the format's significand."""
    floor: Lane
    """Bits of the smallest positive value; below it there is one step, from 0 to it."""
    half_low: Lane
    """Bits of floor/2, rounded down to the word."""
    half_high: Lane
    """Bits of floor/2, rounded up to the word."""
    unit: Lane
    """z, where floor = floor_odd·2^z."""
    floor_odd: int
    """1, or the odd factor of a floor that is no power of two."""
    limit: tuple[Lane, Lane]
    """Bits of the largest magnitude (positive, negative)."""
    overflow: tuple[Lane, Lane]
    """Bits of what a larger finite magnitude becomes."""
    infinity: tuple[Lane, Lane]
    """Bits of what an infinity becomes."""
    keep_sign: Lane
    """-1 where a result of zero keeps its sign, 0 where it is +0."""
    wrap: tuple[int, int, bool] | None = None
    """(wl, fl, signed): wrap instead of overflowing."""
    deep: Deep = Deep.NO


def normalised(m: Lanes, a: Lane, word: Word) -> Lane:
    """Bits of a finite magnitude with the exponent field carried on below zero for subnormals."""
    low = m.float_bits(a, word) + (word.qmin << word.man)
    return m.where(a < word.implicit, low, a)


def where(m: Lanes, condition: Lane, a: Lane, b: Lane) -> Lane:
    """Selection that folds constant conditions and equal constants."""
    if isinstance(condition, bool):
        return a if condition else b
    if isinstance(a, int) and isinstance(b, int) and a == b:
        return a
    return m.where(condition, a, b)


def minimum(m: Lanes, a: Lane, b: Lane) -> Lane:
    """Smaller integer, folded."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else m.minimum(a, b)


def maximum(m: Lanes, a: Lane, b: Lane) -> Lane:
    """Larger integer, folded."""
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else m.maximum(a, b)


def by_sign(negative: Lane, pair: tuple[Lane, Lane]) -> Lane:
    """pair[0] where negative is 0, pair[1] where it is -1."""
    positive_side, negative_side = pair
    if positive_side is negative_side:
        return positive_side
    return (negative & (positive_side ^ negative_side)) ^ positive_side


def quantize_bits(
    m: Lanes, bits: Lane, grid: Grid, mode: Rounding, word: Word, u: Lane = None
) -> Lane:
    """The quantized bits of elements given as bits of the word's float.

    ``u`` (STOCHASTIC only): the r random bits, left-aligned in 32: u·2^(32−r), as an int32 in a
    32-bit word and a non-negative int64 in a 64-bit one. NaN keeps its payload.
    """
    negative = bits >> (word.bits - 1)
    a = bits & word.magnitude
    finite = m.minimum(a, word.inf)
    r = round_magnitude(m, finite, negative, grid, mode, word, u)
    if grid.wrap is not None:
        return _wrap(m, bits, a, negative, r, grid.wrap, word)
    return finished(m, bits, r, grid, word)


def finished(m: Lanes, bits: Lane, r: Lane, grid: Grid, word: Word) -> Lane:
    """A rounded magnitude with overflow, infinities, sign and NaN put right."""
    negative, a = bits >> (word.bits - 1), bits & word.magnitude
    finite = m.minimum(a, word.inf)
    r = m.where(r > by_sign(negative, grid.limit), by_sign(negative, grid.overflow), r)
    if grid.infinity is not grid.overflow:
        r = m.where(finite == word.inf, by_sign(negative, grid.infinity), r)
    sign = bits & word.sign
    if not (isinstance(grid.keep_sign, int) and grid.keep_sign == -1):
        sign = m.where(r == 0, sign & grid.keep_sign, sign)
    return m.where(a > word.inf, bits, r | sign)


def round_magnitude(
    m: Lanes, a: Lane, negative: Lane, grid: Grid, mode: Rounding, word: Word, u: Lane
) -> Lane:
    """Round magnitudes a (bits, at most the word's infinity) as if the exponent were unbounded."""
    e = maximum(m, a >> word.man, 1)
    d0, parity = grid.d0, None
    if grid.deep is not Deep.NO:
        exponent = normalised(m, a, word) >> word.man
        d0 = d0 + (m.minimum(exponent, 1) - 1)
        if grid.deep is Deep.POWERS:
            parity = exponent ^ (grid.flip >> word.man)
    d = minimum(m, maximum(m, grid.c1 - e, d0), word.man)
    mask = (1 << d) - 1
    if parity is None:
        parity = (a ^ grid.flip) >> d
    addend = _addend(negative, d, mask, parity & 1, mode, word, u)
    rounded = (a + addend) & ~mask if addend is not None else a & ~mask
    return where(m, a < grid.floor, _below_floor(m, a, e, negative, grid, mode, word, u), rounded)


def _addend(
    negative: Lane, d: Lane, mask: Lane, odd: Lane, mode: Rounding, word: Word, u: Lane
) -> Lane:
    """What is added before the low d bits are cleared: the seven modes (None is 0)."""
    match mode:
        case Rounding.TIES_TO_EVEN:
            # `& mask` is for d = 0, where nothing may be added.
            return (mask >> 1) + (odd & mask)
        case Rounding.TIES_TO_AWAY:
            return (mask + 1) >> 1
        case Rounding.TOWARD_ZERO:
            return None
        case Rounding.UPWARD:
            return mask & ~negative
        case Rounding.DOWNWARD:
            return mask & negative
        case Rounding.TO_ODD:
            return mask & (odd - 1)
        case Rounding.STOCHASTIC:
            # ⌊u·2^(d−32)⌋ carries into the kept bits iff u + ⌊f·2^32⌋ >= 2^32.
            return stochastic_addend(d, word, u)


def stochastic_addend(d: Lane, word: Word, u: Lane) -> Lane:
    """⌊u·2^(d−32)⌋ for d up to the word's bits less 8."""
    if word.bits == 32:
        return ((u >> 1) & word.magnitude) >> (31 - d)
    return (u << 24) >> (56 - d)


def _below_floor(
    m: Lanes, a: Lane, e: Lane, negative: Lane, grid: Grid, mode: Rounding, word: Word, u: Lane
) -> Lane:
    """The result for 0 <= a < floor: zero (which is even) or floor."""
    floor = grid.floor
    match mode:
        case Rounding.TIES_TO_EVEN:
            return where(m, a > grid.half_low, floor, 0)
        case Rounding.TIES_TO_AWAY:
            return where(m, a >= grid.half_high, floor, 0)
        case Rounding.TOWARD_ZERO:
            return 0
        case Rounding.UPWARD:
            return where(m, a > 0, floor & ~negative, 0)
        case Rounding.DOWNWARD:
            return where(m, a > 0, floor & negative, 0)
        case Rounding.TO_ODD:
            return where(m, a > 0, floor, 0)
        case Rounding.STOCHASTIC:
            return where(m, _moves_to_floor(m, a, e, grid, word, u), floor, 0)


def _moves_to_floor(m: Lanes, a: Lane, e: Lane, grid: Grid, word: Word, u: Lane) -> Lane:
    """U + ⌊f·2^32⌋ >= 2^32 with f = a/floor, for a below floor (elsewhere: anything)."""
    s = m.where(a < word.implicit, a, (a & (word.implicit - 1)) | word.implicit)
    # f·2^32 = s·2^(32 + ulp − z)/floor_odd, ulp the exponent of a's last place.
    right = grid.unit + (word.bias + word.man - 32) - e
    if grid.floor_odd != 1:
        v = ((1 << 32) - (m.wide(u) & 0xFFFFFFFF)) * grid.floor_odd
        return _shifted(m, m.wide(s), m.wide(right), 63) >= v
    # Both sides lie below 2^32. Where they fill the word, the comparison is unsigned.
    f = _shifted(m, s, right, word.bits - 1)
    if word.bits == 64:
        return f + u >= 1 << 32
    return (f ^ word.sign) > (~u ^ word.sign)


def _shifted(m: Lanes, s: Lane, right: Lane, most: int) -> Lane:
    """S shifted right, or left where ``right`` is negative, by at most ``most`` bits."""
    up = s << minimum(m, maximum(m, 0 - right, 0), most)
    return m.where(right < 0, up, s >> minimum(m, maximum(m, right, 0), most))


def _wrap(
    m: Lanes,
    bits: Lane,
    a: Lane,
    negative: Lane,
    r: Lane,
    wrap: tuple[int, int, bool],
    word: Word,
) -> Lane:
    """The low wl bits of the rounded integer, in two's complement; NaN for infinities and NaN."""
    wl, fl, signed = wrap
    e = m.wide(maximum(m, r >> word.man, 1))
    s = m.wide(m.where(r < word.implicit, r, (r & (word.implicit - 1)) | word.implicit))
    shift = e + (fl - word.bias - word.man)
    left = minimum(m, maximum(m, shift, 0), 63)
    k = (s << left) >> minimum(m, maximum(m, 0 - shift, 0), 63)
    minus = m.wide(negative)
    k = (k ^ minus) - minus
    k = (k << (64 - wl)) >> (64 - wl) if signed else k & ((1 << wl) - 1)
    minus = k >> 63
    # |k| has at most man+1 significant bits (a wrapped value is a multiple of the input's last
    # place), but may be larger than 2^(man+1): convert its odd part, then move the exponent.
    out = _float_from_int(m, (k ^ minus) - minus, fl, word)
    out = out | (m.narrow(minus, word) & word.sign)
    out = m.where(a >= word.inf, word.nan, out)
    return m.where(a > word.inf, bits, out)


def _float_from_int(m: Lanes, k: Lane, fl: int, word: Word) -> Lane:
    """Bits of k·2^−fl, where k >= 0 (64-bit) makes that exact."""
    bits = m.float_bits(k, word)
    e = (bits >> word.man) - fl
    normal = bits - (fl << word.man)
    significand = (bits & (word.implicit - 1)) | word.implicit
    subnormal = significand >> minimum(m, maximum(m, 1 - e, 0), word.man + 1)
    return m.where(bits == 0, 0, m.where(e >= 1, normal, subnormal))
