"""The operator qinductor::accumulate: a matmul whose accumulator is simulated.

Definition (k ascending; Q rounds the exact value once):

    acc ← Q_acc(acc + Q_prod(a·b));   every ``chunk`` terms: total ← Q_outer(total + acc), acc ← 0

With ``aligned_bits`` n, a group of products and acc, E the largest of their exponents, are cut
toward zero to multiples of 2^(E+1−n), summed exactly and rounded by Q_acc.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from qinductor.errors import ConfigError
from qinductor.numerics import native
from qinductor.numerics.carrier import CARRIERS
from qinductor.numerics.format_base import Format
from qinductor.numerics.formats import FixedPoint, FloatingPoint
from qinductor.numerics.quantize import quantize
from qinductor.numerics.sources import SOURCE_DIGEST

from .accumulate_source import accumulate_source
from .accumulator import Accumulator, parse_accumulator

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@torch.library.custom_op("qinductor::accumulate", mutates_args=())
def accumulate_op(a: Tensor, b: Tensor, accumulator: str, digest: int) -> Tensor:
    """(B, M, K) x (B, K, N) → (B, M, N), in a's dtype."""
    recipe = parse_accumulator(accumulator)
    left, right = a.float().contiguous(), b.float().contiguous()
    out = _run_kernel(left, right, recipe) if a.device.type == "cpu" else None
    if out is None:
        out = define(left, right, recipe)
    return out.to(a.dtype)


@accumulate_op.register_fake
def _(a: Tensor, b: Tensor, accumulator: str, digest: int) -> Tensor:
    return a.new_empty((a.shape[0], a.shape[1], b.shape[2]))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, ctx.accumulator, ctx.digest = inputs
    ctx.save_for_backward(a, b)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Both gradients are matmuls with the same accumulator."""
    a, b = ctx.saved_tensors
    options = (ctx.accumulator, ctx.digest)
    grad_a = grad_b = None
    if ctx.needs_input_grad[0]:
        grad_a = accumulate_op(grad, b.transpose(1, 2), *options)
    if ctx.needs_input_grad[1]:
        grad_b = accumulate_op(a.transpose(1, 2), grad, *options)
    return grad_a, grad_b, None, None


accumulate_op.register_autograd(_backward, setup_context=_setup_context)


def accumulate(a: Tensor, b: Tensor, accumulator: Accumulator) -> Tensor:
    """A @ b with a simulated accumulator, forward and backward.

    Args:
        a: (B, M, K) or (M, K); float32, bfloat16 or float16, whose products float64 holds exactly.
        b: (B, K, N) or (K, N), of a's dtype.
        accumulator: formats and order.

    Returns:
        (B, M, N) or (M, N), a value of the accumulator's format (the outer one's) in a's dtype.

    Raises:
        ConfigError: dtypes or shapes do not fit.
    """
    for x in (a, b):
        if x.dtype not in DTYPES:
            raise ConfigError(
                f"a simulated accumulator takes {', '.join(map(str, DTYPES))}, not {x.dtype}."
            )
    if a.dim() != b.dim() or a.dim() not in (2, 3) or a.shape[-1] != b.shape[-2]:
        raise ConfigError(
            f"accumulate() multiplies (B, M, K) with (B, K, N) or (M, K) with (K, N), not "
            f"{tuple(a.shape)} with {tuple(b.shape)}."
        )
    options = (accumulator.key, SOURCE_DIGEST)
    if a.dim() == 2:
        return accumulate_op(a[None], b[None], *options)[0]  # type: ignore[no-any-return]
    return accumulate_op(a, b, *options)  # type: ignore[no-any-return]


def define(a: Tensor, b: Tensor, accumulator: Accumulator) -> Tensor:
    """The definition, as tensor operations: (B, M, K) x (B, K, N) float32 → (B, M, N) float32."""
    k = a.shape[2]
    acc = torch.zeros(*a.shape[:2], b.shape[2], dtype=torch.float64, device=a.device)
    total, chunk = torch.zeros_like(acc), accumulator.chunk or max(k, 1)
    size = accumulator.aligned_group if accumulator.aligned_bits else 1

    def rounded(x: Tensor, fmt: Format | None) -> Tensor:
        return x if fmt is None else quantize(x, fmt, accumulator.rounding)

    for begin in range(0, k, chunk):
        end = min(begin + chunk, k)
        for first in range(begin, end, size):
            stop = min(first + size, end)
            terms = [
                rounded(a[:, :, i, None].double() * b[:, None, i].double(), accumulator.product)
                for i in range(first, stop)
            ]
            if accumulator.aligned_bits:
                acc = _aligned(acc, terms, accumulator)
            else:
                acc = rounded(odd_sum(acc, terms[0]), accumulator.format)
        if accumulator.chunk:
            total = rounded(odd_sum(total, acc), accumulator.outer or accumulator.format)
            acc = torch.zeros_like(acc)
    return (total if accumulator.chunk else acc).float()


def odd_sum(a: Tensor, b: Tensor) -> Tensor:
    """A + b in float64, rounded to odd: any format of at most 51 bits then rounds it correctly.

    Source: Boldo and Melquiond, Emulation of FMA and Correctly Rounded Sums (2008); the error of
    the sum is Knuth's.
    """
    s = a + b
    v = s - a
    e = (a - (s - v)) + (b - v)
    bits = s.view(torch.int64)
    up = ((e.view(torch.int64) ^ bits) >> 63) | 1
    inexact = ((e > 0) | (e < 0)) & (bits & 1 == 0)
    return torch.where(inexact, bits + up, bits).view(torch.float64)


def _aligned(acc: Tensor, terms: list[Tensor], accumulator: Accumulator) -> Tensor:
    assert accumulator.aligned_bits is not None
    largest = torch.stack([acc, *terms]).abs().amax(0)
    exponent = (largest.view(torch.int64) >> 52) - 1023 + 1 - accumulator.aligned_bits
    quantum = ((exponent + 1023) << 52).view(torch.float64)
    inverse = ((1023 - exponent) << 52).view(torch.float64)
    cut = [torch.trunc(x * inverse) for x in (acc, *terms)]
    exact = sum(cut[1:], cut[0]) * quantum
    rounded = quantize(exact, accumulator.format, accumulator.rounding)
    return torch.where(largest == 0, acc, rounded)


def _run_kernel(a: Tensor, b: Tensor, accumulator: Accumulator) -> Tensor | None:
    """The compiled kernel; None where there is no compiler."""
    if a.shape[1] > b.shape[2] and b.shape[2] < 32:
        # Products commute: the lanes go along the longer side.
        turned = _run_kernel(b.transpose(1, 2).contiguous(), a.transpose(1, 2).contiguous(),
                             accumulator)  # fmt: skip
        return None if turned is None else turned.transpose(1, 2).contiguous()
    narrow = accumulator.aligned_bits is None and _fits_float32(a, b, accumulator)
    carrier = CARRIERS[torch.float32 if narrow else torch.float64]
    function = native.build(accumulate_source(accumulator, carrier))
    if function is None:
        return None
    (batch, m, k), n = a.shape, b.shape[2]
    out = torch.empty(batch, m, n)
    if not out.numel():
        return out
    if not k:
        return out.zero_()
    function(
        *(ctypes.c_void_p(t.data_ptr()) for t in (a, b, out)),
        *(ctypes.c_int64(size) for size in (batch, m, n, k)),
        ctypes.c_int(native.threads_for(batch * m * n * k)),
    )
    return out


def _fits_float32(a: Tensor, b: Tensor, accumulator: Accumulator) -> bool:
    """Whether float32 holds every product exactly, and an odd sum with two bits to spare.

    Operands of at most 12 significant bits, between 2^−50 and 2^50; formats of at most 22 bits
    whose values are float32's.
    """
    for fmt in (accumulator.format, accumulator.product, accumulator.outer):
        if isinstance(fmt, FloatingPoint):
            if fmt.man > 21 or fmt.max > 2.0**100 or fmt.step < 2.0**-120:
                return False
        elif isinstance(fmt, FixedPoint) and (fmt.wl > 22 or abs(fmt.fl) > 60):
            return False
    for x in (a, b):
        if not x.numel() or bool((x.view(torch.int32) & 0xFFF).any()):
            return False
        sizes = x.abs()
        small = torch.where(sizes > 0, sizes, torch.inf).min()
        if not (sizes.max() < 2.0**50 and small > 2.0**-50):
            return False
    return True
