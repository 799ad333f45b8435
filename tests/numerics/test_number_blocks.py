"""Formats with shared scales: against the oracle, against torchao and by hand."""

from __future__ import annotations

import math
from fractions import Fraction

import grid_oracle as go
import oracle
import pytest
import torch

from qinductor.numerics import (
    E2M1,
    E4M3,
    INT8,
    MX,
    NAMED,
    NVFP4,
    BlockFloatingPoint,
    FloatingPoint,
    Granularity,
    Integer,
    Nans,
    Rounding,
    ScaleRule,
    quantize,
)
from qinductor.numerics.execute import random_input
from qinductor.numerics.native import block_kernel
from qinductor.numerics.random_bits import Draw
from qinductor.numerics.reference import reference_quantize

CHECKED_EVERYWHERE = (Rounding.TIES_TO_EVEN, Rounding.STOCHASTIC)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
FORMATS = {
    **{n: f for n, f in NAMED.items() if isinstance(f, MX)},
    **{f"MXFP4_{r.name}": MX(E2M1, scale_rule=r) for r in ScaleRule},
    **{f"MXFP8_{r.name}": MX(E4M3, block=7, scale_rule=r) for r in ScaleRule},
    "MX_man0": MX(FloatingPoint(3, 0, nans=Nans.NONE), block=5),
    "bfp4": BlockFloatingPoint(4, axis=-1, block=8),
    "bfp2": BlockFloatingPoint(2, axis=-1, block=8),
    "bfp8_row": BlockFloatingPoint(8, dim=0),
    "bfp16": BlockFloatingPoint(16, axis=1, block=6),
    "bfp24_tensor": BlockFloatingPoint(24),
    "bfp40": BlockFloatingPoint(40, axis=-1, block=8),
}


def rows(dtype):
    """Rows of 35: random patterns; ordinary values; extremes; specials."""
    torch.manual_seed(4)
    x = torch.zeros(12, 35, dtype=torch.float64)
    x[0] = go.random_patterns(35, 11).double()
    x[1] = torch.randn(35)
    x[2] = torch.arange(-17, 18) / 16
    x[3] = torch.randn(35) * 2.0**-140
    x[4] = torch.randn(35) * 2.0**126
    x[5] = torch.arange(35) * 2.0**-149
    x[6, 3], x[6, 4], x[6, 5] = float("inf"), float("nan"), -float("inf")
    x[6, 10:] = torch.randn(25)
    x[7] = 1.9999999
    x[8] = -0.0
    x[9] = torch.randn(35) * 2.0 ** torch.arange(-17, 18)
    x[10] = torch.randn(35) * 2.0**-16
    x[11] = torch.arange(35) * 2.0**-24
    return x.to(dtype)


def blocks(x, fmt):
    """Index lists of the blocks of a 2-d tensor."""
    n, m = x.shape
    if isinstance(fmt, BlockFloatingPoint) and fmt.block is None:
        every = [[(i, j) for j in range(m)] for i in range(n)]
        return every if fmt.dim is not None else [[ij for row in every for ij in row]]
    return [
        [(i, j) for j in range(s, min(s + fmt.block, m))]
        for i in range(n)
        for s in range(0, m, fmt.block)
    ]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_the_oracle(name, dtype):
    fmt = FORMATS[name]
    x = rows(dtype)
    for mode in Rounding:
        u = random_input(x, Draw(torch.tensor(5)))
        if dtype != torch.float32 and mode not in CHECKED_EVERYWHERE:
            continue
        got = reference_quantize(x, fmt, mode, u if mode is Rounding.STOCHASTIC else None)
        want = torch.zeros(x.shape, dtype=torch.float64)
        xl, ul = x.double().tolist(), u.tolist()
        for block in blocks(x, fmt):
            xs, us = [xl[i][j] for i, j in block], [ul[i][j] for i, j in block]
            for (i, j), w in zip(
                block, oracle.block_quantize(xs, fmt, mode, str(dtype)[6:], us), strict=True
            ):
                want[i, j] = w
        wrong = go.same(got.flatten(), want.flatten().numpy())
        assert not len(wrong), (mode, x.flatten()[wrong[:4]], got.flatten()[wrong[:4]])


@pytest.mark.parametrize("mode", [Rounding.TIES_TO_EVEN, Rounding.STOCHASTIC])
@pytest.mark.parametrize("name", ["MXFP4", "MXINT8", "MXFP8_RCEIL", "bfp8_row", "bfp24_tensor"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_is_the_aten_form(name, dtype, mode):
    if dtype in (torch.float64, torch.float16) and name not in ("MXFP4", "bfp24_tensor"):
        pytest.skip("two formats are compiled for this dtype")
    fmt = FORMATS[name]
    big = (torch.randn(40, 5001) * 2.0 ** torch.randint(-30, 15, (40, 1))).to(dtype)
    for x in (rows(dtype), big, rows(dtype)[0, 3], big.t()):
        u = random_input(x, Draw(torch.tensor(5), None, 0, 9, 77))
        plain = reference_quantize(x, fmt, mode, u, 9)
        got = quantize(x, fmt, mode, seed=5, random_bits=9, index_offset=77)
        assert not len(go.same(got, plain.double().numpy()))


LAYOUTS = [
    MX(E2M1, axis=0, block=8),
    MX(E2M1, axis=1),
    MX(E2M1, axis=2, block=5),
    *(BlockFloatingPoint(6, dim=d) for d in range(3)),
    BlockFloatingPoint(6),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", [Rounding.TIES_TO_EVEN, Rounding.STOCHASTIC])
def test_kernels_of_every_layout(dtype, mode):
    x = (torch.randn(19, 40, 150) * 2.0 ** torch.randint(-9, 9, (19, 40, 1))).to(dtype)
    x[3, 4, 5], x[7, 8, 9], x[11] = float("nan"), float("inf"), 0
    lane = 8 if mode is Rounding.STOCHASTIC else 0
    for fmt in LAYOUTS if dtype in (torch.float32, torch.float16) else LAYOUTS[:1]:
        for entry in ("run", "run_columns", "run_segments"):
            assert block_kernel(fmt, dtype, mode, lane, entry) is not None, "it compiles"
        for t in (x, x.transpose(0, 1)):
            u = random_input(t, Draw(torch.tensor(5), None, 0, 7, 1001))
            plain = reference_quantize(t, fmt, mode, u, 7)
            got = quantize(t, fmt, mode, seed=5, random_bits=7, index_offset=1001)
            assert not len(go.same(got.flatten(), plain.double().flatten().numpy())), fmt


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shorter_code_and_its_edges(dtype):
    # Blocks of every exponent: those near the ends of the carrier take the rule as it stands.
    x = torch.randn(512, 64, dtype=torch.float64)
    x = (x * 2.0 ** torch.arange(-256, 256, dtype=torch.float64)[:, None]).to(dtype)
    for fmt in (NAMED["MXFP4"], NAMED["MXINT8"], FORMATS["bfp8_row"]):
        plain = reference_quantize(x, fmt, Rounding.TIES_TO_EVEN)
        assert not len(go.same(quantize(x, fmt).flatten(), plain.double().flatten().numpy())), fmt


def test_axis_is_a_transposed_last_axis():
    x = torch.randn(40, 3, 6)
    for fmt in (MX(E2M1), NVFP4(), BlockFloatingPoint(5, axis=-1, block=16)):
        first = fmt.replace(axis=0)
        assert torch.equal(
            quantize(x, first), quantize(x.movedim(0, -1).contiguous(), fmt).movedim(-1, 0)
        )


def test_an_all_zero_block_is_zeros_and_large_maxima_are_kept():
    assert torch.equal(quantize(torch.zeros(3, 4), BlockFloatingPoint(8)), torch.zeros(3, 4))
    big = torch.tensor([2.0**126, 8.5e37])
    assert quantize(big, BlockFloatingPoint(8))[0] == 2.0**126
    assert quantize(torch.tensor([1.99, 0.3]), BlockFloatingPoint(4)).tolist() == [1.75, 0.25]


@pytest.mark.parametrize(
    ("name", "element", "size"),
    [
        ("MXFP8_E4M3", torch.float8_e4m3fn, 32),
        ("MXFP8_E5M2", torch.float8_e5m2, 32),
        ("MXFP4", torch.float4_e2m1fn_x2, 32),
    ],
)
@pytest.mark.parametrize("rule", ["FLOOR", "CEIL", "RCEIL", "EVEN"])
def test_torchao_agrees(name, element, size, rule):
    mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    mode = mx_tensor.ScaleCalculationMode[rule]
    x = torch.randn(64, size) * 2.0 ** torch.randint(-20, 20, (64, 1))
    scale, data = mx_tensor.to_mx(x, element, size, mode)
    theirs = mx_tensor.to_dtype(data, scale, element, size, torch.float32)
    ours = quantize(x, NAMED[name].replace(scale_rule=ScaleRule[rule]))
    assert torch.equal(ours, theirs.view_as(ours))


def test_nvfp4_by_rationals():
    torch.manual_seed(0)
    x = torch.randn(6, 40) * torch.tensor([[1.0], [2.0**-20], [50.0], [1.0], [0.0], [3.0]])
    x[3, 5] = float("nan")
    x[3, 6] = float("-inf")
    got = {m: quantize(x, "NVFP4_E2M1", m, seed=1) for m in Rounding}
    u = random_input(x, Draw(torch.tensor(1)))
    finite = torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)
    t = (finite.abs().max() / 2688).item()
    for i in range(6):
        for start in range(0, 40, 16):
            cut = slice(start, min(start + 16, 40))
            a = finite[i, cut].abs().max()
            s = oracle.quantize(((a / 6) / torch.tensor(t)).item(), E4M3, Rounding.TIES_TO_EVEN)
            unit = Fraction(max(s, 2.0**-9)) * Fraction(t)
            grid = [Fraction(v) * unit for v in E2M1.values if v >= 0]
            for j in range(cut.start, cut.stop):
                value = x[i, j].item()
                for mode, q in got.items():
                    if math.isnan(value):
                        assert q[i, j].isnan()
                        continue
                    sign = math.copysign(1, value)
                    mag = grid[-1] if math.isinf(value) else min(abs(Fraction(value)), grid[-1])
                    k = max(n for n, v in enumerate(grid) if v <= mag)
                    if k < 7:
                        f = (mag - grid[k]) / (grid[k + 1] - grid[k])
                        place = oracle.Place(grid[k], grid[k + 1], f, k % 2 == 0)
                        k += oracle.goes_up(mode, place, sign < 0, int(u[i, j]), 32)
                    want = torch.tensor(float(grid[k]) * sign, dtype=torch.float64).float()
                    assert q[i, j] == want, (mode, i, j, value, q[i, j], want)


def test_integer_is_the_kernels_arithmetic():
    x = torch.randn(7, 9) * 5
    scale = x.abs().max() / 127
    k = torch.clamp(torch.round(x * (1 / scale)), -127, 127)
    assert torch.equal(quantize(x, INT8), k * scale)
    given = Integer(8, signed=False, symmetric=False, scale=0.05, zero_point=100)
    s = torch.tensor(0.05)
    k = torch.clamp(torch.round(x * (1 / s)) + 100, 0, 255)
    assert torch.equal(quantize(x, given), (k - 100) * s)
    low, high = x.min(), x.max()
    s = (high / 2 - low / 2) / 127.5
    z = -torch.round(low / s)
    k = torch.clamp(torch.round(x * (1 / s)) + z, 0, 255)
    observed = Integer(8, signed=False, symmetric=False)
    assert torch.equal(quantize(x, observed), (k - z) * s)


@pytest.mark.parametrize("granularity", list(Granularity))
def test_integer_granularities(granularity):
    x = torch.randn(6, 8)
    group = 4 if granularity is Granularity.GROUP else None
    fmt = Integer(4, granularity=granularity, axis=1, group=group)
    parts = {
        Granularity.PER_TENSOR: [x],
        Granularity.PER_CHANNEL: list(x.split(1, 1)),
        Granularity.PER_TOKEN: list(x.split(1, 0)),
        Granularity.GROUP: [g for row in x.split(1, 0) for g in row.split(4, 1)],
    }[granularity]
    whole = sorted(quantize(x, fmt).flatten().tolist())
    each = sorted(v for p in parts for v in quantize(p.contiguous(), Integer(4)).flatten().tolist())
    assert whole == each


def test_integer_specials():
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0, -0.0])
    q = quantize(x, INT8)
    assert q[0].isnan()
    assert q[1:4].tolist() == [1.0, -1.0, 1.0]
    assert not torch.signbit(q[4])
