"""Kernels are named, floats are named, and gradient links are gone."""

from __future__ import annotations

import pytest
import torch
from foreign import capture
from int8_nets import int8_linear
from torch import Tensor, nn

from qinductor.capability import Capability, Isa
from qinductor.errors import CapabilityError
from qinductor.passes import PASSES
from qinductor.passes.base import PassLog, module_path
from qinductor.passes.inference_scale import DropInferenceScale
from qinductor.passes.kernels import ChooseKernels
from qinductor.templates import TEMPLATES
from qinductor.templates.base import KERNEL_META, choose

ops = torch.ops.qinductor


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(int8_linear(64, 64), nn.Linear(64, 8, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) @ torch.ones(8, 3)


def test_int8_and_float_linears_are_named_and_other_products_are_not() -> None:
    found = capture(Mixed(), torch.randn(3, 64), ChooseKernels())
    by_action = {e.action: (e.site, e.detail) for e in found.entries}
    isa = Capability.detect().isa.value
    assert by_action == {
        "int8": ("body.0", f"u8_s8_qlinear__{isa} (bias + → float32)"),
        "kept": ("body.1", "torch.float32 matmul: no int8 weight"),
    }
    assert len(found.entries) == 2
    (linear,) = [n for n in found.after.graph.nodes if n.target is ops.qlinear.default]
    assert linear.meta[KERNEL_META].isa.value == isa


@pytest.mark.parametrize("isa", list(Isa))
def test_the_first_usable_template_is_chosen(isa: Isa) -> None:
    capability = Capability.detect()
    if isa not in capability.isas:
        with pytest.raises(CapabilityError, match=f"isa='{isa.value}' was asked for.*has only"):
            capability.capped(isa)
        return
    chosen = choose(TEMPLATES["qlinear", "cpu"], capability.capped(isa))
    assert chosen is not None and chosen.isa is isa


def test_every_template_of_the_registry_has_its_sources_and_class() -> None:
    from qinductor.templates.cpu.text import sources

    for implementations in TEMPLATES.values():
        for implementation in implementations:
            assert f"struct {implementation.cpp_class} {{" in sources(implementation)


def test_pass_names_are_unique() -> None:
    names = [rule.name for rule in PASSES]
    assert len(set(names)) == len(names)


def test_gradient_links_are_removed() -> None:
    layer = int8_linear(64, 64)

    class Linked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            scale = ops.inference_scale(layer.x_scale, x)
            codes = ops.quantize(x, layer.x_inverse_scale, layer.x_zero_point)
            return ops.qlinear(
                codes, scale, layer.x_zero_point, layer.packed, layer.w_scale, layer.w_sum
            )

    found = capture(Linked(), torch.randn(3, 64), DropInferenceScale())
    assert found.count(ops.inference_scale.default) == 0
    (quantize,) = [n for n in found.after.graph.nodes if n.target is ops.quantize.default]
    assert len(quantize.args[0].users) == 1
    old, new = found.outputs()
    assert torch.equal(old, new)


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("L['self'].layer[0].query", "layer.0.query"),
        ("L['self']._modules['layer']._modules['0']", "layer.0"),
        ("L['model'].head", "head"),
        ("G['model'].head", "head"),
        ("L['self']", ""),
    ],
)
def test_module_path(source: str, path: str) -> None:
    assert module_path(source) == path


def test_an_empty_log_has_no_entries() -> None:
    assert PassLog().entries == []
