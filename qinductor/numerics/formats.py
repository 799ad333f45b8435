"""Number formats of single elements: which values exist. Data only; nothing here rounds.

A format is a set of exact reals plus the rule for what lies outside it. The dtype of a tensor is
only the carrier: what a quantizer returns is always in *format ∩ carrier*.

Adding a format is adding a constant to :mod:`qinductor.numerics.named`.
"""

from __future__ import annotations

import enum
import itertools
import math
from dataclasses import dataclass
from fractions import Fraction

from qinductor.errors import ConfigError

from .format_base import MAX_LISTED_BITS, ElementFormat, require_int

DEFAULT_BIAS = -(2**31)
"""Stands for 2^(exp−1)−1 in FloatingPoint's arguments."""


class Nans(enum.Enum):
    """Which code words of a floating-point format are NaN (and, with them, which are infinite)."""

    IEEE = "top exponent reserved: infinity at mantissa 0, NaN elsewhere"
    TOP_CODE = "only the code with all exponent and mantissa bits set is NaN"
    NEGATIVE_ZERO = "the code of -0 is the only NaN; there is no -0"
    NONE = "no special codes"


class Overflow(enum.Enum):
    """What fixed point does with a value outside its range."""

    SATURATE = "the nearest end of the range"
    WRAP = "the low bits of the two's complement (infinities become NaN: they have no low bits)"


@dataclass(frozen=True, repr=False)
class FloatingPoint(ElementFormat):
    """Binary floating point, 1 sign bit, ``exp`` exponent bits, ``man`` mantissa bits.

    Values are ±2^(e−bias)·(1 + m/2^man), and ±2^(1−bias)·m/2^man at e = 0 with subnormals.
    IEEE-like by default: ``FloatingPoint(4, 3)`` has infinities and a maximum of 240.

    Args:
        exp: 1 to 11. man: 0 to 52. bias: 2^(exp−1)−1 where not given.
        subnormals: False leaves a gap between 0 and the smallest normal number; it counts as one
            step, so nearest modes round it at its middle.
        zero_binade: with ``subnormals=False``, exponent field 0 holds normal numbers except for
            its first code, which is zero (DLFloat: Agrawal et al., ARITH 2019).
        nans: which codes are special. saturate: overflow gives ±max, infinities included;
            otherwise ±inf where the format has it and NaN where it has not.

    Raises:
        ConfigError: a field is out of range, or the set would be empty or not fit float64.
    """

    exp: int
    man: int
    bias: int = DEFAULT_BIAS
    subnormals: bool = True
    zero_binade: bool = False
    nans: Nans = Nans.IEEE
    saturate: bool = False

    def __post_init__(self) -> None:
        require_int("FloatingPoint", "exp", self.exp, 1, 11)
        require_int("FloatingPoint", "man", self.man, 0, 52)
        if self.bias == DEFAULT_BIAS:
            object.__setattr__(self, "bias", 2 ** (self.exp - 1) - 1)
        require_int("FloatingPoint", "bias", self.bias, -1200, 1200)
        if not isinstance(self.nans, Nans):
            raise ConfigError(
                f"FloatingPoint: nans={self.nans!r} must be one of "
                f"{', '.join(f'Nans.{n.name}' for n in Nans)}."
            )
        if self.zero_binade and self.subnormals:
            raise ConfigError("FloatingPoint: zero_binade=True needs subnormals=False.")
        if self.zero_binade and self.man > 24:
            raise ConfigError(f"FloatingPoint: zero_binade=True takes man <= 24, not {self.man}.")
        if self._top_code < 1:
            raise ConfigError(
                f"FloatingPoint: exp={self.exp}, man={self.man} with {self.nans} has no finite "
                "value but zero. Use more bits or nans=Nans.NONE."
            )
        if self.exact_max >= Fraction(2) ** 1024 or self.exact_step < Fraction(1, 2**1074):
            raise ConfigError(
                f"FloatingPoint: exp={self.exp}, man={self.man}, bias={self.bias} reaches beyond "
                "float64 (2^-1074 to 2^1024). Use fewer exponent bits or another bias."
            )

    @property
    def infinities(self) -> bool:
        """Whether ±inf have codes."""
        return self.nans is Nans.IEEE

    @property
    def negative_zero(self) -> bool:
        """Whether -0 has a code."""
        return self.nans is not Nans.NEGATIVE_ZERO

    @property
    def bits(self) -> int:
        """Sign, exponent and mantissa bits."""
        return 1 + self.exp + self.man

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal number."""
        return -self.bias if self.zero_binade else 1 - self.bias

    @property
    def _top_code(self) -> int:
        """Largest finite magnitude code."""
        codes = 1 << (self.exp + self.man)
        if self.nans is Nans.IEEE:
            return codes - (1 << self.man) - 1
        return codes - 2 if self.nans is Nans.TOP_CODE else codes - 1

    def magnitude(self, code: int) -> Fraction:
        """Value of a magnitude code (exponent and mantissa bits, no sign)."""
        e, m = code >> self.man, code & ((1 << self.man) - 1)
        scale = Fraction(2) ** (max(e, 0 if self.zero_binade else 1) - self.bias - self.man)
        if e == 0 and not (self.zero_binade and m):
            return m * scale if self.subnormals else Fraction(0)
        return ((1 << self.man) + m) * scale

    @property
    def exact_max(self) -> Fraction:
        """Largest finite value."""
        return self.magnitude(self._top_code)

    @property
    def min_normal(self) -> float:
        """Smallest positive normal number."""
        tiny = Fraction(1, 2**self.man) if self.zero_binade else 0
        return float(Fraction(2) ** self.emin * (1 + tiny))

    @property
    def exact_step(self) -> Fraction:
        """Smallest positive value."""
        if self.subnormals and self.man:
            return Fraction(2) ** (self.emin - self.man)
        if self.zero_binade:
            return Fraction(2) ** self.emin * (1 + Fraction(1, 2**self.man))
        return Fraction(2) ** self.emin

    def _finite(self) -> list[Fraction]:
        positive = [self.magnitude(c) for c in range(self._top_code + 1)]
        return [*positive, *(-v for v in positive)]


@dataclass(frozen=True, repr=False)
class FixedPoint(ElementFormat):
    """Fixed point: k·2^−fl with k in [−2^(wl−1), 2^(wl−1)−1], or [0, 2^wl−1] unsigned. No −0.

    Args:
        wl: word length, 2 to 53 signed (1 to 53 unsigned). fl: fractional bits, any sign.
        symmetric: leave −2^(wl−1) out. overflow: SATURATE, or WRAP to the low wl bits.

    Raises:
        ConfigError: a field is out of range, or symmetric is combined with WRAP or unsigned.
    """

    wl: int
    fl: int
    signed: bool = True
    symmetric: bool = False
    overflow: Overflow = Overflow.SATURATE

    def __post_init__(self) -> None:
        if self.signed and isinstance(self.wl, int) and self.wl == 1:
            raise ConfigError(
                "FixedPoint: wl=1 has no bit beside the sign. Use wl >= 2, or signed=False."
            )
        require_int("FixedPoint", "wl", self.wl, 1, 53)
        require_int("FixedPoint", "fl", self.fl, -960, 1074)
        if not isinstance(self.overflow, Overflow):
            raise ConfigError(
                f"FixedPoint: overflow={self.overflow!r} must be Overflow.SATURATE or "
                "Overflow.WRAP."
            )
        if self.symmetric and not self.signed:
            raise ConfigError("FixedPoint: symmetric=True needs signed=True.")
        if self.symmetric and self.overflow is Overflow.WRAP:
            raise ConfigError(
                "FixedPoint: symmetric=True drops a code word, so WRAP is not defined. "
                "Use overflow=Overflow.SATURATE or symmetric=False."
            )

    @property
    def bits(self) -> int:
        """Word length."""
        return self.wl

    @property
    def kmax(self) -> int:
        """Largest integer code."""
        return (1 << (self.wl - 1)) - 1 if self.signed else (1 << self.wl) - 1

    @property
    def kmin(self) -> int:
        """Smallest integer code."""
        if not self.signed:
            return 0
        return -self.kmax if self.symmetric else -self.kmax - 1

    @property
    def exact_step(self) -> Fraction:
        """Distance between neighbours, 2^−fl."""
        return Fraction(2) ** -self.fl

    @property
    def exact_max(self) -> Fraction:
        """Largest value."""
        return self.kmax * self.exact_step

    @property
    def exact_min(self) -> Fraction:
        """Smallest value."""
        return self.kmin * self.exact_step

    def _finite(self) -> list[Fraction]:
        return [k * self.exact_step for k in range(self.kmin, self.kmax + 1)]


@dataclass(frozen=True, repr=False)
class Posit(ElementFormat):
    """Posit(n, es) of the 2022 standard: no −0, no infinities, NaN is NaR.

    Rounding never gives 0 or NaR: below the smallest positive value lies that value, above the
    largest lies the largest. It happens in the code: a tie is the (n+1)-bit posit between two
    neighbours, and the discarded fraction of stochastic rounding is that of the code's bits.

    Args:
        n: 3 to 32 bits. es: 0 to 4 exponent bits (2 in the standard).
    """

    n: int
    es: int = 2

    def __post_init__(self) -> None:
        require_int("Posit", "n", self.n, 3, 32)
        require_int("Posit", "es", self.es, 0, 4)

    @property
    def bits(self) -> int:
        """Word length n."""
        return self.n

    def magnitude(self, code: int) -> Fraction:
        """Value of a positive code, 0 < code < 2^(n−1)."""
        width = self.n - 1
        first = code >> (width - 1) & 1
        run = 1
        while run < width and (code >> (width - 1 - run) & 1) == first:
            run += 1
        left = max(width - run - 1, 0)
        tail = code & ((1 << left) - 1)
        if left >= self.es:
            e, f_bits = tail >> (left - self.es), left - self.es
        else:
            e, f_bits = tail << (self.es - left), 0
        scale = (((run - 1) if first else -run) << self.es) + e
        significand = (1 << f_bits) + (tail & ((1 << f_bits) - 1))
        return significand * Fraction(2) ** (scale - f_bits)

    @property
    def exact_max(self) -> Fraction:
        """Largest value, 2^((n−2)·2^es)."""
        return Fraction(1 << ((self.n - 2) << self.es))

    @property
    def exact_step(self) -> Fraction:
        """Smallest positive value, 2^(−(n−2)·2^es)."""
        return Fraction(1, 1 << ((self.n - 2) << self.es))

    def _finite(self) -> list[Fraction]:
        positive = [self.magnitude(c) for c in range(1, 1 << (self.n - 1))]
        return [Fraction(0), *positive, *(-v for v in positive)]


@dataclass(frozen=True, repr=False)
class Table(ElementFormat):
    """An arbitrary grid: its values, ascending. "Even" is an even index; overflow saturates.

    Args:
        grid: 2 to 2^16 finite floats, strictly ascending, each 0 or of magnitude 2^−300 to 2^300.
    """

    grid: tuple[float, ...]

    def __post_init__(self) -> None:
        grid = tuple(float(v) for v in self.grid)
        object.__setattr__(self, "grid", tuple(v + 0.0 for v in grid))
        if not 2 <= len(grid) <= 2**MAX_LISTED_BITS:
            raise ConfigError(f"Table: {len(grid)} values; it takes 2 to {2**MAX_LISTED_BITS}.")
        if not all(math.isfinite(v) for v in grid):
            raise ConfigError("Table: every value must be finite; remove inf and NaN.")
        if any(v and not 2.0**-300 <= abs(v) <= 2.0**300 for v in grid):
            raise ConfigError("Table: a value is neither 0 nor of magnitude 2^-300 to 2^300.")
        if any(a >= b for a, b in itertools.pairwise(grid)):
            raise ConfigError(
                "Table: values must be strictly ascending. Use Table(tuple(sorted(set(values))))."
            )

    @property
    def bits(self) -> int:
        """Bits of an index."""
        return max(1, (len(self.grid) - 1).bit_length())

    @property
    def exact_max(self) -> Fraction:
        """Last value."""
        return Fraction(self.grid[-1])

    @property
    def exact_min(self) -> Fraction:
        """First value."""
        return Fraction(self.grid[0])

    @property
    def exact_step(self) -> Fraction:
        """Smallest distance between neighbours."""
        return min(
            Fraction(b) - Fraction(a) for a, b in zip(self.grid, self.grid[1:], strict=False)
        )

    def _finite(self) -> list[Fraction]:
        return [Fraction(v) for v in self.grid]
