"""Every format × mode × carrier against the oracle: exhaustive, at the boundaries, at random."""

from __future__ import annotations

import math

import grid_oracle as go
import numpy as np
import oracle
import pytest
import torch

from qinductor.numerics import (
    NAMED,
    FixedPoint,
    FloatingPoint,
    Overflow,
    Posit,
    Rounding,
    Table,
    native,
    quantize,
)
from qinductor.numerics.carrier import carrier_of
from qinductor.numerics.execute import random_input
from qinductor.numerics.fast_paths import fast_path
from qinductor.numerics.grids import grid_of
from qinductor.numerics.posits import POSIT_MODES
from qinductor.numerics.random_bits import Draw
from qinductor.numerics.reference import reference_quantize

NAMED_FLOATS = {n: f for n, f in NAMED.items() if isinstance(f, FloatingPoint)}
FORMATS = {**NAMED_FLOATS, **go.ELEMENT_FORMATS}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SEED = torch.tensor(7)


def bits_for(x, mode, r):
    return random_input(x, Draw(SEED, None, 3, r)) if mode is Rounding.STOCHASTIC else None


def both(x, fmt, mode, r=32):
    """The aten form and what quantize() runs, which must agree; with the random integers."""
    u = bits_for(x, mode, r)
    plain = reference_quantize(x, fmt, mode, u, r)
    run = quantize(x, fmt, mode, seed=7, site=3, random_bits=r)
    assert not len(go.same(run, plain.double().numpy()))
    return run, u


def check(x, fmt, mode, r=32):
    got, u = both(x, fmt, mode, r)
    wrong = go.same(got, go.expected(x, fmt, mode, u, r))
    assert not len(wrong), (fmt, mode, x[wrong[:5]].tolist(), got[wrong[:5]].tolist())


def twins(fmt):
    return (
        [fmt, fmt.replace(saturate=not fmt.saturate)] if isinstance(fmt, FloatingPoint) else [fmt]
    )


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_16_bit_inputs(name, dtype):
    x = go.all_16_bit(dtype)
    for fmt in twins(FORMATS[name]):
        for mode in Rounding:
            check(x, fmt, mode)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_boundaries(name, dtype):
    for fmt in twins(FORMATS[name]):
        x = go.boundaries(fmt, dtype)
        for mode in Rounding:
            check(x, fmt, mode)
        check(x, fmt, Rounding.STOCHASTIC, r=5)


@pytest.mark.parametrize("name", NAMED_FLOATS)
def test_a_million_random_patterns(name):
    fmt = NAMED_FLOATS[name]
    x = torch.cat([go.random_patterns(10**6 - 2**17, 1), go.near_range(fmt, 2**17, 2)])
    check(x, fmt, Rounding.TIES_TO_EVEN)
    # The oracle divides by a step that is no power of two with rationals: an eighth of them.
    check(x[::8] if fmt.zero_binade else x, fmt, Rounding.STOCHASTIC)
    part = x[-(2**18) :: 8 if fmt.zero_binade else 1]
    for mode in Rounding:
        check(part, fmt, mode, r=11)


@pytest.mark.parametrize("name", FORMATS)
def test_grid_oracle_is_the_fraction_oracle(name):
    fmt = FORMATS[name]
    for dtype in DTYPES:
        x = torch.cat([go.boundaries(fmt, dtype)[::97], go.near_range(fmt, 12, 5, dtype)])
        for mode in Rounding:
            u = torch.arange(len(x)) * 2654435761 % 2**32
            want = [
                oracle.quantize(v, fmt, mode, str(dtype)[6:], k)
                for v, k in zip(x.double().tolist(), u.tolist(), strict=True)
            ]
            got = torch.from_numpy(go.expected(x, fmt, mode, u))
            assert not len(go.same(got, np.array(want))), (fmt, dtype, mode)


WIDE = {
    "fixed(32,0)": FixedPoint(32, 0),
    "fixed(53,30)": FixedPoint(53, 30),
    "float(8,23)": FloatingPoint(8, 23),
    "float(11,52)": FloatingPoint(11, 52),
    "wrap(8,-3)": FixedPoint(8, -3, overflow=Overflow.WRAP),
    "wrap(8,3,unsigned)": FixedPoint(8, 3, signed=False, overflow=Overflow.WRAP),
    "wrap(24,20)": FixedPoint(24, 20, overflow=Overflow.WRAP),
    "posit(8,2)": Posit(8, 2),
    "posit(11,1)": Posit(11, 1),
    "posit(16,2)": Posit(16, 2),
    "posit(6,0)": Posit(6, 0),
    "posit(9,4)": Posit(9, 4),
    "table": Table((-3.0, -1.5, -0.1, 0.0, 1e-20, 0.3, 0.7, 8.0, 1e10)),
    "table_no_zero": Table((-1.0, -0.25, 0.25, 1.0)),
}


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_formats_against_the_fraction_oracle(name, dtype):
    fmt = WIDE[name]
    modes = POSIT_MODES if isinstance(fmt, Posit) else tuple(Rounding)
    x = torch.cat([go.random_patterns(40, 3).to(dtype), torch.randn(30, dtype=dtype).to(dtype) * 4])
    if isinstance(fmt, Table):
        ties = torch.tensor([-2.25, 0.5, 4.35, 0.15, -0.8, 0.0, -0.1, 0.3], dtype=dtype)
        x = torch.cat([x, ties])
    else:
        x = torch.cat([x, go.near_range(fmt, 40, 9, torch.float64).to(dtype)])
        step = min(float(fmt.exact_step), 2.0**10)
        x = torch.cat([x, torch.arange(-9, 9, dtype=torch.float64).to(dtype) * (step / 2)])
    for mode in modes:
        for r in (32, 6):
            got, u = both(x, fmt, mode, r)
            us = [0] * len(x) if u is None else u.tolist()
            for v, g, k in zip(x.double().tolist(), got.double().tolist(), us, strict=True):
                want = oracle.quantize(v, fmt, mode, str(dtype)[6:], k, r)
                same = g == want and math.copysign(1, g) == math.copysign(1, want)
                assert same or (math.isnan(g) and math.isnan(want)), (v, mode, r, g, want)


EDGES = [
    *(FixedPoint(8, fl) for fl in (-105, -104, -103, -97, -96, 70, 93, 94, 95, 140)),
    *(FixedPoint(wl, 4) for wl in (22, 23, 24, 25)),
    *(FloatingPoint(3, man, bias=b) for man in (1, 12) for b in (-100, -80, 88, 92, 97)),
    *(FloatingPoint(3, 3, bias=b, saturate=True) for b in (-123, -120, -105)),
]


@pytest.mark.parametrize("fmt", EDGES, ids=repr)
def test_where_shorter_kernels_begin_and_end(fmt):
    x = torch.cat([go.random_patterns(5000, 2), go.near_range(fmt, 5000, 3), go.boundaries(fmt)])
    x = torch.cat([x, torch.zeros(-len(x) % 2048 + 2048)])
    for mode in (Rounding.TIES_TO_EVEN, Rounding.STOCHASTIC):
        for r in (32, 5):
            check(x, fmt, mode, r)


@pytest.mark.parametrize("mode", [Rounding.TIES_TO_EVEN, Rounding.STOCHASTIC])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_compile_in_every_form(dtype, mode):
    seen = set()
    for fmt in (*NAMED_FLOATS.values(), NAMED_FLOATS["FP16"], *go.ELEMENT_FORMATS.values()):
        lane = 32 if mode is Rounding.STOCHASTIC else 0
        assert native.element_kernel(fmt, dtype, mode, lane)[0] is not None
        carrier = carrier_of(dtype)
        seen.add(fast_path(grid_of(fmt, carrier, mode), carrier.word, mode))
    assert len(seen) == (1 if mode is Rounding.STOCHASTIC and dtype == torch.float64 else 3)


def test_values_of_the_definition():
    fixed = quantize(torch.tensor([3e9, -3e9]), FixedPoint(32, 0)).tolist()
    assert fixed == [2147483520.0, -2147483648.0]
    assert (
        quantize(
            torch.tensor([1e38], dtype=torch.bfloat16), NAMED["FP16"].replace(saturate=True)
        ).item()
        == 65280.0
    )
    below = torch.tensor([7.9999995])
    assert quantize(below, "E4M3", Rounding.TOWARD_ZERO).item() == 7.5
    e4m3 = quantize(torch.tensor([1e9, float("inf"), float("nan"), -0.0]), "E4M3")
    assert e4m3[:2].tolist() == [448.0, 448.0]
    assert e4m3[2].isnan()
    assert torch.signbit(e4m3[3])
    lost = quantize(torch.tensor([1e9]), NAMED["E4M3"].replace(saturate=False))
    assert lost.isnan().all()


def test_dlfloat_is_ibms():
    # onnx-mlir: NNPALimit.hpp gives the maximum, DLF16Conversion.hpp reads 0x0001 as 2^-31·513/512.
    fmt = NAMED["DLFLOAT16"]
    assert fmt.max == 2.0**32 * (1 + 510 / 512)
    assert fmt.step == fmt.min_normal == 2.0**-31 * (1 + 1 / 512)
    assert fmt.values[:2] == (-fmt.max, -(2.0**32) * (1 + 509 / 512))


def test_float64_is_rounded_once():
    # 1 + 2^-11 + 2^-40: nearest FP16 is above the tie; through fp32 it would look like the tie.
    x = torch.tensor([1 + 2.0**-11 + 2.0**-40], dtype=torch.float64)
    assert quantize(x, "FP16").item() == 1 + 2.0**-10
