"""Formats whose elements share a scale: block floating point, MX, NVFP4, affine integers.

As in :mod:`qinductor.numerics.formats`, data only.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from qinductor.errors import ConfigError

from .format_base import Format, require_int
from .formats import FixedPoint, FloatingPoint


class ScaleRule(enum.Enum):
    """How MX picks the exponent X of a block from its largest magnitude a.

    With the element format's maximum m, and emax its exponent:
    """

    FLOOR = "⌊log2 a⌋ − emax (OCP MX v1.0, section 6.3)"
    CEIL = "⌈log2 a⌉ − emax"
    RCEIL = "⌈log2 (a/m)⌉, exact (what cvt.rp.satfinite.ue8m0x2 does to a/m)"
    EVEN = "⌊log2 a′⌋ − emax, a′ = a with half a unit of the element's last place added"


class Granularity(enum.Enum):
    """Which elements share the scale of an Integer format."""

    PER_TENSOR = "one scale"
    PER_CHANNEL = "one scale for each index of `axis`"
    PER_TOKEN = "one scale for each vector along the last axis"
    GROUP = "one scale for each `group` consecutive elements along the last axis"


class ScaledFormat(Format):
    """Base of the formats with shared scales."""


@dataclass(frozen=True, repr=False)
class ScaleFormat(Format):
    """A format of scales, not of tensors: quantize() refuses it. E8M0 is the only one."""

    def __repr__(self) -> str:
        return "ScaleFormat()"

    @property
    def bits(self) -> int:
        """Eight exponent bits, no sign, no zero."""
        return 8


def require_axis(owner: str, name: str, value: object) -> None:
    """Raise ConfigError unless ``value`` is an int that can be an axis."""
    require_int(owner, name, value, -64, 63)


@dataclass(frozen=True, repr=False)
class BlockFloatingPoint(ScaledFormat):
    """Block floating point: k·2^(E+2−wl), |k| ≤ 2^(wl−1)−1, E = ⌊log2 max|x|⌋ of the block.

    Exactly one of: ``dim`` (one exponent for each index of that dim over all others, QPyTorch's);
    ``axis`` and ``block`` (each run of ``block`` elements along ``axis``; a short last one is a
    block); neither (the whole tensor).

    Args:
        wl: 2 to 53. dim, axis: any dim of the tensor, negative from the end. block: ≥ 1.
    """

    wl: int
    dim: int | None = None
    axis: int | None = None
    block: int | None = None

    def __post_init__(self) -> None:
        if self.wl == 1:
            raise ConfigError("BlockFloatingPoint: wl=1 has no bit beside the sign. Use wl >= 2.")
        require_int("BlockFloatingPoint", "wl", self.wl, 2, 53)
        if self.dim is not None:
            require_axis("BlockFloatingPoint", "dim", self.dim)
        if (self.axis is None) != (self.block is None):
            raise ConfigError(
                f"BlockFloatingPoint: axis={self.axis}, block={self.block}: give both or neither."
            )
        if self.axis is not None:
            require_axis("BlockFloatingPoint", "axis", self.axis)
            require_int("BlockFloatingPoint", "block", self.block, 1, 2**31 - 1)
            if self.dim is not None:
                raise ConfigError(
                    f"BlockFloatingPoint: dim={self.dim} and axis={self.axis} exclude each other."
                )

    @property
    def element(self) -> FixedPoint:
        """The elements of a block whose exponent E is 0."""
        return FixedPoint(self.wl, self.wl - 2, symmetric=True)

    @property
    def bits(self) -> int:
        """Word length of an element."""
        return self.wl

    @property
    def bits_per_value(self) -> float:
        """With an 8-bit exponent a block, where the block's length is part of the format."""
        return self.wl + (8 / self.block if self.block else 0.0)


@dataclass(frozen=True, repr=False)
class MX(ScaledFormat):
    """Microscaling: blocks of ``block`` elements times 2^X, X in [−127, 127] (OCP MX v1.0).

    Elements saturate: their overflow rule is not asked.

    Args:
        element: the element format: E4M3, E5M2, E3M2, E2M3, E2M1 or FixedPoint(8, 6,
            symmetric=True) in the standard; any FloatingPoint with subnormals or symmetric
            FixedPoint here. block: 32 in the standard. scale_rule: how X is chosen.
        axis: the dim along which blocks lie; a short last block is a block.
    """

    element: FloatingPoint | FixedPoint
    block: int = 32
    scale_rule: ScaleRule = ScaleRule.FLOOR
    axis: int = -1

    def __post_init__(self) -> None:
        fixed = isinstance(self.element, FixedPoint) and self.element.symmetric
        floating = isinstance(self.element, FloatingPoint) and self.element.subnormals
        if not (fixed or floating):
            raise ConfigError(
                f"MX: element={self.element!s} must be a FloatingPoint with subnormals or a "
                "symmetric FixedPoint, such as E4M3, E2M1 or FixedPoint(8, 6, symmetric=True)."
            )
        require_int("MX", "block", self.block, 1, 2**31 - 1)
        require_axis("MX", "axis", self.axis)
        if not isinstance(self.scale_rule, ScaleRule):
            raise ConfigError(
                f"MX: scale_rule={self.scale_rule!r} must be one of "
                f"{', '.join(f'ScaleRule.{r.name}' for r in ScaleRule)}."
            )

    @property
    def emax(self) -> int:
        """Exponent of the element's largest value."""
        return math.frexp(self.element.max)[1] - 1

    @property
    def man(self) -> int:
        """Mantissa bits of the element's largest binade."""
        element = self.element
        return element.man if isinstance(element, FloatingPoint) else element.wl - 2

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return self.element.bits

    @property
    def bits_per_value(self) -> float:
        """Element bits and an eighth-byte share of the scale."""
        return self.bits + 8 / self.block


@dataclass(frozen=True, repr=False)
class NVFP4(ScaledFormat):
    """NVIDIA FP4: E2M1 elements, an E4M3 scale for each 16 of them, one fp32 scale a tensor.

    Tensor scale t = fl32(amax / 2688) (2688 = 6·448). Block scale s = E4M3(fl32(fl32(a / 6) / t)),
    nearest even, at least 2^−9, where a is the block's largest magnitude. An element is E2M1's
    value of x/(s·t), with the exact quotient; its value is k·s·t rounded once to the carrier.
    A tensor whose amax is 0 is zeros.
    """

    block: int = 16
    axis: int = -1

    def __post_init__(self) -> None:
        require_int("NVFP4", "block", self.block, 1, 2**31 - 1)
        require_axis("NVFP4", "axis", self.axis)

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return 4

    @property
    def bits_per_value(self) -> float:
        """Four bits and the share of an 8-bit block scale."""
        return 4 + 8 / self.block


@dataclass(frozen=True, repr=False)
class Integer(ScaledFormat):
    """Affine integers: value = fl32((k − zero_point)·scale), the arithmetic of int8 kernels.

    inv = fl32(1/scale); k = clamp(round(fl32(x·inv)) + zero_point, kmin, kmax). x is taken in
    fp32, and the value is rounded to the tensor's dtype.

    Observed scales: symmetric, scale = fl32(amax / kmax), zero_point 0 (2^(bits−1) unsigned).
    Asymmetric: the range is widened to hold 0, scale = fl32((hi − lo)/(kmax − kmin)),
    zero_point = kmin − RNE(fl32(lo/scale)). A range of 0 gives scale 1. Non-finite elements are
    not observed.

    Args:
        bits: 2 to 16. granularity: which elements share a scale; axis for PER_CHANNEL, group for
            GROUP. scale, zero_point: given for the whole tensor (then PER_TENSOR), else observed.
    """

    bits: int = 8
    signed: bool = True
    symmetric: bool = True
    granularity: Granularity = Granularity.PER_TENSOR
    axis: int = 0
    group: int | None = None
    scale: float | None = None
    zero_point: int | None = None

    def __post_init__(self) -> None:
        require_int("Integer", "bits", self.bits, 2, 16)
        require_axis("Integer", "axis", self.axis)
        if not isinstance(self.granularity, Granularity):
            raise ConfigError(
                f"Integer: granularity={self.granularity!r} must be one of "
                f"{', '.join(f'Granularity.{g.name}' for g in Granularity)}."
            )
        if (self.group is not None) != (self.granularity is Granularity.GROUP):
            raise ConfigError(
                f"Integer: group={self.group} goes with granularity=Granularity.GROUP and only it."
            )
        if self.group is not None:
            require_int("Integer", "group", self.group, 1, 2**31 - 1)
        if self.scale is None:
            if self.zero_point is not None:
                raise ConfigError("Integer: zero_point needs scale; give both or neither.")
            return
        if self.granularity is not Granularity.PER_TENSOR:
            raise ConfigError("Integer: a given scale is for the whole tensor (PER_TENSOR).")
        if not (math.isfinite(self.scale) and 2.0**-126 <= self.scale <= 2.0**126):
            raise ConfigError(f"Integer: scale={self.scale} must lie from 2^-126 to 2^126.")
        if self.zero_point is None:
            object.__setattr__(self, "zero_point", self.middle)
        require_int("Integer", "zero_point", self.zero_point, self.kmin, self.kmax)

    @property
    def kmin(self) -> int:
        """Smallest code; symmetric sets leave −2^(bits−1) (unsigned: 0) out."""
        lowest = -(1 << (self.bits - 1)) if self.signed else 0
        return lowest + 1 if self.symmetric else lowest

    @property
    def kmax(self) -> int:
        """Largest code."""
        return (1 << (self.bits - 1)) - 1 if self.signed else (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        """The zero point of a symmetric set."""
        return 0 if self.signed else 1 << (self.bits - 1)
