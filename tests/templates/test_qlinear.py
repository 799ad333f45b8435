"""The C++ int8 linear of every instruction set, against the eager operator, bit for bit.

All kernels of one instruction set are compiled in one function whose number of rows is unknown, so
that M = 0 and M = 1 run in the same code as M = 130.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from int8_nets import int8_linear, same_bits, scales, weight_codes
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from qinductor.backend import qsim
from qinductor.capability import Capability, Isa
from qinductor.templates import TEMPLATES

qlinear = torch.ops.qinductor.qlinear
F32, BF16, FP16, U8 = torch.float32, torch.bfloat16, torch.float16, torch.uint8

ISAS = [
    pytest.param(isa.value, marks=() if isa is Isa.PORTABLE else pytest.mark.isa(isa.value))
    for isa in Isa
]
ROWS = (130, 0, 1, 2, 5, 6, 7, 17, 64)
CLASS = {i.isa.value: i.cpp_class for i in TEMPLATES["qlinear", "cpu"]}


@dataclass(frozen=True)
class Case:
    """One kernel: its shape and everything of its epilogue."""

    n: int
    k: int
    activation: str = "none"
    out: torch.dtype = F32
    bias: torch.dtype | None = None
    residual: torch.dtype | None = None
    per_token: bool = False
    out_per_channel: bool = False

    @functools.cached_property
    def layer(self) -> tuple[Tensor, ...]:
        """Weights, scales and bias. Channel 0's scale is so small that products underflow to -0."""
        g = torch.Generator().manual_seed(self.n * 1000 + self.k)
        weight = weight_codes(self.n, self.k)
        w_scale = (torch.rand(self.n, generator=g) + 0.5) / (25 * self.k**0.5)
        bias = None
        if self.bias is not None:
            bias = torch.randn(self.n, generator=g).to(self.bias)
        if self.n > 8:
            w_scale[0] = 2.0**-149
            if bias is not None:
                bias[1:5] = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e4])
        packed = torch.ops.qinductor.pack_weight(weight)
        requantize = (None, None)
        if self.out is U8:
            one_a_channel = torch.rand(self.n, generator=g) * 40 + 1
            inverse = one_a_channel if self.out_per_channel else torch.tensor(37.0)
            requantize = (inverse, torch.tensor([101], dtype=torch.int32))
        return (packed, w_scale, weight.sum(dim=1, dtype=torch.int32), bias, *requantize)

    def inputs(self, m: int) -> tuple[Any, ...]:
        """Codes, scales a token, residual, layer. Row 0 is all 255, row 1 all 0."""
        g = torch.Generator().manual_seed(m)
        x = torch.randint(0, 256, (m, self.k), generator=g).to(U8)
        x[:1], x[1:2] = 255, 0
        token_scales = torch.rand(m, 1, generator=g).mul_(0.05) if self.per_token else None
        residual = None
        if self.residual is not None:
            residual = torch.randn(m, self.n, generator=g).to(self.residual)
            special = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0]).to(self.residual)
            residual[:, :4] = special[: self.n]
        return x, token_scales, residual, self.layer

    def __call__(
        self, x: Tensor, token_scales: Tensor | None, residual: Tensor | None, layer: Any
    ) -> Tensor:
        packed, w_scale, w_sum, bias, inverse, zero_point = layer
        return qlinear(
            x,
            STATIC["x_scale"] if token_scales is None else token_scales,
            STATIC["x_zero_point"],
            packed, w_scale, w_sum, bias, residual, self.activation, self.out, inverse, zero_point,
        )  # fmt: skip


STATIC = scales()
EXACT = (
    Case(1, 1),
    Case(16, 3, "relu"),
    Case(63, 5, "gelu", U8, F32),
    Case(64, 4, out=BF16, per_token=True),
    Case(65, 130, bias=F32, residual=F32),
    Case(130, 515, "gelu", U8, F32, out_per_channel=True),
    Case(64, 64, "gelu", FP16, FP16),
    Case(65, 64, "relu", BF16, F32, BF16, per_token=True),
    Case(130, 64, "gelu", U8, BF16, FP16, per_token=True, out_per_channel=True),
    Case(64, 515, "gelu", bias=F32, residual=F32, per_token=True),
)
BOUNDED = (Case(130, 3, "gelu_tanh"), Case(63, 64, "silu"), Case(16, 130, "tanh"))
CASES = EXACT + BOUNDED


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _all_cases(inputs: list[tuple[Any, ...]]) -> tuple[Tensor, ...]:
    return tuple(case(*given) for case, given in zip(CASES, inputs, strict=True))


def _inputs(m: int) -> list[tuple[Any, ...]]:
    given = [case.inputs(m) for case in CASES]
    for *tensors, _ in given:
        for tensor in tensors:
            if tensor is not None:
                torch._dynamo.decorators.mark_unbacked(tensor, 0)
    return given


def _compiled(function: Callable[..., Any], isa: str | None = None, **options: Any) -> Any:
    if isa is not None:
        options["isa"] = isa
    return torch.compile(function, backend="qsim", fullgraph=True, options=options)


@pytest.mark.parametrize("isa", ISAS)
def test_every_isa_equals_the_eager_operator(isa: str) -> None:
    compiled = _compiled(_all_cases, isa)
    outputs, codes = run_and_get_code(compiled, _inputs(ROWS[0]))
    # which one ran
    (code,) = codes
    assert code.count(f"qinductor::gemm<qinductor::{CLASS[isa]},") == len(CASES)
    assert f"// u8_s8_qlinear__{isa}" in code
    assert not [c for c in CLASS.values() if c != CLASS[isa] and f"gemm<qinductor::{c}," in code]
    calls = ("extern_kernels.", "torch.ops.aten.mm", "torch.ops.aten.addmm", "_int_mm")
    assert not [call for call in calls if call in code]
    _compare(outputs, ROWS[0])
    with torch.compiler.set_stance("fail_on_recompile"):
        for m in ROWS[1:]:
            _compare(compiled(_inputs(m)), m)


def _compare(outputs: tuple[Tensor, ...], m: int) -> None:
    inputs = _inputs(m)
    for case, got, want in zip(CASES, outputs, _all_cases(inputs), strict=True):
        if case in EXACT:
            assert same_bits(got, want), f"{case} at M={m}"
    for case, got, given in zip(CASES, outputs, inputs, strict=True):
        if case in BOUNDED:
            _assert_bounded(case, got, Case(case.n, case.k)(*given))


def _assert_bounded(case: Case, got: Tensor, y: Tensor) -> None:
    """``got`` against the activation of ``y``, which is exact, in float64.

    exp and tanh of glibc and of the vector library are within 2 ulp, that is 2**-22 of the result;
    every other operation rounds by 2**-24. For gelu_tanh, with u = c * (y + a * y**3), seven
    roundings of u change tanh(u) by at most max |u| / cosh(u)**2 = 0.448 times 7 * 2**-24.
    """
    exact, unit = y.double(), 2.0**-24
    if case.activation == "tanh":
        exact = torch.tanh(exact)
        bound = 4 * unit * exact.abs()
    elif case.activation == "silu":
        exact = exact * torch.sigmoid(exact)
        # exp(-y) overflows below -88.7, and the result is -0 instead of y * exp(y).
        bound = (4 + 1 + 1) * unit * exact.abs() + 89 * 2.0**-128
    else:
        exact = torch.nn.functional.gelu(exact, approximate="tanh")
        bound = ((0.448 * 7 + 4 + 2) / 2 + 1) * unit * y.double().abs()
    error = (got.double() - exact).abs()
    assert (error <= bound * 1.001 + 2.0**-149).all(), f"{case}: {(error / bound).max()}"


def test_a_negative_zero_keeps_its_sign_in_relu() -> None:
    packed = torch.ops.qinductor.pack_weight(torch.full((2, 4), -1, dtype=torch.int8))
    w_sum = torch.full((2,), -4, dtype=torch.int32)
    tiny, zero = torch.full((2,), 2.0**-149), torch.tensor(0, dtype=torch.int32)
    x, scale = torch.ones(3, 4, dtype=U8), torch.tensor(2.0**-20)

    def run(x: Tensor) -> Tensor:
        return qlinear(x, scale, zero, packed, tiny, w_sum, None, None, "relu")

    assert torch.signbit(run(x)).all(), "a product that underflows"
    for isa in _isas_here():
        torch._dynamo.reset()
        assert same_bits(_compiled(run, isa)(x), run(x)), isa


def test_the_best_instruction_set_is_the_default() -> None:
    layer = int8_linear(64, 64)
    _, (code,) = run_and_get_code(_compiled(layer), torch.randn(2, 64))
    assert f"// u8_s8_qlinear__{Capability.detect().isa.value}" in code


def test_codes_of_255_and_weights_of_minus_128_at_3072() -> None:
    """Where vpmaddubsw, or a float32 accumulator, would be wrong."""
    k = 3072
    weight = torch.full((2, k), -128, dtype=torch.int8)
    weight[1] = 127
    packed = torch.ops.qinductor.pack_weight(weight)
    w_sum = weight.sum(dim=1, dtype=torch.int32)
    x = torch.full((3, k), 255, dtype=U8)
    one, zero = torch.ones(2), torch.tensor(0, dtype=torch.int32)

    for isa in _isas_here():
        torch._dynamo.reset()
        function = _compiled(lambda x: qlinear(x, one[0], zero, packed, one, w_sum), isa)
        want = torch.tensor([255.0 * -128 * k, 255.0 * 127 * k])
        assert torch.equal(function(x), want.expand(3, 2)), isa


def _isas_here() -> list[str]:
    return [isa.value for isa in Capability.detect().isas]


# ---------------------------------------------------------------- inputs of unusual layout


def test_one_row_with_odd_strides() -> None:
    """A size-1 dimension may have any stride, 0 among them (pytorch issue 195066)."""
    case = CASES[4]
    x, _, residual, layer = case.inputs(2)
    odd_x = x[:1].as_strided((1, case.k), (0, 1))
    odd_residual = residual[:1].as_strided((1, case.n), (0, 1))
    compiled = torch.compile(case, backend="qsim", dynamic=False)
    for given in ((odd_x, None, odd_residual), (x[:1].expand(1, case.k), None, residual[:1])):
        assert same_bits(compiled(*given, layer), case(*given, layer))


def test_inputs_that_are_not_contiguous() -> None:
    case = CASES[4]
    x, _, residual, layer = case.inputs(12)
    six, added = x[:6], residual[:6]
    given = [
        (x[::2], residual[::2]),
        (six.t().contiguous().t(), added.t().contiguous().t()),
        (x[:1].expand(6, case.k), residual[:1].expand(6, case.n)),
        (six.repeat(1, 2)[:, : case.k], added.repeat(1, 2)[:, case.n :]),
    ]
    compiled = torch.compile(case, backend="qsim", dynamic=False)
    for codes, addend in given:
        assert same_bits(compiled(codes, None, addend, layer), case(codes, None, addend, layer))


def test_operands_that_begin_inside_their_buffer() -> None:
    """Slices that are taken in the graph share a buffer with other operands and have an offset."""
    layer = int8_linear(65, 64)
    stacked = torch.randn(4, 65)
    x_scale = torch.tensor([0.5, 0.03, 0.2])
    codes = torch.randint(0, 256, (9, 64), dtype=U8)
    rows = torch.randn(9, 65)

    def function(codes: Tensor, rows: Tensor, stacked: Tensor, x_scale: Tensor, n: int) -> Tensor:
        return qlinear(
            codes[n:], x_scale[1], layer.x_zero_point, layer.packed, stacked[0].abs(), layer.w_sum,
            stacked[2], rows[n:],
        ) + qlinear(
            codes[:-n], x_scale[2:], layer.x_zero_point, layer.packed, layer.w_scale, layer.w_sum,
            stacked[3], rows[:-n],
        )  # fmt: skip

    compiled = torch.compile(function, backend="qsim", dynamic=True)
    for n in (2, 3, 5):
        given = (codes, rows, stacked, x_scale, n)
        assert same_bits(compiled(*given), function(*given))


def test_one_tensor_in_two_roles() -> None:
    s, z = torch.tensor(0.05), torch.tensor(7, dtype=torch.int32)
    layer = int8_linear(64, 64)

    def function(x: Tensor) -> Tensor:
        codes = torch.ops.qinductor.quantize(x, s, z)
        scale = layer.w_scale
        return qlinear(codes, s, z, layer.packed, scale, layer.w_sum, scale, None, "none", U8, s, z)

    x = torch.randn(5, 64) * 1000
    assert torch.equal(_compiled(function)(x), function(x))


def test_any_number_of_dimensions() -> None:
    layers = [int8_linear(64, 64), int8_linear(64, 64, dynamic=True)]
    inputs = [torch.randn(shape) for shape in ((64,), (4, 64), (2, 2, 64), (2, 1, 2, 64))]

    def function(inputs: list[Tensor]) -> list[Tensor]:
        return [layer(x) for layer in layers for x in inputs]

    for got, want in zip(_compiled(function)(inputs), function(inputs), strict=True):
        assert same_bits(got, want)


def test_quantizers_equal_the_eager_operators() -> None:
    """Their lowerings are pointwise code of Inductor's, with another way of clamping."""
    special = [0.0, -0.0, 0.5, 1.5, -2.5, torch.inf, -torch.inf, torch.nan, 3e38, 1e-45, -1e-40]
    x = torch.cat([torch.tensor(special), torch.randn(53) * 3]).repeat(4, 1)
    x[0] = torch.linspace(-2, 2, 64)  # a finite row, and one of zeros
    x[1] = 0
    x[2, 4:9] = 1.0
    inverse, zero_point = torch.rand(64) * 60, torch.tensor([77], dtype=torch.int32)
    multiplier = torch.rand(64) + 0.5

    def function(x: Tensor) -> tuple[Tensor, ...]:
        ops = torch.ops.qinductor
        return (
            ops.quantize(x, inverse, zero_point),
            ops.quantize(x, inverse[0], zero_point[0]),
            *ops.quantize_per_token(x, multiplier),
            *ops.quantize_per_token(x, None, 127.5, 1e-5),
        )

    for dtype in (F32, BF16, FP16):
        given = x.to(dtype)
        compiled = torch.compile(function, backend="qsim", dynamic=False)
        for got, want in zip(compiled(given), function(given), strict=True):
            assert same_bits(got, want), dtype


# ---------------------------------------------------------------- threads


def test_the_number_of_threads_changes_nothing_and_may_change_after_compiling() -> None:
    layer = int8_linear(130, 515)
    x = torch.randn(200, 515)
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []

    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        compiled = qsim(gm, inputs)
        return lambda *args: calls.append((compiled, args)) or compiled(*args)

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want, (code,) = run_and_get_code(torch.compile(layer, backend=backend), x)
        assert "omp_get_max_threads()" in code
        ((compiled, args),) = calls
        for threads in (2, 3, 1):
            torch.set_num_threads(threads)
            # Below Dynamo, whose guards would compile for each number anew.
            assert same_bits(compiled(*args)[0], want), threads
    finally:
        torch.set_num_threads(before)
    assert same_bits(want, layer(x))
