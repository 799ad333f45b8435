"""SmoothQuantConfig: how a model's Linears become int8."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, UnknownOptionError
from .torchao_api import AOBaseConfig, Granularity, PerRow, PerTensor


class Activation(enum.Enum):
    """When the scale of an activation is chosen."""

    STATIC = "static"
    """In calibration: one scale a tensor; unsigned codes, or signed ones if ``symmetric``."""
    DYNAMIC = "dynamic"
    """At run time: one symmetric scale a token."""


class ActivationRange(enum.Enum):
    """How the range of a static activation follows from the values seen in calibration."""

    MINMAX = "minmax"
    """Smallest to largest value: exact, from per-channel statistics alone."""
    PERCENTILE = "percentile"
    """Quantiles of a sample of tokens. Clips; models with outlier channels can lose a lot."""
    MSE = "mse"
    """The clipping that minimises the squared quantization error of a sample of tokens."""


def _member(kind: str, enum_class: type[enum.Enum], value: object) -> enum.Enum:
    try:
        return enum_class(value)
    except ValueError:
        raise UnknownOptionError(kind, value, (str(m.value) for m in enum_class)) from None


@dataclass(frozen=True)
class SmoothQuantConfig(AOBaseConfig):  # type: ignore[misc]  # torchao is untyped
    """Recipe of prepare() and convert(): SmoothQuant (Xiao et al., 2022, arXiv 2211.10438).

    Weights are int8, symmetric, one scale an output channel. The smoothing factor of input channel
    k is ``max|x_k|**alpha / max|w_k|**(1 - alpha)``; x is divided and w multiplied by it.

    Attributes:
        alpha: 0 … 1, how much of the activations' range moves into the weights; None: no smoothing.
        activation: "static" (per tensor, calibrated) or "dynamic" (per token).
        activation_range: "minmax", "percentile" or "mse"; only for static activations.
        symmetric: static activations get signed codes around zero instead of an affine u8 range.
        percentile: 50 < percentile <= 100, the upper quantile of "percentile", in per cent.
        skip: fnmatch patterns of module names that are kept in float.

    Raises:
        ConfigError: a value is not one of the above.
    """

    alpha: float | None = 0.5
    activation: str = "static"
    activation_range: str = "minmax"
    symmetric: bool = False
    percentile: float = 99.99
    skip: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("activation", "activation_range"):
            value = getattr(self, name)
            if isinstance(value, enum.Enum):
                object.__setattr__(self, name, value.value)
        _member("activation", Activation, self.activation)
        _member("activation_range", ActivationRange, self.activation_range)
        if self.alpha is not None and (
            isinstance(self.alpha, bool)
            or not isinstance(self.alpha, int | float)
            or not 0 <= self.alpha <= 1
        ):
            raise ConfigError(f"alpha={self.alpha!r} is not a number from 0 to 1, nor None.")
        if not isinstance(self.symmetric, bool):
            raise ConfigError(f"symmetric={self.symmetric!r} is neither True nor False.")
        if not (isinstance(self.percentile, int | float) and 50 < self.percentile <= 100):
            raise ConfigError(f"percentile={self.percentile!r} is not above 50 and at most 100.")
        skip: object = self.skip
        patterns = (skip,) if isinstance(skip, str) else skip
        if not isinstance(patterns, tuple | list) or not all(isinstance(p, str) for p in patterns):
            raise ConfigError(f"skip={skip!r} is not a tuple of module name patterns.")
        object.__setattr__(self, "skip", tuple(patterns))
        if not self.is_static and (self.range_rule is not ActivationRange.MINMAX or self.symmetric):
            raise ConfigError(
                f"activation_range={self.activation_range!r} and symmetric={self.symmetric} shape "
                'a static scale. A per-token scale (activation="dynamic") is always symmetric and '
                'min-max: leave them out, or choose activation="static".'
            )

    @property
    def scheme(self) -> Activation:
        """``activation`` as an enum member."""
        return Activation(self.activation)

    @property
    def range_rule(self) -> ActivationRange:
        """``activation_range`` as an enum member."""
        return ActivationRange(self.activation_range)

    @property
    def is_static(self) -> bool:
        """Whether scales of activations come from calibration."""
        return self.scheme is Activation.STATIC

    @property
    def activation_granularity(self) -> Granularity:
        """Granularity of activations, in torchao's terms."""
        return PerTensor() if self.is_static else PerRow()

    @property
    def weight_granularity(self) -> Granularity:
        """Granularity of weights, in torchao's terms."""
        return PerRow()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-serialisable values."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**fields, "skip": list(self.skip)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SmoothQuantConfig:
        """Undo :meth:`to_dict`.

        Raises:
            UnknownOptionError: a key is not a field; the message lists the fields.
        """
        valid = [f.name for f in dataclasses.fields(cls)]
        for key in values:
            if key not in valid:
                raise UnknownOptionError("SmoothQuantConfig field", key, valid)
        return cls(**values)
