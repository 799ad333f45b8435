"""Accumulator: how the hardware that is simulated adds up products. Data only."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

from qinductor.errors import ConfigError
from qinductor.numerics.format_base import Format
from qinductor.numerics.formats import FixedPoint, FloatingPoint
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
        if self.aligned_bits is not None and not 3 <= self.aligned_bits <= 48:
            raise ConfigError(f"Accumulator: aligned_bits={self.aligned_bits} must be 3 to 48.")
        if self.aligned_group > 16:
            raise ConfigError(f"Accumulator: aligned_group={self.aligned_group} is at most 16.")

    @property
    def key(self) -> str:
        """Canonical text; :func:`parse_accumulator` reads it back."""
        fields = (f for f in dataclasses.fields(self) if getattr(self, f.name) is not None)
        return ";".join(f"{f.name}={_plain(getattr(self, f.name))}" for f in fields)

    def __str__(self) -> str:
        parts = [str(self.format)]
        parts += [f"products {self.product!s}"] if self.product else []
        parts += [f"chunks of {self.chunk}"] if self.chunk else []
        parts += [f"outer {self.outer!s}"] if self.outer else []
        return ", ".join(parts)


def _plain(value: object) -> str:
    if isinstance(value, Format):
        return value.key
    return value.name if isinstance(value, Rounding) else str(value)


@functools.lru_cache(maxsize=256)
def parse_accumulator(key: str) -> Accumulator:
    """Read :attr:`Accumulator.key` back."""
    fields = dict(part.split("=", 1) for part in key.split(";"))
    numbers = ("chunk", "aligned_bits", "aligned_group")
    values: dict[str, Any] = {k: int(v) if k in numbers else v for k, v in fields.items()}
    return Accumulator(**values)
