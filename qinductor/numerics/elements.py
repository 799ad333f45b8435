"""The rule of each kind of format, on lanes: what every backend instantiates."""

from __future__ import annotations

from .carrier import Carrier
from .formats import FixedPoint, FloatingPoint, Posit
from .grids import block_exponent, grid_of, scaled_grid
from .posits import posit_bits
from .qpytorch import QTorchElement
from .qpytorch_rules import qtorch_bits
from .rounding import Lane, Lanes, Rounding, quantize_bits
from .scaled import MX, BlockFloatingPoint

Element = FloatingPoint | FixedPoint | Posit | QTorchElement
"""Formats of single elements with a rule in closed form."""

Block = MX | BlockFloatingPoint
"""Formats whose elements share a power of two."""


def element_bits(
    m: Lanes, bits: Lane, fmt: Element, carrier: Carrier, mode: Rounding, u: Lane = None
) -> Lane:
    """The quantized bits; arguments as :func:`qinductor.numerics.rounding.quantize_bits`."""
    if isinstance(fmt, QTorchElement):
        return qtorch_bits(m, bits, fmt, carrier, mode, u)
    if isinstance(fmt, Posit):
        return posit_bits(m, bits, fmt, carrier, mode, u)
    return quantize_bits(m, bits, grid_of(fmt, carrier, mode), mode, carrier.word, u)


def block_bits(
    m: Lanes, bits: Lane, amax: Lane, fmt: Block, carrier: Carrier, mode: Rounding, u: Lane = None
) -> Lane:
    """The same for elements of blocks; amax: bits of the block's largest finite magnitude."""
    grid = scaled_grid(m, fmt, carrier, block_exponent(m, amax, fmt, carrier.word))
    return quantize_bits(m, bits, grid, mode, carrier.word, u)
