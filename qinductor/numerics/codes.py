"""Code words: what a quantized tensor looks like in memory, and back.

A format's code words are listed in a table of values by code; encoding looks a quantized value up
in it. So encode and decode cannot disagree, and formats of more than 16 bits have no code words.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from qinductor.errors import ConfigError

from .arguments import checked_draw
from .blocks import blocks_of
from .carrier import carrier_of
from .execute import random_input
from .format_base import ElementFormat, Format
from .formats import FixedPoint, FloatingPoint, Nans, Posit, Table
from .named import E2M1, E4M3, parse_format
from .qpytorch import QTorchBlock, QTorchElement
from .quantize import quantize
from .random_bits import RandomOptions
from .reference import (
    block_exponents,
    integer_codes,
    magnitudes,
    nvfp4_indices,
    nvfp4_scales,
)
from .rounding import Rounding
from .scaled import MX, NVFP4, BlockFloatingPoint, Integer

if TYPE_CHECKING:
    from typing_extensions import Unpack

E8M0_NAN = 255


class Encoded(NamedTuple):
    """Code words and scales. Blocks follow the order of the format's partition.

    codes: x's shape, uint8 up to 8 bits, else uint16; 4-bit codes are packed two to a byte along
    the last axis (the first in the low half), an odd last axis padded with code 0.
    scale: (blocks,) uint8 E8M0 of MX, int16 exponents of BlockFloatingPoint, uint8 E4M3 of NVFP4,
    float32 of Integer. offset: (blocks,) int32 zero points of Integer; () float32 tensor scale of
    NVFP4.
    """

    codes: Tensor
    shape: tuple[int, ...]
    scale: Tensor | None = None
    offset: Tensor | None = None


@functools.lru_cache(maxsize=64)
def code_table(fmt: ElementFormat) -> Tensor:
    """Value of every code word, float64 of 2^bits entries (a Table's codes past its end: NaN).

    Raises:
        ConfigError: more than 16 bits.
    """
    if isinstance(fmt, QTorchElement):
        return code_table(fmt.plain)
    if fmt.bits > 16:
        raise ConfigError(
            f"{fmt} has {fmt.bits} bits; code words exist for at most 16. Use quantize()."
        )
    if isinstance(fmt, FloatingPoint):
        half = [float(fmt.magnitude(c)) for c in range(1 << (fmt.bits - 1))]
        for code in range(fmt._top_code + 1, len(half)):
            exact = code == fmt._top_code + 1
            half[code] = float("inf") if fmt.nans is Nans.IEEE and exact else float("nan")
        values = half + [-v for v in half]
        if fmt.nans is Nans.NEGATIVE_ZERO:
            values[len(half)] = float("nan")
    elif isinstance(fmt, FixedPoint):
        size = 1 << fmt.wl
        ks = [k - size if fmt.signed and k >= size // 2 else k for k in range(size)]
        values = [float(k * fmt.exact_step) if k >= fmt.kmin else float("nan") for k in ks]
    elif isinstance(fmt, Posit):
        half = [0.0, *(float(fmt.magnitude(c)) for c in range(1, 1 << (fmt.n - 1)))]
        values = [*half, float("nan"), *(-v for v in reversed(half[1:]))]
    else:
        assert isinstance(fmt, Table)
        values = [*fmt.grid, *[float("nan")] * ((1 << fmt.bits) - len(fmt.grid))]
    return torch.tensor(values, dtype=torch.float64)


def _nan_code(fmt: ElementFormat) -> int | None:
    if isinstance(fmt, QTorchElement):
        return _nan_code(fmt.plain)
    if isinstance(fmt, Posit):
        return 1 << (fmt.n - 1)
    if isinstance(fmt, FloatingPoint):
        top = (1 << (fmt.bits - 1)) - 1
        quiet = (fmt._top_code + 1) | (1 << max(fmt.man - 1, 0))
        return {
            Nans.IEEE: quiet if fmt.man else None,
            Nans.TOP_CODE: top,
            Nans.NEGATIVE_ZERO: top + 1,
            Nans.NONE: None,
        }[fmt.nans]
    return None


def _look_up(values: Tensor, fmt: ElementFormat, nan_allowed: bool) -> Tensor:
    """int64 codes of float64 values, all of which must be the format's or NaN."""
    table = code_table(fmt).to(values.device)
    order = torch.argsort(torch.nan_to_num(table, nan=float("inf")), stable=True)
    ascending = torch.nan_to_num(table, nan=float("inf"), posinf=float("inf"))[order]
    where = torch.searchsorted(
        ascending,
        torch.nan_to_num(values, nan=0.0, posinf=float("inf"), neginf=float("-inf")).contiguous(),
    )
    codes = order[where.clamp(max=len(table) - 1)]
    if fmt.negative_zero:
        minus_zero = (values == 0) & torch.signbit(values)
        codes = torch.where(minus_zero, 1 << (fmt.bits - 1), codes)
    is_nan = torch.isnan(values)
    if is_nan.any():
        nan = _nan_code(fmt)
        if nan is None and not nan_allowed:
            raise ConfigError(
                f"{int(is_nan.sum())} NaN cannot be encoded: {fmt} has no code for it. Replace "
                "them (torch.nan_to_num), or for MX pass nan_scale=True."
            )
        codes = torch.where(is_nan, nan or 0, codes)
    return codes


def encode(
    x: Tensor,
    fmt: Format | str,
    rounding: Rounding = Rounding.TIES_TO_EVEN,
    *,
    nan_scale: bool = False,
    **options: Unpack[RandomOptions],
) -> Encoded:
    """The code words of :func:`quantize` of x; the arguments are that function's.

    With ``nan_scale``, an MX block that holds a NaN its elements cannot hold gets the NaN scale.

    Raises:
        ConfigError: the format has more than 16 bits, or x holds a NaN that has no code.
    """
    fmt = parse_format(fmt) if isinstance(fmt, str) else fmt
    draw = checked_draw(x, fmt, rounding, **options)
    random, random_bits = draw.options(), draw.random_bits
    shape = tuple(x.shape)
    if isinstance(fmt, ElementFormat):
        values = quantize(x.detach(), fmt, rounding, **random).to(torch.float64)
        return Encoded(_packed(_look_up(values, fmt, False), fmt.bits), shape)
    if not x.numel():
        raise ConfigError("encode() of a scaled format needs at least one element.")
    blocks, back = blocks_of(fmt, x).matrix(x.detach())
    if isinstance(fmt, QTorchBlock):
        # The values are the exact format's, and on its grid they stay.
        return encode(quantize(x.detach(), fmt, rounding, **random), fmt.plain)
    if isinstance(fmt, MX | BlockFloatingPoint):
        exponent = block_exponents(blocks, fmt, carrier_of(x.dtype)).to(torch.int64)
        q = quantize(x.detach(), fmt, rounding, **random).to(torch.float64)
        scaled = torch.ldexp(blocks_of(fmt, x).matrix(q)[0], -exponent)
        codes = _look_up(scaled, fmt.element, nan_scale and isinstance(fmt, MX))
        if isinstance(fmt, BlockFloatingPoint):
            scale = exponent.flatten().clamp(-1200, 1200).to(torch.int16)
            return Encoded(_packed(back(codes), fmt.bits), shape, scale)
        lost = torch.isnan(scaled).any(1) & (_nan_code(fmt.element) is None)
        scale = torch.where(lost, E8M0_NAN, exponent.flatten() + 127).to(torch.uint8)
        return Encoded(_packed(back(codes), fmt.bits), shape, scale)
    if torch.isnan(x).any():
        raise ConfigError(f"NaN cannot be encoded: {fmt} has no code for it (torch.nan_to_num).")
    u = None
    if rounding is Rounding.STOCHASTIC:
        u = blocks_of(fmt, x).matrix(random_input(x, draw))[0]
    if isinstance(fmt, Integer):
        k, scale, zero_point = integer_codes(blocks, fmt, rounding, u, random_bits)
        codes = k.to(torch.int64) & ((1 << fmt.bits) - 1)
        offset = zero_point.flatten().to(torch.int32)
        return Encoded(_packed(back(codes), fmt.bits), shape, scale.flatten(), offset)
    assert isinstance(fmt, NVFP4)
    scales = nvfp4_scales(x, blocks)
    index, _ = nvfp4_indices(blocks, scales, rounding, u, random_bits)
    codes = index | (torch.signbit(blocks).to(torch.int64) << 3)
    block_scale = _look_up(scales[0].flatten().to(torch.float64), E4M3, False).to(torch.uint8)
    return Encoded(_packed(back(codes), 4), shape, block_scale, scales[1])


def decode(encoded: Encoded, fmt: Format | str, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of code words: what quantize() gave when encode() made them."""
    fmt = parse_format(fmt) if isinstance(fmt, str) else fmt
    if isinstance(fmt, QTorchBlock):
        fmt = fmt.plain
    carrier_of(dtype)
    codes = _unpacked(encoded, fmt.bits)
    if isinstance(fmt, ElementFormat):
        return code_table(fmt).to(codes.device)[codes].to(dtype)
    scale, offset = encoded.scale, encoded.offset
    if scale is None or (offset is None and isinstance(fmt, NVFP4 | Integer)):
        raise ConfigError(f"decode(): {fmt} needs the scales that encode() returned.")
    blocks, back = blocks_of(fmt, codes).matrix(codes)
    if isinstance(fmt, MX | BlockFloatingPoint):
        exponent = scale.to(torch.int64)[:, None] - (127 if isinstance(fmt, MX) else 0)
        values = torch.ldexp(code_table(fmt.element).to(codes.device)[blocks], exponent)
        if isinstance(fmt, MX):
            values = torch.where(scale[:, None] == E8M0_NAN, float("nan"), values)
        return back(values).to(dtype)
    assert offset is not None
    if isinstance(fmt, Integer):
        top = 1 << (fmt.bits - 1)
        signed = torch.where(blocks >= top, blocks - 2 * top, blocks) if fmt.signed else blocks
        k = signed.to(torch.float32) - offset.to(torch.float32)[:, None]
        return back((k * scale[:, None]).to(dtype))
    block_scale = code_table(E4M3).to(codes.device)[scale.to(torch.int64)][:, None]
    magnitude = magnitudes(codes.device)[blocks & 7] * (block_scale * offset.to(torch.float64))
    return back(torch.where(blocks >= 8, -magnitude, magnitude)).to(dtype)


def _packed(codes: Tensor, bits: int) -> Tensor:
    if bits > 8:
        return codes.to(torch.int32).to(torch.uint16)
    small = codes.to(torch.uint8)
    if bits != E2M1.bits or not small.dim():
        return small
    if small.shape[-1] % 2:
        small = torch.nn.functional.pad(small, (0, 1))
    return small[..., 0::2] | (small[..., 1::2] << 4)


def _unpacked(encoded: Encoded, bits: int) -> Tensor:
    codes = encoded.codes
    if bits != E2M1.bits or not encoded.shape:
        return codes.to(torch.int32).to(torch.int64)
    wide = codes.to(torch.int64)
    pairs = torch.stack([wide & 15, wide >> 4], -1).flatten(-2)
    return pairs[..., : encoded.shape[-1]]
