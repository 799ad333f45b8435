"""The operator qinductor::fake_quantize: schema, fake, autograd, vmap.

Formats and modes travel as text, so that graphs can be saved; seeds as 0-d tensors, so that a
thousand steps compile once.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from .aten import LANES, to_bits
from .blocks import blocks_of
from .carrier import carrier_of
from .execute import execute
from .format_base import ElementFormat
from .formats import Posit
from .grids import scaled_grid
from .named import parse_format
from .qpytorch import QTorchNumber
from .random_bits import Draw
from .random_op import random_bits_op as _random_bits_op  # noqa: F401 - cached graphs call it
from .reference import (
    block_exponents,
    check_format,
    integer_parameters,
    magnitudes,
    nvfp4_scales,
)
from .rounding import Rounding
from .scaled import MX, BlockFloatingPoint, Integer

OP_NAME = "qinductor::fake_quantize"


@torch.library.custom_op(OP_NAME, mutates_args=())
def fake_quantize(
    x: Tensor,
    seed: Tensor | None,
    step: Tensor | None,
    format: str,
    rounding: str,
    site: int,
    random_bits: int,
    index_offset: int,
    mask: bool,
    digest: int,
) -> Tensor:
    """X rounded to a format. See :func:`qinductor.numerics.quantize` for the meaning.

    ``mask``: the gradient is zero outside the range. ``digest``: of the sources, so that cached
    graphs are not reused after a change.
    """
    fmt, mode = parse_format(format), Rounding[rounding]
    check_format(fmt, mode, x.dtype)
    return execute(x, fmt, mode, Draw(seed, step, site, random_bits, index_offset))


@fake_quantize.register_fake
def _(
    x: Tensor,
    seed: Tensor | None,
    step: Tensor | None,
    format: str,
    rounding: str,
    *_rest: object,
) -> Tensor:
    carrier_of(x.dtype)
    check_format(parse_format(format), Rounding[rounding], x.dtype)
    if "torch._inductor.lowering" in sys.modules:
        from .lowering import register

        register()
    return torch.empty_like(x)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *_, mask, _digest = inputs
    ctx.format = inputs[3]
    ctx.masked = mask
    if mask:
        ctx.save_for_backward(x)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    if ctx.masked:
        (x,) = ctx.saved_tensors
        grad = grad.masked_fill(outside(x, ctx.format), 0)
    return (grad, *(None,) * 9)


fake_quantize.register_autograd(_backward, setup_context=_setup_context)


@fake_quantize.register_vmap
def _vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, *args: Any) -> tuple[Tensor, int]:
    """Each slice is quantized as if alone: its own indices, its own blocks, its own seed."""
    x_dim, seed_dim, step_dim = in_dims[:3]
    seed, step, format, rounding, *rest = args
    elementwise = isinstance(parse_format(format), ElementFormat)
    if x_dim is not None and elementwise and Rounding[rounding] is not Rounding.STOCHASTIC:
        return fake_quantize(x, None, None, format, rounding, *rest), x_dim

    def at(value: Tensor | None, dim: int | None, i: int) -> Tensor | None:
        return value if dim is None or value is None else value.select(dim, i)

    slices = []
    for i in range(info.batch_size):
        one = at(x, x_dim, i)
        assert one is not None
        slices.append(
            fake_quantize(
                one, at(seed, seed_dim, i), at(step, step_dim, i), format, rounding, *rest
            )
        )
    return torch.stack(slices), 0


def outside(x: Tensor, format: str) -> Tensor:
    """Where x lies outside the range of the format (of its block); NaN does not."""
    fmt = parse_format(format)
    if isinstance(fmt, QTorchNumber):
        fmt = fmt.plain
    if isinstance(fmt, ElementFormat):
        if isinstance(fmt, Posit):
            return x.abs() > fmt.max
        return (x < fmt.min) | (x > fmt.max)
    blocks, back = blocks_of(fmt, x).matrix(x)
    if isinstance(fmt, MX | BlockFloatingPoint):
        carrier = carrier_of(x.dtype)
        grid = scaled_grid(LANES, fmt, carrier, block_exponents(blocks, fmt, carrier))
        magnitude = to_bits(blocks, carrier) & carrier.word.magnitude
        beyond = (magnitude > grid.limit[0]) & (magnitude <= carrier.word.inf)
        return back(beyond)
    if isinstance(fmt, Integer):
        scale, zero_point = integer_parameters(blocks, fmt)
        low, high = (fmt.kmin - zero_point) * scale, (fmt.kmax - zero_point) * scale
        return back((blocks < low) | (blocks > high))
    block_scale, tensor_scale = nvfp4_scales(x, blocks)
    limit = magnitudes(x.device)[-1] * block_scale.double() * tensor_scale.double()
    return back(blocks.abs() > limit)
