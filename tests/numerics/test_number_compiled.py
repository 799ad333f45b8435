"""Under Inductor: the same bits as eager, fused, compiled once."""

from __future__ import annotations

import grid_oracle as go
import pytest
import torch
import torch._inductor.metrics as metrics
from torch._inductor.utils import run_and_get_code

from qinductor.numerics import (
    MX,
    NAMED,
    BlockFloatingPoint,
    FixedPoint,
    FloatingPoint,
    Overflow,
    Posit,
    QTorchBlock,
    Rounding,
    Table,
    quantize,
)
from qinductor.numerics.lowering import why_not_fused

SR = Rounding.STOCHASTIC
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    metrics.reset()


def inputs(dtype):
    x = torch.cat([go.random_patterns(3000, 6).to(dtype), torch.randn(1003).to(dtype) * 3])
    return x.reshape(-1)[: 4003 // 3 * 3].reshape(3, -1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_mode_is_eagers_bits(dtype):
    modes = tuple(Rounding) if dtype == torch.float32 else (Rounding.TO_ODD, SR)
    formats = [NAMED["E4M3"], FixedPoint(9, 5)]
    if dtype == torch.float32:
        formats.append(NAMED["FP16"].replace(saturate=True))

    # Nearest by addition, beside its edges: a wide fixed point, a grid too low, one that overflows.
    shorter = [FixedPoint(23, 4), FixedPoint(24, 4), FloatingPoint(3, 3, bias=100),
               NAMED["E4M3"].replace(saturate=False), NAMED["E4M3FNUZ"]]  # fmt: skip

    def every(x, step):
        out = [quantize(x, f, m, seed=5, step=step) for f in formats for m in modes]
        out += [quantize(x, f) for f in shorter if dtype == torch.float32]
        return [*out, quantize(x, Posit(8, 2)), quantize(x, "E2M1", SR, seed=1, random_bits=8)]

    x, step = inputs(dtype), torch.tensor(4)
    compiled = torch.compile(every, fullgraph=True)
    for got, want in zip(compiled(x, step), every(x, step), strict=True):
        assert not len(go.same(got, want.double().numpy()))


def test_it_fuses_into_its_neighbours():
    x = torch.randn(64, 256)
    f = torch.compile(lambda t: quantize(t * 2, "E4M3") + 1, fullgraph=True)
    assert torch.equal(f(x), quantize(x * 2, "E4M3") + 1)
    assert metrics.generated_kernel_count == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_fused_producers_value_is_rounded_to_the_dtype_first(dtype):
    x = go.all_16_bit(dtype)
    f = torch.compile(lambda t: quantize(t * 1.37, "E4M3", Rounding.TO_ODD), fullgraph=True)
    want = quantize(x * 1.37, "E4M3", Rounding.TO_ODD)
    assert not len(go.same(f(x), want.double().numpy()))


def test_the_unfused_say_why_and_are_right():
    x = torch.randn(8, 64)
    formats = [NAMED["NVFP4_E2M1"], NAMED["INT8"], Table((-1.0, 0.0, 1.0)), QTorchBlock(8)]
    assert all(why_not_fused(f) for f in formats)
    assert why_not_fused(NAMED["E4M3"]) is None
    # A block that does not divide its axis.
    formats.append(MX(NAMED["E2M1"], block=24))

    def every(t):
        return [quantize(t, f, Rounding.TIES_TO_EVEN) * 2 for f in formats]

    for got, want in zip(torch.compile(every, fullgraph=True)(x), every(x), strict=True):
        assert torch.equal(got, want)


BLOCKS = [
    MX(NAMED["E2M1"]),
    MX(NAMED["E4M3"], axis=0, block=4),
    MX(NAMED["E2M3"], block=128),
    BlockFloatingPoint(8, dim=1),
    BlockFloatingPoint(6),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_fuse_and_are_eagers_bits(dtype):
    x = torch.randn(12, 96) * 2.0 ** torch.randint(-30, 30, (12, 1))
    x[0], x[1], x[3] = go.random_patterns(96, 1), 0, torch.arange(96) * 2.0**-149
    x[2, 3], x[2, 7], x[4] = float("nan"), float("inf"), torch.randn(96) * 2.0**126
    x = x.to(dtype)
    formats = BLOCKS if dtype == torch.float32 else BLOCKS[::3]

    def every(t):
        return [quantize(t * 1.37, f, m, seed=3) for f in formats
                for m in ((SR, Rounding.TO_ODD) if f is BLOCKS[0] else (SR,))]  # fmt: skip

    y, code = run_and_get_code(torch.compile(every, fullgraph=True), x)
    for got, want in zip(y, every(x), strict=True):
        assert not len(go.same(got.flatten(), want.double().flatten().numpy()))
    assert "ops.qinductor.fake_quantize.default(" not in code[0]


def test_a_block_quantizer_is_one_kernel():
    x = torch.randn(64, 256)
    f = torch.compile(lambda t: quantize(t * 2, "MXFP4") + 1, fullgraph=True)
    y, code = run_and_get_code(f, x)
    assert torch.equal(y, quantize(x * 2, "MXFP4") + 1)
    assert code[0].count("async_compile.cpp_pybinding") == 1


@pytest.mark.parametrize("fmt", [FixedPoint(8, 3, overflow=Overflow.WRAP), NAMED["DLFLOAT16"]])
def test_64_bit_steps_beside_32_bit_ones(fmt):
    x = inputs(torch.float32)
    f = torch.compile(lambda t: quantize(t, fmt, SR, seed=3), fullgraph=True)
    assert not len(go.same(f(x), quantize(x, fmt, SR, seed=3).double().numpy()))


def test_gradients_and_steps_compile_once():
    def loss(x, step):
        return (quantize(x * 3, "E2M1", SR, seed=1, step=step, backward="mask") * 2).sum()

    compiled = torch.compile(loss, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for k in range(4):
            x = torch.linspace(-4, 4, 101, requires_grad=True)
            y = x.detach().clone().requires_grad_()
            step = torch.tensor(k)
            got, want = compiled(x, step), loss(y, step)
            assert torch.equal(got, want)
            got.backward()
            want.backward()
            assert torch.equal(x.grad, y.grad)


def test_dynamic_shapes():
    f = torch.compile(lambda t: quantize(t, "E4M3", SR, seed=1), dynamic=True, fullgraph=True)
    for n in (7, 100, 1000):
        x = torch.randn(n, 3)
        assert torch.equal(f(x), quantize(x, "E4M3", SR, seed=1))
