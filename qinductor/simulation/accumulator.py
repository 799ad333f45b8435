"""Accumulator: how the hardware that is simulated adds up products. Data only."""

from __future__ import annotations

from dataclasses import dataclass

from qinductor.errors import ConfigError
from qinductor.numerics.formats import FixedPoint, FloatingPoint, Format
from qinductor.numerics.named import parse_format
from qinductor.numerics.rounding import Rounding


@dataclass(frozen=True)
class Accumulator:
    """acc ← Q_acc(acc + Q_prod(a·b)), k ascending, each sum exact and then rounded once.

    Every ``chunk`` terms the partial sum is added to an outer accumulator, which Q_outer rounds.

    Attributes:
        format: of the accumulator: FloatingPoint or saturating FixedPoint (or a name).
        product: of each product; None leaves it exact.
        chunk: terms of a partial sum; None: all of K.
        outer: of the outer accumulator; None: the accumulator's format.
        rounding: deterministic mode of all three.
        aligned_bits: if given, the products of a group of ``aligned_group`` and the accumulator are
            aligned to their largest exponent, truncated to this many bits and summed exactly.
        aligned_group: products summed at once.

    Raises:
        ConfigError: a field is not valid.
    """

    format: Format
    product: Format | None = None
    chunk: int | None = None
    outer: Format | None = None
    rounding: Rounding = Rounding.TIES_TO_EVEN
    aligned_bits: int | None = None
    aligned_group: int = 4

    def __post_init__(self) -> None:
        from .spec import as_rounding

        for name in ("format", "product", "outer"):
            value = getattr(self, name)
            if isinstance(value, str):
                value = parse_format(value)
                object.__setattr__(self, name, value)
            if value is None and name != "format":
                continue
            if not isinstance(value, FloatingPoint | FixedPoint):
                raise ConfigError(
                    f"Accumulator: {name}={value!r} must be a FloatingPoint or a FixedPoint."
                )
        object.__setattr__(self, "rounding", as_rounding(self.rounding))
        if self.rounding is Rounding.STOCHASTIC:
            raise ConfigError(
                "Accumulator: rounding=STOCHASTIC is not simulated. Use a deterministic mode."
            )
        for name in ("chunk", "aligned_bits", "aligned_group"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"Accumulator: {name}={value!r} must be a positive integer.")
        if self.aligned_bits is not None and self.aligned_bits > 48:
            raise ConfigError(f"Accumulator: aligned_bits={self.aligned_bits} must be at most 48.")

    def __str__(self) -> str:
        parts = [str(self.format)]
        parts += [f"products {self.product!s}"] if self.product else []
        parts += [f"chunks of {self.chunk}"] if self.chunk else []
        parts += [f"outer {self.outer!s}"] if self.outer else []
        return ", ".join(parts)
