"""Matmuls with a simulated accumulator: exact arithmetic, the definition and the kernel agree."""

from __future__ import annotations

from fractions import Fraction

import oracle
import pytest
import sim_nets as nets
import torch
from torch import nn

from qinductor import Accumulator, ConfigError, Precision, Rounding, Rule, SimulationSpec, simulate
from qinductor.numerics import quantize
from qinductor.simulation import accumulate as module
from qinductor.simulation.accumulate import accumulate, define
from qinductor.simulation.accumulator import parse_accumulator

ACCUMULATORS = [
    Accumulator("FP16"),
    Accumulator("DLFLOAT16", chunk=5),
    Accumulator("E5M2", product="E4M3", chunk=4, outer="FloatingPoint(8, 23)"),
    Accumulator("FixedPoint(16, 8)", product="FixedPoint(12, 7)", rounding="TOWARD_ZERO"),
    Accumulator("FixedPoint(9, 2)", rounding=Rounding.TO_ODD),
    Accumulator("BF16", rounding="UPWARD", chunk=1),
    Accumulator("FloatingPoint(8, 23)", aligned_bits=14),
    Accumulator("FP16", aligned_bits=6, aligned_group=8, chunk=10, product="BF16"),
]
NARROW = Accumulator("FloatingPoint(6, 9)")


def operands(m=3, k=23, n=5, batch=2, quantized=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(batch, m, k, generator=generator)
    b = torch.randn(batch, k, n, generator=generator)
    # Sizes apart: sums that are inexact in float64 too.
    a *= torch.exp2(torch.randint(-30, 8, a.shape, generator=generator).float())
    return (quantize(a, "E4M3"), quantize(b, "E4M3")) if quantized else (a, b)


def exact(a, b, accumulator):
    """One element in rational arithmetic."""
    mode, total, acc = accumulator.rounding, Fraction(0), Fraction(0)

    def rounded(x, fmt):
        return x if fmt is None else oracle_round(x, fmt, mode)

    terms = [Fraction(x) * Fraction(y) for x, y in zip(a, b, strict=True)]
    chunk = accumulator.chunk or len(terms)
    size = accumulator.aligned_group if accumulator.aligned_bits else 1
    for begin in range(0, len(terms), chunk):
        part = terms[begin : begin + chunk]
        for first in range(0, len(part), size):
            group = [rounded(t, accumulator.product) for t in part[first : first + size]]
            if accumulator.aligned_bits:
                largest = max(abs(t) for t in (acc, *group))
                if largest:
                    unit = Fraction(2) ** (
                        oracle.floor_log2(largest) + 1 - accumulator.aligned_bits
                    )
                    cut = [int(t / unit) * unit for t in (acc, *group)]  # int() truncates
                    acc = rounded(sum(cut), accumulator.format)
            else:
                acc = rounded(acc + group[0], accumulator.format)
        if accumulator.chunk:
            total = rounded(total + acc, accumulator.outer or accumulator.format)
            acc = Fraction(0)
    return float(total if accumulator.chunk else acc)


def oracle_round(x, fmt, mode):
    return Fraction(oracle.quantize(x, fmt, mode, "float64"))


@pytest.mark.parametrize("accumulator", ACCUMULATORS, ids=str)
def test_the_definition_is_exact_arithmetic_rounded_where_it_says(accumulator):
    a, b = operands()
    got = define(a, b, accumulator)
    for i in range(3):
        for j in range(5):
            want = exact(a[0, i].tolist(), b[0, :, j].tolist(), accumulator)
            assert float(got[0, i, j]) == want, (i, j)


@pytest.mark.parametrize("accumulator", [*ACCUMULATORS, NARROW], ids=str)
@pytest.mark.parametrize("quantized", [False, True])
def test_the_kernel_is_the_definition(accumulator, quantized):
    for m, k, n in ((3, 23, 5), (1, 1, 1), (70, 20, 3), (2, 33, 65), (33, 40, 64)):
        a, b = operands(m, k, n, quantized=quantized)
        got = module._run_kernel(a, b, accumulator)
        assert got is not None, "no kernel"
        assert torch.equal(got, define(a, b, accumulator)), (m, k, n)


def test_float32_is_used_only_where_it_is_exact():
    narrow, wide = operands(quantized=True), operands()
    assert module._fits_float32(*narrow, NARROW)
    assert not module._fits_float32(*wide, NARROW)
    assert not module._fits_float32(*narrow, Accumulator("FloatingPoint(8, 23)"))
    assert not module._fits_float32(narrow[0] * 2.0**60, narrow[1], NARROW)


def test_special_values():
    a, b = operands(1, 6, 40)
    a[0, 0, 1], a[1, 0, 2] = torch.inf, torch.nan
    for accumulator in ACCUMULATORS:
        got, want = module._run_kernel(a, b, accumulator), define(a, b, accumulator)
        assert torch.equal(got.nan_to_num(7e30), want.nan_to_num(7e30)), accumulator
        assert want[1].isnan().all()


def test_threads_change_nothing():
    a, b = operands(40, 64, 200, quantized=True)
    threads = torch.get_num_threads()
    try:
        results = []
        for n in (1, 3):
            torch.set_num_threads(n)
            results.append(accumulate(a, b, NARROW))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)


def test_empty_and_bad_operands():
    assert accumulate(torch.ones(2, 0), torch.ones(0, 3), NARROW).tolist() == [[0] * 3] * 2
    assert accumulate(torch.ones(0, 2), torch.ones(2, 3), NARROW).shape == (0, 3)
    with pytest.raises(ConfigError, match=r"not torch.float64"):
        accumulate(torch.ones(2, 2).double(), torch.ones(2, 2).double(), NARROW)
    with pytest.raises(ConfigError, match=r"not \(2, 3\) with \(2, 3\)"):
        accumulate(torch.ones(2, 3), torch.ones(2, 3), NARROW)
    for accumulator in ACCUMULATORS:
        assert parse_accumulator(accumulator.key) == accumulator


def test_opcheck():
    a, b = (t.requires_grad_() for t in operands())
    torch.library.opcheck(module.accumulate_op, (a, b, NARROW.key, 0))


def test_a_linear_forward_and_backward():
    torch.manual_seed(0)
    layer, accumulator = nn.Linear(20, 9), ACCUMULATORS[1]
    x, g = torch.randn(2, 4, 20, requires_grad=True), torch.randn(2, 4, 9)
    spec = SimulationSpec(Rule(op="linear", accumulator=accumulator))
    with simulate(layer, spec) as handle:
        y = layer(x)
    y.backward(g)
    assert [s.role for s in handle.sites] == ["accumulator"]
    x2, g2, w = x.detach().flatten(0, 1), g.flatten(0, 1), layer.weight.detach()
    assert torch.equal(y.flatten(0, 1), accumulate(x2, w.t(), accumulator) + layer.bias)
    assert torch.equal(x.grad.flatten(0, 1), accumulate(g2, w, accumulator))
    assert torch.equal(layer.weight.grad, accumulate(g2.t(), x2, accumulator))


FULL = Accumulator("FloatingPoint(8, 23)")
"""Rounds as a float32 sum would, so results are torch's up to the order: K·2^−23 of the terms."""


@pytest.mark.parametrize(
    ("conv", "shape"),
    [
        (nn.Conv2d(4, 6, 3, padding=1), (2, 4, 7, 6)),
        (nn.Conv2d(4, 6, (3, 2), stride=(2, 3), padding=(1, 2), dilation=(2, 1)), (2, 4, 9, 8)),
        (nn.Conv2d(4, 6, 3, stride=2, groups=2, bias=False), (2, 4, 8, 8)),
        (nn.Conv2d(4, 6, (2, 3), padding="same"), (2, 4, 5, 5)),
        (nn.Conv1d(4, 6, 5, stride=2, padding=3), (2, 4, 11)),
        (nn.Conv2d(3, 2, 1), (3, 5, 5)),
    ],
    ids=str,
)
def test_convolutions_are_torchs_up_to_rounding(conv, shape):
    torch.manual_seed(0)
    x = torch.randn(shape, requires_grad=True)
    want = conv(x)
    g = torch.randn_like(want)
    grads = torch.autograd.grad(want, [x, *conv.parameters()], g)
    with simulate(conv, SimulationSpec(Rule(op=("conv1d", "conv2d"), accumulator=FULL))):
        got = conv(x)
    ours = torch.autograd.grad(got, [x, *conv.parameters()], g)
    for a, b in zip((got, *ours), (want, *grads), strict=True):
        assert a.shape == b.shape and torch.allclose(a, b, atol=2e-5, rtol=1e-5)


def test_matmuls_of_every_shape():
    class Net(nn.Module):
        def forward(self, a, b):
            return a @ b

    model = Net()
    spec = SimulationSpec(Rule(op="matmul", accumulator=FULL))
    for left, right in (((5,), (5,)), ((5,), (5, 3)), ((2, 5), (5,)), ((2, 3, 5), (5, 4)),
                        ((2, 1, 3, 5), (4, 5, 2)), ((3, 5), (2, 5, 4))):  # fmt: skip
        a, b = torch.randn(left), torch.randn(right)
        with simulate(model, spec):
            y = model(a, b)
        assert y.shape == (a @ b).shape and torch.allclose(y, a @ b, atol=1e-5)


def test_what_is_not_simulated_is_refused():
    conv = nn.Conv3d(1, 1, 2)
    spec, message = SimulationSpec(Rule(op="conv3d", accumulator=FULL)), r"conv3d accumulator #0"
    with simulate(conv, spec), pytest.raises(ConfigError, match=message):
        conv(torch.ones(1, 1, 3, 3, 3))


def test_eager_and_compiled_agree():
    torch.manual_seed(0)
    eight = Precision("E5M2", "STOCHASTIC")
    rule = Rule(
        op=("linear", "conv2d", "matmul"),
        input=eight, weight=eight, grad_output=eight,
        accumulator=Accumulator("DLFLOAT16", chunk=64),
    )  # fmt: skip
    model, spec = nets.ConvNet(), SimulationSpec(rule, seed=0)
    x = torch.randn(3, 3, 6, 6)
    with simulate(model, spec):
        want = nets.train(model, model, [x, x], lr=0)
    compiled = torch.compile(model, backend="qsim", options={"simulate": spec}, fullgraph=True)
    assert nets.same(nets.train(model, compiled, [x, x], lr=0), want)


def test_autocast_gives_the_products_its_dtype():
    layer = nn.Linear(8, 8)
    spec = SimulationSpec(Rule(op="linear", accumulator=FULL))
    with simulate(layer, spec), torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(torch.randn(2, 8))
    assert y.dtype == torch.bfloat16
