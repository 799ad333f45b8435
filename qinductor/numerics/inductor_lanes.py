"""The rounding rule as Inductor IR: lanes that are values of a loop body."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.virtualized import ops

from .carrier import Word
from .expressions import Expression
from .rounding import Lane

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
            a, b = widened(a), widened(b)
        left, right = (b, a) if swap else (a, b)
        value = getattr(ops, _OPERATORS[op])(left.value, right.value)
        return InductorExpression(value, a.dtype)

    def compare(self, op: str, other: Lane) -> Any:
        """A bool value."""
        a, b = self, self.lift(other)
        if a.dtype != b.dtype:
            a, b = widened(a), widened(b)
        return getattr(ops, _OPERATORS[op])(a.value, b.value)


def widened(a: InductorExpression) -> InductorExpression:
    """To int64."""
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
            left, right = widened(left), widened(right)
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
        return widened(a)

    def narrow(self, a: Lane, word: Word) -> Lane:
        """To the word's integer."""
        value = ops.to_dtype(a.value, word.int_dtype, a.dtype)
        return InductorExpression(value, word.int_dtype)

    def float_bits(self, a: Lane, word: Word) -> Lane:
        """Integer to float to bits."""
        real = ops.to_dtype(a.value, word.float_dtype, a.dtype)
        bits = ops.to_dtype_bitcast(real, word.int_dtype, word.float_dtype)
        return InductorExpression(bits, word.int_dtype)
