"""Linears on a stated GPU: what is generated, and that it computes the eager operators' bits.

The generated code runs in Triton's interpreter, whole: quantizers, products and their epilogues.
"""

from __future__ import annotations

import pytest
import torch
from int8_nets import Feedforward, int8_linear, same_bits, scales
from interpreter import Interpreter, interpreter  # noqa: F401 - a fixture
from run_generated import run_generated
from stated_gpu import generate
from torch import Tensor, nn

from qinductor.gpu import in_layout_of, lay_out, rows_of
from qinductor.ops import pack_weight, packed_shape
from qinductor.templates.triton.gemm import NAME

pytestmark = pytest.mark.interpret
ops = torch.ops.qinductor
CUDA = torch.device("cuda")


def in_rows(model: nn.Module) -> nn.Module:
    """Lay the weights of a model on the CPU out as on a GPU."""
    for module in model.modules():
        if getattr(module, "packed", None) is not None:
            module._buffers["packed"] = in_layout_of(CUDA, module.packed)
    return model


def kinds(kernels: list[str]) -> list[str]:
    """poi, per, red or tem: pointwise, reduction in one or more steps, template."""
    return [name.split("_")[1] for name in kernels]


def test_a_feedforward_block_is_one_quantizer_and_two_products(
    interpreter: Interpreter,  # noqa: F811
) -> None:
    model, x = in_rows(Feedforward(64, 130)), torch.randn(20, 64)
    made = generate((9, 0), model, x)
    assert kinds(made.kernels()) == ["poi", "tem", "tem"]
    assert [site for site, action, _ in made.report if action == "int8"] == ["up", "down"]
    details = [detail for _, action, detail in made.report if action == "int8"]
    assert details == [
        "s8_s8_qlinear__triton (bias + relu + → uint8)",
        "s8_s8_qlinear__triton (bias + residual + → float32)",
    ]
    (got,) = interpreter(run_generated, made.code, *made.inputs)
    assert same_bits(got, model(x))


def test_weights_in_panels_are_copied_and_the_report_says_so(
    interpreter: Interpreter,  # noqa: F811
) -> None:
    model, x = int8_linear(70, 36), torch.randn(5, 36)
    made = generate((9, 0), model, x)
    assert kinds(made.kernels()) == ["poi", "poi", "tem"]
    (detail,) = (detail for _, action, detail in made.report if action == "int8")
    assert detail.endswith("copies its weight in every call: see qinductor.gpu.lay_out")
    (got,) = interpreter(run_generated, made.code, *made.inputs)
    assert same_bits(got, model(x))


class Norm(nn.Module):
    """A linear behind a LayerNorm."""

    def __init__(self, width: int, *, dynamic: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = int8_linear(33, width, dynamic=dynamic)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "per_token"])
def test_the_quantizer_is_part_of_the_kernel_before_it(
    interpreter: Interpreter,  # noqa: F811
    dynamic: bool,
) -> None:
    """LayerNorm, row maximum, scale and codes: one kernel. Then the product."""
    torch.manual_seed(0)
    model, x = in_rows(Norm(48, dynamic=dynamic)), torch.randn(7, 48)
    made = generate((9, 0), model, x)
    assert kinds(made.kernels()) == ["per", "tem"]
    if dynamic:
        assert made.code.count("triton.language.div_rn(") >= 2, "scale and reciprocal"
    (got,) = interpreter(run_generated, made.code, *made.inputs)
    # Two ways to sum a row may differ in a bit, and a code at a tie moves by one step.
    steps = (got - model(x)).abs() / one_step(model, x)
    assert steps.max() <= 1


def one_step(model: Norm, x: Tensor) -> Tensor:
    """How far the output moves when every code of a row moves by one."""
    linear = model.linear
    scale = linear.x_scale if linear.is_static else model.norm(x).abs().amax(-1, True) / 127
    return scale * linear.weight.abs().sum(dim=1)


@pytest.mark.parametrize(
    "m", [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(16, marks=pytest.mark.slow)]
)
def test_few_rows_split_k_among_blocks_and_stay_exact(
    interpreter: Interpreter,  # noqa: F811
    m: int,
) -> None:
    model, x = in_rows(int8_linear(40, 770, dynamic=True)), torch.randn(m, 770)
    made = generate((9, 0), model, x)
    assert "SPLITS : tl.constexpr = 3" in made.code
    assert kinds(made.kernels())[-2:] == ["tem", "poi"]
    (got,) = interpreter(run_generated, made.code, *made.inputs)
    assert same_bits(got, model(x))


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_every_epilogue_is_bit_equal(
    interpreter: Interpreter,  # noqa: F811
    activation: str,
    out: torch.dtype,
) -> None:
    """Per-token scale, bias in bfloat16, residual, odd sizes, and a zero point that is not 128."""
    torch.manual_seed(1)
    m, n, k = 9, 71, 37
    weight = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    args: list[Tensor | None] = [
        torch.randint(0, 256, (3, 3, k), dtype=torch.uint8),
        torch.rand(3, 3, 1) / 100,
        torch.tensor([93], dtype=torch.int32),
        in_layout_of(CUDA, pack_weight(weight)),
        torch.rand(n) / 50,
        weight.sum(1, dtype=torch.int32),
        torch.randn(n).bfloat16(),
        torch.randn(3, 3, n),
    ]
    requantize = (torch.tensor(21.5), torch.tensor(117, dtype=torch.int32))
    more = requantize if out is torch.uint8 else (None, None)

    def run(*args: Tensor) -> Tensor:
        return ops.qlinear(*args[:8], activation, out, *args[8:])

    given = [*args, *(t for t in more if t is not None)]
    made = generate((8, 0), run, *given)
    assert kinds(made.kernels()) == ["poi", "tem"]
    (got,) = interpreter(run_generated, made.code, *made.inputs)
    want = run(*given)
    assert want.float().std() > 0.1
    assert same_bits(got, want), m


def test_linears_of_one_input_share_its_codes(interpreter: Interpreter) -> None:  # noqa: F811
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = scales()
            self.q = int8_linear(20, 40, static=shared)
            self.k = int8_linear(30, 40, static=shared, seed=5)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.q(x), self.k(x)

    model, x = in_rows(Two()), torch.randn(6, 40)
    made = generate((9, 0), model, x)
    assert kinds(made.kernels()) == ["poi", "tem", "tem"]
    got = interpreter(run_generated, made.code, *made.inputs)
    assert all(same_bits(g, w) for g, w in zip(got, model(x), strict=True))


def test_one_kernel_serves_every_number_of_rows(interpreter: Interpreter) -> None:  # noqa: F811
    model = in_rows(Feedforward(32, 20))
    made = generate((9, 0), model, torch.randn(12, 32), dynamic=True)
    assert kinds(made.kernels()) == ["poi", "tem", "tem"]
    sizes = [i for i, value in enumerate(made.inputs) if not isinstance(value, Tensor)]
    (x_at,) = (i for i, t in enumerate(made.inputs) if isinstance(t, Tensor) and t.dim() == 2)
    assert len(sizes) >= 1
    for rows in (1, 5, 70):
        x = torch.randn(rows, 32)
        inputs = [rows if i in sizes else v for i, v in enumerate(made.inputs)]
        inputs[x_at] = x
        (got,) = interpreter(run_generated, made.code, *inputs)
        assert same_bits(got, model(x)), rows


def test_an_old_gpu_runs_the_eager_operator_and_the_report_says_why() -> None:
    made = generate((7, 5), in_rows(int8_linear(16, 32)), torch.randn(4, 32))
    assert NAME not in made.code
    assert "torch.ops.qinductor.qlinear.default" in made.code
    (detail,) = (detail for _, action, detail in made.report if action == "int8")
    assert detail == "eager operator: s8 products need sm_80, this GPU is sm_75"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_linear_runs_through_the_same_template(
    interpreter: Interpreter,  # noqa: F811
    dtype: torch.dtype,
) -> None:
    """Small integers, so that the sum is exact and the epilogue has to be bit-equal."""
    torch.manual_seed(2)
    x, weight = (torch.randint(-4, 5, s).to(dtype) for s in ((2, 5, 45), (18, 45)))
    args = (x, torch.rand(2, 5, 1), weight, torch.rand(18), torch.randn(18))

    def run(*args: Tensor) -> Tensor:
        return torch.relu(ops.fp8_linear(*args, torch.float32))

    made = generate((8, 9), run, *args)
    assert kinds(made.kernels()) == ["tem"]
    assert [e[1:] for e in made.report] == [("fused", "fp8_fp8_fp8_linear__triton")]
    (got,) = interpreter(run_generated, made.code, *made.inputs)
    assert same_bits(got, run(*args))


def test_fp8_below_sm_89_is_refused_with_the_reason() -> None:
    x, w = (torch.zeros(4, 32).to(torch.float8_e4m3fn) for _ in range(2))
    made = generate((8, 0), ops.fp8_linear.default, x, torch.ones(1), w, torch.ones(4))
    assert NAME not in made.code
    assert made.report[0][1:] == (
        "refused",
        "fp8 linear as eager operator: fp8 products need sm_89, this GPU is sm_80",
    )


def test_layout_of_a_packed_weight_changes_its_strides_alone() -> None:
    weight = torch.randint(-128, 128, (70, 37), dtype=torch.int8)
    packed = pack_weight(weight)
    rows = in_layout_of(CUDA, packed)
    assert rows.shape == packed_shape(70, 37) and torch.equal(rows, packed)
    assert rows_of(rows).data_ptr() == rows.data_ptr(), "a view"
    assert torch.equal(rows_of(rows)[:70, :37], weight)
    assert rows_of(packed).data_ptr() != packed.data_ptr()
    assert in_layout_of(CUDA, rows).data_ptr() == rows.data_ptr()
    model = in_rows(Feedforward(64, 130))
    before = model.state_dict()["up.packed"].clone()
    lay_out(model)
    assert model.up.packed.is_contiguous() and torch.equal(model.up.packed, before)
