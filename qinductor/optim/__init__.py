"""Optimizers whose weights, gradients and states are rounded."""

from __future__ import annotations

from .averaging import WeightAverage
from .low_precision import LowPrecision

__all__ = ["LowPrecision", "WeightAverage"]
