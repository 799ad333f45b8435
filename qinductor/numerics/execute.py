"""Running a quantizer now: the compiled kernel where there is one, else the aten form."""

from __future__ import annotations

import torch
from torch import Tensor

from . import native
from .format_base import Format
from .qpytorch import QTorchElement, QTorchNumber
from .qpytorch_rules import qtorch_quantize
from .random_bits import Draw, random_integers
from .reference import reference_quantize
from .rounding import Rounding


def random_input(x: Tensor, draw: Draw) -> Tensor:
    """The r-bit random integers of x's elements, int64 of x's shape."""
    zero = torch.zeros((), dtype=torch.int64, device=x.device)
    u = random_integers(
        x.numel(),
        draw.random_bits,
        zero if draw.seed is None else draw.seed,
        zero if draw.step is None else draw.step,
        site=draw.site,
        index_offset=draw.index_offset,
    )
    return u.reshape(x.shape)


def execute(
    x: Tensor, fmt: Format, mode: Rounding, draw: Draw, out: Tensor | None = None
) -> Tensor:
    """Quantize x into ``out``, or into a new tensor with x's strides."""
    if out is None:
        out = torch.empty_like(x)
    if not x.numel():
        return out
    if isinstance(fmt, QTorchNumber):
        return _qtorch(x, fmt, mode, draw, out)
    if native.quantize_into(x, out, fmt, mode, draw):
        return out
    u = random_input(x, draw) if mode is Rounding.STOCHASTIC else None
    return out.copy_(reference_quantize(x, fmt, mode, u, draw.random_bits))


def _qtorch(x: Tensor, fmt: QTorchNumber, mode: Rounding, draw: Draw, out: Tensor) -> Tensor:
    """Its exact steps, each by its kernel; those of elements write into ``out`` at once."""
    target = out if isinstance(fmt, QTorchElement) else None
    q = qtorch_quantize(x, fmt, mode, lambda y, f, m: execute(y, f, m, draw, target))
    return q if q is out else out.copy_(q)
