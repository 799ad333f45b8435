"""What every number format is: a frozen set of reals with a name, fields and a readable repr."""

from __future__ import annotations

import abc
import dataclasses
import enum
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, TypeVar

from qinductor.errors import ConfigError

MAX_LISTED_BITS = 16
"""Formats of at most this many bits can list their values and have code words."""

_F = TypeVar("_F", bound="Format")


@dataclass(frozen=True, repr=False)
class Format(abc.ABC):
    """Base of every format. ``repr`` is an expression that :func:`parse_format` reads back."""

    name: str = field(default="", compare=False, kw_only=True)

    @property
    @abc.abstractmethod
    def bits(self) -> int:
        """Bits of one element, without any shared scale."""

    @property
    def bits_per_value(self) -> float:
        """Bits of one element with its share of the block's scale."""
        return float(self.bits)

    @property
    def key(self) -> str:
        """Canonical text of the format: equal formats have equal keys."""
        return repr(self)

    def replace(self: _F, **changes: Any) -> _F:
        """A copy with some fields changed: ``E4M3.replace(saturate=False)``.

        Raises:
            ConfigError: a field does not exist, or the new combination is not a format.
        """
        known = [f.name for f in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                raise ConfigError(
                    f"{type(self).__name__} has no field {name!r}. Its fields: {', '.join(known)}."
                )
        if self.name and "name" not in changes:
            listed = ", ".join(f"{k}={_text(v)}" for k, v in changes.items())
            changes["name"] = f"{self.name}({listed})"
        return dataclasses.replace(self, **changes)

    def __repr__(self) -> str:
        fields = (f for f in dataclasses.fields(self) if f.name != "name")
        inside = ", ".join(f"{f.name}={_text(getattr(self, f.name))}" for f in fields)
        return f"{type(self).__name__}({inside})"

    def __str__(self) -> str:
        return self.name or repr(self)


def _text(value: object) -> str:
    return f"{type(value).__name__}.{value.name}" if isinstance(value, enum.Enum) else repr(value)


def require_int(owner: str, name: str, value: object, low: int, high: int) -> None:
    """Raise ConfigError unless ``value`` is an int in [low, high]."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{owner}: {name}={value!r} must be an integer from {low} to {high}.")


@dataclass(frozen=True, repr=False)
class ElementFormat(Format):
    """A set of reals that does not depend on the tensor's other elements."""

    @property
    @abc.abstractmethod
    def exact_max(self) -> Fraction:
        """Largest finite value."""

    @property
    def exact_min(self) -> Fraction:
        """Smallest (most negative) finite value."""
        return -self.exact_max

    @property
    @abc.abstractmethod
    def exact_step(self) -> Fraction:
        """Smallest positive value: the step next to zero."""

    @property
    def negative_zero(self) -> bool:
        """Whether -0 exists; where it does not, results of zero are +0."""
        return False

    @property
    def max(self) -> float:
        """Largest finite value, as a float."""
        return float(self.exact_max)

    @property
    def min(self) -> float:
        """Smallest (most negative) finite value, as a float."""
        return float(self.exact_min)

    @property
    def step(self) -> float:
        """Smallest positive value, as a float."""
        return float(self.exact_step)

    @property
    def listed(self) -> bool:
        """Whether there are few enough values to list them."""
        return self.bits <= MAX_LISTED_BITS

    def exact_values(self) -> list[Fraction]:
        """All finite values in ascending order, zero once.

        Raises:
            ConfigError: the format has more than 2^16 of them.
        """
        if not self.listed:
            raise ConfigError(
                f"{self!r} does not list its values: only bounded formats of at most "
                f"{MAX_LISTED_BITS} bits do. Use .max, .min and .step instead."
            )
        return sorted(set(self._finite()))

    @property
    def values(self) -> tuple[float, ...]:
        """All finite values in ascending order as floats, where there are at most 2^16."""
        return tuple(float(v) for v in self.exact_values())

    @abc.abstractmethod
    def _finite(self) -> list[Fraction]:
        """Every finite value at least once, in any order."""
