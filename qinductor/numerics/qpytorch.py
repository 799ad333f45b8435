"""QPyTorch's formats: its value sets, with its own idea of "nearest".

They let scripts written for QPyTorch 0.3.0 give the bits they gave (:mod:`qinductor.qtorch`), and
can stand wherever a format can. Their values are those of an exact format, ``plain``; stochastic
rounding is that format's, and only nearest rounding differs. Data only, as in ``formats``; the
rules are in :mod:`qinductor.numerics.qpytorch_rules`.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from fractions import Fraction

from qinductor.errors import ConfigError

from .format_base import ElementFormat, Format, require_int
from .formats import FixedPoint, FloatingPoint, Nans
from .scaled import BlockFloatingPoint, ScaledFormat

WHOLE_TENSOR = -1
"""QPyTorch's ``dim`` of a tensor that is one block."""


class QTorchNumber(Format):
    """Base of QPyTorch's formats; there its name is ``qtorch.Number``."""

    @property
    @abc.abstractmethod
    def plain(self) -> FixedPoint | FloatingPoint | BlockFloatingPoint:
        """The exact format with the same values."""


@dataclass(frozen=True, repr=False)
class QTorchElement(QTorchNumber, ElementFormat):
    """A format of single elements: the properties of its plain one."""

    @property
    @abc.abstractmethod
    def plain(self) -> FixedPoint | FloatingPoint:
        """The exact format with the same values."""

    @property
    def exact_max(self) -> Fraction:
        """Largest finite value."""
        return self.plain.exact_max

    @property
    def exact_min(self) -> Fraction:
        """Smallest (most negative) finite value."""
        return self.plain.exact_min

    @property
    def exact_step(self) -> Fraction:
        """Smallest positive value."""
        return self.plain.exact_step

    @property
    def negative_zero(self) -> bool:
        """Whether -0 exists."""
        return self.plain.negative_zero

    def _finite(self) -> list[Fraction]:
        return self.plain._finite()


@dataclass(frozen=True, repr=False)
class QTorchFixed(QTorchElement):
    """QPyTorch's fixed point: k·2^−fl, ties to even, without −0.

    Args:
        wl: word length, 2 to 53. fl: fractional bits, -100 to 149.
        clamp: False leaves the range unbounded; infinities then stay. symmetric: drop the minimum.

    Raises:
        ConfigError: a field is out of range.
    """

    wl: int
    fl: int
    clamp: bool = True
    symmetric: bool = False

    def __post_init__(self) -> None:
        require_int("QTorchFixed", "wl", self.wl, 2, 53)
        require_int("QTorchFixed", "fl", self.fl, -100, 149)
        for name in ("clamp", "symmetric"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"QTorchFixed: {name}={getattr(self, name)!r} must be True or False."
                )

    @property
    def plain(self) -> FixedPoint | FloatingPoint:
        """Fixed point; unbounded, the floating point whose subnormal numbers are k·2^−fl."""
        if self.clamp:
            return FixedPoint(self.wl, self.fl, symmetric=self.symmetric)
        # Numbers of 2^(23-fl) and more have steps of their own in float32, and stay.
        bias = self.fl - 22
        return FloatingPoint((129 + bias).bit_length(), 23, bias=bias)

    @property
    def negative_zero(self) -> bool:
        """There is none, clamped or not."""
        return False

    @property
    def bits(self) -> int:
        """Word length."""
        return self.wl

    @property
    def listed(self) -> bool:
        """Not without an end."""
        return self.clamp and super().listed

    def __str__(self) -> str:
        return self.name or f"FixedPoint (wl={self.wl}, fl={self.fl})"


@dataclass(frozen=True, repr=False)
class QTorchFloat(QTorchElement):
    """QPyTorch's floating point: no infinities or NaN codes, saturating, ties away from zero.

    So (4, 3) ends at 480. Below the smallest normal number 2^emin, its sum with x is rounded to
    float32 first (to even), then to ``man`` bits.

    Args:
        exp: 1 to 8. man: 0 to 23.

    Raises:
        ConfigError: a field is out of range.
    """

    exp: int
    man: int

    def __post_init__(self) -> None:
        require_int("QTorchFloat", "exp", self.exp, 1, 8)
        require_int("QTorchFloat", "man", self.man, 0, 23)

    @property
    def plain(self) -> FloatingPoint:
        """Floating point without special codes."""
        return FloatingPoint(self.exp, self.man, nans=Nans.NONE, saturate=True)

    @property
    def bits(self) -> int:
        """Sign, exponent and mantissa bits."""
        return 1 + self.exp + self.man

    def __str__(self) -> str:
        return self.name or f"FloatingPoint (exponent={self.exp}, mantissa={self.man})"


@dataclass(frozen=True, repr=False)
class QTorchBlock(QTorchNumber, ScaledFormat):
    """QPyTorch's block floating point: x + 6·2^E rounded to float32, then half up at wl bits.

    From wl = 23 on, and in blocks whose maximum is 2^126 or more, that sum has no room: there the
    block is rounded as :class:`BlockFloatingPoint`, to nearest even.

    Args:
        wl: word length, 2 to 53. dim: one exponent for each index of that dim; -1: one in all.

    Raises:
        ConfigError: a field is out of range.
    """

    wl: int
    dim: int = WHOLE_TENSOR

    def __post_init__(self) -> None:
        if self.wl == 1:
            raise ConfigError("QTorchBlock: wl=1 has no bit beside the sign. Use wl >= 2.")
        require_int("QTorchBlock", "wl", self.wl, 2, 53)
        require_int("QTorchBlock", "dim", self.dim, WHOLE_TENSOR, 63)

    @property
    def plain(self) -> BlockFloatingPoint:
        """Block floating point over the same blocks."""
        return BlockFloatingPoint(self.wl, dim=None if self.dim == WHOLE_TENSOR else self.dim)

    @property
    def bits(self) -> int:
        """Word length of an element."""
        return self.wl

    def __str__(self) -> str:
        return self.name or f"BlockFloatingPoint (wl={self.wl}, dim={self.dim})"
