"""What follows an int8 linear moves into it, or stays where moving it would change the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from foreign import Capture, capture
from int8_nets import int8_linear, same_bits, scales
from torch import Tensor, nn

from qinductor.passes.base import argument
from qinductor.passes.qlinear_epilogue import FuseActivation, FuseRequantize, FuseResidual

ops = torch.ops.qinductor
aten = torch.ops.aten
QLINEAR, QUANTIZE = ops.qlinear.default, ops.quantize.default
WIDTH = 64


class Net(nn.Module):
    """``after`` gets the output of an int8 linear, its float input, and the module."""

    def __init__(self, after: Callable[..., Any], n: int = WIDTH, dtype: Any = torch.float32):
        super().__init__()
        self.first = int8_linear(n, WIDTH)
        self.second = int8_linear(WIDTH, n, seed=5)
        self.register_buffer("row", torch.randn(n))
        self.after, self.dtype = after, dtype

    def forward(self, x: Tensor) -> Any:
        x = x.to(self.dtype)
        return self.after(self.first(x), x, self)


def _captured(
    after: Callable[..., Any], rule: Any, *, dynamic: bool = False, **net: Any
) -> Capture:
    return capture(Net(after, **net), torch.randn(3, 5, WIDTH), rule, dynamic=dynamic)


def _linears(found: Capture) -> list[Any]:
    return [node for node in found.after.graph.nodes if node.target is QLINEAR]


def _only_refusal(found: Capture) -> str:
    assert not found.details("fused")
    (reason,) = found.details("refused")
    return reason


def _float_operators(found: Capture) -> int:
    """Calls that are neither ours nor a view."""
    return sum(
        n.op == "call_function" and not str(n.target).startswith(("qinductor", "aten.view"))
        for n in found.after.graph.nodes
    )


# ---------------------------------------------------------------- activation

ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_is_fused(name: str, dynamic: bool) -> None:
    found = _captured(lambda y, x, net: ACTIVATIONS[name](y), FuseActivation(), dynamic=dynamic)
    assert found.details("fused") == [f"{name} in the epilogue"]
    (linear,) = _linears(found)
    assert argument(linear, "activation") == name
    assert _float_operators(found) == 0
    old, new = found.outputs()
    # gelu differs by the polynomial's 4.7e-7 and float32's roundings of aten's decomposition,
    # the others by the order of the decomposition's operations.
    bound = {"relu": 0.0, "tanh": 0.0}.get(name, 1e-6)
    assert (new - old).abs().max() <= bound * old.abs().max().clamp_min(1)


def test_activation_then_residual_then_requantize() -> None:
    """The whole chain, pass by pass: three rewrites of one linear."""
    from qinductor.passes.base import PassLog

    class All:
        name, optional = "all", False

        def run(self, graph: Any, capability: Any, log: PassLog) -> None:
            for rule in (FuseActivation(), FuseResidual(), FuseRequantize()):
                rule.run(graph, capability, log)

    found = _captured(lambda y, x, net: net.second(F.relu(y) + x), All())
    assert len(found.details("fused")) == 3
    first, _ = _linears(found)
    assert argument(first, "out_dtype") is torch.uint8 and argument(first, "activation") == "relu"
    assert argument(first, "residual") is not None
    assert found.count(QUANTIZE) == 1  # of the net's input
    assert same_bits(*found.outputs())


@pytest.mark.parametrize("name", ["gelu", "relu"])
def test_activation_of_a_value_with_another_reader_stays(name: str) -> None:
    found = _captured(lambda y, x, net: (ACTIVATIONS[name](y), y), FuseActivation())
    assert not found.details("fused")
    (linear,) = _linears(found)
    assert argument(linear, "activation") == "none"
    assert "other readers" in _only_refusal(found)


@pytest.mark.parametrize("name", ["gelu", "relu", "silu"])
def test_activation_of_a_rounded_output_stays(name: str) -> None:
    found = _captured(
        lambda y, x, net: ACTIVATIONS[name](y), FuseActivation(), dtype=torch.bfloat16
    )
    assert "bfloat16" in _only_refusal(found)


def test_something_like_a_gelu_stays() -> None:
    found = _captured(lambda y, x, net: y * 0.5 * (1 + torch.erf(y * 0.7)), FuseActivation())
    assert not found.details("fused")


# ---------------------------------------------------------------- residual


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("after", [lambda y, x, net: y + x, lambda y, x, net: x + y])
def test_residual_is_fused(after: Callable[..., Tensor], dynamic: bool) -> None:
    found = _captured(after, FuseResidual(), dynamic=dynamic)
    assert found.details("fused") == ["residual addition in the epilogue"]
    (linear,) = _linears(found)
    assert argument(linear, "residual") is not None and found.count(aten.add.Tensor) == 0
    assert same_bits(*found.outputs())


def test_the_sum_of_two_linears_is_fused_once() -> None:
    found = _captured(lambda y, x, net: y + net.second(x), FuseResidual())
    assert len(found.details("fused")) == 1
    with_residual = [n for n in _linears(found) if argument(n, "residual") is not None]
    assert len(with_residual) == 1 and found.count(aten.add.Tensor) == 0
    assert same_bits(*found.outputs())


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        (lambda y, x, net: y + net.row, "addend has shape"),
        (lambda y, x, net: y + x[:, :1], "addend has shape"),
        (lambda y, x, net: (y + x, y), "not the only reader"),
        (lambda y, x, net: y + y, "not the only reader"),
        (lambda y, x, net: y + x.long(), "addend is torch.int64"),
        (lambda y, x, net: y + x.double(), "addend is torch.float64"),
    ],
    ids=["row", "broadcast", "other reader", "doubled", "int64", "float64"],
)
def test_residual_is_refused(after: Callable[..., Any], reason: str) -> None:
    found = _captured(after, FuseResidual())
    assert reason in _only_refusal(found)
    assert all(argument(n, "residual") is None for n in _linears(found))
    assert same_bits(*found.outputs())


def test_residual_of_a_bfloat16_linear_is_refused() -> None:
    found = _captured(lambda y, x, net: y + x, FuseResidual(), dtype=torch.bfloat16)
    assert "bfloat16" in _only_refusal(found)


def test_a_scaled_addition_and_a_number_are_no_residual() -> None:
    for after in (lambda y, x, net: torch.add(y, x, alpha=2), lambda y, x, net: y + 1.5):
        found = _captured(after, FuseResidual())
        assert not found.details("fused")
        assert same_bits(*found.outputs())


# ---------------------------------------------------------------- requantize


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("per_channel", [False, True], ids=["tensor", "channel"])
def test_requantize_is_fused(per_channel: bool, dynamic: bool) -> None:
    def after(y: Tensor, x: Tensor, net: Net) -> Tensor:
        inverse = net.row.abs() * 40 if per_channel else net.second.x_inverse_scale
        return ops.quantize(y, inverse, net.second.x_zero_point)

    found = _captured(after, FuseRequantize(), dynamic=dynamic, n=130)
    assert found.details("fused") == ["requantized to u8 in the epilogue"]
    (linear,) = _linears(found)
    assert argument(linear, "out_dtype") is torch.uint8
    assert argument(linear, "out_inverse_scale") is not None
    assert found.count(QUANTIZE) == 1
    old, new = found.outputs()
    assert torch.equal(old, new) and old.unique().numel() > 20


@pytest.mark.parametrize(
    ("after", "net", "reason"),
    [
        (lambda y, x, net: (net.second(y), y), {}, "other readers"),
        (lambda y, x, net: (net.second(y), net.first(y)), {}, "other readers"),
        (lambda y, x, net: net.second(y), {"dtype": torch.bfloat16}, "bfloat16"),
    ],
    ids=["read as float", "two quantizers", "rounded"],
)
def test_requantize_is_refused(after: Callable[..., Any], net: Any, reason: str) -> None:
    found = _captured(after, FuseRequantize(), **net)
    assert not found.details("fused")
    assert found.details("refused") and all(reason in r for r in found.details("refused"))
    assert all(argument(n, "out_dtype") is not torch.uint8 for n in _linears(found))


def test_per_token_codes_are_not_made_in_the_epilogue() -> None:
    """A scale a token needs the whole row first."""
    found = _captured(lambda y, x, net: ops.quantize_per_token(y), FuseRequantize())
    assert not found.details("fused") and found.count(ops.quantize_per_token.default) == 1


def test_scales_helper_is_what_the_nets_use() -> None:
    assert torch.equal(int8_linear(4, 4).x_scale, scales()["x_scale"])
