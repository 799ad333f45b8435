"""Kernels around the Triton functions, and what they are compared on."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from qinductor.numerics import (
    MX,
    NAMED,
    BlockFloatingPoint,
    FixedPoint,
    FloatingPoint,
    Nans,
    Overflow,
    Posit,
    QTorchFixed,
    QTorchFloat,
    Rounding,
)
from qinductor.numerics.elements import Block, Element
from qinductor.numerics.posits import POSIT_MODES
from qinductor.numerics.qpytorch import QTorchElement
from qinductor.numerics.triton_twin import random_bits

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
FORMATS = {
    **{n: f for n, f in NAMED.items() if isinstance(f, Element | Block)},
    "E4M3(saturate=False)": NAMED["E4M3"].replace(saturate=False),
    "fixed(8,4)": FixedPoint(8, 4),
    "fixed(6,2,unsigned)": FixedPoint(6, 2, signed=False),
    "wrap(8,3)": FixedPoint(8, 3, overflow=Overflow.WRAP),
    "deep": FloatingPoint(8, 2, bias=140),
    "deep_powers": FloatingPoint(7, 0, bias=147),
    "no_subnormals": FloatingPoint(4, 3, subnormals=False),
    "man0": FloatingPoint(5, 0),
    "posit(9,4)": Posit(9, 4),
    "qtorch fixed": QTorchFixed(8, 0, clamp=False),
    "qtorch float": QTorchFloat(4, 3),
    "MX man0, EVEN": MX(FloatingPoint(3, 0, nans=Nans.NONE), block=16),
    "BFP 6": BlockFloatingPoint(6, axis=-1, block=64),
}
SEED, STEP, SITE = -(2**40) - 5, 9, 0xDEADBEEF


def modes_of(fmt):
    if isinstance(fmt, Posit):
        return POSIT_MODES
    if isinstance(fmt, QTorchElement):
        return (Rounding.TIES_TO_EVEN, Rounding.STOCHASTIC)
    return tuple(Rounding)


def block_of(fmt):
    return fmt.block if isinstance(fmt, Block) else 64


@triton.jit
def apply(x_ptr, out_ptr, Q: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    i = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out_ptr + i, Q(tl.load(x_ptr + i)))


@triton.jit
def apply_random(
    x_ptr, out_ptr, seed, step, site, offset,
    Q: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    u = random_bits(seed, step, site, i.to(tl.int64) + offset, BITS)
    tl.store(out_ptr + i, Q(tl.load(x_ptr + i), u))
