"""On a GPU: the kernels and compiled linears against the eager operators. `pytest -m gpu`."""

from __future__ import annotations

import pytest
import torch
from int8_nets import Feedforward, int8_linear, same_bits
from tolerances import UNIT_ROUNDOFF, gamma
from torch import Tensor

from qinductor import explain, lay_out
from qinductor.backend import qsim
from qinductor.capability import Capability
from qinductor.numerics import FloatingPoint
from qinductor.ops import quantize_per_token
from qinductor.templates.triton import launch
from qinductor.templates.triton.accumulator import accumulated_matmul
from qinductor.templates.triton.tiles import Tile, candidates, choose_tile

pytestmark = pytest.mark.gpu
ops = torch.ops.qinductor
SHAPES = [(1, 64, 64), (1, 100, 1030), (16, 4096, 1024), (33, 65, 127), (300, 513, 768)]


@pytest.fixture
def gpu():
    found = Capability.detect().gpu
    assert found is not None
    if (reason := found.reason_against("s8")) is not None:
        pytest.skip(reason)
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_tile_is_exact(gpu, shape: tuple) -> None:
    m, n, k = shape
    a, b = (torch.randint(-128, 128, s, dtype=torch.int8, device="cuda") for s in ((m, k), (n, k)))
    want = (a.double() @ b.double().t()).to(torch.int32)
    for tile in (*candidates(m, n, k, gpu), Tile(16, 16, 32, 1, 2, splits=3)):
        got = launch.gemm(a, b, tile).sum(0, dtype=torch.int32)
        assert torch.equal(got, want), tile


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "per_token"])
@pytest.mark.parametrize("rows", [1, 16, 200])
def test_compiled_blocks_are_bit_equal(gpu, rows: int, dynamic: bool) -> None:
    model = lay_out(Feedforward(128, 520, dynamic=dynamic).cuda())
    x = torch.randn(rows, 128, device="cuda")
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(model, backend=qsim)
        assert same_bits(compiled(x).cpu(), model(x).cpu())
    sites = explain(compiled).to_dict()["sites"]
    assert all("__triton" in site["detail"] for site in sites)


@pytest.mark.parametrize("activation", ["none", "relu", "gelu"])
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_epilogues_are_bit_equal(gpu, activation: str, out: torch.dtype) -> None:
    layer = lay_out(int8_linear(200, 96, dynamic=True).cuda())
    codes, scale = quantize_per_token(torch.randn(70, 96, device="cuda"))
    residual = torch.randn(70, 200, device="cuda")

    def run(codes: Tensor, scale: Tensor, residual: Tensor) -> Tensor:
        return ops.qlinear(
            codes, scale, layer.x_zero_point, layer.packed, layer.w_scale, layer.w_sum, layer.bias,
            residual, activation, out,
        )  # fmt: skip

    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(run, backend=qsim)(codes, scale, residual)
    assert same_bits(got.cpu(), run(codes, scale, residual).cpu())


@pytest.mark.parametrize("k", [1, 100, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_per_token_codes_are_those_of_the_cpu(gpu, k: int, dtype: torch.dtype) -> None:
    """One definition on both devices: kernel, eager operator and compiled graph."""
    x = (torch.randn(50, k) * 3).to(dtype)
    want = quantize_per_token(x)
    torch._dynamo.reset()
    compiled = torch.compile(lambda t: ops.quantize_per_token(t), backend=qsim)
    for got in (
        launch.quantize_rows(x.cuda())[:2],
        quantize_per_token(x.cuda()),
        compiled(x.cuda()),
    ):
        assert torch.equal(got[0].cpu(), want[0]) and same_bits(got[1].cpu(), want[1])


def test_bfloat16_producers_round_before_they_quantize(gpu) -> None:
    x = torch.randn(20, 768, device="cuda").bfloat16()
    weight = torch.rand(768, device="cuda") + 0.5
    codes, scales, produced = launch.quantize_rows(x, "rms_norm", weight=weight, store=True)
    assert produced is not None
    want = quantize_per_token(produced)
    assert torch.equal(codes, want[0]) and same_bits(scales.cpu(), want[1].cpu())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_is_within_the_bound_of_its_accumulator(gpu, dtype: torch.dtype) -> None:
    if (reason := gpu.reason_against("fp8")) is not None:
        pytest.skip(reason)
    m, n, k = 70, 130, 512
    x, w = (torch.randn(s, device="cuda").to(dtype) for s in ((m, k), (n, k)))
    args = (x, torch.rand(m, 1, device="cuda"), w, torch.rand(n, device="cuda"))
    torch._dynamo.reset()
    got = torch.compile(lambda *a: ops.fp8_linear(*a), backend=qsim)(*args).double()
    exact = (x.double() @ w.double().t()) * args[1].double() * args[3].double()
    size = (x.double().abs() @ w.double().abs().t()) * args[1].double() * args[3].double()
    # Hopper aligns the terms of a group to the largest and keeps 13 bits: 2**-13 of it for each.
    assert ((got - exact).abs() <= (k * 2.0**-13 + gamma(k + 4)) * size + 1e-30).all()
    assert (got - exact).abs().mean() <= 2.0**-10 * size.mean(), "far inside of it on average"


def test_simulated_accumulator_is_the_same_on_both_devices(gpu) -> None:
    """A chain of rounded sums, on a GPU and in float64 arithmetic on the CPU."""
    fmt = FloatingPoint(5, 10)
    a, b = torch.randn(33, 70), torch.randn(18, 70)
    got = accumulated_matmul(a.cuda(), b.cuda(), fmt, chunk=16)
    total = torch.zeros(33, 18)
    for begin in range(0, 70, 16):
        acc = torch.zeros(33, 18)
        for k in range(begin, min(70, begin + 16)):
            exact = acc.double() + a[:, k, None].double() * b[None, :, k].double()
            acc = exact.half().float()
        total = total + acc
    # float64 to half in one step: exact sums have at most 48 + 16 bits, rarely more than 53.
    assert (got.cpu() - total).abs().max() <= 2 * UNIT_ROUNDOFF[torch.float16] * total.abs().max()
    assert (got.cpu() == total).float().mean() > 0.99


def test_the_chosen_tile_fits_this_gpu(gpu) -> None:
    for m in (1, 64, 4096):
        choose_tile(m, 4096, 4096, gpu).check(gpu)
