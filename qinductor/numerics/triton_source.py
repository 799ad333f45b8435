"""The rounding rule as Triton text: lanes that print themselves as lines of a @triton.jit function.

Integer operations and exact conversions only, so that contraction of floating-point operations
cannot change a bit. Types follow Triton's promotion: an int literal takes the other operand's.
"""

from __future__ import annotations

import torch

from .carrier import Carrier, Word
from .elements import Block, Element, block_bits, element_bits
from .expressions import Expression
from .rounding import Lane, Rounding
from .scaled import MX, BlockFloatingPoint

_TO_BITS = {
    torch.float32: "x.to(tl.int32, bitcast=True)",
    torch.float64: "x.to(tl.int64, bitcast=True)",
    torch.bfloat16: "x.to(tl.int16, bitcast=True).to(tl.int32) << 16",
    torch.float16: "x.to(tl.float32).to(tl.int32, bitcast=True)",
}
_FROM_BITS = {
    torch.float32: "{}.to(tl.float32, bitcast=True)",
    torch.float64: "{}.to(tl.float64, bitcast=True)",
    torch.bfloat16: "({} >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)",
    torch.float16: "{}.to(tl.float32, bitcast=True).to(tl.float16)",
}


class TritonExpression(Expression):
    """A Triton expression: a name, or a comparison in place."""

    def __init__(self, lanes: TritonLanes, text: str) -> None:
        self.lanes, self.text = lanes, text

    def arithmetic(self, op: str, other: Lane, swap: bool = False) -> TritonExpression:
        """A new variable."""
        a, b = self.text, _text(other)
        return self.lanes.let(f"{b} {op} {a}" if swap else f"{a} {op} {b}")

    def compare(self, op: str, other: Lane) -> TritonExpression:
        """An expression in place."""
        return TritonExpression(self.lanes, f"({self.text} {op} {_text(other)})")


def _text(value: Lane) -> str:
    if isinstance(value, TritonExpression):
        return value.text
    return str(value) if value >= 0 else f"({value})"


class TritonLanes:
    """Lanes that collect lines of Triton."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def let(self, text: str) -> TritonExpression:
        """A new variable with this value."""
        name = f"t{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        return TritonExpression(self, name)

    def _call(self, function: str, *values: Lane) -> TritonExpression:
        return self.let(f"{function}({', '.join(_text(v) for v in values)})")

    def where(self, condition: Lane, a: Lane, b: Lane) -> Lane:
        """tl.where."""
        return self._call("tl.where", condition, a, b)

    def minimum(self, a: Lane, b: Lane) -> Lane:
        """tl.minimum."""
        return self._call("tl.minimum", a, b)

    def maximum(self, a: Lane, b: Lane) -> Lane:
        """tl.maximum."""
        return self._call("tl.maximum", a, b)

    def wide(self, a: Lane) -> Lane:
        """To int64."""
        return self.let(f"{_text(a)}.to(tl.int64)")

    def narrow(self, a: Lane, word: Word) -> Lane:
        """To the word's integer."""
        return self.let(f"{_text(a)}.to(tl.int{word.bits})")

    def float_bits(self, a: Lane, word: Word) -> Lane:
        """Integer to float to bits."""
        b = word.bits
        return self.let(f"{_text(a)}.to(tl.float{b}).to(tl.int{b}, bitcast=True)")


def function_source(name: str, fmt: Element | Block, carrier: Carrier, mode: Rounding) -> str:
    """Text of ``name(x)``, or ``name(x, u)`` for STOCHASTIC, for x of the carrier's dtype."""
    m, word = TritonLanes(), carrier.word
    bits = m.let(_TO_BITS[carrier.dtype])
    u: Lane = None
    if mode is Rounding.STOCHASTIC:
        u = TritonExpression(m, "u")
        u = m.let("u.to(tl.int64) & 4294967295") if word.bits == 64 else u
    if isinstance(fmt, MX | BlockFloatingPoint):
        magnitude = bits & word.magnitude
        finite = m.where(magnitude < word.inf, magnitude, 0)
        amax = m.let(f"tl.max({finite.text}, axis=len(x.shape) - 1, keep_dims=True)")
        result = block_bits(m, bits, amax, fmt, carrier, mode, u)
    else:
        result = element_bits(m, bits, fmt, carrier, mode, u)
    body = "\n    ".join(m.lines)
    return f"""import triton
import triton.language as tl


@triton.jit
def {name}({"x" if u is None else "x, u"}):
    tl.static_assert(x.dtype == tl.{str(carrier.dtype)[6:]}, "x has another dtype")
    {body}
    return {_FROM_BITS[carrier.dtype].format(result.text)}
"""
