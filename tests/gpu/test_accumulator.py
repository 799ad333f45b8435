"""The accumulator-simulating product against exact rational arithmetic, one rounding at a time."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from interpreter import Interpreter, interpreter  # noqa: F401 - a fixture
from oracle import CARRIERS, goes_up, grid_of, infinity, largest, overflow
from torch import Tensor

from qinductor.errors import ConfigError
from qinductor.numerics import FixedPoint, FloatingPoint, Rounding
from qinductor.numerics.formats import Overflow
from qinductor.templates.triton.accumulator import FP32, MODES, accumulated_matmul

EVEN = Rounding.TIES_TO_EVEN
Number = Fraction | float


def rounded(x: Number, fmt: FloatingPoint | FixedPoint, mode: Rounding) -> Number:
    """Q(x) of a real number, or of an infinity or NaN."""
    if isinstance(x, float):
        if x != x:
            return x
        bound = infinity(fmt, largest(fmt, CARRIERS["float64"], x < 0))
        return -bound if x < 0 else bound
    if x == 0:
        return x
    carrier = CARRIERS["float64"]
    place = grid_of(fmt, carrier).place(abs(x))
    magnitude: Number = place.hi if goes_up(mode, place, x < 0, 0, 32) else place.lo
    bound = largest(fmt, carrier, x < 0)
    if magnitude > bound:
        magnitude = overflow(fmt, mode, bound, x < 0)
    return -magnitude if x < 0 else magnitude


def add(x: Number, y: Number) -> Number:
    exact = isinstance(x, Fraction) and isinstance(y, Fraction)
    return x + y if exact else float(x) + float(y)


def reference(
    a: Tensor,
    b: Tensor,
    acc: FloatingPoint | FixedPoint,
    *,
    prod: FloatingPoint | FixedPoint | None = None,
    chunk: int | None = None,
    outer: FloatingPoint | FixedPoint = FP32,
    rounding: Rounding = EVEN,
) -> Tensor:
    """The definition, term by term."""
    k = a.shape[1]
    out = torch.empty(a.shape[0], b.shape[0])
    for m, row in enumerate(a.tolist()):
        for n, column in enumerate(b.tolist()):
            total: Number = Fraction(0)
            for begin in range(0, k, chunk or k):
                partial: Number = Fraction(0)
                for x, y in list(zip(row, column, strict=True))[begin : begin + (chunk or k)]:
                    term: Number = Fraction(x) * Fraction(y)
                    if prod is not None:
                        term = rounded(term, prod, rounding)
                    partial = rounded(add(partial, term), acc, rounding)
                total = rounded(add(total, partial), outer, rounding) if chunk else partial
            out[m, n] = float(total)
    return out


FORMATS = {
    "fp16": FloatingPoint(5, 10),
    "bf16": FloatingPoint(8, 7),
    "fp32": FP32,
    "14 bits, saturating": FloatingPoint(6, 7, saturate=True),
    "fp8": FloatingPoint(4, 3),
    "fixed": FixedPoint(16, 8),
    "narrow fixed": FixedPoint(6, 2),
}


def operands(m: int, n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Numbers of all sizes, so that terms vanish, tie and overflow."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((m, k), (n, k))
    a, b = (
        torch.randn(s, generator=generator) * 2.0 ** torch.randint(-6, 3, s, generator=generator)
        for s in shapes
    )
    a[0] = torch.randint(-8, 9, (k,), generator=generator) / 4
    b[0] = torch.randint(-8, 9, (k,), generator=generator) / 8
    return a, b


@pytest.mark.interpret
@pytest.mark.parametrize("rounding", MODES, ids=lambda r: r.name)
@pytest.mark.parametrize("name", FORMATS)
def test_every_term_is_rounded_once(
    interpreter: Interpreter,  # noqa: F811
    name: str,
    rounding: Rounding,
) -> None:
    a, b = operands(3, 4, 20)
    got = interpreter(accumulated_matmul, a, b, FORMATS[name], rounding=rounding)
    want = reference(a, b, FORMATS[name], rounding=rounding)
    assert torch.equal(got.nan_to_num(nan=1e30), want.nan_to_num(nan=1e30))
    assert name == "fp32" or (want - a @ b.t()).abs().max() > 0, "rounding is seen"


@pytest.mark.interpret
@pytest.mark.parametrize("chunk", [1, 3, 8, 64])
def test_chunks_are_promoted(interpreter: Interpreter, chunk: int) -> None:  # noqa: F811
    a, b = operands(2, 3, 19, seed=chunk)
    given = {"prod": FloatingPoint(5, 4), "chunk": chunk}
    got = interpreter(accumulated_matmul, a, b, FORMATS["bf16"], **given)
    assert torch.equal(got, reference(a, b, FORMATS["bf16"], **given))
    other = interpreter(accumulated_matmul, a, b, FORMATS["bf16"], outer=FORMATS["fp8"], **given)
    assert torch.equal(other, reference(a, b, FORMATS["bf16"], outer=FORMATS["fp8"], **given))


@pytest.mark.interpret
def test_a_sum_that_float64_cannot_hold_is_rounded_once(interpreter: Interpreter) -> None:  # noqa: F811
    """The term is 2**49 * (1 - 2**-46): half a step of the accumulator, less a 57th bit.

    float64 rounds the sum up to the tie, and the tie goes to the even neighbour above.
    """
    start = 2.0**60 + 2.0**50
    a = torch.tensor([[start, 2.0**30 * (1 + 2.0**-23)]])
    b = torch.tensor([[1.0, 2.0**19 * (1 - 2.0**-23)]])
    assert start + a[0, 1].item() * b[0, 1].item() == start + 2.0**49, "float64 does not see it"
    fmt = FloatingPoint(8, 10)
    got = interpreter(accumulated_matmul, a, b, fmt)
    assert got.item() == start == reference(a, b, fmt).item()
    tie = interpreter(accumulated_matmul, torch.tensor([[start, 2.0**49]]), torch.ones(1, 2), fmt)
    assert tie.item() == start + 2.0**50


def test_formats_and_modes_that_the_kernel_lacks_are_refused() -> None:
    a = torch.zeros(1, 1)
    for fmt, reason in (
        (FixedPoint(8, 2, overflow=Overflow.WRAP), "it wraps around"),
        (FixedPoint(53, 2), "wl=53 is above 50"),
        (FloatingPoint(5, 2, subnormals=False), "it has no subnormals"),
        (FloatingPoint(11, 52), "man=52 is not between 1 and 50"),
    ):
        with pytest.raises(ConfigError, match=reason):
            accumulated_matmul(a, a, fmt)
    with pytest.raises(ConfigError, match="STOCHASTIC is not simulated"):
        accumulated_matmul(a, a, FP32, rounding=Rounding.STOCHASTIC)
    with pytest.raises(ConfigError, match="chunk=0"):
        accumulated_matmul(a, a, FP32, chunk=0)
