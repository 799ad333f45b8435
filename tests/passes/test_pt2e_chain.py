"""PT2E's int8 linears in real Inductor graphs: recognized, rewritten, or refused with a reason."""

from __future__ import annotations

from typing import Any

import foreign
import pytest
import torch
from tolerances import float_linear_bound, one_step_bound
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.ao.quantization.fx import _decomposed  # noqa: F401 - defines the operators

import qinductor
from qinductor.backend import inductor_options, qsim
from qinductor.errors import ConfigError
from qinductor.passes import chain
from qinductor.passes.pt2e_chain import Pt2eChain

aten = torch.ops.aten
PT2E = torch.ops.quantized_decomposed
MATMULS = (aten.mm.default, aten.addmm.default)
OLD = (
    *MATMULS,
    PT2E.quantize_per_tensor.default,
    PT2E.quantize_per_tensor.tensor,
    PT2E.dequantize_per_tensor.default,
    PT2E.dequantize_per_tensor.tensor,
    PT2E.dequantize_per_channel.default,
)
RULE = Pt2eChain()


class Net(nn.Module):
    """One PT2E linear, written out: every argument of its operators can be chosen."""

    def __init__(
        self,
        *,
        codes: torch.dtype = torch.uint8,
        bounds: tuple[int, int] | None = None,
        zero_point: int = 7,
        w_bounds: tuple[int, int] = (-128, 127),
        w_zero_point: int = 0,
        axis: int = 0,
        per_tensor: bool = False,
        bias: bool = True,
        quantized: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        low, high = w_bounds
        self.register_buffer(
            "w", torch.randint(low, high + 1, (64, 64), generator=generator).to(torch.int8)
        )
        self.register_buffer("w_scale", torch.rand(64, generator=generator) * 0.01 + 0.001)
        self.register_buffer("w_zero", torch.full((64,), w_zero_point, dtype=torch.int64))
        self.register_buffer(
            "bias", torch.randn(64, generator=generator).to(dtype) if bias else None
        )
        full = (0, 255) if codes is torch.uint8 else (-128, 127)
        self.scheme = (0.031, zero_point, *(bounds or full), codes)
        self.w_bounds, self.axis, self.per_tensor = w_bounds, axis, per_tensor
        self.quantized, self.dtype = quantized, dtype

    def activation(self, x: Tensor) -> Tensor:
        if not self.quantized:
            return x
        codes = PT2E.quantize_per_tensor(x, *self.scheme)
        return PT2E.dequantize_per_tensor(codes, *self.scheme)

    def weight(self) -> Tensor:
        if self.per_tensor:
            zero_point = int(self.scheme[1]) if self.axis else 0
            return PT2E.dequantize_per_tensor(self.w, 0.01, zero_point, *self.w_bounds, torch.int8)
        return PT2E.dequantize_per_channel(
            self.w, self.w_scale, self.w_zero, self.axis, *self.w_bounds, torch.int8
        )

    def forward(self, x: Tensor) -> Tensor:
        x, w = self.activation(x).to(self.dtype), self.weight().to(self.dtype)
        return nn.functional.linear(x, w, self.bias)


def _bound(net: Net, x: Tensor) -> Tensor:
    x = net.activation(x).reshape(-1, 64)
    return float_linear_bound(x, net.weight(), net.bias)


# ---------------------------------------------------------------- what PT2E emits


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("codes", [torch.uint8, torch.int8])
def test_linear_is_replaced(codes: torch.dtype, bias: bool) -> None:
    x = foreign.inputs(2, 3, 64)
    net = Net(codes=codes, bias=bias)
    got = foreign.capture(net, x, RULE)
    assert got.count(*OLD) == 0
    assert (got.count(chain.QUANTIZE), got.count(chain.QLINEAR)) == (1, 1)
    assert got.count(chain.PACKED_OF) == 1
    assert [e.action for e in got.entries] == ["fused"]
    (linear,) = (n for n in got.after.graph.nodes if n.target is chain.QLINEAR)
    assert linear.meta["val"].shape == (2, 3, 64)
    old, new = got.outputs()
    assert ((old.double() - new.double()).reshape(-1, 64).abs() <= _bound(net, x)).all()


def test_weight_with_one_scale() -> None:
    x = foreign.inputs(5, 64)
    net = Net(per_tensor=True)
    got = foreign.capture(net, x, RULE)
    assert got.count(*OLD) == 0
    old, new = got.outputs()
    assert ((old.double() - new.double()).abs() <= _bound(net, x)).all()


def test_bfloat16_linear_gives_bfloat16() -> None:
    x = foreign.inputs(5, 64)
    got = foreign.capture(Net(dtype=torch.bfloat16), x, RULE)
    assert got.count(*MATMULS) == 0
    (linear,) = (n for n in got.after.graph.nodes if n.target is chain.QLINEAR)
    assert linear.meta["val"].dtype is torch.bfloat16
    # The float linear rounds its operands and its output to bfloat16 (2**-8), ours the output.
    net = Net()
    old, new = got.outputs()
    magnitude = net.activation(x).double().abs() @ net.weight().double().abs().t()
    magnitude = magnitude + net.bias.double().abs()
    bound = _bound(net, x) + (4 * 2.0**-8 * (1 + 2.0**-7)) * magnitude
    assert ((old.double() - new.double()).abs() <= bound).all()


def test_narrow_activation_range_keeps_its_quantizer() -> None:
    x = foreign.inputs(5, 64)
    for codes, bounds in ((torch.uint8, (0, 15)), (torch.int8, (-8, 7))):
        net = Net(codes=codes, bounds=bounds, zero_point=3)
        got = foreign.capture(net, x, RULE)
        assert got.count(chain.QUANTIZE, *MATMULS) == 0
        assert got.count(chain.QLINEAR) == 1
        (reason,) = got.details("refused")
        assert f"range is [{bounds[0]}, {bounds[1]}], not 8 bits" in reason
        old, new = got.outputs()
        assert ((old.double() - new.double()).abs() <= _bound(net, x)).all()


def test_per_token_quantizer() -> None:
    class PerToken(Net):
        def activation(self, x: Tensor) -> Tensor:
            scale, zero = PT2E.choose_qparams_per_token(x, torch.int8)
            codes = PT2E.quantize_per_token(x, scale, zero, -128, 127, torch.int8)
            return PT2E.dequantize_per_token(
                codes, scale, zero, -128, 127, torch.int8, torch.float32
            )

    x = foreign.inputs(2, 3, 64)
    x[0, 0] = 0.0  # a row below the lower bound of scales
    net = PerToken()
    got = foreign.capture(net, x, RULE)
    assert got.count(*OLD, PT2E.quantize_per_token.default) == 0
    assert got.count(chain.PER_TOKEN) == 1
    old, new = got.outputs()
    assert ((old.double() - new.double()).reshape(-1, 64).abs() <= _bound(net, x)).all()


def test_asymmetric_per_token_quantizer_is_refused() -> None:
    class PerToken(Net):
        def activation(self, x: Tensor) -> Tensor:
            scale, zero = PT2E.choose_qparams_per_token_asymmetric(x, torch.int8)
            codes = PT2E.quantize_per_token(x, scale, zero, -128, 127, torch.int8)
            return PT2E.dequantize_per_token(
                codes, scale, zero, -128, 127, torch.int8, torch.float32
            )

    got = foreign.capture(PerToken(), foreign.inputs(5, 64), RULE)
    assert got.count(chain.QLINEAR) == 0
    assert any("not those of a symmetric row" in d for d in got.details("refused"))


def test_another_reader_of_the_dequantized_activation_keeps_it() -> None:
    class Residual(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.activation(x)
            return nn.functional.linear(x, self.weight(), self.bias) + x

    x = foreign.inputs(5, 64)
    net = Residual()
    got = foreign.capture(net, x, RULE)
    assert got.count(*MATMULS) == 0
    assert got.count(PT2E.dequantize_per_tensor.default) == 1
    old, new = got.outputs()
    residual = 2 * 2.0**-24 * (old.double().abs() + net.activation(x).double().abs())
    assert ((old.double() - new.double()).abs() <= _bound(net, x) + residual).all()


@pytest.mark.parametrize(
    ("net", "reason"),
    [
        (Net(w_bounds=(-8, 7)), "range is [-8, 7], not 8 bits"),
        (Net(axis=1), "runs along axis 1"),
        (Net(per_tensor=True, axis=1), "zero point 7, not 0"),
        (Net(quantized=False), "weight-only"),
    ],
    ids=["int4", "axis", "zero_point", "weight_only"],
)
def test_near_miss_is_refused(net: Net, reason: str) -> None:
    x = foreign.inputs(5, 64)
    got = foreign.capture(net, x, RULE)
    assert got.count(chain.QLINEAR) == 0
    assert got.count(*MATMULS) == 1
    assert any(reason in d for d in got.details("refused"))
    old, new = got.outputs()
    assert torch.equal(old, new)


def test_other_scale_than_the_quantizers_keeps_the_quantizer() -> None:
    def edit(graph: fx.Graph) -> None:
        node = next(n for n in graph.nodes if n.target is PT2E.quantize_per_tensor.default)
        node.args = (node.args[0], 0.05, *node.args[2:])

    got = foreign.capture(Net(), foreign.inputs(5, 64), RULE, edit=edit)
    assert got.count(chain.QUANTIZE) == 0
    assert got.count(chain.QLINEAR) == 1
    assert any("another scale than it dequantizes" in d for d in got.details("refused"))


def test_float_linear_is_left_alone_silently() -> None:
    got = foreign.capture(foreign.one_linear(), foreign.inputs(5, 64), RULE)
    assert got.entries == []
    assert got.count(*MATMULS) == 1


# ---------------------------------------------------------------- exported, converted, compiled


@pytest.mark.parametrize("how", ["backend", "options"])
def test_compiled_static_model_runs_int8(how: str) -> None:
    x = foreign.inputs(2, 3, 64)
    batch, length = torch.export.Dim("b", min=2, max=64), torch.export.Dim("s", min=2, max=64)
    model = foreign.pt2e_model(foreign.mlp(), x, dynamic_shapes=({0: batch, 1: length},))
    torch._dynamo.reset()
    given: dict[str, Any] = {"backend": qsim} if how == "backend" else {}
    if how == "options":
        given["options"] = {**inductor_options(), "fx_graph_cache": False}
    compiled = torch.compile(model, dynamic=True, **given)
    with torch.no_grad():
        _, codes = run_and_get_code(compiled, x)
        before = counters["stats"]["unique_graphs"]
        for shape in ((2, 3, 64), (7, 5, 64)):
            other = foreign.inputs(*shape)
            bound = _two_layer_bound(model, other)
            difference = (compiled(other) - model(other)).double().abs()
            assert (difference <= bound).all()
        assert counters["stats"]["unique_graphs"] == before
    if how == "options":
        (code,) = codes
        assert code.count("// u8_s8_qlinear__") == 2
        assert "extern_kernels" not in code.split("def call")[1]
    else:
        entries = qinductor.explain(compiled).entries
        assert sum(e.rule == "pt2e_chain" and e.action == "fused" for e in entries) == 2


def _two_layer_bound(model: nn.Module, x: Tensor) -> Tensor:
    """The first linear's difference may move each code of the second by a step; then its own."""
    first, second = (n for n in model.graph.nodes if n.target is PT2E.quantize_per_tensor.default)
    weights = [
        (model.get_buffer(f"_frozen_param{i}") * model.get_buffer(f"_scale_{i}")[:, None])
        for i in (0, 1)
    ]
    biases = [model.get_parameter(f"{name}.bias") for name in ("0", "2")]
    scale = torch.tensor(second.args[1])
    largest = [torch.full((1, w.shape[1]), 255.0 * q.args[1])
               for w, q in zip(weights, (first, second), strict=True)]  # fmt: skip
    hidden = float_linear_bound(largest[0], weights[0], biases[0])
    assert hidden.max() < scale  # so that no code moves by two steps
    return one_step_bound(scale, weights[1]) + float_linear_bound(largest[1], weights[1], biases[1])


def test_compiled_dynamic_model_runs_int8() -> None:
    x = foreign.inputs(2, 3, 64)
    model = foreign.pt2e_model(foreign.mlp(), x, dynamic_activation=True)
    got = foreign.capture(model, x, RULE)
    assert got.count(*OLD) == 0
    assert got.count(chain.QUANTIZE) == 2
    assert [e.action for e in got.entries] == ["fused", "fused"]


def test_weight_zero_point_is_looked_at_when_the_graph_runs() -> None:
    """It is an input of the graph, and one graph may run for several models."""
    x = foreign.inputs(5, 64)
    torch._dynamo.reset()
    symmetric, asymmetric = Net(), Net(w_zero_point=3)
    with torch.no_grad():
        torch.compile(symmetric, backend=qsim)(x)
        with pytest.raises(ConfigError, match="zero point 3"):
            torch.compile(asymmetric, backend=qsim)(x)
        torch._dynamo.reset()
        compiled = torch.compile(asymmetric, backend=qsim, options={"disable": ("pt2e_chain",)})
        assert ((compiled(x) - asymmetric(x)).double().abs() <= 2 * _bound(asymmetric, x)).all()
