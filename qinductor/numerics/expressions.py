"""The rounding rule as C++ text: lanes that print themselves."""

from __future__ import annotations

import abc
from typing import Any

from .carrier import Word
from .rounding import Lane


class Expression(abc.ABC):
    """Python's operators, for subclasses that build code from them."""

    __hash__ = None  # type: ignore[assignment]

    @abc.abstractmethod
    def arithmetic(self, op: str, other: Lane, swap: bool = False) -> Lane:
        """``self op other``, or ``other op self`` with ``swap``."""

    @abc.abstractmethod
    def compare(self, op: str, other: Lane) -> Lane:
        """A condition."""

    def __add__(self, other: Lane) -> Lane:
        return self.arithmetic("+", other)

    def __radd__(self, other: Lane) -> Lane:
        return self.arithmetic("+", other, swap=True)

    def __sub__(self, other: Lane) -> Lane:
        return self.arithmetic("-", other)

    def __rsub__(self, other: Lane) -> Lane:
        return self.arithmetic("-", other, swap=True)

    def __mul__(self, other: Lane) -> Lane:
        return self.arithmetic("*", other)

    def __rmul__(self, other: Lane) -> Lane:
        return self.arithmetic("*", other, swap=True)

    def __and__(self, other: Lane) -> Lane:
        return self.arithmetic("&", other)

    def __rand__(self, other: Lane) -> Lane:
        return self.arithmetic("&", other, swap=True)

    def __or__(self, other: Lane) -> Lane:
        return self.arithmetic("|", other)

    def __ror__(self, other: Lane) -> Lane:
        return self.arithmetic("|", other, swap=True)

    def __xor__(self, other: Lane) -> Lane:
        return self.arithmetic("^", other)

    def __rxor__(self, other: Lane) -> Lane:
        return self.arithmetic("^", other, swap=True)

    def __lshift__(self, other: Lane) -> Lane:
        return self.arithmetic("<<", other)

    def __rlshift__(self, other: Lane) -> Lane:
        return self.arithmetic("<<", other, swap=True)

    def __rshift__(self, other: Lane) -> Lane:
        return self.arithmetic(">>", other)

    def __invert__(self) -> Lane:
        return self.arithmetic("^", -1)

    def __lt__(self, other: Lane) -> Lane:
        return self.compare("<", other)

    def __le__(self, other: Lane) -> Lane:
        return self.compare("<=", other)

    def __gt__(self, other: Lane) -> Lane:
        return self.compare(">", other)

    def __ge__(self, other: Lane) -> Lane:
        return self.compare(">=", other)

    def __eq__(self, other: Any) -> Any:
        return self.compare("==", other)


class CExpression(Expression):
    """A C++ expression of the word's integer (or int64_t, or bool)."""

    def __init__(self, lanes: CLanes, text: str, kind: str) -> None:
        self.lanes, self.text, self.kind = lanes, text, kind

    def arithmetic(self, op: str, other: Lane, swap: bool = False) -> CExpression:
        """A new variable."""
        a, b = self, self.lanes.lift(other, self)
        kind = "int64_t" if "int64_t" in (a.kind, b.kind) else "I"
        left, right = (b, a) if swap else (a, b)
        return self.lanes.let(kind, f"{left.text} {op} {right.text}")

    def compare(self, op: str, other: Lane) -> CExpression:
        """An expression in place."""
        text = f"({self.text} {op} {self.lanes.lift(other, self).text})"
        return CExpression(self.lanes, text, "bool")


class CLanes:
    """Lanes that collect C++ statements in ``lines``. ``I`` is the word's integer type."""

    def __init__(self, word: Word, prefix: str = "t") -> None:
        self.word, self.prefix = word, prefix
        self.lines: list[str] = []

    def name(self, text: str, kind: str = "I") -> CExpression:
        """A variable of the surrounding code."""
        return CExpression(self, text, kind)

    def let(self, kind: str, text: str) -> CExpression:
        """A new variable with this value."""
        name = f"{self.prefix}{len(self.lines)}"
        self.lines.append(f"const {kind} {name} = {text};")
        return CExpression(self, name, kind)

    def lift(self, value: Lane, like: CExpression) -> CExpression:
        """An int as a literal of the other operand's type."""
        if isinstance(value, CExpression):
            return value
        # Written as a difference, since C++ has no negative literals.
        text = f"({value + 1}LL - 1)" if value < 0 else f"{value}LL"
        return CExpression(self, f"({like.kind}){text}", like.kind)

    def where(self, condition: Lane, a: Lane, b: Lane) -> Lane:
        """The ternary operator."""
        kinds = {v.kind for v in (a, b) if isinstance(v, CExpression)}
        kind = "int64_t" if "int64_t" in kinds else "I"
        like = CExpression(self, "", kind)
        left, right = self.lift(a, like), self.lift(b, like)
        return self.let(kind, f"{condition.text} ? {left.text} : {right.text}")

    def minimum(self, a: Lane, b: Lane) -> Lane:
        """Smaller of two."""
        if not isinstance(a, CExpression):
            a, b = b, a
        b = self.lift(b, a)
        return self.let(a.kind, f"{a.text} < {b.text} ? {a.text} : {b.text}")

    def maximum(self, a: Lane, b: Lane) -> Lane:
        """Larger of two."""
        if not isinstance(a, CExpression):
            a, b = b, a
        b = self.lift(b, a)
        return self.let(a.kind, f"{a.text} > {b.text} ? {a.text} : {b.text}")

    def wide(self, a: Lane) -> Lane:
        """To int64_t."""
        return self.let("int64_t", f"(int64_t){a.text}")

    def narrow(self, a: Lane, word: Word) -> Lane:
        """To the word."""
        return self.let("I", f"(I){a.text}")

    def float_bits(self, a: Lane, word: Word) -> Lane:
        """Integer to float to bits."""
        return self.let("I", f"float_bits({a.text})")
