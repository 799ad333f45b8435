"""One quantizer for all linears that read a tensor with the same scale."""

from __future__ import annotations

import pytest
import torch
from foreign import Capture, capture
from int8_nets import int8_linear, same_bits, scales
from torch import Tensor, nn

from qinductor.passes.shared_quantize import ShareQuantize

ops = torch.ops.qinductor


class Heads(nn.Module):
    """Three linears that read one tensor, as Q, K and V do."""

    def __init__(self, *, same_scale: bool = True, dynamic: bool = False) -> None:
        super().__init__()
        shared = scales(0.03)
        given = [shared if same_scale else scales(0.03) for _ in range(3)]
        self.heads = nn.ModuleList(
            int8_linear(32, 64, seed=i, dynamic=dynamic, static=s) for i, s in enumerate(given)
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        return [head(x) for head in self.heads]


def _captured(net: nn.Module, *, dynamic: bool = False) -> Capture:
    return capture(net, torch.randn(3, 64), ShareQuantize(), dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static shapes", "dynamic shapes"])
def test_a_group_is_quantized_once(dynamic: bool) -> None:
    found = _captured(Heads(), dynamic=dynamic)
    assert found.count(ops.quantize.default) == 1
    assert found.details("fused") == ["shares the quantized input of its group"] * 2
    assert {e.site for e in found.entries} <= {"heads.1", "heads.2"}
    assert same_bits(*found.outputs())


def test_per_token_quantizers_are_shared() -> None:
    found = _captured(Heads(dynamic=True))
    assert found.count(ops.quantize_per_token.default) == 1
    assert len(found.details("fused")) == 2
    assert same_bits(*found.outputs())


def test_different_scale_tensors_are_not_shared() -> None:
    """Equal today, but another module of the class, or an update, may hold other numbers."""
    found = _captured(Heads(same_scale=False))
    assert found.count(ops.quantize.default) == 3 and not found.entries


def test_different_inputs_are_not_shared() -> None:
    net = Heads()
    net.forward = lambda x: [head(x * (i + 1.5)) for i, head in enumerate(net.heads)]
    found = _captured(net)
    assert found.count(ops.quantize.default) == 3 and not found.entries
