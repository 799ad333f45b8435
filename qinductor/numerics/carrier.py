"""Carriers: the dtypes that hold quantized values, and the words their bits are worked in."""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from fractions import Fraction

import torch

from qinductor.errors import ConfigError


@dataclass(frozen=True)
class Word:
    """An IEEE binary interchange format seen as a signed integer of ``bits`` bits.

    bfloat16 and float16 are worked in the 32-bit word: widening is exact, and a result lies in
    *format ∩ carrier*, so narrowing is exact too.
    """

    bits: int
    man: int

    @property
    def bias(self) -> int:
        """Exponent bias."""
        return (1 << (self.bits - self.man - 2)) - 1

    @property
    def qmin(self) -> int:
        """Exponent of the smallest subnormal number."""
        return 1 - self.bias - self.man

    @property
    def sign(self) -> int:
        """The sign bit, as a signed integer."""
        return -(1 << (self.bits - 1))

    @property
    def magnitude(self) -> int:
        """Mask of everything but the sign."""
        return (1 << (self.bits - 1)) - 1

    @property
    def implicit(self) -> int:
        """The implicit bit: 1 in the exponent field."""
        return 1 << self.man

    @property
    def inf(self) -> int:
        """Bits of +infinity."""
        return (2 * self.bias + 1) << self.man

    @property
    def nan(self) -> int:
        """Bits of the quiet NaN without payload."""
        return self.inf | 1 << (self.man - 1)

    @property
    def int_dtype(self) -> torch.dtype:
        """The integer dtype of the word."""
        return torch.int32 if self.bits == 32 else torch.int64

    @property
    def float_dtype(self) -> torch.dtype:
        """The floating dtype of the word."""
        return torch.float32 if self.bits == 32 else torch.float64

    def pattern(self, x: Fraction) -> int:
        """Bits of x >= 0, which must be a value of the word's dtype."""
        kind, code = ("<f", "<i") if self.bits == 32 else ("<d", "<q")
        bits = int(struct.unpack(code, struct.pack(kind, float(x)))[0])
        assert Fraction(struct.unpack(kind, struct.pack(kind, float(x)))[0]) == x, x
        return bits

    def floor(self, x: Fraction) -> int:
        """Bits of the largest value not above x >= 0; that of the largest finite one at most."""
        if x == 0:
            return 0
        step = Fraction(2) ** max(floor_log2(x) - self.man, self.qmin)
        largest = (2 - Fraction(1, self.implicit)) * Fraction(2) ** self.bias
        return self.pattern(min(x // step * step, largest))


@dataclass(frozen=True)
class Carrier:
    """A floating dtype: values k·2^q with |k| < 2^(man+1), q >= qmin, and at most ``max``."""

    dtype: torch.dtype
    man: int
    emin: int
    word: Word

    @property
    def qmin(self) -> int:
        """Exponent of the smallest subnormal number."""
        return self.emin - self.man

    @property
    def max(self) -> Fraction:
        """Largest finite value."""
        return (2 - Fraction(1, 2**self.man)) * Fraction(2) ** (1 - self.emin)


WORD32 = Word(32, 23)
WORD64 = Word(64, 52)

CARRIERS: dict[torch.dtype, Carrier] = {
    torch.float32: Carrier(torch.float32, 23, -126, WORD32),
    torch.float64: Carrier(torch.float64, 52, -1022, WORD64),
    torch.bfloat16: Carrier(torch.bfloat16, 7, -126, WORD32),
    torch.float16: Carrier(torch.float16, 10, -14, WORD32),
}


@functools.cache
def floor_log2(x: Fraction) -> int:
    """⌊log2 x⌋ of a positive rational, exact."""
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e if Fraction(2) ** e <= x else e - 1


def carrier_of(dtype: torch.dtype) -> Carrier:
    """The carrier of a tensor's dtype.

    Raises:
        ConfigError: integer, complex, bool and 8-bit dtypes hold no reals to quantize.
    """
    carrier = CARRIERS.get(dtype)
    if carrier is None:
        raise ConfigError(
            f"quantize() takes {', '.join(str(d) for d in CARRIERS)} tensors, not {dtype}. "
            "Convert first, for example x.float()."
        )
    return carrier
