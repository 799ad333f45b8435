"""QPyTorch's number formats under QPyTorch's names."""

from __future__ import annotations

from qinductor.numerics.qpytorch import QTorchBlock as BlockFloatingPoint
from qinductor.numerics.qpytorch import QTorchFixed as FixedPoint
from qinductor.numerics.qpytorch import QTorchFloat as FloatingPoint
from qinductor.numerics.qpytorch import QTorchNumber as Number

__all__ = ["BlockFloatingPoint", "FixedPoint", "FloatingPoint", "Number"]
