"""Every quantizer on tensors, by aten operations: the meaning, and the form without a compiler."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qinductor.errors import ConfigError

from .aten import LANES, from_bits, left_aligned, to_bits
from .blocks import blocks_of
from .carrier import CARRIERS, Carrier, carrier_of
from .elements import Block, Element, block_bits, element_bits
from .format_base import Format
from .formats import FixedPoint, FloatingPoint, Posit, Table
from .grids import block_exponent
from .named import E2M1, E4M3
from .posits import check_posit_mode
from .qpytorch import QTorchBlock, QTorchNumber
from .qpytorch_rules import check_qtorch, qtorch_quantize
from .rounding import Rounding
from .scaled import MX, NVFP4, BlockFloatingPoint, Integer
from .tables import goes_up, table_quantize

FP32 = CARRIERS[torch.float32]


def check_format(fmt: Format, mode: Rounding, dtype: torch.dtype | None = None) -> None:
    """Raise ConfigError where a tensor cannot be quantized to ``fmt`` with ``mode``."""
    if isinstance(fmt, QTorchNumber):
        return check_qtorch(fmt, mode, dtype)
    if not isinstance(
        fmt, FloatingPoint | FixedPoint | Posit | Table | BlockFloatingPoint | MX | NVFP4 | Integer
    ):
        raise ConfigError(
            f"{fmt} is not a tensor format: quantize() takes FloatingPoint, FixedPoint, Posit, "
            "Table, BlockFloatingPoint, MX, NVFP4 or Integer, or a name such as 'E4M3'. "
            "E8M0 is the type of MX's scales: use MXFP8_E4M3 or another MX format."
        )
    if isinstance(fmt, Posit):
        check_posit_mode(mode)
    return None


def reference_quantize(
    x: Tensor, fmt: Format, mode: Rounding, u: Tensor | None = None, random_bits: int = 32
) -> Tensor:
    """Round x to ``fmt``: a new tensor of x's shape and dtype.

    x is float16, bfloat16, float32 or float64 of any shape; u, for STOCHASTIC, is int64 of x's
    shape, each in [0, 2^random_bits).

    Raises:
        ConfigError: the dtype, the format, the mode or a dim does not apply.
    """
    check_format(fmt, mode, x.dtype)
    carrier = carrier_of(x.dtype)
    if isinstance(fmt, QTorchBlock):
        return qtorch_quantize(
            x, fmt, mode, lambda y, f, m: reference_quantize(y, f, m, u, random_bits)
        )
    if isinstance(fmt, Table):
        return table_quantize(x, fmt, mode, u, random_bits)
    if isinstance(fmt, Element):
        aligned = None if u is None else left_aligned(u, random_bits, carrier.word)
        return _elements(x, fmt, carrier, mode, aligned)
    blocks, back = blocks_of(fmt, x).matrix(x)
    if not x.numel():
        return x.clone()
    ub = None if u is None else blocks_of(fmt, x).matrix(u)[0]
    if isinstance(fmt, MX | BlockFloatingPoint):
        aligned = None if ub is None else left_aligned(ub, random_bits, carrier.word)
        amax, bits = block_maxima(blocks, carrier), to_bits(blocks, carrier)
        out = block_bits(LANES, bits, amax, fmt, carrier, mode, aligned)
        return back(from_bits(out, carrier))
    if isinstance(fmt, Integer):
        codes, scale, zero_point = integer_codes(blocks, fmt, mode, ub, random_bits)
        value = (codes - zero_point) * scale
        return back(torch.where(torch.isnan(blocks), blocks, value.to(x.dtype)))
    assert isinstance(fmt, NVFP4)
    index, scale = nvfp4_indices(blocks, nvfp4_scales(x, blocks), mode, ub, random_bits)
    value = torch.copysign(magnitudes(x.device)[index] * scale, blocks.to(torch.float64))
    return back(torch.where(torch.isnan(blocks), blocks, value.to(x.dtype)))


def _elements(
    x: Tensor, fmt: Element, carrier: Carrier, mode: Rounding, u: Tensor | None
) -> Tensor:
    return from_bits(element_bits(LANES, to_bits(x, carrier), fmt, carrier, mode, u), carrier)


def block_maxima(blocks: Tensor, carrier: Carrier) -> Tensor:
    """Bits of the largest finite magnitude of each row: (rows, 1), the word's integers."""
    magnitude = to_bits(blocks, carrier) & carrier.word.magnitude
    return torch.where(magnitude < carrier.word.inf, magnitude, 0).amax(1, keepdim=True)


def block_exponents(blocks: Tensor, fmt: Block, carrier: Carrier) -> Tensor:
    """X of each row: (rows, 1), the word's integers."""
    return block_exponent(LANES, block_maxima(blocks, carrier), fmt, carrier.word)  # type: ignore[no-any-return]


class Codes(NamedTuple):
    """Affine integers: codes float32 (exact), scale and zero_point float32 of shape (rows, 1)."""

    codes: Tensor
    scale: Tensor
    zero_point: Tensor


def integer_parameters(blocks: Tensor, fmt: Integer) -> tuple[Tensor, Tensor]:
    """(scale, zero_point) of each row, float32 of shape (rows, 1)."""
    one = torch.ones(len(blocks), 1, dtype=torch.float32, device=blocks.device)
    if fmt.scale is not None and fmt.zero_point is not None:
        return one * fmt.scale, one * fmt.zero_point
    finite = torch.where(torch.isfinite(blocks), blocks, 0).to(torch.float32)
    finite = finite.clamp(-torch.finfo(torch.float32).max, torch.finfo(torch.float32).max)
    tiny = torch.finfo(torch.float32).tiny
    if fmt.symmetric:
        amax = finite.abs().amax(1, keepdim=True)
        scale = torch.where(amax > 0, (amax / (fmt.kmax - fmt.middle)).clamp(min=tiny), one)
        return scale, one * fmt.middle
    low = finite.amin(1, keepdim=True).clamp(max=0)
    high = finite.amax(1, keepdim=True).clamp(min=0)
    # Halves, so that the difference of two large values does not overflow.
    span = (high / 2 - low / 2) / ((fmt.kmax - fmt.kmin) / 2)
    scale = torch.where(span > 0, span.clamp(min=tiny), one)
    return scale, (fmt.kmin - torch.round(low / scale)).clamp(fmt.kmin, fmt.kmax)


def integer_codes(
    blocks: Tensor, fmt: Integer, mode: Rounding, u: Tensor | None, random_bits: int
) -> Codes:
    """K = clamp(round(fl32(x·fl32(1/scale))) + zero_point, kmin, kmax); NaN gives zero_point."""
    scale, zero_point = integer_parameters(blocks, fmt)
    scaled = blocks.to(torch.float32) * (1 / scale)
    aligned = None if u is None else left_aligned(u, random_bits, FP32.word)
    rounded = _elements(scaled, FixedPoint(32, 0), FP32, mode, aligned)
    codes = (torch.nan_to_num(rounded, nan=0.0) + zero_point).clamp(fmt.kmin, fmt.kmax)
    return Codes(codes, scale, zero_point)


def magnitudes(device: torch.device) -> Tensor:
    """E2M1's magnitudes in code order, float64."""
    return torch.tensor([v for v in E2M1.values if v >= 0], dtype=torch.float64, device=device)


def nvfp4_scales(x: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(E4M3 block scales (rows, 1), fp32 tensor scale ()), both float32."""
    finite = torch.where(torch.isfinite(blocks), blocks, 0).abs().to(torch.float64)
    largest = torch.finfo(torch.float32).max
    # A float64 quotient rounded to fp32 is the fp32 quotient: 53 >= 2·24 + 2 bits.
    tensor_scale = (finite.amax() / 2688).clamp(2.0**-149, largest).to(torch.float32)
    amax = finite.amax(1, keepdim=True).clamp(max=largest).to(torch.float32)
    raw = (amax / 6) / tensor_scale
    block_scale = _elements(raw, E4M3, FP32, Rounding.TIES_TO_EVEN, None)
    return block_scale.clamp(min=2.0**-9), tensor_scale


def nvfp4_indices(
    blocks: Tensor,
    scales: tuple[Tensor, Tensor],
    mode: Rounding,
    u: Tensor | None,
    random_bits: int,
) -> tuple[Tensor, Tensor]:
    """(index into E2M1's magnitudes, s·t as float64 (rows, 1)). NaN gives index 0."""
    grid = magnitudes(blocks.device)
    scale = scales[0].to(torch.float64) * scales[1].to(torch.float64)
    wide = torch.nan_to_num(blocks.to(torch.float64), nan=0.0)
    negative = wide < 0
    inside = torch.minimum(wide.abs(), grid[-1] * scale)
    below = torch.zeros_like(inside, dtype=torch.int64)
    for value in grid[1:-1]:
        below += inside >= value * scale
    inner, outer = grid[below] * scale, grid[below + 1] * scale
    sign = torch.where(negative, -1.0, 1.0).to(torch.float64)
    up = goes_up(inside * sign, inner * sign, outer * sign, below % 2 == 0, mode, u, random_bits)
    # The largest magnitude is no interval's inner end.
    index = below + (up | (inside == outer)).to(torch.int64)
    return index, scale
