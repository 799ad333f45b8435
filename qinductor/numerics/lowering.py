"""Inductor's lowering of the quantizer: one ir.Pointwise of integer operations, so that it fuses.

Registered by the operator's fake, hence also for stock Inductor. Formats with shared scales,
tables and wrapping fixed point stay calls of the operator; ``why_not_fused`` says why.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, register_lowering
from torch._inductor.virtualized import ops

from .carrier import CARRIERS, Carrier, Word, carrier_of
from .elements import Element, element_bits
from .expressions import Expression
from .format_base import Format
from .formats import FixedPoint, FloatingPoint
from .grids import grid_of
from .named import BF16, FP16, parse_format
from .random_op import random_bits_op
from .rounding import Lane, Rounding, quantize_bits

_OPERATORS = {
    "+": "add",
    "-": "sub",
    "*": "mul",
    "&": "bitwise_and",
    "|": "bitwise_or",
    "^": "bitwise_xor",
    "<<": "bitwise_left_shift",
    ">>": "bitwise_right_shift",
    "<": "lt",
    "<=": "le",
    ">": "gt",
    ">=": "ge",
    "==": "eq",
}


class InductorExpression(Expression):
    """A value of Inductor's loop body with its integer dtype."""

    def __init__(self, value: Any, dtype: torch.dtype) -> None:
        self.value, self.dtype = value, dtype

    def lift(self, other: Lane) -> InductorExpression:
        """An int as a constant of this dtype."""
        if isinstance(other, InductorExpression):
            return other
        return InductorExpression(ops.constant(other, self.dtype), self.dtype)

    def arithmetic(self, op: str, other: Lane, swap: bool = False) -> InductorExpression:
        """An ops call; int32 meets int64 as int64."""
        a, b = self, self.lift(other)
        if a.dtype != b.dtype:
            a, b = _widened(a), _widened(b)
        left, right = (b, a) if swap else (a, b)
        value = getattr(ops, _OPERATORS[op])(left.value, right.value)
        return InductorExpression(value, a.dtype)

    def compare(self, op: str, other: Lane) -> Any:
        """A bool value."""
        a, b = self, self.lift(other)
        if a.dtype != b.dtype:
            a, b = _widened(a), _widened(b)
        return getattr(ops, _OPERATORS[op])(a.value, b.value)


def _widened(a: InductorExpression) -> InductorExpression:
    if a.dtype == torch.int64:
        return a
    return InductorExpression(ops.to_dtype(a.value, torch.int64, torch.int32), torch.int64)


class InductorLanes:
    """Lanes that are values of Inductor's loop body."""

    def __init__(self, word: Word) -> None:
        self.word = word

    def where(self, condition: Lane, a: Lane, b: Lane) -> Lane:
        """ops.where."""
        like = next((v for v in (a, b) if isinstance(v, InductorExpression)), None)
        if like is None:
            like = InductorExpression(None, self.word.int_dtype)
        left, right = like.lift(a), like.lift(b)
        if left.dtype != right.dtype:
            left, right = _widened(left), _widened(right)
        return InductorExpression(ops.where(condition, left.value, right.value), left.dtype)

    def minimum(self, a: Lane, b: Lane) -> Lane:
        """ops.minimum."""
        return self._pair(ops.minimum, a, b)

    def maximum(self, a: Lane, b: Lane) -> Lane:
        """ops.maximum."""
        return self._pair(ops.maximum, a, b)

    def _pair(self, function: Any, a: Lane, b: Lane) -> Lane:
        if not isinstance(a, InductorExpression):
            a, b = b, a
        return InductorExpression(function(a.value, a.lift(b).value), a.dtype)

    def wide(self, a: Lane) -> Lane:
        """To int64."""
        return _widened(a)

    def narrow(self, a: Lane, word: Word) -> Lane:
        """To the word's integer."""
        value = ops.to_dtype(a.value, word.int_dtype, a.dtype)
        return InductorExpression(value, word.int_dtype)

    def float_bits(self, a: Lane, word: Word) -> Lane:
        """Integer to float to bits."""
        real = ops.to_dtype(a.value, word.float_dtype, a.dtype)
        bits = ops.to_dtype_bitcast(real, word.int_dtype, word.float_dtype)
        return InductorExpression(bits, word.int_dtype)


def why_not_fused(fmt: Format) -> str | None:
    """Why a quantizer to this format stays a call of the operator; None where it fuses."""
    if isinstance(fmt, FixedPoint) and grid_of(fmt, CARRIERS[torch.float64], _ANY).wrap:
        return "wrapping needs 64-bit integers beside 32-bit ones"
    if isinstance(fmt, FloatingPoint) and fmt.zero_binade:
        return "its smallest value is no power of two"
    if isinstance(fmt, Element):
        return None
    return "its elements share scales or have no regular grid"


_ANY = Rounding.TIES_TO_EVEN


def _rounded(value: Any, fmt: Element, carrier: Carrier, mode: Rounding, u: Any) -> Any:
    """The loop body: a value of the carrier's dtype, quantized."""
    word = carrier.word
    lanes = InductorLanes(word)
    real = ops.to_dtype(value, word.float_dtype, src_dtype=carrier.dtype)
    bits: Lane = InductorExpression(
        ops.to_dtype_bitcast(real, word.int_dtype, word.float_dtype), word.int_dtype
    )
    own = {torch.bfloat16: BF16, torch.float16: FP16}.get(carrier.dtype)
    if own is not None:
        # A fused producer hands its fp32 value on; eager would have rounded it to the dtype.
        grid = grid_of(own, CARRIERS[torch.float32], Rounding.TIES_TO_EVEN)
        bits = quantize_bits(lanes, bits, grid, Rounding.TIES_TO_EVEN, word)
    random: Lane = None
    if u is not None:
        random = InductorExpression(u, torch.int32)
        if word.bits == 64:
            random = _widened(random) & 0xFFFFFFFF
    bits = element_bits(lanes, bits, fmt, carrier, mode, random)
    out = ops.to_dtype_bitcast(bits.value, word.float_dtype, word.int_dtype)
    return ops.to_dtype(out, carrier.dtype, src_dtype=word.float_dtype)


@functools.cache
def register() -> None:
    """Register the lowering with Inductor, once."""

    @register_lowering(torch.ops.qinductor.fake_quantize.default, type_promotion_kind=None)  # type: ignore[untyped-decorator,unused-ignore]
    def lower(
        x: Any,
        seed: Any,
        step: Any,
        format: str,
        rounding: str,
        site: int,
        random_bits: int,
        index_offset: int,
        mask: bool,
        digest: int,
    ) -> Any:
        fmt, mode = parse_format(format), Rounding[rounding]
        if why_not_fused(fmt) is not None:
            handler = fallback_handler(
                torch.ops.qinductor.fake_quantize.default, add_to_fallback_set=False
            )
            return handler(
                *(x, seed, step, format, rounding, site, random_bits, index_offset, mask, digest)
            )
        element = cast("Element", fmt)
        carrier = carrier_of(x.get_dtype())
        load = x.make_loader()
        load_u = None
        if mode is Rounding.STOCHASTIC:
            draw = fallback_handler(random_bits_op._opoverload, add_to_fallback_set=False)
            load_u = draw(
                seed, step, list(x.get_size()), site, random_bits, index_offset
            ).make_loader()

        def inner(index: Any) -> Any:
            u = None if load_u is None else load_u(index)
            return _rounded(load(index), element, carrier, mode, u)

        return ir.Pointwise.create(
            device=x.get_device(),
            dtype=x.get_dtype(),
            inner_fn=inner,
            ranges=list(x.get_size()),
        )
