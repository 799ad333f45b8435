"""Nearest rounding as QPyTorch 0.3.0 does it on CPUs, in terms of the exact quantizers.

Found by measurement against its kernels, which add in float32 where an exact rule would not; what
they get wrong (sign errors, masked NaN, results outside the format) is not repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from qinductor.errors import ConfigError

from .blocks import blocks_of
from .carrier import WORD32, Carrier
from .format_base import Format
from .formats import FixedPoint, FloatingPoint
from .grids import grid_of
from .qpytorch import QTorchBlock, QTorchElement, QTorchFixed, QTorchFloat, QTorchNumber
from .rounding import Lane, Lanes, Rounding, quantize_bits

NEAREST = (Rounding.TIES_TO_EVEN, Rounding.TIES_TO_AWAY)
"""Either of them means QPyTorch's nearest, which has ties of its own."""

Step = tuple[FloatingPoint | FixedPoint, Rounding]
Quantize = Callable[[Tensor, Format, Rounding], Tensor]


class Plan(NamedTuple):
    """Exact quantizers one after the other, and a repair."""

    steps: tuple[Step, ...]
    zero_at: float | None = None
    """An input whose result is 0."""
    positive_zero: bool = False
    """Whether a result of -0 becomes +0."""


def check_qtorch(fmt: QTorchNumber, mode: Rounding, dtype: torch.dtype | None) -> None:
    """Raise ConfigError where QPyTorch's formats have no meaning."""
    if mode not in (*NEAREST, Rounding.STOCHASTIC):
        raise ConfigError(
            f"{fmt!r} rounds to nearest (TIES_TO_EVEN; ties are QPyTorch's own) or STOCHASTIC, "
            f"not {mode.name}. Use its .plain format for the other modes."
        )
    if dtype not in (None, torch.float32):
        raise ConfigError(
            f"{fmt!r} rounds float32 tensors, as QPyTorch, not {dtype}. Convert with x.float(), "
            "or use its .plain format."
        )


def plan(fmt: QTorchElement, mode: Rounding) -> Plan:
    """How an element format is rounded."""
    zero = isinstance(fmt, QTorchFixed) and not fmt.clamp
    if mode is Rounding.STOCHASTIC:
        return Plan(((fmt.plain, mode),), positive_zero=zero)
    if isinstance(fmt, QTorchFloat):
        last = (fmt.plain, Rounding.TIES_TO_AWAY)
        # fl32(2^emin + x) is x in steps of 2^(emin-23). With 8 exponent bits that is every x.
        first = (fmt.plain.replace(man=23, name=""), Rounding.TIES_TO_EVEN)
        return Plan((first, last) if fmt.exp < 8 and fmt.man < 23 else (last,))
    assert isinstance(fmt, QTorchFixed)
    # fl32(a + 1/2) is where a's binade ends: 1/2 + 2^-24 falls back on the tie, hence to 0.
    above_half = (0.5 + 2.0**-24) * 2.0**-fmt.fl if fmt.fl < 100 else None
    return Plan(((fmt.plain, Rounding.TIES_TO_EVEN),), above_half, zero)


def qtorch_bits(
    m: Lanes, bits: Lane, fmt: QTorchElement, carrier: Carrier, mode: Rounding, u: Lane = None
) -> Lane:
    """The rule on lanes; arguments as :func:`qinductor.numerics.rounding.quantize_bits`."""
    steps, zero_at, positive_zero = plan(fmt, mode)
    word, r = carrier.word, bits
    for step, own in steps:
        r = quantize_bits(m, r, grid_of(step, carrier, own), own, word, u)
    if zero_at is not None:
        special = torch.tensor(zero_at).view(torch.int32).item()
        r = m.where(bits == special, 0, r)
    return m.where(r == word.sign, 0, r) if positive_zero else r


def qtorch_quantize(x: Tensor, fmt: QTorchNumber, mode: Rounding, quantize: Quantize) -> Tensor:
    """The rule on tensors, by a function that quantizes to exact formats."""
    if isinstance(fmt, QTorchBlock):
        if mode is Rounding.STOCHASTIC or fmt.wl >= 23:
            return quantize(x, fmt.plain, mode)
        return _block_nearest(x, fmt, quantize)
    assert isinstance(fmt, QTorchElement)
    steps, zero_at, positive_zero = plan(fmt, mode)
    # Found before the steps: they may write over x.
    zeros = None if zero_at is None else x == zero_at
    r = x
    for step, own in steps:
        r = quantize(r, step, own)
    if zeros is not None:
        r = r.masked_fill_(zeros, 0)
    return r.add_(0.0) if positive_zero else r


def _block_nearest(x: Tensor, fmt: QTorchBlock, quantize: Quantize) -> Tensor:
    """T = fl32(x + 6·2^E), rounded half up at wl mantissa bits, minus 6·2^E; clipped."""
    blocks, back = blocks_of(fmt, x).matrix(x)
    inf, man = WORD32.inf, WORD32.man
    magnitude = blocks.view(torch.int32) & WORD32.magnitude
    amax = torch.where(magnitude < inf, magnitude, 0).amax(1, keepdim=True)
    exponent = amax & inf
    # A block of subnormal numbers has E = 0 in its field: nothing is added, as there.
    base = exponent.view(torch.float32) * 6
    half = 1 << (man - 1 - fmt.wl)
    limit = (exponent | ((1 << man) - (1 << (man + 2 - fmt.wl)))).view(torch.float32)
    rounded = ((blocks + base).view(torch.int32) + half) & -(2 * half)
    q = rounded.view(torch.float32) - base
    beyond = (q.view(torch.int32) & inf) > exponent
    q = torch.where(beyond, torch.copysign(limit, q), q)
    q = torch.where(torch.isinf(blocks), torch.copysign(limit, blocks), q)
    q = back(torch.where(torch.isnan(blocks), blocks, q))
    crowded = back((amax >= WORD32.pattern(Fraction(2**126))).expand_as(blocks).contiguous())
    return torch.where(crowded, quantize(x, fmt.plain, Rounding.TIES_TO_EVEN), q)
