"""FuseRows: layer normalization and quantizers move into the int8 linear that feeds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from foreign import Capture, capture
from int8_nets import int8_linear, same_bits, scales
from tolerances import layer_norm_bound
from torch import Tensor, fx, nn
from torch._inductor.utils import run_and_get_code

from qinductor.capability import Capability
from qinductor.passes.base import PassLog, argument
from qinductor.passes.qlinear_epilogue import FuseResidual
from qinductor.passes.row_epilogue import FuseRows
from qinductor.passes.shared_quantize import ShareQuantize

ops = torch.ops.qinductor
ROWS, QLINEAR = ops.qlinear_rows.default, ops.qlinear.default
WIDTH, EPS = 64, 1e-5


class Block(nn.Module):
    """``after`` gets an int8 linear's output, the module and its float input."""

    def __init__(self, after: Callable[..., Any], *, dynamic: bool, dtype: torch.dtype):
        super().__init__()
        self.first = int8_linear(WIDTH, WIDTH, static=scales(0.05))
        given = {"dynamic": dynamic, "static": scales(0.02)}
        self.second, self.third = (int8_linear(WIDTH, WIDTH, seed=s, **given) for s in (3, 4))
        self.norm = nn.LayerNorm(WIDTH, eps=EPS)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)
        self.after, self.dtype = after, dtype

    def forward(self, x: Tensor) -> Any:
        x = x.to(self.dtype)
        return self.after(self.first(x), self, x)


class Passes:
    """The passes that come before, then the one under test, whose entries are kept."""

    name, optional = "fuse_rows", True

    def run(self, graph: fx.Graph, capability: Capability, log: PassLog) -> None:
        for rule in (ShareQuantize(), FuseResidual()):
            rule.run(graph, capability, PassLog())
        FuseRows().run(graph, capability, log)


def _captured(
    after: Callable[..., Any], *, dynamic: bool = False, dtype: torch.dtype = torch.float32
) -> Capture:
    net = Block(after, dynamic=dynamic, dtype=dtype).to(dtype).eval()
    return capture(net, torch.randn(3, 5, WIDTH), Passes())


def _rows(found: Capture) -> dict[str, Any]:
    (node,) = (n for n in found.after.graph.nodes if n.target is ROWS)
    names = (arg.name for arg in ROWS._schema.arguments)
    return {name: argument(node, name) for name in names}


def _post_norm(y: Tensor, net: Block, x: Tensor) -> Tensor:
    """BERT's: the sum is normalized, and read by the next linear and by the next residual."""
    z = net.norm(y + x)
    return net.second(z) + z


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "per token"])
def test_residual_normalization_and_quantizer_become_one_call(dynamic: bool) -> None:
    found = _captured(_post_norm, dynamic=dynamic)
    kind = "per_token" if dynamic else "fixed"
    rows = _rows(found)
    assert rows["residual"] is not None and rows["norm_weight"] is not None
    assert (rows["keeps"], rows["quantizer"], rows["eps"]) == (True, kind, EPS)
    assert found.count(torch.ops.aten.var_mean.correction, ops.quantize_per_token.default) == 0
    assert found.count(ops.quantize.default) == 1, "that of the block's input"
    assert len(found.details("fused")) == 1 and not found.details("refused")
    old, new = found.outputs()
    # A normalized value at a boundary may round to the other code: two of a row's 64 at most here,
    # each worth a step of the activation times a weight.
    step, weight = 0.02 if not dynamic else 4 / 127, 128 * 1.5 / (60 * WIDTH**0.5)
    assert (old - new).abs().max() <= 2 * step * weight


def test_queries_keys_and_values_take_the_codes_of_one_normalization() -> None:
    def both(y: Tensor, net: Block, x: Tensor) -> tuple[Tensor, Tensor]:
        z = net.norm(y)
        net.third.x_scale, net.third.x_inverse_scale = (
            net.second.x_scale,
            net.second.x_inverse_scale,
        )
        net.third.x_zero_point = net.second.x_zero_point
        return net.second(z), net.third(z)

    found = _captured(both)
    rows = _rows(found)
    assert not rows["keeps"] and rows["quantizer"] == "fixed" and found.count(QLINEAR) == 2


def test_the_last_normalization_has_no_quantizer() -> None:
    found = _captured(lambda y, net, x: net.norm(y + x))
    rows = _rows(found)
    assert rows["keeps"] and rows["quantizer"] == "none"
    old, new = found.outputs()
    assert (old - new).abs().max() <= 1e-5 * new.abs().max()


@pytest.mark.parametrize("multiplied", [False, True])
def test_a_quantizer_per_token_alone_is_exact(multiplied: bool) -> None:
    def codes(y: Tensor, net: Block, x: Tensor) -> Tensor:
        multiplier = net.norm.weight if multiplied else None
        quantized, scale = ops.quantize_per_token(y, multiplier)
        return quantized * scale

    found = _captured(codes)
    rows = _rows(found)
    assert not rows["keeps"] and (rows["multiplier"] is not None) == multiplied
    assert same_bits(*found.outputs())


def _no_parameters(y: Tensor, net: Block, x: Tensor) -> Tensor:
    return F.layer_norm(y, (WIDTH,))


def _other_reader(y: Tensor, net: Block, x: Tensor) -> Tensor:
    return net.norm(y) + y


def _other_dimension(y: Tensor, net: Block, x: Tensor) -> Tensor:
    return F.layer_norm(y, (5, WIDTH), net.norm.weight.expand(5, -1), net.norm.bias.expand(5, -1))


def _variance_read(y: Tensor, net: Block, x: Tensor) -> tuple[Tensor, ...]:
    variance, mean = torch.var_mean(y, [2], correction=0, keepdim=True)
    return (y - mean) * (variance + EPS).rsqrt() * net.norm.weight + net.norm.bias, variance


def _codes_and_floats(y: Tensor, net: Block, x: Tensor) -> tuple[Tensor, Tensor]:
    quantized, scale = ops.quantize_per_token(y)
    return quantized * scale, y + 1


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        (_no_parameters, "no layer normalization with weight and bias"),
        (_other_reader, "other readers"),
        (_other_dimension, "not over the last dimension"),
        (_variance_read, "not read once each|used for something else|no layer normalization"),
        (_codes_and_floats, "the float output has other readers"),
    ],
)
def test_near_misses_stay_with_a_reason(after: Callable[..., Any], reason: str) -> None:
    found = _captured(after)
    assert found.count(ROWS) == 0 and not found.details("fused")
    (given,) = found.details("refused")
    assert any(part in given for part in reason.split("|")), given


def test_a_rounded_output_is_left_alone() -> None:
    found = _captured(lambda y, net, x: net.norm(y), dtype=torch.bfloat16)
    assert found.count(ROWS) == 0


def test_compiled_block_is_within_the_bound_and_its_kernel_is_named() -> None:
    net = Block(lambda y, net, x: net.norm(y + x), dynamic=False, dtype=torch.float32).eval()
    x = torch.randn(3, 40, WIDTH)
    torch._dynamo.reset()
    with torch.no_grad():
        got, (code,) = run_and_get_code(torch.compile(net, backend="qsim"), x)
        y = net.first(x) + x
        exact = F.layer_norm(
            y.double(), (WIDTH,), net.norm.weight.double(), net.norm.bias.double(), EPS
        )
        bound = layer_norm_bound(y, net.norm.weight, net.norm.bias, EPS)
    assert code.count("// u8_s8_qlinear_rows__") == 1
    assert ((got.double() - exact).abs() <= bound).all()
